"""Weights to and from the ranks of a pipeline, one tensor at a time: no rank but one need ever hold the whole model.

To begin with, the ranks build the model on meta (``torch.device("meta")``) and keep their part of it; ``deliver`` sends
each what it needs, from the one that has the weights. In the end ``collect`` brings them together again.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshfit.anatomy.record_build import tied
from meshfit.axes.pipeline.axis import Staged
from meshfit.torch_private import own_buffers, own_parameters


def deliver(staged: Staged, model: nn.Module, group: dist.ProcessGroup, device: torch.device, source: int = 0) -> None:
    """Fill this rank's part from ``model`` on rank ``source``, where it must still be whole. Sent by way of ``device``.
    Tensors of a part that are on meta are made anew, so optimizers come after. All ranks call it together."""
    rank = dist.get_rank(group)
    holders = staged.holders
    mine = _named(staged.model)
    whole = _named(model)
    made: dict[int, Tensor] = {}
    for name, ranks in holders.items():
        if rank == source:
            sent = whole[name].detach().to(device).contiguous()
            for target in ranks:
                if target != source:
                    dist.send(sent, group=group, group_dst=target)
        elif rank in ranks:
            old = mine[name]
            new = torch.empty(old.shape, dtype=old.dtype, device=device)
            dist.recv(new, group=group, group_src=source)
            if old.is_meta:
                made[id(old)] = new
            else:
                old.detach().copy_(new)
    _replace(staged.model, made)


def _named(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _replace(part: nn.Module, made: dict[int, Tensor]) -> None:
    """Put ``made`` in the place of tensors on meta, by identity: ties stay ties."""
    kept: dict[int, Tensor] = {}
    for module in part.modules():
        for held in (own_parameters(module), own_buffers(module)):
            for name, old in held.items():
                if old is None or id(old) not in made:
                    continue
                if id(old) not in kept:
                    new = made[id(old)]
                    grad = old.requires_grad
                    kept[id(old)] = nn.Parameter(new, requires_grad=grad) if isinstance(old, nn.Parameter) else new
                held[name] = kept[id(old)]  # type: ignore[assignment]


def collect(
    mine: Mapping[str, Mapping[str, Tensor]], owners: Mapping[str, int], group: dist.ProcessGroup, *, keep: bool
) -> dict[str, dict[str, Tensor]]:
    """Tensors that go with parameters and buffers, of all ranks, on the CPU: by the name of the parameter, then by one
    of their own. Each comes from its owner. Ranks that do not ``keep`` them hold one at a time. All ranks call it."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    said = {
        name: {key: (tuple(t.shape), t.dtype) for key, t in many.items()}
        for name, many in mine.items()
        if owners.get(name) == rank
    }
    every: list[dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]]] = [said] * world
    dist.all_gather_object(every, said, group=group)
    nccl = "nccl" in dist.get_backend(group)
    device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
    found: dict[str, dict[str, Tensor]] = {}
    for name, owner in owners.items():
        for key, (shape, dtype) in every[owner].get(name, {}).items():
            own = rank == owner
            tensor = mine[name][key].detach() if own else torch.empty(shape, dtype=dtype, device=device)
            tensor = tensor.to(device).contiguous()
            dist.broadcast(tensor, group=group, group_src=owner)
            if keep:
                found.setdefault(name, {})[key] = tensor.cpu().clone()
    return found


def whole_state(staged: Staged, group: dist.ProcessGroup, *, keep: bool) -> dict[str, Tensor]:
    """All weights and buffers of the model, on the CPU, tied ones under each of their names."""
    mine = {name: {"": tensor} for name, tensor in _named(staged.model).items()}
    found = {name: many[""] for name, many in collect(mine, staged.owners, group, keep=keep).items()}
    if keep:
        found |= {name: found[first] for name, first in tied(staged.skeleton).items()}
    return found
