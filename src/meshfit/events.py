"""What a rank did and when: spans, scalars, instants, kept cheaply, appended to one file a rank, or a model server.

Nothing in the training loop knows who reads them. A line is a JSON object, one of

    {"rank": 0, "time": 1771000000.25}                                       the first: when its clock began
    {"span": "backward", "step": 12, "at": 3.4712, "for": 0.0031, "microbatch": 2}
    {"totals": {"data": 0.02, ...}, "moved": {"all_reduce": [48, 9600000]}, "steps": [51, 98], "at": 4.1, "for": 1.0}
                                            all spans of whole steps, by name, about once a second; calls and bytes
                                            handed to collectives. The first step of a run has a line of its own
    {"scalar": "grad_scale", "value": 1024.0, "step": 12, "at": 3.5}
    {"sample": {"cpu": 97.0, "rss": 512000000}, "at": 4.0}                   use of the machine, now and then
    {"instant": "compiled", "step": 25, "at": 3.5}
    {"facts": {"device": "cpu", ...}, "at": 0.1}

``at`` and ``for`` are seconds, ``at`` since the rank's clock began. On a GPU a span also has ``gpu_at`` and
``gpu_for``: when the device did what the span submitted, by events in its stream, read once they have passed; nobody
waits for them. Marks at both ends of a phase also see what the device did *not* do in it: ``gpu_for`` of "data" is the
time in which the device had nothing to do.

Totals are exact for every step. Single spans are written for the first 256 steps, then for 256 steps in each doubling
of their number, in windows of 8, the same on all ranks; and whenever one took long. So a file grows by kilobytes a
minute however long the run. A mark on a GPU costs some microseconds: there, what lies within phases is marked and
written in a quarter of the first 256 steps, and totals of it are estimated from those.
"""

import json
import math
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch

FLUSH_SECONDS = 1.0
FULL_STEPS, WINDOW = 256, 8
LONG_SECONDS = 0.25
ANCHOR_SECONDS = 10.0  # CUDA tells elapsed milliseconds in 32 bits: beyond some seconds they are coarse
SAME_SECONDS = 25e-6  # marks nearer to each other than this are one: a mark costs some of it
PHASES = frozenset({"data", "forward_backward", "exchange", "update", "evaluate", "checkpoint"})
"""Marked on a GPU in every step; other spans in those of ``in_depth``, and their totals are estimated."""
MARKED = 4  # of so many windows of the first steps, one is marked in depth
POOL = 64

About = dict[str, Any]


class Ended(NamedTuple):
    """Seconds by span when a step had ended: phases and what lies within them, of the same steps."""

    at: float
    step: int
    seconds: dict[str, float]


class Events:
    """One rank's events. Without a folder only the totals by span are kept."""

    def __init__(self, folder: Path | None = None, rank: int = 0, *, of: str = "rank"):
        global _current
        self.rank, self.folder = rank, folder
        self.start = self._flushed = time.perf_counter()
        self.seconds: dict[str, float] = defaultdict(float)
        """By span, as the process saw it."""
        self.gpu_seconds: dict[str, float] = defaultdict(float)
        """The same as the device saw it, as far as it has got."""
        self.traffic: dict[str, list[int]] = {}
        """Calls and bytes, by collective."""
        self.own_flushes = True
        """Whether a flush is this object's business; a thread that does it instead says False."""
        self._step, self._detailed, self._deep, self._told = 0, True, True, 0
        self._first: Ended | None = None
        self._ended: Ended | None = None
        """The first step of this run, and the last that has ended."""
        self._since = self.start
        """Until when totals have been told."""
        self._held: deque[Any] = deque()
        self._reading = threading.Lock()  # many may add, one at a time takes away
        self._last: dict[str, float] = {}
        self._last_traffic: dict[str, list[int]] = {}
        self._marks: _Marks | None = None
        self._aside = False
        self._file: TextIO | None = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / f"{of}{rank}.jsonl").open("w")
            self._held.append({"rank": rank, "time": time.time() - (time.perf_counter() - self.start)})
        _current = self

    @property
    def step(self) -> int:
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        if self._step:
            self._ended = self._now_ended()
            self._first = self._first or self._ended
        else:
            self._told = step - 1
        self._step, self._detailed, self._deep = step, in_detail(step), in_depth(step)

    @property
    def kept(self) -> bool:
        """Whether events go to a file."""
        return self._file is not None

    def on(self, device: torch.device) -> None:
        """Time spans on ``device`` too, if it is a GPU. Waits for it, once."""
        if device.type == "cuda":
            self._marks = _Marks(device, self.start)

    def span(self, name: str, **about: Any) -> "_Span":
        """Time what happens within. ``about`` goes into its line: microbatch=3, stage=0, bytes=4096."""
        return _Span(self, name, about)

    def mark(self) -> Any:
        """This moment: here, and in the device's stream. For ``between``."""
        return time.perf_counter(), self._mark("")

    def _mark(self, name: str) -> "_Mark | None":
        if self._marks is None or not (name in PHASES or (self._deep and self._file is not None)):
            return None
        return self._marks.now()

    def between(self, name: str, began: Any, ended: Any, **about: Any) -> None:
        """A span from one ``mark`` to another."""
        (t0, mark0), (t1, mark1) = began, ended
        self._add(name, t0, t1, about, None if mark0 is None else (mark0, mark1))

    def add(self, name: str, began: float, ended: float, **about: Any) -> None:
        """A span whose ends are known, by ``time.perf_counter()``."""
        self._add(name, began, ended, about, None)

    def _add(self, name: str, began: float, ended: float, about: About, marks: Any) -> None:
        took = ended - began
        self.seconds[name] += took
        if self._file is None and marks is None:
            return
        detailed = self._detailed if self._marks is None or name in PHASES else self._deep
        if marks is not None or detailed or took > LONG_SECONDS:
            written = self._file is not None and (detailed or took > LONG_SECONDS)
            self._held.append((name, self._step, began - self.start, took, about, marks, written))
        if self.own_flushes and ended - self._flushed > FLUSH_SECONDS:
            self.flush()

    def moved(self, name: str, count: int) -> None:
        """``count`` bytes were handed to the collective ``name``: the larger side of a gather or scatter."""
        known = self.traffic.get(name)
        if known is None:
            self.traffic[name] = [1, count]
        else:
            known[0] += 1
            known[1] += count

    def waiting(self, name: str) -> AbstractContextManager[None]:
        """Time a wait for others in the middle of a pass. Not on a GPU: there it is the stream that waits."""
        return nullcontext() if self._marks is not None or self._aside else _Span(self, name, {})

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Around passes that are no part of a step: waits within them are not those of steps."""
        self._aside = True
        try:
            yield
        finally:
            self._aside = False

    def arrived(self, began: float) -> None:
        """Traffic that was handed over at ``began``, by ``time.perf_counter()``, is here. Not on a GPU, as above."""
        if self._marks is None:
            self._add("collective", began, time.perf_counter(), {}, None)

    def scalar(self, name: str, value: float) -> None:
        """A number of the user's or of a part's own, at this step."""
        self._line({"scalar": name, "value": float(value), "step": self._step, "at": self._now()})

    def instant(self, name: str, **about: Any) -> None:
        """Something that happened, and took no time worth a span."""
        self._line({"instant": name, "step": self._step, "at": self._now(), **about})

    def sample(self, values: dict[str, Any]) -> None:
        """Use of the machine."""
        self._line({"sample": values, "at": self._now()})

    def facts(self, **facts: Any) -> None:
        """What holds for the rest of the run."""
        self._line({"facts": facts, "at": self._now()})

    def _line(self, value: dict[str, Any]) -> None:
        if self._file is not None:
            self._held.append(value)

    def _now(self) -> float:
        return round(time.perf_counter() - self.start, 6)

    def _now_ended(self) -> Ended:
        return Ended(time.perf_counter(), self._step, dict(self.seconds))

    def phases(self) -> dict[str, float]:
        """Seconds by span: the device's own where it is a GPU."""
        with self._reading:
            self._settle(math.inf, last=True)
        return {**self.seconds, **self.gpu_seconds}

    def flush(self, *, between_steps: bool = False) -> None:
        """Write what is held. May be called from another thread; ``between_steps`` says that no step is under way."""
        with self._reading:
            self._flushed = time.perf_counter()
            if between_steps or not self._step:
                self._ended = self._now_ended()
            lines = []
            for ended in (self._first, self._ended):
                if ended is not None and ended.at > self._since:
                    self._settle(ended.step)
                    lines += self._totals(ended)
            if self._file is not None:
                self._write(self._file, lines)

    def _write(self, file: TextIO, totals: list[str]) -> None:
        lines, waiting = [], []
        while self._held:
            entry = self._held.popleft()
            if isinstance(entry, dict):
                lines.append(json.dumps(entry, default=str) + "\n")
            elif entry[5] is not None:
                waiting.append(entry)  # the device has not come that far
            else:
                lines.append(_text(*entry[:5]))
        self._held.extendleft(reversed(waiting))
        try:
            file.writelines(lines + totals)
            file.flush()
        except OSError as error:  # a full disk, say: a training is worth more than its events
            print(f"meshfit: {file.name} ends here: {error.strerror or error}", file=sys.stderr, flush=True)
            self._file = None
            with suppress(OSError):
                file.close()

    def _totals(self, ended: Ended) -> list[str]:
        now = {**ended.seconds, **{f"gpu {name}": took for name, took in self.gpu_seconds.items()}}
        fresh = {n: round(took - self._last.get(n, 0.0), 6) for n, took in now.items() if took > self._last.get(n, 0.0)}
        began, self._since = self._since, ended.at
        if not fresh:
            return []
        self._last = now
        first, self._told = self._told + 1, max(self._told, ended.step)
        at, took = round(began - self.start, 6), round(ended.at - began, 6)
        line: dict[str, Any] = {"totals": fresh, "steps": [min(first, self._told), self._told], "at": at, "for": took}
        traffic = {name: list(known) for name, known in list(self.traffic.items())}
        if traffic != self._last_traffic:
            before = {name: self._last_traffic.get(name, [0, 0]) for name in traffic}
            line["moved"] = {n: [now - was for now, was in zip(traffic[n], before[n], strict=True)] for n in traffic}
            self._last_traffic = traffic
        return [json.dumps(line) + "\n"]

    def _settle(self, until: float, last: bool = False) -> None:
        """Take from the device the times it has passed, in order, up to step ``until``; all of them at the ``last``."""
        marks = self._marks
        if marks is None:
            return
        held = [self._held.popleft() for _ in range(len(self._held))]  # others add to it meanwhile, at its end
        passed = len(held)
        while not last and passed and not marks.passed(held[passed - 1]):  # what is before one that has passed has, too
            passed -= 1
        if not last:  # of whole steps alone
            later = (i for i, e in enumerate(held[:passed]) if not isinstance(e, dict) and e[1] > until)
            passed = next(later, passed)
        settled = []
        for entry in held[:passed]:
            if not isinstance(entry, dict) and entry[5] is not None:
                name, step, at, took, about, pair, written = entry
                gpu_at, gpu_for = marks.read(*pair)
                self.gpu_seconds[name] += gpu_for * (1.0 if name in PHASES else _stands_for(step))
                entry = (name, step, at, took, {**about, "gpu_at": gpu_at, "gpu_for": gpu_for}, None, written)
            if isinstance(entry, dict) or entry[6]:
                settled.append(entry)
        self._held.extendleft(reversed([*settled, *held[passed:]]))

    def close(self) -> None:
        global _current
        with self._reading:
            self._settle(math.inf, last=True)
        self.flush(between_steps=True)
        self._marks = None
        if self._file is not None:
            self._file.close()
            self._file = None
        if _current is self:
            _current = _NOBODY


def in_detail(step: int) -> bool:
    """Whether the spans of ``step`` are written one by one: the same on every rank."""
    if step <= FULL_STEPS:
        return True
    octave = 1 << (step.bit_length() - 1)
    return (step - octave) % (octave * WINDOW // FULL_STEPS) < WINDOW


def in_depth(step: int) -> bool:
    """Whether a GPU is also asked when it did what lies within the phases of ``step``."""
    return in_detail(step) and (step > FULL_STEPS or (step - 1) // WINDOW % MARKED == 0)


def _stands_for(step: int) -> float:
    """How many steps one that is in depth stands for."""
    return max(1.0, (1 << (step.bit_length() - 1)) / FULL_STEPS) if step > FULL_STEPS else float(MARKED)


def _text(name: str, step: int, at: float, took: float, about: About) -> str:
    more = "".join(
        f', "{key}": {value:.6f}'
        if type(value) is float
        else f', "{key}": {value if type(value) is int else json.dumps(value, default=str)}'
        for key, value in about.items()
    )
    return f'{{"span": "{name}", "step": {step}, "at": {at:.6f}, "for": {took:.6f}{more}}}\n'


class _Span:
    __slots__ = ("about", "began", "events", "mark", "name")

    def __init__(self, events: Events, name: str, about: About):
        self.events, self.name, self.about = events, name, about

    def __enter__(self) -> None:
        self.mark = self.events._mark(self.name)
        self.began = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        ended = time.perf_counter()
        pair = None if self.mark is None else (self.mark, self.mark.marks.now())
        self.events._add(self.name, self.began, ended, self.about, pair)


class _Mark:
    """A moment in a GPU's stream. Its event serves again when nobody has it any more."""

    __slots__ = ("at", "event", "marks")

    def __init__(self, marks: "_Marks", event: torch.cuda.Event):
        self.marks, self.event = marks, event
        self.at: float | None = None

    def __del__(self) -> None:
        self.marks.free.append(self.event)


class _Marks:
    """Makes marks, and tells them as seconds on the rank's clock."""

    def __init__(self, device: torch.device, start: float):
        self.stream = torch.cuda.current_stream(device)  # asking again each time would cost as much as a mark
        self.free = [torch.cuda.Event(enable_timing=True) for _ in range(POOL)]
        for event in self.free:
            event.record(self.stream)  # an event is made by its first use
        self._last, self._made = None, 0.0
        self._anchor = self.now()
        self._anchor.event.synchronize()
        self._anchor.at = self._zero = time.perf_counter() - start  # of the anchor, on the rank's clock

    def now(self) -> _Mark:
        made = time.perf_counter()
        if self._last is not None and made - self._made < SAME_SECONDS:
            return self._last
        mark = _Mark(self, self.free.pop() if self.free else torch.cuda.Event(enable_timing=True))
        mark.event.record(self.stream)
        self._last, self._made = mark, time.perf_counter()
        return mark

    def passed(self, entry: Any) -> bool:
        """Whether the device has come to the end of a span that is held. Those that it has not marked tell nothing."""
        if isinstance(entry, dict) or entry[5] is None:
            return False
        end: _Mark = entry[5][1]
        return end.at is not None or end.event.query()

    def _at(self, mark: _Mark) -> float:
        if mark.at is None:
            try:
                passed = self._anchor.event.elapsed_time(mark.event) / 1e3
            except RuntimeError:  # not there yet: it looks itself
                mark.event.synchronize()
                passed = self._anchor.event.elapsed_time(mark.event) / 1e3
            mark.at = self._zero + passed
            if passed > ANCHOR_SECONDS:
                self._anchor, self._zero = mark, mark.at
        return mark.at

    def read(self, began: _Mark, ended: _Mark) -> tuple[float, float]:
        """Start and length in seconds; waits where the marks have not passed."""
        at = self._at(began)
        return at, self._at(ended) - at


_NOBODY = Events()
_current = _NOBODY


def current() -> Events:
    """The events of the run whose turn it is in this process (``turns.py``); of nobody, and forgotten, between runs.

    For parts that are not handed any: ``with events.current().span("gather", bytes=n): ...``
    """
    return _current


def use(events: Events | None) -> None:
    """Let ``current()`` be ``events``; None: nobody's."""
    global _current
    _current = _NOBODY if events is None else events
