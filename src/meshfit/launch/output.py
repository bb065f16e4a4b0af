"""What ranks write to standard output and error, whoever writes it (Python, C, a process they start), line by line.

Each rank writes into two pipes. A thread of the caller empties them, so that no rank waits for a caller that is busy,
and hands the lines on: to ``logs/rank0.log`` in the run's folder, all of them, and to the caller's own ``sys.stdout``
and ``sys.stderr``, whatever these are just then (a terminal, a progress bar's, a notebook's, a test's):

    loading                     rank 0's lines as they are
    [rank 2] no such file       another's
    [4 ranks] building          what all of them say at the same time, once

A pipe outlives who wrote into it: the last lines of a rank that was killed are read like any others.
"""

import atexit
import os
import re
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import BinaryIO, TextIO

TOGETHER = 0.3  # seconds within which equal lines of several ranks are one
MOST_HELD = 1000  # lines that wait for others to say the same
LONGEST_LINE = 64 << 10
MOST_LOGGED = 10 << 20
LAST_LINES, KEPT_LINES = 5, 80
PIPE_READ, PIPE_HOLDS = 1 << 16, 1 << 20  # bytes at once; and the most that a pipe can hold

TIME = re.compile(r"^(\[rank\d+\]:)?(\W*(?:[A-Z]\d{4} )?(?:\d{4}-\d\d-\d\d[ T])?\d\d:\d\d:\d\d(?:[.,]\d+)?(?: +\d+)?)?")
WARNING = re.compile(r"^\S.*:\d+: \w*Warning: |^(\[rank\d+\]:)?\[W\d{4} ")


@dataclass(slots=True)
class HeldLine:
    """A line, and who has said it so far."""

    number: int
    stream: int
    text: str
    since: float
    who: list[int] = field(default_factory=list)


class Lines:
    """The lines of ``size`` ranks as those of one: what is to be shown, in an order that is each rank's own."""

    def __init__(self, size: int, role: str = "rank"):
        self.size, self.role = size, role
        self._held: deque[HeldLine] = deque()
        self._alike: defaultdict[tuple[int, str], deque[HeldLine]] = defaultdict(deque)
        self._last = [0] * size  # the number of the newest line that each has said
        self._count = 0
        self._warned: dict[str, int] = {}  # who said it first
        self._silent = [False] * size  # in the middle of a warning that another has given already

    def add(self, who: int, stream: int, text: str, now: float) -> None:
        """A line of rank ``who``, written to 1 or 2, standard output or error."""
        said = TIME.sub("", text, count=1)  # lines that differ by the time at their beginning are equal
        for held in self._alike.get((stream, said), ()):
            if held.number > self._last[who]:
                held.who.append(who)
                self._last[who] = held.number
                return
        if self._repeats(who, text, said):
            return
        self._count += 1
        self._last[who] = self._count
        held = HeldLine(self._count, stream, text, now, [who])
        self._held.append(held)
        self._alike[stream, said].append(held)

    def _repeats(self, who: int, text: str, said: str) -> bool:
        """Whether it belongs to a warning that another rank has given, be it long ago."""
        if WARNING.match(text):
            self._silent[who] = self._warned.setdefault(said, who) != who
        elif not text.startswith("  "):  # the line of code that a warning names comes after it
            self._silent[who] = False
        return self._silent[who]

    def due(self, now: float) -> Iterable[tuple[int, str]]:
        """Stream and text of lines that wait no longer."""
        while self._held and self._is_due(self._held[0], now):
            held = self._held.popleft()
            key = held.stream, TIME.sub("", held.text, count=1)
            self._alike[key].popleft()
            if not self._alike[key]:
                del self._alike[key]
            prefix = self._prefix(sorted(held.who))
            if held.text or not prefix or len(held.who) == self.size:
                yield held.stream, f"{prefix}{held.text}\n" if held.text else "\n"

    def _is_due(self, held: HeldLine, now: float) -> bool:
        return len(held.who) == self.size or now - held.since >= TOGETHER or len(self._held) > MOST_HELD

    def _prefix(self, who: list[int]) -> str:
        if who == [0] and self.role == "rank":
            return ""
        if len(who) == 1:
            return f"[{self.role} {who[0]}] "
        if len(who) == self.size or len(who) > 4:
            return f"[{len(who)} {self.role}s] "
        return f"[{self.role}s {', '.join(map(str, who))}] "

    @property
    def waits(self) -> bool:
        return bool(self._held)


class Log:
    """The newest of what one rank wrote, at most ``MOST_LOGGED`` bytes; its first line says if there was more."""

    def __init__(self, path: Path):
        self.path = path
        self._file: BinaryIO | None = None
        self._size = self._cut = 0
        self._broken = False

    def add(self, data: bytes) -> None:
        if self._broken:
            return
        try:
            file = self._file or self._open()
            if self._size + len(data) > MOST_LOGGED:
                file = self._shorten(file, MOST_LOGGED // 2 - len(data))
            self._size += file.write(data)
        except OSError as error:
            self._broken = True
            print(f"meshfit: {self.path} ends here: {error}", file=sys.stderr)

    def _open(self) -> BinaryIO:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a+b", buffering=0)
        self._size = self._file.seek(0, os.SEEK_END)
        return self._file

    def _shorten(self, file: BinaryIO, kept: int) -> BinaryIO:
        file.seek(max(0, self._size - max(0, kept)))
        newest = file.read()
        newest = newest[newest.find(b"\n") + 1 :]
        self._cut += self._size - len(newest)
        beside = self.path.with_suffix(".new")
        beside.write_bytes(b"[meshfit: about %d bytes before this are gone]\n" % self._cut + newest)
        beside.replace(self.path)
        file.close()
        return self._open()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


@dataclass(slots=True)
class Pipe:
    """What one rank writes to one stream."""

    fd: int
    who: int
    stream: int
    rest: bytes = b""
    """Of a line that has not ended."""
    since: float = 0.0
    shown: int = 0
    """Bytes of it that have been shown."""


class Output:
    """Of ``size`` ranks: take ``ends`` for one of them to write into; ``close`` when all have ended."""

    def __init__(self, size: int, *, role: str = "rank", folder: Path | None = None):
        self._lines = Lines(size, role)
        self._logs = [None if folder is None else Log(folder / "logs" / f"{role}{i}.log") for i in range(size)]
        self._last = [deque[str](maxlen=KEPT_LINES) for _ in range(size)]
        self._pipes: dict[int, Pipe] = {}
        self._middle: Pipe | None = None  # whose line is the last one shown, and has not ended
        self._lock = threading.Lock()
        self._woken, self._wake = os.pipe()
        self._closed, self._owner = False, os.getpid()
        self._thread = threading.Thread(target=self._read, name="meshfit output", daemon=True)

    @contextmanager
    def ends(self, who: int) -> Iterator[list[int]]:
        """Two descriptors to write to, to be handed on."""
        written = []
        for stream in (1, 2):
            ours, theirs = os.pipe()
            os.set_blocking(ours, False)
            self._pipes[ours] = Pipe(ours, who, stream)
            written.append(theirs)
        try:
            yield written
        finally:
            for end in written:
                os.close(end)

    def start(self) -> None:
        atexit.register(self.close)  # a thread that writes to a stream while Python goes down takes it along
        self._thread.start()

    def last(self, who: int, count: int = LAST_LINES) -> list[str]:
        """The newest lines of a rank."""
        with self._lock:
            return list(self._last[who])[-count:]

    def note(self, who: int, text: str) -> None:
        """Write something about a rank into its log."""
        with self._lock:
            if (log := self._logs[who]) is not None:
                log.add(text.encode() + b"\n")

    def settle(self) -> None:
        """Hand on all that has been written until now."""
        with self._lock:
            self._take(list(self._pipes.values()), PIPE_HOLDS)
            self._show(float("inf"))

    def close(self) -> None:
        """Hand on what is left, and end."""
        if os.getpid() != self._owner:  # a child of the caller's, which has no such thread, and shares the pipes
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        atexit.unregister(self.close)
        os.write(self._wake, b".")
        if self._thread.ident is not None:
            self._thread.join()
        self.settle()
        with self._lock:
            for pipe in list(self._pipes.values()):
                self._drop(pipe)
            self._show(float("inf"))
            for log in filter(None, self._logs):
                log.close()
        os.close(self._wake)
        os.close(self._woken)

    def _read(self) -> None:
        while True:
            with self._lock:
                held = self._lines.waits or any(map(self._unfinished, self._pipes.values()))
                fds = list(self._pipes)
            ready = wait([*fds, self._woken], TOGETHER / 4 if held else None)
            if self._woken in ready:
                return
            with self._lock:
                self._take([pipe for fd, pipe in self._pipes.items() if fd in ready], PIPE_READ)
                self._show(time.monotonic())

    def _take(self, pipes: list[Pipe], most: int) -> None:
        """Read what there is, at most so many bytes of each."""
        for pipe in pipes:
            left = most
            while left > 0:
                try:
                    data = os.read(pipe.fd, PIPE_READ)
                except BlockingIOError:
                    break
                if not data:  # nobody can write into it any more
                    self._drop(pipe)
                    break
                left -= len(data)
                self._cut(pipe, data)

    def _drop(self, pipe: Pipe) -> None:
        del self._pipes[pipe.fd]
        if pipe.rest:
            self._line(pipe, pipe.rest, time.monotonic())
        os.close(pipe.fd)

    def _cut(self, pipe: Pipe, data: bytes) -> None:
        now = time.monotonic()
        if len(pipe.rest) == pipe.shown:
            pipe.since = now
        *whole, pipe.rest = (pipe.rest + data).split(b"\n")
        rest = pipe.rest
        for line in whole:
            self._line(pipe, line, now)
        while len(rest) > LONGEST_LINE:
            self._line(pipe, rest[:LONGEST_LINE], now)
            rest = rest[LONGEST_LINE:]
        pipe.rest = rest

    def _line(self, pipe: Pipe, line: bytes, now: float) -> None:
        log = self._logs[pipe.who]
        if log is not None:
            log.add(line + b"\n")
        text = line.decode(errors="replace").removesuffix("\r")
        if text.strip():
            self._last[pipe.who].append(text.rpartition("\r")[2])
        if pipe.shown:
            self._write(pipe.stream, line[pipe.shown :].decode(errors="replace") + "\n", after=pipe)
            pipe.shown, self._middle = 0, None
        else:
            self._lines.add(pipe.who, pipe.stream, text, now)
        pipe.rest, pipe.since = b"", now

    def _show(self, now: float) -> None:
        block: dict[int, str] = {}
        for stream, text in self._lines.due(now):
            if stream not in block and block:
                self._write(*block.popitem())
            block[stream] = block.get(stream, "") + text
        if block:
            self._write(*block.popitem())
        if not self._lines.waits:
            for pipe in self._pipes.values():
                if self._unfinished(pipe) and now - pipe.since >= TOGETHER:
                    self._begin(pipe)

    def _unfinished(self, pipe: Pipe) -> bool:
        """Whether it is in the middle of a line of which something should show: a question, a bar of its own."""
        return pipe.who == 0 and self._lines.role == "rank" and len(pipe.rest) > pipe.shown

    def _begin(self, pipe: Pipe) -> None:
        if hasattr(_target(pipe.stream), "rich_proxied_file"):  # above a progress bar there are whole lines alone
            return
        with suppress(UnicodeDecodeError):  # in the middle of a character
            self._write(pipe.stream, pipe.rest[pipe.shown :].decode(), after=pipe)
            pipe.shown, self._middle = len(pipe.rest), pipe

    def _write(self, stream: int, text: str, after: Pipe | None = None) -> None:
        if self._middle is not None and self._middle is not after:
            interrupted, self._middle = self._middle, None
            self._write(interrupted.stream, "\n")
        target = _target(stream)
        with suppress(OSError, ValueError, AttributeError):  # closed, or none: nobody looks
            try:
                target.write(text)
            except UnicodeEncodeError:
                encoding = target.encoding or "ascii"
                target.write(text.encode(encoding, "backslashreplace").decode(encoding))
            target.flush()


def _target(stream: int) -> TextIO:
    return sys.stdout if stream == 1 else sys.stderr
