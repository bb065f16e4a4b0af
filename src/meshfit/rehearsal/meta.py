"""A rank's program on tensors without values: shapes and dtypes go through all of it, numbers through none.

A number read from such a tensor is one. Weights stay without values, messages say what they hold and hold
nothing, and nobody looks whether a loss is finite or an index in range. torch ignores autocast there, so that
activations travel in fp32. What decides by values (which expert takes a token, a loop that runs until something
converges) cannot be rehearsed so.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshfit.axes import place
from meshfit.comm.transport import Transport
from meshfit.nonfinite import NonFiniteWatch
from meshfit.patches import replaced

CPU = torch.device("cpu")


@contextmanager
def without_values() -> Iterator[None]:
    """Around a rank's program on meta."""
    numbers: dict[str, Callable[[Tensor], Any]] = {
        "item": _number,
        "tolist": lambda tensor: torch.ones(tensor.shape, dtype=tensor.dtype).tolist(),
        "cpu": lambda tensor: torch.ones(tensor.shape, dtype=tensor.dtype),
        "__bool__": lambda tensor: True,
        "__float__": lambda tensor: 1.0,
        "__int__": lambda tensor: 1,
        "__index__": lambda tensor: 1,
    }
    with ExitStack() as stack:
        for name, answer in numbers.items():
            make = partial(_answering, answer)
            real = getattr(torch.Tensor, name)
            stack.enter_context(replaced(torch.Tensor, name, make, everywhere=True, real=real))
        for name in ("allclose", "equal"):
            stack.enter_context(replaced(torch, name, _equal, everywhere=True))
        for name in ("autocast", "is_autocast_enabled", "get_autocast_dtype"):
            stack.enter_context(replaced(torch, name, _on_host, everywhere=True))
        copies = partial(replaced, torch.Tensor, "copy_", everywhere=True, real=torch.Tensor.copy_)
        stack.enter_context(copies(_kept))
        for name in ("announce", "receive_layouts", "_warm_up"):
            stack.enter_context(replaced(Transport, name, _in_host_memory, everywhere=True))
        stack.enter_context(replaced(vars(place), "fill", lambda before: _not_filled, everywhere=True))
        stack.enter_context(replaced(NonFiniteWatch, "see", lambda before: _looked_away, everywhere=True))
        yield


def _number(tensor: Tensor) -> Any:
    return torch.ones((), dtype=tensor.dtype).item()


def _answering(answer: Callable[[Tensor], Any], before: Callable[..., Any]) -> Callable[..., Any]:
    def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return answer(tensor) if tensor.is_meta else before(tensor, *args, **kwargs)

    return call


def _equal(before: Callable[..., Any]) -> Callable[..., Any]:
    def call(one: Tensor, other: Tensor, *args: Any, **kwargs: Any) -> Any:
        return one.is_meta or other.is_meta or before(one, other, *args, **kwargs)

    return call


def _on_host(before: Callable[..., Any]) -> Callable[..., Any]:
    def call(*device: Any, **kwargs: Any) -> Any:
        return before(*("cpu" if each == "meta" else each for each in device), **kwargs)

    return call


def _kept(before: Callable[..., Any]) -> Callable[..., Any]:
    """What has values keeps them, where it would be given some that are not known."""

    def call(tensor: Tensor, source: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(source, Tensor) and source.is_meta and not tensor.is_meta:
            return tensor
        return before(tensor, source, *args, **kwargs)

    return call


def _in_host_memory(before: Callable[..., Any]) -> Callable[..., Any]:
    """What says something is sent with its values."""

    def call(transport: Transport, *args: Any) -> Any:
        memory, device = transport.memory, transport.device
        transport.memory = transport.device = CPU
        try:
            return before(transport, *args)
        finally:
            transport.memory, transport.device = memory, device

    return call


def _not_filled(placed: Any, *_: Any) -> None:
    placed.changed()


def _looked_away(*_: Any) -> None:
    """From what depends on values: whether a step is finite, an index in range."""
