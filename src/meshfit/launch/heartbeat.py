"""What each rank says of itself every few seconds, so that one that has stalled can be named: see stalls.py.

A thread of the rank looks whether it got on since its last look: a step or a span of events.py has ended, or, where
neither has, the process and those below it have used the CPU or read and written files. So compiling, planning,
evaluating and saving are no silence. Where its main thread is, it tells too, and whether that is a wait for others. It
costs a fraction of a millisecond every two seconds, and the training nothing.

Ranks of this machine write into a piece of memory that they share with the caller, in which live.py writes, too, at
every phase of a step; ranks of torchrun into its store.
"""

import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from mmap import mmap

from meshfit.launch.frames import spot, stack, where
from meshfit.live import LIVE, WHOLE, read

SILENCE = 20.0
"""Seconds without progress after which a rank is reported: with one beat more, and one look, less than 30."""
BEATS = 9
"""That a rank gives within that time."""
TEXT, SLOT = 8192, 8192 + WHOLE  # bytes of shared memory a rank: for its beat, and with what live.py writes
PATIENCE = 180.0  # seconds until a save, or the first batch of all evaluations, has stalled: a far place may take so
# long (checkpoint/bucket.py asks it for two minutes). Not a save that waits for a disk
LONGER = 10  # times the longest step so far: a rank that is busy for so long with one has stalled
MOST_TEXT = 6000
BUSY = 0.05  # of a core: less is the work of threads that look after things
UNKNOWN = 1e9  # seconds
LATE = 4  # times as long as from look to look
FULL_SPEED = 5 * 2**20  # bytes a second that count as much as a core


@dataclass(frozen=True, slots=True)
class Beat:
    """What a rank says of itself."""

    number: int
    """Grows with each: one that stays the same is of a rank that cannot speak."""
    rank: int
    pid: int
    host: str
    state: str
    """works, or, without progress: waits (for other ranks), busy, idle; excused (at the caller's word, saving,
    compiling); done."""
    still: float
    """Seconds in this state without progress."""
    step: int
    slowest: float
    """Seconds of the longest of the last steps, or within an evaluation of the longest batch so far; 1e9: unknown."""
    stack: str
    """Where its main thread is, and threads of its own that are in code which is not meshfit's."""
    spot: str = ""
    """The line of it that says most, where it stands still."""
    ticks: int = 0
    """Of live.py, when this was said."""


class SharedBoard:
    """A board in memory, for processes that were handed its descriptor."""

    def __init__(self, fd: int, size: int = 0):
        """``size``: of how many ranks; 0: whoever made it has said so."""
        self.fd = fd
        if size:
            os.ftruncate(fd, size * SLOT)

    def put(self, rank: int, text: bytes) -> None:
        os.pwrite(self.fd, text[: TEXT - 1].ljust(TEXT, b"\0"), rank * SLOT)

    def get(self, rank: int) -> bytes:
        return os.pread(self.fd, TEXT, rank * SLOT).rstrip(b"\0")

    def live(self, rank: int) -> bytes:
        """What live.py has written for a rank."""
        return os.pread(self.fd, WHOLE, rank * SLOT + TEXT)

    def memory(self, rank: int) -> memoryview | None:
        """Where live.py may write for a rank."""
        size = os.fstat(self.fd).st_size
        if size < (rank + 1) * SLOT:
            return None
        return memoryview(mmap(self.fd, size))[rank * SLOT + TEXT : (rank + 1) * SLOT]


class StoreBoard:
    """A board in the store that torchrun's ranks meet in, over a connection of its own."""

    def __init__(self) -> None:
        from torch.distributed import PrefixStore, TCPStore

        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10))
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun keeps its store when it starts ranks again
        self.store = PrefixStore(f"meshfit/watch/{start}", store)

    def put(self, rank: int, text: bytes) -> None:
        self.store.set(f"live/{rank}", bytes(LIVE.memory).hex())
        self.store.set(f"beat/{rank}", text.decode())

    def get(self, rank: int) -> bytes:
        key = f"beat/{rank}"
        return self.store.get(key) if self.store.check([key]) else b""

    def live(self, rank: int) -> bytes:
        """Not more than a process has by itself: it is sent with each beat."""
        key = f"live/{rank}"
        return bytes.fromhex(self.store.get(key).decode()) if self.store.check([key]) else b""

    def memory(self, rank: int) -> memoryview | None:
        return None


def silence_of(timeout: float, hang: float = math.inf) -> float:
    """Seconds after which a rank is reported where collectives may take ``timeout``: well before these give up; and not
    later than one that hangs is ended."""
    return min(SILENCE, max(1.0, timeout / 2), hang)


def parsed(text: bytes) -> Beat | None:
    with suppress(ValueError, TypeError):  # nothing there yet, or read while it was written
        return Beat(**json.loads(text))
    return None


class Heart:
    """Beats for one rank, in a thread, until stopped; the thread that makes it is the one that works. ``after`` is
    called after each beat, ``failed`` when it can beat no more."""

    def __init__(
        self,
        board: "SharedBoard | StoreBoard",
        rank: int,
        *,
        silence: float,
        after: Callable[[], None] = lambda: None,
        failed: Callable[[Exception], None] = lambda error: None,
    ):
        self.board, self.rank, self._after, self._failed = board, rank, after, failed
        self.each = silence / BEATS
        self.main = threading.get_ident()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="meshfit heartbeat", daemon=True)
        self.broken = False
        self._number = 0
        self._progress: object = None
        self._since = self._active = self._looked = time.monotonic()
        self._used, self._was_active = 0.0, True
        self._place, self._placed = "", self._since
        self._step = 0
        self._batch: tuple[int, float] | None = None
        """Within an evaluation: ticks, and when they last grew."""
        self._longest_batch = 0.0
        """Of all evaluations: the longest time between two ticks."""
        self._noting: AbstractContextManager[None] = nullcontext()

    def start(self) -> None:
        """Beat; note the collectives of this process meanwhile."""
        from meshfit.torch_private.groups import noted

        if (memory := self.board.memory(self.rank)) is not None:
            LIVE.move(memory)
        self._noting = noted(LIVE.collective)
        self._noting.__enter__()
        self._thread.start()

    def stop(self) -> None:
        """The work is done."""
        self._end.set()
        self._noting.__exit__(None, None, None)
        self._thread.join(timeout=30.0)  # a thread inside the store when Python ends would abort the process
        if not self.broken:
            with suppress(Exception):
                self._put("done", 0.0, "")

    def _beat(self) -> None:
        try:
            while not self._end.is_set():
                self._look(time.monotonic())
                self._after()
                self._end.wait(self.each)
        except Exception as error:  # who watches must not disturb
            self.broken = True
            if not self._end.is_set():
                self._failed(error)

    def _look(self, now: float) -> None:
        try:
            state, still = self._state(now)
            text = stack(self.main)
            line = spot(self.main, LIVE.model()) if still > 1.5 * self.each else ""
        except Exception:  # a process that was looked at is gone, say: the next look will tell
            state, still, text, line = "works", 0.0, "", ""
        self._put(state, still, text, line)
        if self._gets_on(state, still):
            LIVE.alive()

    def _gets_on(self, state: str, still: float) -> bool:
        """Whether nobody would say that it has stalled."""
        limits = {"busy": LONGER * self._slowest, "idle": BEATS * self.each, "waits": 0.0, "asks": 0.0}
        return still < limits.get(state, math.inf)

    def _state(self, now: float) -> tuple[str, float]:
        self._step, progress = _progress()
        evaluating = self._evaluates(now)
        if now - self._looked > LATE * self.each:  # it could not look: the machine slept, say. So nobody got on
            progress = object()
        if progress != self._progress:
            self._progress, self._used, self._was_active = progress, 0.0, True
            self._since = self._active = self._looked = now
            return "works", 0.0
        used, elapsed = _used(), max(1e-3, now - self._looked)
        states = _states()
        active = bool(self._used) and (used - self._used > BUSY * elapsed or not states.isdisjoint("RD"))
        if active and self._was_active:  # once may be a thread that looks after something
            self._active = now
        self._used, self._looked, self._was_active = used, now, active
        place = where(self.main)
        if place != self._place:  # one that waited, and waits no longer, gets on
            self._place, self._placed = place, now
        idle, there = now - max(self._active, self._placed), now - max(self._since, self._placed)
        if place in ("waits", "asks"):
            return place, there
        begins = evaluating and not self._evaluated  # what opens and compiles may take its time
        if idle > (PATIENCE if place == "saves" or begins else 1.5 * self.each) and place != "excused":
            return "idle", idle
        if place == "elsewhere" or (place == "saves" and there > PATIENCE and "D" not in states):
            return "busy", there
        if place != "saves":
            self._since = self._active = now
        return "excused", 0.0

    def _evaluates(self, now: float) -> bool:
        """Whether the rank is at an evaluation; how long its batches take is noted."""
        if not LIVE.evaluating:
            self._batch = None
            return False
        ticks = LIVE.ticks
        if self._batch is not None and ticks != self._batch[0]:
            self._longest_batch = max(self._longest_batch, now - self._batch[1])
        if self._batch is None or ticks != self._batch[0]:
            self._batch = ticks, now
        return True

    @property
    def _evaluated(self) -> bool:
        """Whether it knows how long a batch of an evaluation may take: one has ended, or an evaluation has."""
        events = sys.modules.get("meshfit.events")
        return bool(self._longest_batch) or (events is not None and "evaluate" in events.current().seconds)

    @property
    def _slowest(self) -> float:
        """See ``Beat.slowest``."""
        if self._batch is not None and not self._evaluated:
            return PATIENCE / 3
        if self._batch is not None and self._longest_batch:
            return self._longest_batch
        seen = read(bytes(LIVE.memory))
        times = [] if seen is None else [each.whole for each in seen.times]
        return max(times) if len(times) > 1 else UNKNOWN

    def _put(self, state: str, still: float, stack: str, spot: str = "") -> None:
        self._number += 1
        beat = Beat(
            number=self._number,
            rank=self.rank,
            pid=os.getpid(),
            host=socket.gethostname(),
            state=state,
            still=round(still, 3),
            step=self._step,
            slowest=self._slowest,
            stack=stack[-MOST_TEXT:],
            spot=spot,
            ticks=LIVE.ticks,
        )
        self.board.put(self.rank, json.dumps(asdict(beat)).encode())


def _progress() -> tuple[int, object]:
    """The step under way, and what changes with every span that ends."""
    events = sys.modules.get("meshfit.events")
    if events is None:
        return 0, LIVE.ticks
    current = events.current()
    return current.step, (id(current), current.step, LIVE.ticks, sum(list(current.seconds.values())))


def step_under_way() -> int:
    """Of the training in this process; 0: none."""
    return _progress()[0]


def _used() -> float:
    """Seconds of CPU of this process, but for this thread, and of those below it; what it writes, or reads from a disk,
    counts as well."""
    import psutil

    me, total = psutil.Process(), time.process_time() - time.thread_time()
    with suppress(psutil.Error, AttributeError):
        counted = me.io_counters()
        total += (counted.write_chars + counted.read_bytes) / FULL_SPEED  # type: ignore[union-attr]
    for process in me.children(recursive=True):
        with suppress(psutil.Error):
            total += sum(process.cpu_times()[:2])
    return total


def _states() -> set[str]:
    """Of the threads of this process but this one, by the kernel's letters: R, it runs, D, it waits for a disk."""
    me, found = str(threading.get_native_id()), set()
    with suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            with suppress(OSError), open(f"/proc/self/task/{thread}/stat") as file:
                if thread != me:
                    found.add(file.read().rpartition(")")[2].split()[0])
    return found
