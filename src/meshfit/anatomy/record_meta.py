"""Running on meta tensors: no memory, no arithmetic, only shapes.

Code sees of such tensors the device on which the model really is (it may choose by it what to do), while everything
is made on meta. What cannot run there at all is tried on a copy, on zeros, for the shapes of what it makes.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from meshfit.anatomy.record_program import tensors
from meshfit.torch_private.operators import without_torch_function

DEVICES: dict[str, Callable[[torch.device], Any]] = {
    "device": lambda device: device,
    "is_cuda": lambda device: device.type == "cuda",
    "is_cpu": lambda device: device.type == "cpu",
    "is_meta": lambda device: device.type == "meta",
    "get_device": lambda device: -1 if device.index is None else device.index,
}
"""What tensors on meta say to the glue: the device on which the model is. Code may choose by it what to do."""

LARGEST_TRIAL = 2 << 30
"""Bytes of parameters up to which a module that cannot run on meta is run on zeros."""


def on_meta(tree: Any) -> Any:
    """Arguments for a run on meta: every device in them is meta."""
    if isinstance(tree, torch.device):
        return torch.device("meta")
    if isinstance(tree, str) and (tree in ("cpu", "cuda") or tree.startswith("cuda:")):
        return "meta"
    if type(tree) is tuple:
        return tuple(map(on_meta, tree))
    if type(tree) is dict and any(isinstance(item, str | torch.device) for item in tree.values()):
        return {key: on_meta(item) for key, item in tree.items()}
    return tree  # a list stays the same object: a module may add to it


def _zeros(tensor: Tensor) -> Tensor:
    zeros = torch.zeros(tensor.shape, dtype=tensor.dtype)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(zeros, tensor.requires_grad)
    return zeros.requires_grad_(True) * 1 if tensor.requires_grad else zeros


def all_on_meta(run: Callable, call: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """``call`` with the tensors moved to meta that the code made elsewhere."""
    given = tensors((args, kwargs))
    if all(tensor.is_meta for tensor in given):
        raise ValueError("they are all there")
    args, kwargs = copy.deepcopy((args, kwargs), {id(t): t if t.is_meta else t.to("meta") for t in given})
    return run(call, args, kwargs)


def on_zeros(
    run: Callable, know: Callable[[list[Tensor]], None], module: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> Any:
    """What a module makes that cannot run on meta, as meta tensors: from a copy of it, on zeros. ``know`` gets
    the copy's parameters and buffers."""
    if sum(p.numel() * p.element_size() for p in module.parameters()) > LARGEST_TRIAL:
        raise ValueError("too large")
    with without_torch_function():  # nor is meta the default device here
        given = tensors((args, kwargs))
        real = {id(t): _zeros(t) for t in (*module.parameters(), *module.buffers(), *given)}
        twin, args, kwargs = copy.deepcopy((module, args, kwargs), real)
        know([*twin.parameters(), *twin.buffers()])
        result = run(functools.partial(nn.Module.__call__, twin), args, kwargs)
        sources = [t for t in given if t.requires_grad]
        return copy.deepcopy(result, {id(t): _bridged(t, sources) for t in tensors(result)})


def _bridged(made: Tensor, sources: list[Tensor]) -> Tensor:
    """A meta tensor for ``made``, in the graph of autograd after it and after ``sources``: a cost that follows the
    graph backward finds both."""
    if not made.requires_grad:
        return torch.empty_like(made, device="meta")
    return _Bridge.apply(made, *sources)  # type: ignore[return-value]


class _Bridge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, made: Tensor, *sources: Tensor) -> Tensor:
        return torch.empty_like(made, device="meta")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise NotImplementedError("recordings on meta have no backward")
