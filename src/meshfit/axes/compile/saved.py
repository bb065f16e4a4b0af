"""What compiled code keeps for backward, as its compiler decides it, on fake tensors: nothing is computed.

Compiled forward and backward are traced together, and parted where least has to be kept: what is cheap (norms,
activations, casts of weights) is computed again. That depends on the whole of what is compiled, so the compiler itself
is asked (AOTAutograd's partition, with inductor's passes), of model and loss together or of each block that is unlike
the others. What it cannot follow counts as in eager mode, where more is kept.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from meshfit.anatomy.copies import copied
from meshfit.anatomy.kernels import attention_of_cuda
from meshfit.anatomy.trace import Event, Trace
from meshfit.axes import bf16_compute
from meshfit.axes.precision import DTYPES, WITHOUT_AUTOCAST
from meshfit.axes.shard.units import Whole
from meshfit.data import tree
from meshfit.torch_private.compilation import fake_tensors, saved_for_backward
from meshfit.torch_private.tensors import storage_id

Kept = Mapping[str, tuple[int, int]]
"""By the path of what is compiled ("": model and loss as one), bytes of activations, and of copies of weights."""


def kept_by_compiled(
    model: nn.Module,
    objective: Callable[[nn.Module, Any], Any],
    batch: Any,
    blocks: Sequence[str] = (),
    *,
    precision: str = "fp32",
    device: str = "cuda",
) -> Kept:
    """For ``batch``, on ``device``: of each of ``blocks``; without any, of model and loss as one. Model and batch are
    left as they are, and may be on meta."""
    stands_in = (
        device == "cuda" and not torch.backends.cuda.is_built()
    )  # fake tensors on a GPU need torch's code for it
    device = "cpu" if stands_in else device
    with fake_tensors(), attention_of_cuda() if stands_in else nullcontext(), _autocast(precision, device):
        fake = _on(device, model)
        content = tree.map_tensors(lambda tensor: _like(tensor, device), batch)
        if precision == bf16_compute.WORD:
            fake = bf16_compute.as_computed(fake)
        whole, inputs = Whole(fake, objective), [*tree.tensors(content)]
        if not blocks:
            return {"": _kept(whole, (content,), {}, inputs)}
        found: dict[str, tuple[int, int]] = {}
        alike: dict[Any, tuple[int, int]] = {}
        for path, (args, kwargs) in _calls(whole, content, blocks).items():
            block = fake.get_submodule(path)
            tensors = (*block.parameters(), *tree.tensors((args, kwargs)))
            key = type(block), tuple((t.shape, t.dtype, t.requires_grad) for t in tensors)
            if key not in alike:
                alike[key] = _kept(block, args, kwargs, inputs)
            found[path] = alike[key]
        return found


def after_compile(trace: Trace, kept: Kept) -> Trace:
    """``trace`` with that much kept in each of them, shared out over its events as it was before."""

    def compiled(event: Event) -> str | None:
        own = (*event.within, event.name) if event.kind == "module" else event.within
        return "" if "" in kept else next((path for path in own if path in kept), None)

    at = {event.index: compiled(event) for event in trace.events}
    before = {path: [0, 0] for path in kept}
    for event in trace.events:
        if (path := at[event.index]) is not None:
            before[path][0] += event.cost.kept
            before[path][1] += event.cost.rounded

    def changed(event: Event) -> Event:
        if (path := at[event.index]) is None:
            return event
        own = (event.cost.kept, event.cost.rounded)
        kept_, rounded = (
            round(mine * now / max(1, was)) for mine, was, now in zip(own, before[path], kept[path], strict=True)
        )
        return replace(event, cost=replace(event.cost, kept=kept_, rounded=rounded))

    return replace(trace, events=tuple(map(changed, trace.events)))


def _kept(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], there: Iterable[Tensor]
) -> tuple[int, int]:
    """Bytes that ``module`` keeps if it is compiled, beyond its weights and what is ``there`` anyway."""
    held = dict(module.named_parameters()) | dict(module.named_buffers())
    given = tree.map_tensors(lambda t: t.detach().requires_grad_(t.requires_grad), (args, dict(kwargs)))

    def forward(weights: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
        left = iter(inputs)
        args, kwargs = tree.map_tensors(lambda _: next(left), given)
        return [*tree.tensors(torch.func.functional_call(module, dict(zip(held, weights, strict=True)), args, kwargs))]

    saved = saved_for_backward(forward, [*held.values()], [*tree.tensors(given)])
    free = {storage_id(tensor) for tensor in (*held.values(), *there)}
    own = {storage_id(t): (t.untyped_storage().nbytes(), copy) for t, copy in saved if storage_id(t) not in free}
    return sum(size for size, copy in own.values() if not copy), sum(size for size, copy in own.values() if copy)


def _calls(whole: Whole, content: Any, blocks: Sequence[str]) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """What each of ``blocks`` is first called with."""
    found: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def noting(path: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        return lambda _, args, kwargs: found.setdefault(path, (args, kwargs)) and None

    hooks = [
        whole.model.get_submodule(path).register_forward_pre_hook(noting(path), with_kwargs=True) for path in blocks
    ]
    whole(content)
    for hook in hooks:
        hook.remove()
    return found


def _on(device: str, model: nn.Module) -> nn.Module:
    memo: dict[int, Any] = {id(t): _like(t, device) for t in (*model.parameters(), *model.buffers())}
    return copied(model, memo)


def _like(tensor: Tensor, device: str) -> Tensor:
    data = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return nn.Parameter(data, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data


@contextmanager
def _autocast(precision: str, device: str) -> Iterator[None]:
    """``torch.autocast``, for a device that need not be there."""
    was = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, precision not in WITHOUT_AUTOCAST)
    torch.set_autocast_dtype(device, DTYPES.get(precision, was[1]))
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, was[0])
        torch.set_autocast_dtype(device, was[1])
        torch.clear_autocast_cache()
