"""What autograd saves of gathered keys and values: the rank's own positions. Backward gathers the rest again.

So what a rank keeps is 1/n of it, for one gather more. While one attention goes backward, the gather for the one before
it in the forward is under way.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from meshfit.axes.context.piece import Piece, start_gather
from meshfit.axes.context.span import SplitDim
from meshfit.comm.group import CountingGroup, Group
from meshfit.torch_private.autograd import checkpoint_now, saved_tensors_hooks_now
from meshfit.torch_private.tensors import storage_id, version


@dataclass(frozen=True, slots=True)
class _SavedGather:
    """In place of a whole that was gathered, or of a view of it."""

    wholes: "_Wholes"
    index: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Wholes:
    """What was gathered for one call: of each piece the local part, and for a while in backward the whole."""

    def __init__(self, fetch: Callable[[Any], Tensor]):
        self.saved = 0
        self._fetch, self._begun, self._left = fetch, False, 0
        self._locals: list[tuple[Any, int, SplitDim, Group]] = []
        self._arriving: list[Callable[[], Tensor]] = []
        self._there: list[Tensor] = []
        self._before: _Wholes | None = None

    def add(self, piece: Piece, keep: Callable[[Tensor], Any]) -> int:
        if not self._locals and not isinstance(piece.group, CountingGroup):  # which counts one stage after another
            latest = _latest.get(piece.group)
            self._before, _latest[piece.group] = None if latest is None else latest(), ref(self)
        local = piece.plain().detach()
        self._locals.append((keep(local), version(local), piece.span, piece.group))
        return len(self._locals) - 1

    def start(self) -> None:
        """Gather again, in the background. All ranks call it together."""
        self._begun, self._left = True, self.saved
        for packed, known, span, group in self._locals:
            local = self._fetch(packed)
            if version(local) != known:
                raise RuntimeError("a tensor that attention needs for its gradient was changed in place")
            with torch.no_grad():
                self._arriving.append(start_gather(local, span, group))

    def take(self, index: int) -> Tensor:
        """The whole of a piece. All are dropped when what was saved of them has been taken."""
        if not self._there:
            if not self._arriving:
                self.start()
            with torch.no_grad():
                self._there, self._arriving = [arrived() for arrived in self._arriving], []
            before, self._before = self._before, None
            if before is not None and not before._begun:
                before.start()
        whole = self._there[index]
        self._left -= 1
        if not self._left:
            self._there = []
        return whole


_latest: WeakKeyDictionary[Group, ref[_Wholes]] = WeakKeyDictionary()
"""Of the forward under way: backward comes to them in the opposite order. What autograd keeps holds them, and no more:
a forward that is never gone back through leaves nothing behind."""


def begin_forward(group: Group) -> None:
    """What an earlier forward left is none of this one's."""
    _latest.pop(group, None)


@contextmanager
def noted(*given: Any, later: bool = False) -> Iterator["Saving"]:
    """For what is saved within of the wholes of those that are pieces, and of what ``Saving`` gathers. ``later``:
    wholes are gathered within."""
    hooks = saved_tensors_hooks_now()
    again = checkpoint_now(again=True) is not None  # what is computed again is not saved at all
    saving = Saving({storage_id(x.whole()): x for x in given if isinstance(x, Piece)})
    found = saving.gathered
    if again or not (found or later) or not torch.is_grad_enabled():
        yield saving
        found.clear()
        return
    keep, fetch = hooks or (lambda x: x, lambda x: x)
    wholes, indices, others = _Wholes(fetch), {}, []

    def pack(x: Tensor) -> Any:
        number = storage_id(x) if x.layout is torch.strided else None
        if number not in found:
            others.append(other := _SavedOther(x.detach()))  # a result's node would hold itself
            return other
        if number not in indices:
            indices[number] = wholes.add(found[number], keep)
        wholes.saved += 1
        return _SavedGather(wholes, indices[number], x.size(), x.stride(), int(x.storage_offset()))

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, _SavedOther):
            x = fetch(packed.kept)
            if packed.version is not None and packed.version != version(x):
                raise RuntimeError("what attention returned was changed in place, and is needed for its gradient")
            return x
        return packed.wholes.take(packed.index).as_strided(packed.size, packed.stride, packed.offset)

    try:
        with saved_tensors_hooks(pack, unpack):
            yield saving
    finally:
        found.clear()  # autograd keeps the hooks, and they would keep the wholes
        for other in others:
            part = saving.parts.get(storage_id(other.kept)) if other.kept.layout is torch.strided else None
            if part is not None and part.shape == other.kept.shape:
                other.kept, other.version = part, version(part)
            other.kept = keep(other.kept)
        others.clear()


@dataclass(slots=True)
class _SavedOther:
    """What is saved as it is; of a part of a tensor that was put together, that part of it."""

    kept: Any
    version: int | None = None


class Saving:
    """What is known of tensors that may be saved, by their memory."""

    def __init__(self, gathered: dict[int, Piece]):
        self.gathered = gathered
        """Wholes, and the pieces that they were gathered of."""
        self.parts: dict[int, Tensor] = {}
        """Parts of a tensor that are put together, and saved as parts of that: the memory is held once."""

    def gather(self, piece: Piece) -> Callable[[], Tensor]:
        """The whole of ``piece``, in the background and without a derivative: what is returned waits for it."""
        arrived = start_gather(piece.plain(), piece.span, piece.group)

        def wait() -> Tensor:
            whole = arrived()
            self.gathered[storage_id(whole)] = piece
            return whole

        return wait

    def along_positions(self, parts: Sequence[Tensor]) -> Tensor:
        """Results of attention, [..., positions, channels], in memory as they are."""
        if len(parts) == 1:
            return parts[0]
        order = sorted(range(parts[0].dim()), key=parts[0].stride, reverse=True)
        back = sorted(range(len(order)), key=order.__getitem__)
        positions = back[-2]
        whole = torch.cat([part.permute(order) for part in parts], positions).permute(back)
        views = whole.detach().split([part.shape[-2] for part in parts], -2)
        self.parts = {storage_id(part): view for part, view in zip(parts, views, strict=True)}
        return whole
