"""What the first rank of a group finds, on all of them, however long it takes.

The others wait in no collective, which would give up after a while: they look in the group's store, where the first
rank leaves signs of life, and give up when these stop.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from meshfit.comm.objects import broadcast_object
from meshfit.errors import JobError, RankError
from meshfit.launch.frames import users_line
from meshfit.torch_private.groups import noted, store_of, timeout_of

R = TypeVar("R")

BEAT = 2.0
"""Seconds between two signs of life."""

LOOKS = 0.001, 0.2
"""Seconds between two looks: at first, and when it takes long."""


def from_first_rank(find: Callable[[], R], group: dist.ProcessGroup | None) -> R:
    """What the first rank of ``group`` finds, or raises, on all of them, which call it together; None: this rank's."""
    if group is None:
        return find()
    found: Any = None
    waiting = _Waiting.among(group)
    if dist.get_rank(group) == 0:
        with waiting.alive():
            found = _alone(find)
    else:
        waiting.wait()
    found = broadcast_object(found, group)
    if isinstance(found, Exception):
        raise found
    return found


def _alone(find: Callable[[], Any]) -> Any:
    """What ``find`` finds or raises, in one rank. A collective in it would wait for ranks that do not come: refused,
    also where ``find`` takes what is raised in a model for an answer."""
    refusals: list[JobError] = []

    def refuse(group: str, ranks: str, op: str, what: str) -> None:
        if "," not in ranks and "-" not in ranks:
            return  # of this rank alone
        line = users_line()
        refusals.append(
            JobError(
                f"one rank runs the model or a metric alone, and it calls {op} of {what} over ranks {ranks}",
                f"at {line}" if line else "",
                "before the first step this is how it is found what a plan may do; the other ranks are not in there",
                "leave what ranks exchange to the plan: meshfit.gather(x) has the rows of the whole batch in a loss",
            )
        )
        raise refusals[0]

    try:
        with noted(refuse):
            found = find()
    except Exception as error:  # the others wait for an answer
        found = error
    return refusals[0] if refusals else found


class _Waiting:
    """One wait for the first rank. Without a store, which torch's fake ranks lack, it is left to the collective."""

    def __init__(self, store: dist.Store | None, key: str, patience: float):
        self.store, self.key, self.patience = store, key, patience

    @classmethod
    def among(cls, group: dist.ProcessGroup) -> "_Waiting":
        store = store_of(group)
        try:
            number = 0 if store is None else store.add(f"meshfit/first/{dist.get_rank(group)}", 1)
        except RuntimeError:
            number, store = 0, None
        limit = None if store is None else timeout_of(group)
        return cls(store, f"meshfit/first/wait/{number}", 600.0 if limit is None else limit.total_seconds())

    @contextmanager
    def alive(self) -> Iterator[None]:
        """In the first rank, around what it does; the others go on when it is done."""
        store, done = self.store, threading.Event()
        if store is None:
            yield
            return

        def beat() -> None:
            while not done.wait(BEAT):
                store.add(f"{self.key}/alive", 1)

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
        store.set(f"{self.key}/done", "")

    def wait(self) -> None:
        if self.store is None:
            return
        pause, heard, signs, never = LOOKS[0], time.monotonic(), 0, threading.Event()
        looked = heard
        while not self.store.check([f"{self.key}/done"]):
            never.wait(pause)
            pause, now = min(2 * pause, LOOKS[1]), time.monotonic()
            if now - looked < BEAT:
                continue
            looked, before = now, signs
            signs = self.store.add(f"{self.key}/alive", 0)
            heard = now if signs > before else heard
            if now - heard > self.patience:
                raise RankError(
                    f"timed out: the first rank looked at the model, and gave no sign of life for {self.patience:g} s",
                    "it has ended, or is stopped",
                )
