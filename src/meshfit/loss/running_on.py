"""A model in host memory that runs on a device for a while, though it may not fit there.

Modules are copied to the device when they are called, and let go when they return: as many at a time as fit. Nothing is
written back, so their forwards must not change buffers that matter, and nothing is recorded for backward.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from meshfit.torch_private.modules import own_buffers, own_parameters

SHARE = 1 / 4
"""Of the device's free memory that copies may take."""


@contextmanager
def running_on(device: torch.device, model: nn.Module, room: int | None = None) -> Iterator[None]:
    """Within it, calls of ``model`` compute on ``device``; ``room``: bytes for copies there."""
    tensors = [*model.parameters(), *model.buffers()]
    if all(tensor.device.type == device.type for tensor in tensors):
        yield
        return
    if room is None:
        room = int(torch.cuda.mem_get_info(device)[0] * SHARE) if device.type == "cuda" else 2**30
    with ExitStack() as stack:
        if sum(tensor.nbytes for tensor in tensors) <= room:
            copies = _Copies(device, [*model.modules()])
            stack.callback(copies.end)  # before they are made, which may run out of memory halfway
            copies.begin()
        else:
            for module, whole in _parts(model, room):
                copies = _Copies(device, [*module.modules()] if whole else [module])
                begin, end = _as_hook(copies.begin), _as_hook(copies.end)
                stack.callback(module.register_forward_pre_hook(begin).remove)
                stack.callback(module.register_forward_hook(end, always_call=True).remove)
        yield


def _as_hook(act: Callable[[], None]) -> Callable[..., None]:
    return lambda *_: act()


def _parts(module: nn.Module, room: int) -> Iterator[tuple[nn.Module, bool]]:
    """Modules with all below them, where that fits; others by themselves."""
    for part in module.children():
        size = sum(tensor.nbytes for tensor in (*part.parameters(), *part.buffers()))
        if size <= room:
            yield part, True
        else:
            yield from _parts(part, room)
    yield module, False


class _Copies:
    """Some modules' tensors on a device, from ``begin`` to ``end``; calls may nest."""

    def __init__(self, device: torch.device, modules: list[nn.Module]):
        self.device, self.modules, self.depth = device, modules, 0
        self.home: list[tuple[dict[str, Any], str, Tensor]] = []

    def begin(self) -> None:
        self.depth += 1
        if self.depth > 1:
            return
        copies: dict[Tensor, Tensor] = {}
        for module in self.modules:
            for owner in (own_parameters(module), own_buffers(module)):
                for name, tensor in owner.items():
                    if tensor is not None:
                        self.home.append((owner, name, tensor))
                        if tensor not in copies:
                            there = tensor.detach().to(self.device)
                            parameter = isinstance(tensor, nn.Parameter)
                            copies[tensor] = nn.Parameter(there, requires_grad=False) if parameter else there
                        owner[name] = copies[tensor]

    def end(self) -> None:
        self.depth -= 1
        if self.depth == 0:
            for owner, name, tensor in self.home:
                owner[name] = tensor
            self.home.clear()
