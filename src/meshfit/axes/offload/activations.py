"""What autograd saves, in host memory from forward to backward.

Hooks on saved tensors copy each one's memory out as it is saved, and back before backward asks for it, in the order of
the forward from the end; each way on a stream of its own. What was saved last (``WINDOW``) is still on the device when
backward begins, and is used as it is. What stays where it is: parameters, buffers and their copies in half precision,
small tensors, views of something much larger, and tensors of other classes.

The device waits where copies are slower than its work: memory is bounded, not time.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, WeakValueDictionary, ref

import torch
from torch import Tensor

from meshfit.axes.offload.host_copies import CopyEvent, CopyLane, bytes_of, host_memory
from meshfit.torch_private.tensors import KeptTensor, storage_id, version

SMALLEST = 2**16
"""Bytes of a tensor that is worth a copy."""

WINDOW = 2**29
"""Bytes on their way out, and those on their way in: at most, or one tensor."""

VIEW = 4
"""How many times larger than a saved view its memory may be, and still move."""


class HostPool:
    """Host memory that is used again."""

    def __init__(self, *, pinned: bool):
        self._pinned = pinned
        self._free: dict[int, list[tuple[Tensor, CopyEvent]]] = {}
        self.bytes = 0
        """Of all that was ever taken at one time."""

    def take(self, size: int) -> tuple[Tensor, CopyEvent]:
        """Of ``size`` bytes; and after what it may be written to."""
        if free := self._free.get(size):
            return free.pop()
        self.bytes += size
        return host_memory(size, pinned=self._pinned), CopyEvent()

    def give(self, memory: Tensor, after: CopyEvent) -> None:
        self._free.setdefault(memory.numel(), []).append((memory, after))


class SavedMemory:
    """The memory of saved tensors, in host memory."""

    def __init__(self, pool: HostPool, tensor: Tensor, before: "SavedMemory | None"):
        self.size, self.key = tensor.untyped_storage().nbytes(), storage_id(tensor)
        self.here: KeptTensor | None = KeptTensor.of(tensor)
        """While it is still on the device."""
        self.changed = ""
        self.pool = pool
        self.host, self.free = pool.take(self.size)
        self.sent = self.fetched = CopyEvent()
        self.there: Tensor | None = None
        """Once it was fetched."""
        self.left = 0
        """Saved tensors that backward has not asked for."""
        self.before: ReferenceType[SavedMemory] | None = None if before is None else ref(before)

    def release(self) -> None:
        """Let go of the memory on the device, once it is copied."""
        if self.here is not None:
            try:
                self.here.check()  # a copy under way would have seen the change
            except RuntimeError as error:
                self.changed = str(error)
            self.sent.wait()
            self.here = None

    def __del__(self) -> None:
        self.pool.give(self.host, self.fetched)


@dataclass(frozen=True, slots=True)
class SavedView:
    """In place of a saved tensor."""

    copy: SavedMemory
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class HostActivations:
    """Pack and unpack hooks for what is saved on ``device``."""

    def __init__(self, device: torch.device):
        self.device = device
        self._in, self._out = CopyLane(device), CopyLane(device)
        self.pool = HostPool(pinned=device.type == "cuda")
        self._known: WeakValueDictionary[int, SavedMemory] = WeakValueDictionary()
        """By storage, while that is there."""
        self._leaving: deque[SavedMemory] = deque()
        self._coming: dict[SavedMemory, None] = {}
        self._latest: SavedMemory | None = None
        self._stays: Collection[int] = ()
        self._weights: Collection[torch.Size] = ()
        self.moved = 0
        """Bytes copied out."""

    def begin(self, stays: Collection[int], weights: Collection[torch.Size]) -> None:
        """A forward begins; ``stays``: storages that do, ``weights``: shapes whose copies in half precision do."""
        self._stays, self._weights, self._latest = stays, weights, None
        for copy in self._coming:  # that nobody asked for
            copy.fetched.wait()
            copy.there = None
        self._coming.clear()

    def pack(self, tensor: Tensor) -> Any:
        if not self._moves(tensor):
            return KeptTensor.of(tensor)
        copy = self._known.get(storage_id(tensor))
        if copy is None or copy.here is None or copy.here.version != version(tensor):
            copy = self._known[storage_id(tensor)] = self._send(tensor)
        copy.left += 1
        return SavedView(copy, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, KeptTensor):
            return packed.get()
        copy: SavedMemory = packed.copy
        if copy.changed:
            raise RuntimeError(copy.changed)
        self._fetch_ahead(copy)
        if copy.here is not None:
            storage = copy.here.get().untyped_storage()
        else:
            self._fetch(copy)
            copy.fetched.wait()
            assert copy.there is not None
            storage = copy.there.untyped_storage()
            self._coming.pop(copy, None)
        copy.left -= 1
        made = torch.empty(0, dtype=packed.dtype, device=self.device)
        made.set_(storage, packed.offset, packed.size, packed.stride)  # type: ignore[call-overload]
        if copy.left <= 0:
            copy.there = None  # the node has it now; asked for again, it is fetched again
        return made

    def _moves(self, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.device.type != self.device.type:
            return False
        storage, size = tensor.untyped_storage().nbytes(), tensor.numel() * tensor.element_size()
        if size < SMALLEST or storage > VIEW * size or storage_id(tensor) in self._stays:
            return False
        rounded = tensor.dtype in (torch.float16, torch.bfloat16)
        return not (rounded and (tensor.shape in self._weights or tensor.mT.shape in self._weights))

    @torch.no_grad()
    def _send(self, tensor: Tensor) -> SavedMemory:
        copy = SavedMemory(self.pool, tensor, self._latest)
        with self._out.copying(after=copy.free) as copy.sent:
            copy.host.copy_(bytes_of(tensor.untyped_storage()), non_blocking=True)
        self.moved += copy.size
        self._latest = copy
        self._leaving.append(copy)
        while len(self._leaving) > 1 and sum(each.size for each in self._leaving) > WINDOW:
            self._leaving.popleft().release()
        return copy

    def _fetch_ahead(self, copy: SavedMemory) -> None:
        """Start what backward will ask for after ``copy``."""
        for done in [each for each in self._leaving if each.left <= 0]:
            self._leaving.remove(done)
            done.release()
        room, before = WINDOW - sum(each.size for each in self._coming), copy.before
        while before is not None and (one := before()) is not None:
            room -= 0 if one in self._coming else one.size
            if room < 0:
                return
            if one.left > 0:
                self._fetch(one)
            before = one.before

    @torch.no_grad()
    def _fetch(self, copy: SavedMemory) -> None:
        if copy.here is not None or copy.there is not None:
            return
        copy.there = torch.empty(copy.size, dtype=torch.uint8, device=self.device)
        self._coming[copy] = None
        with self._in.copying(after=copy.sent) as copy.fetched:
            copy.there.copy_(copy.host, non_blocking=True)
