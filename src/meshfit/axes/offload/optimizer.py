"""Optimizer state in host memory: it is on the device only while its parameters are stepped.

Parameters are stepped chunk by chunk. While one chunk is stepped, the state of the next is copied in and that of the
one before is copied out, each on a stream of its own. Weights and gradients stay on the device.

    memory   the state of three chunks while a step runs, none of it between steps; all of it on the host, pinned
    traffic  all state once in and once out a step, over the bus; the device waits for it where stepping is faster

State tensors remain the objects they are. While they are away their storage is empty, and reading them reads nothing:
``present`` and ``read`` give them whole. What is smaller than 4 KiB (counters of steps) stays on the device.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshfit.anatomy.probe_optimizer import (
    NOT_COPIED,
    NOT_SETTINGS,
    bare_copy,
    own,
    state_bytes,
)
from meshfit.axes.offload.host_copies import CopyEvent, CopyLane, bytes_of, host_memory
from meshfit.cost import CollectiveCall, Cost, tallied
from meshfit.data import tree
from meshfit.torch_private.optimizers import called_step, step_hooks
from meshfit.torch_private.tensors import storage_id, version

CHUNK = 256 * 2**20
SMALL = 4096


def offload_cost(sizes: Sequence[Sequence[int]], *, chunk: int = CHUNK) -> Cost:
    """``sizes``: bytes of what the optimizer keeps for each parameter."""
    away = [[size for size in each if size >= SMALL] for each in sizes]
    chunks = [sum(sum(away[i]) for i in part) for part in cut([sum(each) for each in away], chunk)]
    here = max((sum(chunks[i : i + 3]) for i in range(len(chunks))), default=0)
    stays = sum(size for each in sizes for size in each if size < SMALL)
    moved = sum(map(sum, away))
    how = {"axis": "offload", "dtype": "float32", "phase": "step", "once": True, "hidden": "update"}
    names = ("host_to_device", "device_to_host")
    return Cost(
        held={"optimizer": stays + here},
        host={"optimizer": moved},
        collectives=tallied(CollectiveCall(n, size, **how) for n in names for each in away for size in each),
    )


def cut(sizes: list[int], limit: int) -> list[range]:
    """Neighbours of ``limit`` in sum at most, and one of them at least."""
    parts, start, total = [], 0, 0
    for i, size in enumerate(sizes):
        if i > start and total + size > limit:
            parts.append(range(start, i))
            start, total = i, 0
        total += size
    return [*parts, range(start, len(sizes))] if sizes else []


class Offloads:
    """Several optimizers whose states are away."""

    def __init__(self, each: Iterable["Offloaded"]):
        self.each = list(each)

    @property
    def move(self) -> bool:
        return any(one.move for one in self.each)

    def fetch(self) -> None:
        """Bring all state back, until the next step."""
        for one in self.each:
            one.fetch()

    @contextmanager
    def present(self) -> Iterator[None]:
        """Within it all state is on the device."""
        with ExitStack() as stack:
            for one in self.each:
                stack.enter_context(one.present())
            yield

    def read(self, parameter: Tensor) -> Any:
        """A copy on the host of what is kept for ``parameter``."""
        return next((one.read(parameter) for one in self.each if one.holds(parameter)), {})


def as_it_is(parameters: Sequence[nn.Parameter], state: MutableMapping[Tensor, Any]) -> AbstractContextManager[None]:
    return nullcontext()


Around = Callable[[Sequence[nn.Parameter], MutableMapping[Tensor, Any]], AbstractContextManager[None]]
"""Entered around the step of some parameters, of an optimizer that has this state."""


class Offloaded:
    """An optimizer whose state is away. It stays the one that schedulers change and whose ``state`` holds everything;
    each chunk is stepped by a copy of it that has fewer parameters and the same state."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        *,
        chunk: int = CHUNK,
        move: bool | None = None,
        around: Around = as_it_is,
    ):
        """Sends what state there is to the host. ``chunk``: bytes of state that are stepped at a time; a parameter
        with more is a chunk of its own. ``move``: whether state really goes away; on CPUs there is nowhere to go, but
        tests ask for it. ``around``: entered around the step of each chunk."""
        self.optimizer, self._around = optimizer, around
        self.move = device.type == "cuda" if move is None else move
        self._kind = device.type
        self._in, self._out = CopyLane(device), CopyLane(device)
        kept = state_bytes(optimizer)
        every = [(g, p) for g, group in enumerate(optimizer.param_groups) for p in group["params"]]
        sizes = [
            sum(size for size in kept.of(tuple(p.shape), str(p.dtype).removeprefix("torch.")) if size >= SMALL)
            if p.requires_grad
            else 0
            for _, p in every
        ]
        self.chunks = [_Chunk(optimizer, [every[i] for i in part]) for part in cut(sizes, chunk)]
        self._chunk_of: dict[Tensor, _Chunk] = {p: chunk for chunk in self.chunks for p in chunk.parameters}
        copies = [chunk.optimizer for chunk in self.chunks]
        self._followed = [_Followed(lambda: vars(optimizer), [vars(c) for c in copies], NOT_COPIED)]
        for g in range(len(optimizer.param_groups)):
            groups = [chunk.groups[g] for chunk in self.chunks if g in chunk.groups]
            if groups:
                self._followed.append(_Followed(lambda g=g: optimizer.param_groups[g], groups, NOT_SETTINGS))
        for one in self.chunks:  # state that the optimizer has already
            self._send(one)

    def step(self) -> None:
        """As ``optimizer.step()``. On a GPU the host waits for all but the last two chunks to be on their way out:
        running further ahead, it would take memory for states that others have not left yet."""
        optimizer: Any = self.optimizer
        called_step(optimizer)
        for hook in step_hooks(optimizer)[0]:
            hook(optimizer, (optimizer,), {})
        for followed in self._followed:
            followed.down()
        for i, chunk in enumerate(self.chunks):
            if i == 0:
                self._fetch(chunk)
            if i >= 2:
                self.chunks[i - 2].sent.settle()
            if i + 1 < len(self.chunks):
                self._fetch(self.chunks[i + 1])
            chunk.fetched.wait()
            chunk.optimizer.state = optimizer.state
            with self._around(chunk.parameters, optimizer.state):
                chunk.optimizer.step()
            self._send(chunk)
        for followed in self._followed:
            followed.up()
        for hook in step_hooks(optimizer)[1]:
            hook(optimizer, (optimizer,), {})

    @contextmanager
    def present(self) -> Iterator[None]:
        """Within it all state is on the device: for ``optimizer.state_dict()`` and ``load_state_dict``."""
        self.fetch()
        try:
            yield
        finally:
            for chunk in self.chunks:
                self._send(chunk)

    def fetch(self) -> None:
        """Bring all state back, until the next step: before the optimizer is used without this."""
        for chunk in self.chunks:
            self._fetch(chunk)
            chunk.fetched.wait()

    def holds(self, parameter: Tensor) -> bool:
        return parameter in self._chunk_of

    def read(self, parameter: Tensor) -> Any:
        """A copy on the host of what ``optimizer.state[parameter]`` holds."""
        chunk = self._chunk_of[parameter]
        chunk.sent.settle()

        def whole(tensor: Tensor) -> Tensor:
            if not _has_storage(tensor) or (away := chunk.away.get(storage_id(tensor))) is None:
                return tensor.detach().to("cpu", copy=True)
            like = torch.empty(0, dtype=tensor.dtype, device="cpu")
            place = tensor.storage_offset(), tensor.shape, tensor.stride()
            return like.set_(away.host.untyped_storage(), *place).clone()

        return tree.map_tensors(whole, self.optimizer.state.get(parameter, {}))

    @torch.no_grad()
    def _fetch(self, chunk: "_Chunk") -> None:
        if not chunk.away:
            return
        coming = [chunk.away[key] for key in self._storages(chunk) if key in chunk.away]  # not what was replaced since
        chunk.spare += [one.host for one in chunk.away.values()]
        chunk.away = {}
        for one in coming:
            one.storage.resize_(one.host.numel())  # the memory is the main stream's, so the copies wait for it
        with self._in.copying(after=chunk.sent) as chunk.fetched:
            for one in coming:
                bytes_of(one.storage).copy_(one.host, non_blocking=True)

    @torch.no_grad()
    def _send(self, chunk: "_Chunk") -> None:
        if not self.move:
            return
        with self._out.copying() as chunk.sent:
            for key, storage in self._storages(chunk).items():
                if key in chunk.away:
                    continue
                host, there = chunk.host(storage), bytes_of(storage)
                host.copy_(there, non_blocking=True)
                self._out.uses(there)
                chunk.away[key] = _Away(storage, host)
                storage.resize_(0)

    def _storages(self, chunk: "_Chunk") -> dict[int, torch.UntypedStorage]:
        """What is (or goes) away of a chunk's state: not what it shares with weights or gradients."""
        near = (t for p in chunk.parameters for t in (p, p.grad) if t is not None and _has_storage(t))
        stays = {storage_id(tensor) for tensor in near}
        found = {}
        for p in chunk.parameters:
            for tensor in tree.tensors(self.optimizer.state.get(p, {})):
                if not _has_storage(tensor) or tensor.device.type != self._kind:
                    continue
                storage = tensor.untyped_storage()
                key = storage_id(storage)
                if key not in stays and (key in chunk.away or storage.nbytes() >= SMALL):
                    found[key] = storage
        return found


@dataclass(frozen=True, slots=True)
class _Away:
    storage: torch.UntypedStorage
    host: Tensor
    """Its bytes."""


class _Chunk:
    """Parameters stepped together: their copy of the optimizer, and where their state is."""

    def __init__(self, optimizer: torch.optim.Optimizer, members: list[tuple[int, nn.Parameter]]):
        self.parameters = [p for _, p in members]
        self.groups: dict[int, dict[str, Any]] = {}
        """By their place in the optimizer's own groups."""
        for g, p in members:
            self.groups.setdefault(g, {"params": []})["params"].append(p)
        self.optimizer: Any = bare_copy(optimizer, list(self.groups.values()), optimizer.state)
        self.away: dict[int, _Away] = {}
        """By storage."""
        self.spare: list[Tensor] = []
        """Host memory for what goes away next."""
        self.fetched, self.sent = CopyEvent(), CopyEvent()

    def host(self, storage: torch.UntypedStorage) -> Tensor:
        """Room for ``storage`` in host memory: what it had before, as a rule."""
        for i, spare in enumerate(self.spare):
            if spare.numel() == storage.nbytes():
                return self.spare.pop(i)
        return host_memory(storage.nbytes(), pinned=storage.device.type == "cuda")


@dataclass
class _Followed:
    """One dict of the optimizer's (a group, or its attributes) and the chunks' own versions of it.

    What somebody changes in the optimizer's (a schedule the learning rate, ``Update`` the loss scale) goes down to all
    of them before a step. What they change themselves (an optimizer that counts its steps in its group) goes up after
    it, from the first: they all count alike.
    """

    whole: Callable[[], dict[str, Any]]
    """Loading a state dict replaces the groups, so they are looked up every time."""
    parts: list[dict[str, Any]]
    skip: Collection[str]
    _seen: dict[str, Any] = field(default_factory=dict)
    _given: dict[str, Any] = field(default_factory=dict)

    def down(self) -> None:
        whole = self.whole()
        for key in [key for key in self._seen if key not in whole]:
            del self._seen[key], self._given[key]
            for part in self.parts:
                part.pop(key, None)
        for key, value in whole.items():
            if key in self.skip or (key in self._seen and _same(self._seen[key], value)):
                continue
            self._seen[key] = _stamp(value)
            for part in self.parts:
                part[key] = own(value)
            self._given[key] = _stamp(self.parts[0][key])

    def up(self) -> None:
        whole = self.whole()
        for key, value in self.parts[0].items():
            if key in self.skip or (key in self._given and _same(self._given[key], value)):
                continue
            whole[key] = own(value)
            self._given[key], self._seen[key] = _stamp(value), _stamp(whole[key])


def _stamp(value: Any) -> tuple[Any, int]:
    """The object, and how often it was written to in place."""
    return value, version(value) if isinstance(value, Tensor) else 0


def _same(stamp: tuple[Any, int], value: Any) -> bool:
    return stamp[0] is value and stamp[1] == _stamp(value)[1]


def _has_storage(tensor: Tensor) -> bool:
    """Not so for tensors that stand for others (quantized, distributed): those stay where they are."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
