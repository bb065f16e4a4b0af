"""The proof of a plan, before anything is cut: a whole module against its parts in threads of this process.

The module runs forward and backward once as it is and once in ``degree`` threads, each with its own copy, cut as the
axis cuts it. In double precision, where a difference is not rounding; in single where a kernel has no double.

Random numbers have no part in it: dropout is left out, what else is drawn is the same each time.
"""

import copy
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshfit.anatomy.copies import sharing
from meshfit.axes.spec import whole_output
from meshfit.comm.group import ThreadGroup, in_threads
from meshfit.errors import in_short
from meshfit.torch_private.trees import tree_flatten, tree_unflatten

R = TypeVar("R")

Given = tuple[tuple, dict[str, Any]]
"""Arguments of a call, with their ``requires_grad``; a tensor passed twice is one tensor."""


class Refused(Exception):
    """The parts do not compute what the whole computes; with the reason."""


def forgotten(refused: Refused) -> Refused:
    """The reason alone: where it was found holds on to all that was computed."""
    refused.__cause__ = refused.__context__ = None
    return refused.with_traceback(None)


@dataclass(eq=False)
class PassResult:
    """Outputs and gradients of a forward and backward."""

    outputs: list[Tensor]
    inputs: list[Tensor | None]
    parameters: dict[str, Tensor | None]
    """Gradients, both of them."""

    buffers: dict[str, Tensor] = field(default_factory=dict)
    narrow: bool = False
    """Something was computed in single precision, as norms often are whatever their input."""


def in_precision(
    convert: Callable[[torch.dtype], nn.Module],
    dtypes: Iterable[torch.dtype],
    run: Callable[[nn.Module, torch.dtype], R],
) -> tuple[nn.Module, torch.dtype, R]:
    """The module in the first of ``dtypes`` in which it runs, that dtype, and ``run``'s result; else ``Refused``."""
    refused: Exception | None = None
    for dtype in dtypes:
        whole = convert(dtype)
        try:
            return whole, dtype, run(whole, dtype)
        except Refused:
            raise
        except Exception as error:  # the module's own
            refused = error
    assert refused is not None
    raise Refused(in_short(refused)) from refused


def in_parts(
    whole: nn.Module,
    groups: list[ThreadGroup],
    cut: Callable[[nn.Module, ThreadGroup], object],
    run: Callable[[nn.Module, ThreadGroup], R],
) -> list[R]:
    """The result of ``run`` on each rank, with a copy of ``whole`` that ``cut`` has cut."""
    copies = [sharing(whole) for _ in groups]
    try:
        for group, module in zip(groups, copies, strict=True):
            cut(module, group)
        return in_threads(groups, lambda group: run(copies[group.rank], group))
    except Refused:
        raise
    except Exception as error:
        raise Refused(in_short(error)) from error


def run_once(
    module: nn.Module,
    given: Given,
    dtype: torch.dtype,
    met: Callable[[Tensor | None], None],
    weights: Callable[[int, Tensor], Tensor | None],
) -> PassResult:
    """Forward, and backward from the sum of the outputs times ``weights(index, output)``, if there are outputs. ``met``
    is called with each input of dropout, and with None for other random numbers."""
    leaves, spec = tree_flatten(given)
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
        total = torch.zeros((), dtype=torch.float64)
        for at, output in enumerate(outputs):
            real = torch.view_as_real(output) if output.is_complex() else output
            if output.requires_grad and (weight := weights(at, real)) is not None:
                total = total + (real * weight).sum()
        if total.requires_grad:
            total.backward()
    return PassResult(
        [output.detach() for output in outputs],
        [x.grad for x in origin],
        {name: parameter.grad for name, parameter in module.named_parameters()},
        dict(module.named_buffers()),
        watched.narrow,
    )


class Close:
    """Whether tensors agree: each element to ``tolerance`` of itself, or of the root mean square of its tensor; of a
    gradient, or of ``floor``, if that is larger."""

    def __init__(self, tolerance: float, floor: float = 0.0):
        self.tolerance, self.floor = tolerance, floor

    def __call__(self, got: Tensor, want: Tensor, floor: float = 0.0) -> bool:
        if got.shape != want.shape or got.dtype != want.dtype:
            return False
        near = self.tolerance * max(size_of(want), floor)
        if not want.numel() or float(torch.linalg.vector_norm((got - want).flatten(), float("inf"))) <= near:
            return True  # most are: by far the faster question
        return torch.allclose(got, want, rtol=self.tolerance, atol=near, equal_nan=True)

    def gradient(self, got: Tensor | None, want: Tensor | None) -> bool:
        """Whether gradients agree; None is the same as zero."""
        if got is None and want is None:
            return True
        if want is None:
            assert got is not None
            want = torch.zeros_like(got)
        return self(torch.zeros_like(want) if got is None else got, want, self.floor)


def size_of(x: Tensor) -> float:
    """Root mean square, without elements that stand for infinity."""
    x = x.detach()
    size = float(torch.linalg.vector_norm(x)) / max(x.numel(), 1) ** 0.5
    if size < 1e28:
        return size
    x = x[x.abs() < 1e30].double()
    return float(x.square().mean().sqrt()) if x.numel() else 0.0


def summed(grads: Iterable[Tensor | None]) -> Tensor | None:
    """The sum of several ranks' gradients of one parameter."""
    there = [grad for grad in grads if grad is not None]
    return functools.reduce(torch.add, there) if there else None


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
    """Skips dropout, and calls ``met`` for it; other random numbers are the same each time. Notes single
    precision."""

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
