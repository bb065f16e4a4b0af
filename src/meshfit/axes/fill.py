"""A model that was built on meta: what plans are tried on, and how each rank comes to its part of the weights.

The first rank makes one parameter at a time (deferred/) and sends it to all; each keeps its part. So no rank ever
holds more than its part and one parameter, and all have the weights of the first, however each built the model. What
each rank reads from a file by itself is not made (checkpoint/initial.py).
"""

import re
import time
from collections.abc import Callable, Collection, Hashable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshfit.anatomy.copies import copied
from meshfit.axes.shard.gather import Shards
from meshfit.comm.objects import broadcast_object
from meshfit.deferred import Deferred
from meshfit.errors import JobError

if TYPE_CHECKING:
    from meshfit.axes.place import Placed

LARGEST = 2**26
"""Elements of parameters up to which plans are tried on the very weights of the model; beyond it, blocks that are alike
have the same ones."""

SIGN_SECONDS = 20.0
"""How often the first rank says that it is still at work, so that nobody's collective times out."""


def rehearsal(deferred: Deferred | None) -> nn.Module:
    """A copy of the model with values, to try plans on. Of a large one, as it might have been built: parameters of the
    same shape whose names differ in numbers alone share their values."""
    assert deferred is not None
    parameters = dict(deferred.model.named_parameters())
    if sum(p.numel() for p in parameters.values()) <= LARGEST:
        values: dict[Tensor, Tensor] = dict(deferred.values())
        first = {p: p for p in parameters.values()}
    else:
        kinds: dict[Hashable, nn.Parameter] = {}
        first = {
            p: kinds.setdefault((re.sub(r"\d+", "#", name), p.shape, p.dtype), p) for name, p in parameters.items()
        }
        values = deferred.samples(set(first.values()))
    memo: dict[int, Any] = {}
    for p in parameters.values():
        new = nn.Parameter(values.get(first[p], first[p].detach()), requires_grad=p.requires_grad)
        vars(new).update(vars(p))
        memo[id(p)] = new
    return copied(deferred.model, memo)


def check_alike(deferred: Deferred, group: dist.ProcessGroup) -> None:
    """Refuse to go on where ranks have built different models: they would wait for each other in vain."""
    model = deferred.model
    mine = [
        (name, tuple(t.shape), t.dtype, t.is_meta, t in deferred.sources)
        for name, t in (*model.named_parameters(), *model.named_buffers())
    ]
    first = broadcast_object(mine, group)
    if first != mine:
        differs = next((b for a, b in zip(first, mine, strict=False) if a != b), None)
        raise JobError(
            "the function given as model= builds another model on this rank than on the first",
            f"{len(first)} tensors there, {len(mine)} here" + (f"; {differs[0]} differs" if differs else ""),
            "it must build the same one in every process",
        )


def fill(placed: "Placed", deferred: Deferred, besides: Collection[Tensor] = ()) -> None:
    """Give every parameter that was on meta its values, ``besides`` those that have them: all ranks call it together,
    with the same ones."""
    group, device = placed.mesh.world, placed.device
    assert group is not None
    parameters, held = deferred.parameters, set(placed.model.parameters())
    header = torch.empty(1, dtype=torch.int64, device=device)

    def announce(number: int) -> None:
        header.fill_(number)
        dist.broadcast(header, group=group, group_src=0)

    def take(number: int, whole: Tensor) -> None:
        if whole.numel():
            dist.broadcast(whole.view(-1).view(torch.uint8), group=group, group_src=0)
        p = parameters[number]
        if p in held:
            for layer in placed.layers.values():
                whole = layer.part(p, whole, copies=False) if isinstance(layer, Shards) else layer.part(p, whole)
            p.data.copy_(whole)

    with torch.no_grad():
        if dist.get_rank(group) == 0:
            numbers: dict[Tensor, int] = {p: i for i, p in enumerate(parameters)}
            for p, whole in deferred.values(_now_and_then(lambda: announce(-1)), besides=besides):
                announce(numbers[p])
                take(numbers[p], whole.to(device, parameters[numbers[p]].dtype).contiguous())
        else:
            for _ in range(sum(p not in besides for p in parameters)):
                announce(-1)
                while (number := int(header)) < 0:
                    announce(-1)
                take(number, torch.empty(deferred.shapes[number], dtype=parameters[number].dtype, device=device))
    placed.changed()


def _now_and_then(act: Callable[[], None]) -> Callable[[], None]:
    last = time.monotonic()

    def told() -> None:
        nonlocal last
        if time.monotonic() - last > SIGN_SECONDS:
            act()
            last = time.monotonic()

    return told
