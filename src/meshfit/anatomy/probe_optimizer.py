"""What kind of optimizer it is, found out by a trial on small tensors and not by its name.

A step may be taken apart in two ways:

    elementwise   a tensor stepped as two 1-D pieces comes out as stepped whole: AdamW yes, LAMB and Muon no
    separate      parameters stepped in two turns come out as stepped together: LAMB and Muon too, Prodigy no

Stepping in parts (offload) needs ``separate``; cutting tensors over ranks that step by themselves needs both. The same
trial tells what an optimizer keeps for a parameter of any shape, which its cost is made of.
"""

import copy
import inspect
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshfit.cpu_threads import cpu_threads
from meshfit.data import tree
from meshfit.errors import in_short
from meshfit.optimizers import Optimizers, needs_closure
from meshfit.torch_private.optimizers import FUSED_OPTIMIZERS, STEP_HOOKS, without_step_hooks

SCALES = (1.0, 1.0, 0.01, 30.0, 1.0, 1000.0, 1.0, 0.1, 1.0, 1.0)
"""Of the gradients, step by step: a norm that only acts above (or below) some bound is met on its other side too."""

TOLERANCE = 1e-5
"""Of how far a tensor moved. The trial runs in fp64; some optimizers compute in fp32 inside."""

SHAPES = {0: ((), ()), 1: ((6,), (4100,)), 2: ((4, 6), (160, 132))}
"""Small ones, and some above what optimizers take for too small to factor or to quantize (128 a dim, 4096 in all)."""

PRIMES = (11, 13, 17, 19, 3, 5, 7)
"""Sizes of dims in the trial for state: the factors of a state tensor's size tell which dims it has."""

KERNELS = {"fused": None, "foreach": None, "capturable": False, "differentiable": False}
"""Settings that choose a kernel, not what it computes: some work on GPUs alone."""

NOT_COPIED = (
    "state",
    "param_groups",
    "step",  # schedulers put one on the instance, bound to it
    *STEP_HOOKS,
)
NOT_SETTINGS = ("params", "param_names")


@dataclass(frozen=True, slots=True)
class OptimizerKind:
    """How a step of an optimizer may be taken apart. Both are False where the trial failed: ``why`` says "unknown"."""

    elementwise: bool
    separate: bool
    why: str
    """Of what is False, in words; "" if neither is."""


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A state tensor's size: ``bytes`` times each dim of its parameter to the power that stands here."""

    powers: tuple[int, ...]
    bytes: int

    def of(self, shape: tuple[int, ...]) -> int:
        return self.bytes * prod(size**power for size, power in zip(shape, self.powers, strict=True))


@dataclass(frozen=True, slots=True)
class StateBytes:
    """What an optimizer keeps for its parameters. Where groups differ, what the greediest keeps."""

    kept: dict[tuple[int, str], tuple[StateTensor, ...]]
    """By number of dims and dtype ("float32")."""

    def of(self, shape: tuple[int, ...], dtype: str) -> tuple[int, ...]:
        """Bytes of each state tensor of one parameter. Empty for a dtype that the optimizer does not hold."""
        if (kept := self.kept.get((len(shape), dtype))) is None:
            shape, kept = (prod(shape),), self.kept.get((1, dtype), ())  # a piece of a tensor, cut over ranks
        return tuple(one.of(shape) for one in kept)


def probe_optimizer(optimizer: Optimizer | Optimizers) -> OptimizerKind:
    """Find out how ``optimizer`` bears being taken apart. It, its parameters and its state are left as they are."""
    if isinstance(optimizer, Optimizers):
        kinds = [probe_optimizer(one) for one in optimizer.each]
        whys = "; ".join(kind.why for kind in kinds if kind.why)
        return OptimizerKind(all(k.elementwise for k in kinds), all(k.separate for k in kinds), whys)
    name = type(optimizer).__name__
    with _quiet():
        tensors = [
            _Small.of(shape, kind, index)
            for kind in _kinds(optimizer)
            for index, shape in enumerate(shape for dims in sorted(kind.dims) for shape in _shapes(dims))
        ]
        failures = []
        for build in (made_again, emptied):
            try:
                whole = _together(build, optimizer, tensors)
                break
            except Exception as error:
                failures.append(in_short(error))
        else:
            return OptimizerKind(
                False, False, f"unknown: {name} cannot be tried on small tensors: {'; '.join(failures)}"
            )
        if not all(path.isfinite().all() for path in whole):
            return OptimizerKind(False, False, f"unknown: {name} does not stay finite on small tensors")
        if not any(_moved(tensor, path).any() for tensor, path in zip(tensors, whole, strict=True)):
            return OptimizerKind(False, False, f"unknown: {name} moves no small tensor")

        def apart(what: str, run: Callable[[], list[Tensor]]) -> str:
            try:
                off = max(_off(*three) for three in zip(tensors, whole, run(), strict=True))
            except Exception as error:
                return f"{name} cannot step {what}: {in_short(error)}"
            return f"{name} stepping {what} differs by {off:.1%} of the update" if off > TOLERANCE else ""

        cut = apart("a tensor as two pieces", lambda: _in_pieces(build, optimizer, tensors))
        turns = apart("its parameters in two turns", lambda: _in_turns(build, optimizer, tensors))
    return OptimizerKind(elementwise=not cut, separate=not turns, why="; ".join(filter(None, (cut, turns))))


def needs_whole(optimizer: Optimizer) -> bool:
    """Whether it steps a tensor otherwise than piece by piece. Those with a fused kernel of torch's are not tried."""
    if type(optimizer) in FUSED_OPTIMIZERS or needs_closure(optimizer):
        return False
    return not probe_optimizer(optimizer).elementwise


def state_bytes(optimizer: Optimizer | Optimizers) -> StateBytes:
    """What ``optimizer`` keeps for a parameter once it has stepped twice, by a trial on small ones. ``RuntimeError``:
    one that evaluates the loss itself is not tried."""
    found: dict[tuple[int, str], tuple[StateTensor, ...]] = {}
    for one in Optimizers.of(optimizer).each:
        if needs_closure(one):
            raise RuntimeError(f"{type(one).__name__} evaluates a loss, and there is none")
        with _quiet():
            for kind, dtype in ((each, dtype) for each in _kinds(one) for dtype in each.dtypes):
                for dims in sorted({1, *(dims for dims in kind.dims if dims <= len(PRIMES))}):
                    try:
                        kept = _kept(one, kind, dims, dtype)
                    except Exception:
                        if dims in kind.dims:
                            raise
                        continue  # takes no 1-D tensors, and holds none
                    key = dims, str(dtype).removeprefix("torch.")
                    size = lambda kept, dims=dims: sum(each.of(PRIMES[:dims]) for each in kept)
                    found[key] = max(found.get(key, ()), kept, key=size)
    return StateBytes(found)


def bare_copy(optimizer: Optimizer, groups: list[dict[str, Any]], state: Any) -> Optimizer:
    """An optimizer with the same settings over other groups: no hooks, and nothing put in place of its ``step``."""
    twin = object.__new__(type(optimizer))
    vars(twin).update({key: own(value) for key, value in vars(optimizer).items() if key not in NOT_COPIED})
    without_step_hooks(twin)
    twin.param_groups, twin.state = groups, state
    return twin


def own(value: Any) -> Any:
    """``value`` such that counting in it changes no other copy."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, list | dict | set) else value


def made_again(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """Its class called again: the one way for state that ``__init__`` makes. Settings are known by their names."""
    known = {**vars(optimizer), **optimizer.defaults}
    known.update({key: value for key, value in KERNELS.items() if key in known})
    accepted = list(inspect.signature(type(optimizer)).parameters)[1:]
    again = type(optimizer)(groups, **{key: known[key] for key in accepted if key in known})  # type: ignore[call-arg]
    held = [[id(p) for p in group["params"]] for group in again.param_groups]
    if held != [[id(p) for p in group["params"]] for group in groups]:
        raise TypeError(f"{type(optimizer).__name__} made again holds other parameters")
    plain = {k: v for k, v in vars(optimizer).items() if v is None or isinstance(v, bool | int | float | str)}
    vars(again).update(plain)
    return again


def emptied(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """A copy of its attributes: for a class that cannot be called again, and makes its state as it steps."""
    for key, value in vars(optimizer).items():
        if key in (*NOT_COPIED, "defaults"):
            continue
        direct = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
        if not direct and any(isinstance(leaf, Tensor | nn.Module | Optimizer) for leaf in tree.leaves(value)):
            raise TypeError(f"its attribute {key} holds tensors, which a copy would step too")
    return bare_copy(optimizer, groups, defaultdict(dict))


@dataclass(frozen=True)
class _Kind:
    """Groups that differ in numbers alone (a learning rate for each layer) are tried as one."""

    settings: dict[str, Any]
    dims: set[int]
    dtypes: set[torch.dtype]


@dataclass(frozen=True)
class _Small:
    """A tensor of the trial: where it starts and what gradients it will see, one a step."""

    kind: _Kind
    start: Tensor
    gradients: Tensor

    @classmethod
    def of(cls, shape: tuple[int, ...], kind: _Kind, index: int) -> "_Small":
        """Gradients point much the same way from step to step: distances from the start then grow, and an optimizer
        that measures them sees so."""
        start, direction = torch.randn(2, *shape, dtype=torch.float64, device="cpu")
        noise = torch.randn(len(SCALES), *shape, dtype=torch.float64, device="cpu")
        scales = torch.tensor(SCALES, dtype=torch.float64, device="cpu").view(-1, *[1] * len(shape))
        return cls(kind, start, (direction + 0.3 * noise) * scales * 2.0 ** (index % 4))

    def pieces(self) -> list["_Small"]:
        start, gradients = self.start.flatten(), self.gradients.reshape(len(SCALES), -1)
        at = start.numel() // 3
        ends = ((0, at), (at, start.numel())) if at else ((0, start.numel()),)
        return [_Small(self.kind, start[a:b], gradients[:, a:b]) for a, b in ends]


Build = Callable[[Optimizer, list[dict[str, Any]]], Optimizer]


def _together(build: Build, optimizer: Optimizer, tensors: list[_Small]) -> list[Tensor]:
    """Where each tensor is after each step."""
    groups, parameters = _groups(tensors)
    return _train([build(optimizer, groups)], tensors, parameters)


def _in_pieces(build: Build, optimizer: Optimizer, tensors: list[_Small]) -> list[Tensor]:
    pieces = [tensor.pieces() for tensor in tensors]
    paths = iter(_together(build, optimizer, [piece for some in pieces for piece in some]))
    return [torch.cat([next(paths) for _ in some], 1) for some in pieces]


def _in_turns(build: Build, optimizer: Optimizer, tensors: list[_Small]) -> list[Tensor]:
    """Copies of one optimizer, each with every other tensor, and one state for both: as a step in parts runs."""
    groups, parameters = _groups(tensors)
    whole = build(optimizer, groups)
    first = {id(p) for p in parameters[::2]}
    turns = []
    for mine in (True, False):
        parts = [{**g, "params": [p for p in g["params"] if (id(p) in first) is mine]} for g in whole.param_groups]
        turns.append(bare_copy(whole, [part for part in parts if part["params"]], whole.state))
    return _train([turn for turn in turns if turn.param_groups], tensors, parameters)


def _train(optimizers: list[Optimizer], tensors: list[_Small], parameters: list[nn.Parameter]) -> list[Tensor]:
    paths = [[] for _ in tensors]
    for step in range(len(SCALES)):
        for parameter, tensor in zip(parameters, tensors, strict=True):
            parameter.grad = tensor.gradients[step].clone()
        for optimizer in optimizers:
            optimizer.step()
        for path, parameter in zip(paths, parameters, strict=True):
            path.append(parameter.detach().flatten().clone())
    return [torch.stack(path) for path in paths]


def _groups(tensors: list[_Small]) -> tuple[list[dict[str, Any]], list[nn.Parameter]]:
    """Parameters for ``tensors``, and the groups they stand in."""
    groups: dict[int, dict[str, Any]] = {}
    parameters = [nn.Parameter(tensor.start.clone()) for tensor in tensors]
    for tensor, parameter in zip(tensors, parameters, strict=True):
        group = groups.setdefault(id(tensor.kind), {"params": [], **_settings(tensor.kind)})
        group["params"].append(parameter)
    return list(groups.values()), parameters


def _settings(kind: _Kind) -> dict[str, Any]:
    settings = {key: own(value.cpu() if isinstance(value, Tensor) else value) for key, value in kind.settings.items()}
    settings.update({key: value for key, value in KERNELS.items() if key in settings})
    if "lr" in settings and float(settings["lr"]) == 0:  # a warmup starts there, and nothing would move
        settings["lr"] = float(settings.get("initial_lr") or 1e-3)
    return settings


def _kinds(optimizer: Optimizer) -> list[_Kind]:
    def sort(value: Any) -> Any:
        if value is None or isinstance(value, bool | str):
            return value
        return bool(value != 0) if isinstance(value, int | float) else type(value)

    kinds: dict[Any, _Kind] = {}
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key not in NOT_SETTINGS}
        key = tuple((key, sort(value)) for key, value in sorted(settings.items()))
        kind = kinds.setdefault(key, _Kind(settings, set(), set()))
        kind.dims.update(p.dim() for p in group["params"])
        kind.dtypes.update(p.dtype for p in group["params"])
    return list(kinds.values())


def _shapes(dims: int) -> Iterable[tuple[int, ...]]:
    return SHAPES.get(dims, ((4, 6, 3, *[2] * (dims - 3)), (3, 5, 2, *[2] * (dims - 3))))


def _kept(optimizer: Optimizer, kind: _Kind, dims: int, dtype: torch.dtype) -> tuple[StateTensor, ...]:
    def state_of(build: Build) -> list[Tensor]:
        parameter = nn.Parameter(torch.randn(PRIMES[:dims], device="cpu").to(dtype))
        stepped = build(optimizer, [{"params": [parameter], **_settings(kind)}])
        for _ in range(2):
            parameter.grad = torch.randn(PRIMES[:dims], device="cpu").to(dtype)
            stepped.step()
        return list(tree.tensors(stepped.state.get(parameter, {})))

    try:
        state = state_of(made_again)
    except Exception:
        state = state_of(emptied)
    kept = []
    for tensor in state:
        rest, powers = tensor.numel(), [0] * dims
        for at, prime in enumerate(PRIMES[:dims]):
            while rest and rest % prime == 0:
                rest, powers[at] = rest // prime, powers[at] + 1
        kept.append(StateTensor(tuple(powers), rest * tensor.element_size()))
    return tuple(kept)


def _moved(tensor: _Small, path: Tensor) -> Tensor:
    """How far a tensor had come from its start at most, by step."""
    return (path - tensor.start.flatten()).abs().amax(1).cummax(0).values


def _off(tensor: _Small, want: Tensor, got: Tensor) -> float:
    """The largest difference of two paths, relative to the update."""
    apart = (want - got).abs().amax(1)
    share = apart / _moved(tensor, want)
    share[apart == 0] = 0.0
    return share.nan_to_num(nan=torch.inf).max().item()


@contextmanager
def _quiet() -> Iterator[None]:
    """The trial is random, but always the same, and takes no random number from the user. One thread: for small tensors
    several cost far more than they save."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), torch.enable_grad(), cpu_threads(1):
        warnings.simplefilter("ignore")
        torch.default_generator.manual_seed(0)  # the CPU's alone
        yield
