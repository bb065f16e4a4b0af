"""Trainings of one process take turns.

The default random number generators, ``events.current()`` and functions that are replaced for a while (``patches.py``)
belong to the whole process. A training that runs in this process therefore takes a turn for its setup and for each
step, and trainings of other threads wait meanwhile. Between turns nothing is replaced, and each training goes on with
the random numbers where its last turn ended: two of them, in two threads or one between two steps of the other, train
like one after the other. On a GPU a turn ends when its work is queued.

Nothing that runs in a turn (``step=``, ``loss=``, ``data=``) may wait for another training of the process: that one
waits for its turn. ``callbacks=`` and the body of a loop over ``steps()`` run outside of turns. Not held apart: what
a thread that is at no training draws from the default generators, or seeds, meanwhile.
"""

import os
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from meshfit import events
from meshfit.errors import JobError
from meshfit.generators import Generators

T = TypeVar("T")

_lock = threading.RLock()
_live: "list[Turn]" = []
_holder: "Turn | None" = None
"""Whose generators and events the process has: of whom the last turn was; None: of what is outside of trainings."""
_outside: tuple[Generators, events.Events] | None = None
"""Those, while a training has its own."""


class Turn:
    """Of one training, on ``device``: ``with turn.under_way():`` around all of it, ``with turn:`` around each part.
    ``world``: this process is one of several ranks, which talk to each other in a turn."""

    def __init__(self, device: torch.device, *, world: bool = False):
        self._device, self._world, self._thread = device, world, threading.get_ident()
        self._left: tuple[Generators, events.Events] | None = None
        self._before: list[Turn | None] = []

    @contextmanager
    def under_way(self) -> Iterator[None]:
        with _lock:
            if any(self._world and other._world and other._thread != self._thread for other in _live):
                raise JobError(
                    "two trainings at once, in two threads of one rank",
                    "their collectives would meet each other's",
                    "one after the other works; so do two at once in a process that is no rank",
                )
            _live.append(self)
        try:
            yield
        finally:
            with _lock:
                _live.remove(self)
                if _holder is self:
                    _take(None, generators=not self._world)

    def __enter__(self) -> None:
        _lock.acquire()
        self._before.append(_holder)
        _take(self)

    def __exit__(self, *error: object) -> None:
        before = self._before.pop()
        if before is not None and before._before:  # this was within another's turn, in the same thread
            _take(before)
        _lock.release()


def _take(turn: Turn | None, *, generators: bool = True) -> None:
    global _holder, _outside
    if _holder is turn:
        return
    device = (turn if _holder is None else _holder)._device  # type: ignore[union-attr]
    now = Generators(device), events.current()
    if _holder is None:
        _outside = now
    else:
        _holder._left = now
    assert _outside is not None
    left, current = _outside if turn is None else turn._left or (_outside[0], None)
    if generators:
        left.restore()
    events.use(current)
    _holder = turn


@contextmanager
def alone() -> Iterator[None]:
    """Within it no training has its turn, and numbers are drawn outside of them all."""
    with _lock:
        holder = _holder
        _take(None)
        try:
            yield
        finally:
            if holder is not None and holder._before:  # this was within one of its turns, in the same thread
                _take(holder)


def in_turns(turn: Turn, steps: Generator[T, None, Any]) -> Generator[T, None, None]:
    """``steps``, each made in a turn."""
    with turn.under_way():
        try:
            while True:
                with turn:
                    try:
                        step = next(steps)
                    except StopIteration:
                        return
                yield step
        finally:
            with turn:
                steps.close()


def _forget() -> None:
    """In a child of a fork: none of the trainings is there."""
    global _lock, _holder
    _lock, _holder = threading.RLock(), None
    _live.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
