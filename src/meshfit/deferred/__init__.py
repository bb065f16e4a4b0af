"""A model that a function builds, on the meta device: what its tensors hold is made later, one tensor at a time.

While the function runs, every operation that makes or changes a tensor is written down and run on meta: it takes no
memory, and no random number is drawn. ``values`` then runs what was written down, in its order and from the same
generators, so that the bits are those of the function run plainly. A tensor is there from the first operation whose
result is kept until the last that touches it. Random numbers that were overwritten later are drawn and dropped.

What a function reads is computed on the spot, if it does not depend on random numbers. What cannot be followed is
``Unfollowable``: the function must be run plainly.
"""

import functools
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from gc import get_referents
from typing import Any

from torch import Tensor, nn

from meshfit.deferred.program import BuildProgram, StorageView, TensorSource, Unfollowable
from meshfit.deferred.record import BuildRecorder, OnCPU
from meshfit.errors import in_short
from meshfit.torch_private.modules import in_place_of_rejection_sampling, own_buffers, without_weak_references

__all__ = ["Deferred", "TensorSource", "Unfollowable", "put_off", "unrecorded"]


_recording: ContextVar[BuildRecorder | None] = ContextVar("recording", default=None)


def unrecorded() -> AbstractContextManager[None]:
    """Within it tensors are what they are, also while a function is recorded."""
    recorder = _recording.get()
    return nullcontext() if recorder is None else recorder.aside()


def put_off(source: TensorSource, tensor: Tensor) -> bool:
    """Whether a function is being recorded. Then ``tensor`` is filled when it is made; or now, if it has values
    already. Else nothing is done."""
    recorder = _recording.get()
    if recorder is None:
        return False
    if not recorder.later(source, tensor):
        with unrecorded():
            source(tensor)
    return True


class Deferred:
    """``model``, as ``build`` makes it, with its parameters on meta; its buffers, and tensors that are neither, have
    their values. Raises ``Unfollowable`` if ``build`` must be run plainly."""

    def __init__(self, build: Callable[[], Any]):
        recorder = BuildRecorder()
        before = _recording.set(recorder)
        try:
            with recorder, OnCPU(recorder), in_place_of_rejection_sampling(recorder.whole):
                self.model = build()
            recorder.check()
        except Unfollowable:
            raise
        except Exception as error:
            raise Unfollowable(in_short(error)) from error
        finally:
            _recording.reset(before)
            if recorder.left_elsewhere(getattr(self, "model", None)):
                _forget_cached_meta_tensors()
        if not isinstance(self.model, nn.Module):
            return  # its caller says so
        if not without_weak_references(self.model):
            raise Unfollowable("something refers weakly to its parameters")
        self._recorder = recorder
        self._give_values_to_all_but_parameters()
        self._views: dict[int, list[tuple[Tensor, StorageView]]] = defaultdict(list)
        """The parameters on each storage."""
        for p in self.model.parameters():
            if recorder.knows(p):
                view = recorder.view(p)
                self._views[view.storage].append((p, view))
        self.parameters = [p for p in self.model.parameters() if recorder.knows(p)]
        """Those on meta, in the model's order."""
        self.shapes = [p.shape for p in self.parameters]
        self.sources = {p: found for p in self.parameters if (found := self._source(p)) is not None}
        """Parameters that hold what was put off to be read from elsewhere, and nothing else."""

    def _give_values_to_all_but_parameters(self) -> None:
        recorder, homes = self._recorder, []
        for module in self.model.modules():
            homes += [(own_buffers(module), name, t) for name, t in own_buffers(module).items() if t is not None]
            homes += [(vars(module), name, t) for name, t in vars(module).items() if isinstance(t, Tensor)]
        homes = [(home, name, t) for home, name, t in homes if recorder.knows(t) and not isinstance(t, nn.Parameter)]
        program = self._program((recorder.view(t).storage for _, _, t in homes))
        memory, made = dict(program.run()), {}
        for home, name, t in homes:
            view = recorder.view(t)
            if id(t) not in made:
                made[id(t)] = view.on(memory[view.storage]).requires_grad_(t.requires_grad)
            home[name] = made[id(t)]

    def _source(self, p: Tensor) -> TensorSource | None:
        view = self._recorder.view(p)
        last = self._recorder.ops[self._recorder.written[view.storage]]
        return last.func if isinstance(last.func, TensorSource) and last.args == (view,) else None

    def _program(self, wanted: Iterable[int], *, exact: bool = True) -> BuildProgram:
        return BuildProgram(self._recorder.ops, self._recorder.sizes, wanted, exact=exact)

    def values(
        self, progress: Callable[[], None] = lambda: None, *, besides: Collection[Tensor] = ()
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Each parameter that is on meta, ``besides`` some, and what it holds, on the CPU: one storage at a time, in
        the order in which they are complete. ``progress`` is called now and then."""
        wanted = [storage for storage, each in self._views.items() if any(p not in besides for p, _ in each)]
        for storage, memory in self._program(wanted).run(progress):
            for p, view in self._views[storage]:
                if p not in besides:
                    yield p, view.on(memory)

    def samples(self, some: Iterable[Tensor]) -> dict[Tensor, Tensor]:
        """Values for ``some`` of the parameters, from other random numbers: as it might have been built."""
        views = {p: view for each in self._views.values() for p, view in each}
        wanted = {p: views[p] for p in some if p in views}
        memory = dict(self._program((view.storage for view in wanted.values()), exact=False).run())
        return {p: view.on(memory[view.storage]) for p, view in wanted.items()}


_Cached = type(functools.lru_cache(lambda: None))


def _forget_cached_meta_tensors() -> None:
    """Empty what ``functools.lru_cache`` has kept in imported modules, where it holds tensors without values."""
    for cached in _caches():
        if _holds_meta(cached):
            cached.cache_clear()


def _caches() -> Iterator[Any]:
    for name, module in list(sys.modules.items()):
        for value in list(getattr(module, "__dict__", {}).values()):
            if type(value) is _Cached:
                yield value
            elif issubclass(type(value), type) and getattr(value, "__module__", "") == name:
                yield from (method for method in list(vars(value).values()) if type(method) is _Cached)


def _holds_meta(cached: Any) -> bool:
    around, seen = [cached], {id(vars(cached))}
    while around:
        for each in get_referents(around.pop()):
            if isinstance(each, Tensor) and each.is_meta:
                return True
            if type(each) in (dict, list, tuple) and id(each) not in seen:
                seen.add(id(each))
                around.append(each)
    return False
