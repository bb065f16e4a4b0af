"""What each rank says of itself every few seconds, so that one that has stalled can be named: see stalls.py.

A thread of the rank looks whether it got on since its last look: a step or a span of events.py has ended, or, where
neither has, the process and those below it have used the CPU or read and written files. So compiling, planning,
evaluating and saving are no silence. Where its main thread is, it tells too, and whether that is a wait for others. It
costs a fraction of a millisecond every five seconds, and the training nothing.

Ranks of this machine write into a piece of memory that they share with the caller; ranks of torchrun into its store.
"""

import json
import linecache
import os
import re
import socket
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import FrameType

SILENCE = 45.0
"""Seconds without progress after which a rank is reported: with one beat more, and one look, less than 60."""
BEATS = 9
"""That a rank gives within that time."""
SLOT = 8192  # bytes of shared memory a rank
MOST_FRAMES, MOST_TEXT = 12, 6000
BUSY = 0.05  # of a core: less is the work of threads that look after things
FULL_SPEED = 5 * 2**20  # bytes a second that count as much as a core

OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
STDLIB = os.path.realpath(sysconfig.get_path("stdlib")) + os.sep
TORCH = f"{os.sep}torch{os.sep}"
WAITS = re.compile(
    r"\.wait\(|\bdist\.|barrier\(|broadcast|all_(reduce|gather|to_all)|reduce_scatter|\.gather\(|[._](recv|receive)\("
    r"|isend|\.item\(\)|\.tolist\(\)|\.cpu\(\)|synchronize\("
)
"""In a line of code: a wait for other ranks, or for a device that may wait for them."""


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
    """Seconds of the longest step so far; infinite before the second."""
    stack: str
    """Where its main thread is, and threads of its own that are in code which is not meshfit's."""


class SharedBoard:
    """A board in memory, for processes that were handed its descriptor."""

    def __init__(self, fd: int):
        self.fd = fd

    def put(self, rank: int, text: bytes) -> None:
        os.pwrite(self.fd, text[: SLOT - 1].ljust(SLOT, b"\0"), rank * SLOT)

    def get(self, rank: int) -> bytes:
        return os.pread(self.fd, SLOT, rank * SLOT).rstrip(b"\0")


class StoreBoard:
    """A board in the store that torchrun's ranks meet in, over a connection of its own."""

    def __init__(self) -> None:
        from torch.distributed import TCPStore

        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10))

    def put(self, rank: int, text: bytes) -> None:
        self.store.set(f"meshfit/beat/{rank}", text.decode())

    def get(self, rank: int) -> bytes:
        key = f"meshfit/beat/{rank}"
        return self.store.get(key) if self.store.check([key]) else b""


def silence_of(timeout: float) -> float:
    """Seconds after which a rank is reported where collectives may take ``timeout``: well before these give up."""
    return min(SILENCE, max(1.0, timeout / 2))


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
        self._steps, self._step_at, self._slowest = 0, self._since, 0.0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """The work is done."""
        self._end.set()
        self._thread.join(timeout=1.0)
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
        except Exception:  # a process that was looked at is gone, say: the next look will tell
            state, still, text = "works", 0.0, ""
        self._put(state, still, text)

    def _state(self, now: float) -> tuple[str, float]:
        step, progress = _progress()
        self._count(step, now)
        if progress != self._progress:
            self._progress, self._used, self._was_active = progress, 0.0, True
            self._since = self._active = self._looked = now
            return "works", 0.0
        used, elapsed = _used(), max(1e-3, now - self._looked)
        active = bool(self._used) and (used - self._used > BUSY * elapsed or _runs())
        if active and self._was_active:  # once may be a thread that looks after something
            self._active = now
        self._used, self._looked, self._was_active = used, now, active
        place = where(self.main)
        if place != self._place:  # one that waited, and waits no longer, gets on
            self._place, self._placed = place, now
        idle, there = now - max(self._active, self._placed), now - max(self._since, self._placed)
        if place == "waits":
            return "waits", there
        if place == "elsewhere" and idle > 1.5 * self.each:
            return "idle", idle
        if place == "elsewhere" and not evaluates(self.main):
            return "busy", there
        self._since = self._active = now
        return "excused", 0.0

    def _count(self, step: int, now: float) -> None:
        if step != self._steps:
            if self._steps:
                self._slowest = max(self._slowest, now - self._step_at)
            self._steps, self._step_at = step, now

    def _put(self, state: str, still: float, stack: str) -> None:
        self._number += 1
        beat = Beat(
            number=self._number,
            rank=self.rank,
            pid=os.getpid(),
            host=socket.gethostname(),
            state=state,
            still=round(still, 3),
            step=self._steps,
            slowest=self._slowest or 1e9,
            stack=stack[-MOST_TEXT:],
        )
        self.board.put(self.rank, json.dumps(asdict(beat)).encode())


def _progress() -> tuple[int, object]:
    """The step under way, and what changes with every span that ends."""
    events = sys.modules.get("meshfit.events")
    if events is None:
        return 0, None
    current = events.current()
    return current.step, (id(current), current.step, sum(list(current.seconds.values())))


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


def _runs() -> bool:
    """Whether a thread of this process, other than this one, runs or waits for a disk just now."""
    me = str(threading.get_native_id())
    with suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            with suppress(OSError), open(f"/proc/self/task/{thread}/stat") as file:
                if thread != me and file.read().rpartition(")")[2].split()[0] in "RD":
                    return True
    return False


def _frames() -> dict[int, FrameType]:
    """Of the other threads: with its own, a function would hold them all in a reference cycle, and with them the
    autograd graphs of a step, which pin the shapes of parameters that are then cut."""
    frames = sys._current_frames()
    frames.pop(threading.get_ident(), None)
    return frames


def where(thread: int) -> str:
    """What a thread that gets nowhere is at: waits, excused, or elsewhere."""
    frames = _frames()
    if thread not in frames:
        return "elsewhere"
    known = {each.ident for each in threading.enumerate()}
    places = [_place(frame) for ident, frame in frames.items() if ident == thread or ident not in known]
    return next((place for place in places if place != "elsewhere"), "elsewhere")  # hooks run in threads of autograd's


def evaluates(thread: int) -> bool:
    """Whether a thread is at an evaluation, which may take much longer than a step."""
    frame = _frames().get(thread)
    return any(inner.f_code.co_filename == f"{OURS}evaluation.py" for inner, _ in traceback.walk_stack(frame))


def _place(frame: FrameType) -> str:
    files = [inner.f_code.co_filename for inner, _ in traceback.walk_stack(frame)]
    for (inner, line), file in zip(traceback.walk_stack(frame), files, strict=True):
        if file.endswith(f"launch{os.sep}channel.py") and file.startswith(OURS):
            return "excused"
        if f"{TORCH}distributed{os.sep}" in file or file.startswith(f"{OURS}server{os.sep}"):
            return "waits"
        if any(f"{TORCH}{part}{os.sep}" in file for part in ("_dynamo", "_inductor")):
            return "excused"
        if _is_library(file):
            continue
        if WAITS.search(linecache.getline(file, line, inner.f_globals)):
            return "waits"
        return "excused" if any(each.startswith(f"{OURS}checkpoint{os.sep}") for each in files) else "elsewhere"
    return "elsewhere"


def stack(thread: int) -> str:
    """Of a thread, newest call last; and of Python's other threads that are in code which is not meshfit's."""
    text = ""
    frames = _frames()
    names = {each.ident: each.name for each in threading.enumerate()}
    for ident, frame in frames.items():
        if ident != thread and _is_theirs(frame):
            text += f"  in thread {names.get(ident, ident)}:\n{_lines(frame)}"
    return text + (_lines(frames[thread]) if thread in frames else "")


def _is_library(file: str) -> bool:
    """Whether a file is Python's or torch's."""
    return TORCH in file or file.startswith("<") or (file.startswith(STDLIB) and "site-packages" not in file)


def _is_theirs(frame: FrameType) -> bool:
    """Whether the innermost frame that is neither Python's nor torch's is the user's."""
    files = (inner.f_code.co_filename for inner, _ in traceback.walk_stack(frame))
    innermost = next((file for file in files if not _is_library(file)), OURS)
    return not innermost.startswith(OURS)


def _lines(frame: FrameType) -> str:
    lines = traceback.format_stack(frame)
    ours = [i for i, line in enumerate(lines) if line.startswith(f'  File "{OURS}launch{os.sep}rank.py"')]
    begin = ours[0] + 1 if ours else 0  # what comes before is how the rank was started
    return "".join(lines[begin:][-MOST_FRAMES:])
