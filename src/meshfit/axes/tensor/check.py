"""The proof of a tensor plan, before anything is cut: a module whole, against its parts in threads.

The module runs once as it is and once as ``degree`` threads of this process, each with its own cut copy, on inputs that
it met in a forward of the model. What must agree, element by element: the outputs that are used, the gradients of its
inputs and of every parameter, buffers that it changes. In double precision, where a difference is no rounding; in
single if its kernels refuse that.

Random numbers have no part in it: dropout is left out. But where it is met is noted: on what all ranks hold alike it
must be drawn from their common stream, on what is shared out from each rank's own.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshfit.anatomy.record_forward import draws
from meshfit.axes.tensor.cut import cut
from meshfit.axes.tensor.ops import Meeting, Stream, Threads
from meshfit.axes.tensor.region import Cut, Region, Traffic, joined
from meshfit.axes.tensor.twin import converted, sharing
from meshfit.axes.tensor.vocabulary import whole_output
from meshfit.torch_private import tree_flatten, tree_map, tree_unflatten

TOLERANCE = {torch.float64: (1e-8, 1e-5), torch.float32: (2e-4, 1e-2)}
"""By how much an element may differ, relative to itself and to the root mean square of its tensor; and how small that
may be beside those of the others, before it is taken for rounding of zero."""


class Refused(Exception):
    """A region does not compute what the whole does: why not, in words."""


@dataclass(eq=False)
class Call:
    """What one call of a module was given, and which of the real tensors that it returned were used."""

    inputs: Any
    """(args, kwargs), detached; those that needed a gradient say so, and what was one tensor is one."""

    used: tuple[bool, ...] = ()


@dataclass(eq=False)
class Reference:
    """What a module computes as a whole, for one call."""

    module: nn.Module
    call: Call
    dtype: torch.dtype
    draws: bool
    result: "Result"


@dataclass(eq=False)
class Result:
    outputs: list[Tensor]
    inputs: list[Tensor | None]
    parameters: dict[str, Tensor | None]
    """Gradients, both of them."""

    buffers: dict[str, Tensor] = field(default_factory=dict)
    narrow: bool = False
    """Something was computed in single precision, as norms often are whatever they are given."""


def reference(module: nn.Module, call: Call) -> Reference:
    """Run ``module`` on ``call``; raises ``Refused`` if it cannot be run by itself."""
    refused: Exception | None = None
    for dtype in TOLERANCE:
        twin = converted(module, dtype)
        met: list[Tensor | None] = []
        before = draws()
        try:
            result = _run(sharing(twin), call, dtype, met.append)
            if draws() != before:
                raise Refused("draws random numbers of Python or NumPy, so that two runs cannot be compared")
            return Reference(twin, call, dtype, bool(met), result)
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            refused = error
    assert refused is not None
    raise Refused(f"{type(refused).__name__}: {first_line(refused)}") from refused


def check(whole: Reference, regions: Sequence[Region], degree: int) -> tuple[tuple[str, ...], tuple[Traffic, ...]]:
    """Whether ``regions`` of the module compute what it does as a whole; raises ``Refused`` if not.

    Returns the names of parameters, among those the regions call partial, whose gradients have to be summed; and the
    collectives of one call.
    """
    meeting = Meeting(degree)
    copies, streams = [], []
    for rank in range(degree):
        group, module = Threads(meeting, rank), sharing(whole.module)
        stream = Stream(group)
        try:
            for region in regions:
                cut(module, region, group, stream)
        except (AttributeError, RuntimeError, TypeError, AssertionError) as error:
            raise Refused(f"cannot be cut: {first_line(error)}") from error
        copies.append(module)
        streams.append((group, stream))

    def work(rank: int) -> Result:
        group, stream = streams[rank]

        def met(x: Tensor | None) -> None:
            if x is None:
                if stream.inside:
                    raise Refused("draws random numbers inside, other than for dropout")
                return
            every = group.all(x.detach())
            alike = all(part.shape == x.shape and torch.allclose(part, every[0]) for part in every)
            if alike == stream.inside:
                raise Refused("drops out what all ranks hold alike and what is shared out in one go")

        return _run(copies[rank], whole.call, whole.dtype, met)

    try:
        results = meeting.run(work)
    except Refused:
        raise
    except Exception as error:
        raise Refused(f"{type(error).__name__}: {first_line(error)}") from error
    partial = _compared(whole, regions, results)
    return partial, tuple(streams[0][0].log)


def _compared(whole: Reference, regions: Sequence[Region], parts: list[Result]) -> tuple[str, ...]:
    want, close = whole.result, _Close(whole)
    cuts = {joined(region.module, each.name): each for region in regions for each in region.cuts}
    claimed = {joined(region.module, name) for region in regions for name in region.partial}
    compared = 0
    for rank, part in enumerate(parts):
        if len(part.outputs) != len(want.outputs):
            unused = not any(whole.call.used[len(part.outputs) :]) and len(part.outputs) < len(want.outputs)
            if not unused:
                raise Refused("returns another number of tensors")
        for used, got, right in zip(whole.call.used, part.outputs, want.outputs, strict=False):
            compared += used
            if used and not close(got, right):
                raise Refused("its output differs")
        for got, right in zip(part.inputs, want.inputs, strict=True):
            if not close.gradient(got, right):
                raise Refused("the gradient of its input differs")
        for name, right in want.buffers.items():
            if not close(part.buffers[name], cuts[name].part(right, rank) if name in cuts else right):
                raise Refused(f"{name} differs")
        for name, right in want.parameters.items():
            if name not in cuts:
                continue
            own = None if right is None else cuts[name].part(right, rank)
            if not close.gradient(_of_copies(name, cuts[name], rank, parts), own):
                raise Refused(f"the gradient of {name} differs")
    if not compared:
        raise Refused("nothing that it returns is used: there is nothing to compare")
    partial = []
    for name, right in want.parameters.items():
        grads = [part.parameters[name] for part in parts]
        if name in cuts or all(close.gradient(grad, right) for grad in grads):
            continue
        there = [grad for grad in grads if grad is not None]
        if name not in claimed or not there or not close.gradient(torch.stack(there).sum(0), right):
            raise Refused(f"the gradient of {name}, which every rank holds, differs")
        partial.append(name)
    return tuple(partial)


def _of_copies(name: str, cut: Cut, rank: int, parts: list[Result]) -> Tensor | None:
    """The gradient of a share, summed over the ranks that hold it."""
    grads = [part.parameters[name] for part, held in zip(parts, cut.ranges, strict=True) if held == cut.ranges[rank]]
    there = [grad for grad in grads if grad is not None]
    return sum(there[1:], start=there[0]) if there else None


class _Close:
    def __init__(self, whole: Reference):
        self.tolerance, floor = TOLERANCE[torch.float32 if whole.result.narrow else whole.dtype]
        grads = (*whole.result.parameters.values(), *whole.result.inputs)
        self.floor = floor * max((_size(grad) for grad in grads if grad is not None), default=1.0)

    def __call__(self, got: Tensor, want: Tensor, floor: float = 0.0) -> bool:
        if got.shape != want.shape or got.dtype != want.dtype:
            return False
        scale = max(_size(want), floor)
        if (
            not want.numel()
            or float(torch.linalg.vector_norm((got - want).flatten(), float("inf"))) <= self.tolerance * scale
        ):
            return True  # most are: by far the faster question
        return torch.allclose(got, want, rtol=self.tolerance, atol=self.tolerance * scale, equal_nan=True)

    def gradient(self, got: Tensor | None, want: Tensor | None) -> bool:
        """No gradient, and one of zero, are the same."""
        if got is None and want is None:
            return True
        if want is None:
            assert got is not None
            want = torch.zeros_like(got)
        return self(torch.zeros_like(want) if got is None else got, want, self.floor)


def _size(x: Tensor) -> float:
    """Root mean square of those elements that are no stand-ins for infinity."""
    x = x.detach()
    size = float(torch.linalg.vector_norm(x)) / max(x.numel(), 1) ** 0.5
    if size < 1e28:
        return size
    x = x[x.abs() < 1e30].double()
    return float(x.square().mean().sqrt()) if x.numel() else 0.0


def _run(module: nn.Module, call: Call, dtype: torch.dtype, met: Callable[[Tensor | None], None]) -> Result:
    leaves, spec = tree_flatten(call.inputs)
    fresh: dict[int, Any] = {}
    origin: list[Tensor] = []
    for leaf in leaves:
        if id(leaf) in fresh:
            continue
        if not isinstance(leaf, Tensor):
            fresh[id(leaf)] = copy.deepcopy(leaf) if hasattr(leaf, "__dict__") and not callable(leaf) else leaf
        elif not leaf.is_floating_point():
            fresh[id(leaf)] = leaf.clone()
        else:
            own = leaf.detach().to(dtype, copy=True).requires_grad_(leaf.requires_grad)
            origin.append(own)
            fresh[id(leaf)] = own.clone()  # a module may write to its inputs
    args, kwargs = tree_unflatten([fresh[id(leaf)] for leaf in leaves], spec)
    with torch.enable_grad(), NoDraws(met) as watched:
        outputs = tensors_of(whole_output(module(*args, **kwargs)))
        random = torch.Generator().manual_seed(3)
        total = torch.zeros((), dtype=torch.float64)
        for used, output in zip(call.used or [True] * len(outputs), outputs, strict=False):
            if used and output.requires_grad:
                weighted = torch.view_as_real(output) if output.is_complex() else output
                total = total + (weighted * torch.randn(weighted.shape, generator=random).to(dtype)).sum()
        if total.requires_grad:
            total.backward()
    return Result(
        [output.detach() for output in outputs],
        [x.grad for x in origin],
        {name: parameter.grad for name, parameter in module.named_parameters()},
        {name: buffer for name, buffer in module.named_buffers() if buffer.is_floating_point()},
        watched.narrow,
    )


def undrawn(module: nn.Module, given: Sequence[Any]) -> tuple[list[Any], list[Tensor | None]]:
    """What ``module`` gives for each, without dropout; and where that was met: None for other random numbers."""
    met: list[Tensor | None] = []
    with NoDraws(met.append):
        return [module(x) for x in given], met


def tensors_of(out: Any) -> list[Tensor]:
    """Real tensors of what a module returned: in tuples, dicts, and objects that hold them."""
    if isinstance(out, Tensor):
        return [out] if out.is_floating_point() or out.is_complex() else []
    if isinstance(out, Mapping):
        return [tensor for item in out.values() for tensor in tensors_of(item)]
    if isinstance(out, (tuple, list)):
        return [tensor for item in out for tensor in tensors_of(item)]
    return [t for item in vars(out).values() for t in tensors_of(item)] if hasattr(out, "__dict__") else []


DROPOUTS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout}
DRAWS = {"rand", "randn", "rand_like", "randn_like", "randint", "randperm", "bernoulli", "bernoulli_", "normal"}
DRAWS |= {"normal_", "uniform_", "exponential_", "multinomial", "poisson", "random_", "geometric_", "randint_like"}


class NoDraws(TorchFunctionMode):
    """Leaves dropout out, and tells of it; other random numbers are the same each time. Notes single precision."""

    def __init__(self, met: Callable[[Tensor | None], None]):
        super().__init__()
        self.met, self.count, self.narrow = met, 0, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in DROPOUTS:
            given = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
            p, training = given.get("p", 0.5), given.get("training", given.get("train", True))
            met = whole_output(given["input"])
            if p > 0 and training:
                self.met(met)
            return met
        at = {F.scaled_dot_product_attention: 4, F.multi_head_attention_forward: 10}.get(func)
        if at is not None and (args[at] if len(args) > at else kwargs.get("dropout_p", 0.0)) > 0:
            self.met(args[0] if args else kwargs["query"])
            if len(args) > at:
                args = (*args[:at], 0.0, *args[at + 1 :])
            else:
                kwargs["dropout_p"] = 0.0
        if getattr(func, "__name__", "") in DRAWS and kwargs.get("generator") is None:
            self.met(None)
            self.count += 1
            try:
                return func(*args, **kwargs, generator=torch.Generator().manual_seed(self.count))
            except TypeError:
                return func(*args, **kwargs)
        result = func(*args, **kwargs)
        self.narrow |= isinstance(result, Tensor) and result.dtype == torch.float32 and result.requires_grad
        return result


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:160] if lines else ""


def alias(out: Any) -> Any:
    """``out`` with a view for each tensor: a gradient that comes to the view came from outside."""
    return tree_map(lambda t: t.view_as(t) if isinstance(t, Tensor) and t.requires_grad else t, out)
