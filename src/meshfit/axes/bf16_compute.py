"""``precision=bf16-compute``: forward and backward in bfloat16 throughout, from fp32 weights, without autocast.

What torch's FSDP2 does with ``MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32)``, under every plan:

    weights      fp32 where they are stepped; the model computes with copies in bf16. Sharded ones are gathered in bf16
                 and used as they are; others are rounded once a step, whatever its microbatches
    gradients    bf16 as backward makes them; accumulated over microbatches and summed over ranks in fp32
    inputs       fp32 tensors become bf16 where they enter a layer: a module that has weights of its own and no modules
                 inside, or one of torch.nn. Integers, and what the model's own code does before, are left alone
    outputs      what the model returns is handed on in fp32; of outputs with a loss of their own the loss alone
    buffers      as they are: rotary tables keep their digits. BatchNorm stays fp32, weights and statistics
    activations  as the model's own code makes them: residuals and norms in bf16, ``x.float()`` in fp32

Beside ``bf16`` (autocast) activations take half the memory, nothing is cast back and forth, and sums along the depth of
the model are rounded to 8 bits. A forward that meets a product of two dtypes (a table in fp32 without ``.to(x.dtype)``)
is an error of torch, and is told with its line.

    memory    2 bytes a weight beside its 4, for a step; under shard those of what is gathered
"""

from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from meshfit.anatomy.copies import copied
from meshfit.anatomy.record_watch import line_of
from meshfit.anatomy.trace import Trace
from meshfit.axes.axis import Applied
from meshfit.axes.shard.open_unit import ParameterPlaces, places_of
from meshfit.data import tree
from meshfit.errors import PlanError, in_short
from meshfit.torch_private.modules import RunningNorm, own_parameters
from meshfit.torch_private.tensors import call_a_parameter, version

if TYPE_CHECKING:
    from meshfit.axes.place import Placed

WORD = "bf16-compute"
DTYPE = torch.bfloat16
MIXED = ("dtype", "scalar type", "same type", "data type")
"""Words of what torch says of an operation that is given several dtypes."""


def rounded(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that ``model`` computes with in bf16, by their first names."""
    kept = {p for module in model.modules() if isinstance(module, RunningNorm) for p in module.parameters()}
    return {name: p for name, p in model.named_parameters() if p.dtype == torch.float32 and p not in kept}


def as_computed(model: nn.Module) -> nn.Module:
    """A copy with weights in bf16, as a step computes with them, for a recording. It shares the buffers."""
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    memo |= {id(p): nn.Parameter(p.detach().to(DTYPE), p.requires_grad) for p in rounded(model).values()}
    made = copied(model, memo)
    with_casts(made)
    return made


def as_held(trace: Trace, names: Iterable[str]) -> Trace:
    """A recording of such a copy with the parameters ``names``, which were rounded, as they are held."""
    wide = {n: replace(p, dtype="float32", bytes=2 * p.bytes, computed="bfloat16") for n, p in trace.parameters.items()}
    return replace(trace, parameters=trace.parameters | {name: wide[name] for name in names})


def with_casts(model: nn.Module, sharded: Container[Any] = ()) -> list[Any]:
    """Let layers that hold bf16 weights take their inputs in bf16, and what the model returns be fp32. Nothing happens
    where weights are in another dtype. ``sharded``: those have been seen to. What to remove it by is returned."""
    apart = lambda module: any(p in sharded for p in own_parameters(module).values() if p is not None)
    layers = [module for module in model.modules() if is_layer(module) and not apart(module)]
    handles = [layer.register_forward_pre_hook(_take_in_bf16, with_kwargs=True) for layer in layers]
    return handles + [module.register_forward_hook(_give_in_fp32) for module in _called(model)]


def casting(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Likewise for a layer whose weights are gathered around its forward, and so later than a hook sees them."""

    def run(*args: Any, **kwargs: Any) -> Any:
        taken = _take_in_bf16(module, args, kwargs)
        if taken is not None:
            args, kwargs = taken
        return forward(*args, **kwargs)

    return run


def is_layer(module: nn.Module) -> bool:
    """Whether it takes its inputs in the dtype of its weights."""
    own = any(p is not None for p in own_parameters(module).values()) and not isinstance(module, RunningNorm)
    return own and (not any(True for _ in module.children()) or type(module).__module__.startswith("torch.nn."))


def _called(model: nn.Module) -> Iterator[nn.Module]:
    """What a step calls: the model, or the parts of one without a forward."""
    if type(model).forward is not nn.Module.forward or "forward" in model.__dict__:
        yield model
        return
    for child in model.children():
        yield from _called(child)


def _take_in_bf16(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not any(map(_is_wide, (*args, *kwargs.values()))):
        return None
    own = own_parameters(module).values()
    if not any(p is not None and p.dtype == DTYPE for p in own):
        return None
    return tuple(map(_narrow, args)), {name: _narrow(x) for name, x in kwargs.items()}


def _is_wide(x: Any) -> bool:
    if isinstance(x, tuple | list):
        return any(map(_is_wide, x))
    return isinstance(x, Tensor) and x.dtype == torch.float32


def _narrow(x: Any) -> Any:
    if isinstance(x, tuple | list) and _is_wide(x):
        return type(x)(map(_narrow, x))
    return x.to(DTYPE) if isinstance(x, Tensor) and x.dtype == torch.float32 else x


def _give_in_fp32(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    if isinstance(own := getattr(output, "loss", None), Tensor):
        if own.dtype == DTYPE:
            output.loss = own.float()
        return output
    if not any(t.dtype == DTYPE for t in tree.tensors(output)):
        return None
    return tree.map_tensors(lambda t: t.float() if t.dtype == DTYPE else t, output)


class Bf16Compute(Applied):
    """Weights that no shard gathers, rounded for each step, in the place of the parameters until its backward is over:
    whatever is computed again in backward finds them, too."""

    def __init__(self, placed: "Placed"):
        self._placed = placed
        self._casts: list[Any] = []
        self._parameters: list[nn.Parameter] = []
        self._places = ParameterPlaces([])
        self._copies: list[Tensor] | None = None
        """While they are in the place of the parameters."""
        self._looked = False

    def _begin(self) -> None:
        """What this rank holds stays as it is from now on: all axes have been."""
        model, shards = self._placed.model, self._placed.shards
        sharded = {} if shards is None else shards.place
        self._casts = with_casts(model, sharded)
        self._parameters = [p for p in rounded(model).values() if p not in sharded]
        places = places_of(model)
        self._places = ParameterPlaces([places[p] for p in self._parameters])

    @contextmanager
    def during(self) -> Iterator[None]:
        if not self._casts:
            self._begin()
        copies = [p.to(DTYPE) for p in self._parameters]
        for copy in copies:
            call_a_parameter(copy)
        self._places.replace(self._parameters, copies)
        self._copies = copies
        versions = [version(copy) for copy in copies]
        try:
            yield
            self._check(copies, versions)
        except RuntimeError as error:
            if not any(word in str(error) for word in MIXED):
                raise
            raise PlanError(
                f"{self._placed.plan}: an operation was given several dtypes: {in_short(error)}",
                line_of(error),
                "weights and what layers make are bf16 here; buffers, and what is made in forward, are as they are",
                "cast at that line: x.to(y.dtype); precision=bf16 (autocast) takes the model as it is",
            ) from error
        finally:
            self._copies = None
            self._places.replace(copies, self._parameters)

    @contextmanager
    def inside(self) -> Iterator[None]:
        if self._copies is not None:
            yield
            return
        with self.during():
            yield

    def _check(self, copies: list[Tensor], versions: list[int]) -> None:
        """Refuse a forward that changes weights: what it changes is a copy. At first values are looked at, too."""
        changed = versions != [version(copy) for copy in copies]
        if torch.is_grad_enabled() and not self._looked:
            self._looked = True
            pairs = zip(copies, self._parameters, strict=True)
            changed |= not all(torch.allclose(copy, p.to(DTYPE), 0.0, 0.0, equal_nan=True) for copy, p in pairs)
        if changed:
            raise PlanError(
                f"{self._placed.plan}: the model's own code changes weights",
                "what was changed was a copy in bf16, made for this step",
                "precision=bf16 (autocast) takes the model as it is",
            )

    def close(self) -> None:
        for cast in self._casts:
            cast.remove()
        self._casts = []
