"""Events of a rank, or of a model server: spans, scalars and instants, appended to one file each.

A line is a JSON object, one of

    {"rank": 0, "time": 1771000000.25}                                       the first: when its clock began
    {"span": "backward", "step": 12, "at": 3.4712, "for": 0.0031, "microbatch": 2}
    {"totals": {"data": 0.02, ...}, "moved": {"all_reduce": [48, 9600000]}, "steps": [51, 98], "at": 4.1, "for": 1.0}
                                            all spans of whole steps, by name, about once a second; calls and bytes
                                            handed to collectives. The first step of a run has a line of its own
    {"scalar": "grad_scale", "value": 1024.0, "step": 12, "at": 3.5}
    {"sample": {"cpu": 97.0, "rss": 512000000}, "at": 4.0}                   use of the machine, once a second
    {"instant": "compiled", "step": 25, "at": 3.5}
    {"facts": {"device": "cpu", ...}, "at": 0.1}

``at`` and ``for`` are seconds, ``at`` since the rank's clock began. On a GPU a span also has ``gpu_at`` and
``gpu_for``: when the device ran what the span submitted, by CUDA events in its stream, which are read after they have
passed, without a synchronisation. So ``gpu_for`` of "data" is the time in which the device was idle.

Totals are exact for every step. Single spans are written for some steps (event_detail.py), and whenever one took long.
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

from meshfit.event_detail import in_depth, in_detail, stands_for
from meshfit.gpu_clock import GpuClock, GpuMark
from meshfit.live import LIVE, StepTimes

FLUSH_SECONDS = 1.0
LONG_SECONDS = 0.25
PHASES = frozenset({"data", "forward_backward", "exchange", "update", "evaluate", "checkpoint"})
"""Timed on a GPU in every step; other spans in those of ``in_depth``, and their totals are estimated."""
WAITS = ("meet", "gather", "average")
"""Spans of waits for other ranks within forward and backward."""
BESIDE = ("evaluate", "checkpoint")
"""Phases that are not part of a step."""

About = dict[str, Any]
NOTHING: About = {}


class Ended(NamedTuple):
    """Seconds by span, at the end of a step."""

    at: float
    step: int
    seconds: dict[str, float]


class HeldSpan(NamedTuple):
    """A span that is not written yet."""

    name: str
    step: int
    at: float
    seconds: float
    about: About
    marks: tuple[GpuMark, GpuMark] | None
    written: bool


class Events:
    """One rank's events. Without a folder there are only totals by span."""

    def __init__(self, folder: Path | None = None, rank: int = 0, *, of: str = "rank"):
        global _current
        self.rank, self.folder = rank, folder
        self.start = self._flushed = time.perf_counter()
        self.seconds: dict[str, float] = defaultdict(float)
        """By span, on the host."""
        self.gpu_seconds: dict[str, float] = defaultdict(float)
        """By span, on the device, up to the last events that have passed."""
        self.traffic: dict[str, list[int]] = {}
        """Calls and bytes, by collective."""
        self.own_flushes = True
        """Whether adding a span may flush; False where a thread does."""
        self._step, self._detailed, self._deep = 0, True, True
        self._first: Ended | None = None
        self._ended: Ended | None = None
        """The first step of this run, and the last that has ended."""
        self._reported = Ended(self.start, 0, {})
        """Where the last line of totals ended."""
        self._reported_traffic: dict[str, list[int]] = {}
        self._gpu_told: tuple[int, dict[str, float]] = 0, {}
        """The step in which ``gpu_seconds`` were last told, and what they were."""
        self._gpu_each: dict[str, float] = {}
        """Seconds a step since then."""
        self._held: deque[HeldSpan | dict[str, Any]] = deque()
        self._reading = threading.Lock()  # many threads may add, one at a time takes away
        self._gpu: GpuClock | None = None
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
            before, self._ended = self._ended, self._now_ended()
            self._first = self._first or self._ended
            if before is not None and step == self._step + 1:
                self._tell_times(before, self._ended)
        else:
            with self._reading:
                self._reported = self._reported._replace(step=step - 1)
        self._step, self._detailed, self._deep = step, in_detail(step), in_depth(step)
        LIVE.step(step)

    def _tell_times(self, before: Ended, ended: Ended) -> None:
        """Whoever compares ranks reads them. On a GPU, what steps took there on average when that was last known."""
        now, known = ended.seconds, before.seconds
        if self._gpu is not None and (gpu := dict(self.gpu_seconds)) != self._gpu_told[1]:
            step, told = self._gpu_told
            each = max(1, ended.step - step)
            self._gpu_each = {name: (took - told.get(name, 0.0)) / each for name, took in gpu.items()}
            self._gpu_told = ended.step, gpu

        def took(*names: str) -> float:
            return sum(self._gpu_each.get(name, now.get(name, 0.0) - known.get(name, 0.0)) for name in names)

        waits = took(*WAITS)
        LIVE.timed(
            StepTimes(
                ended.step,
                took("data"),
                max(0.0, took("forward_backward") - waits),
                took("update"),
                took("exchange") + waits,
                ended.at - before.at - took(*BESIDE),
            )
        )

    @property
    def kept(self) -> bool:
        """Whether events are written to a file."""
        return self._file is not None

    def on(self, device: torch.device) -> None:
        """Time spans on ``device`` too, if it is a GPU. Synchronises with it, once."""
        if device.type == "cuda":
            self._gpu = GpuClock(device, self.start)

    def span(self, name: str, **about: Any) -> "_Span":
        """A context that is timed. ``about`` is written with it: microbatch=3, stage=0, bytes=4096."""
        return _Span(self, name, about)

    def mark(self) -> Any:
        """This moment, on the host and in the device's stream. For ``between``."""
        return time.perf_counter(), self._mark("")

    def _mark(self, name: str) -> GpuMark | None:
        if self._gpu is None or not (name in PHASES or (self._deep and self._file is not None)):
            return None
        return self._gpu.now()

    def between(self, name: str, began: Any, ended: Any, **about: Any) -> None:
        """A span from one ``mark`` to another."""
        (t0, mark0), (t1, mark1) = began, ended
        self.add(name, t0, t1, about, None if mark0 is None else (mark0, mark1))

    def add(self, name: str, began: float, ended: float, about: About = NOTHING, marks: Any = None) -> None:
        """A span whose ends are known, by ``time.perf_counter()``."""
        took = ended - began
        self.seconds[name] += took
        if self._file is None and marks is None:
            return
        detailed = self._detailed if self._gpu is None or name in PHASES else self._deep
        written = self._file is not None and (detailed or took > LONG_SECONDS)
        if marks is not None or written:
            self._held.append(HeldSpan(name, self._step, began - self.start, took, about, marks, written))
        if self.own_flushes and ended - self._flushed > FLUSH_SECONDS:
            self.flush()

    def moved(self, name: str, count: int) -> None:
        """``count`` bytes were handed to the collective ``name``: the larger side of a gather or scatter."""
        known = self.traffic.setdefault(name, [0, 0])
        known[0] += 1
        known[1] += count

    def waiting(self, name: str) -> AbstractContextManager[None]:
        """Time a wait for other ranks in the middle of a pass. Not on a GPU, where the stream waits."""
        return nullcontext() if self._gpu is not None or self._aside else _Span(self, name, NOTHING)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Around passes that are not part of a step: their waits are not timed."""
        self._aside = True
        try:
            yield
        finally:
            self._aside = False

    def arrived(self, began: float) -> None:
        """A collective that began at ``began``, by ``time.perf_counter()``, has ended. Not on a GPU, as above."""
        if self._gpu is None:
            self.add("collective", began, time.perf_counter())

    def scalar(self, name: str, value: float) -> None:
        """A number of the user, or of a part of the training, at this step."""
        self._line({"scalar": name, "value": float(value), "step": self._step, "at": self._now()})

    def instant(self, name: str, **about: Any) -> None:
        """Something that happened at one moment."""
        self._line({"instant": name, "step": self._step, "at": self._now(), **about})

    def sample(self, values: dict[str, Any]) -> None:
        """Use of the machine."""
        self._line({"sample": values, "at": self._now()})

    def facts(self, **facts: Any) -> None:
        """What is true for the rest of the run."""
        self._line({"facts": facts, "at": self._now()})

    def _line(self, value: dict[str, Any]) -> None:
        if self._file is not None:
            self._held.append(value)

    def _now(self) -> float:
        return round(time.perf_counter() - self.start, 6)

    def _now_ended(self) -> Ended:
        return Ended(time.perf_counter(), self._step, dict(self.seconds))

    def phases(self) -> dict[str, float]:
        """Seconds by span: on the device where it is a GPU."""
        with self._reading:
            self._settle(math.inf, last=True)
        return {**self.seconds, **self.gpu_seconds}

    def flush(self, *, between_steps: bool = False) -> None:
        """Write what is held. Another thread may call it; ``between_steps``: no step is under way."""
        with self._reading:
            self._flushed = time.perf_counter()
            if between_steps or not self._step:
                self._ended = self._now_ended()
            lines = []
            for ended in (self._first, self._ended):
                if ended is not None and ended.at > self._reported.at:
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
            elif entry.marks is not None:
                waiting.append(entry)  # the device has not passed them
            else:
                lines.append(_text(entry))
        self._held.extendleft(reversed(waiting))
        try:
            file.writelines(lines + totals)
            file.flush()
        except OSError as error:  # a full disk, say: the training goes on without its events
            print(f"meshfit: no more events in {file.name}: {error.strerror or error}", file=sys.stderr, flush=True)
            self._file = None
            with suppress(OSError):
                file.close()

    def _totals(self, ended: Ended) -> list[str]:
        """The line from the last one up to ``ended``, if any span ended in between."""
        before, known = self._reported, self._reported.seconds
        now = {**ended.seconds, **{f"gpu {name}": took for name, took in self.gpu_seconds.items()}}
        fresh = {n: round(took - known.get(n, 0.0), 6) for n, took in now.items() if took > known.get(n, 0.0)}
        if not fresh:
            self._reported = before._replace(at=ended.at)
            return []
        last = max(before.step, ended.step)
        self._reported = Ended(ended.at, last, now)
        line: dict[str, Any] = {"totals": fresh, "steps": [min(before.step + 1, last), last]}
        line |= {"at": round(before.at - self.start, 6), "for": round(ended.at - before.at, 6)}
        traffic = {name: list(counts) for name, counts in list(self.traffic.items())}
        if traffic != self._reported_traffic:
            was = {name: self._reported_traffic.get(name, [0, 0]) for name in traffic}
            line["moved"] = {n: [now - then for now, then in zip(traffic[n], was[n], strict=True)] for n in traffic}
            self._reported_traffic = traffic
        return [json.dumps(line) + "\n"]

    def _settle(self, until: float, last: bool = False) -> None:
        """Read the device's times of spans that it has passed, in order, up to step ``until``; all at the ``last``."""
        gpu = self._gpu
        if gpu is None:
            return
        held = [self._held.popleft() for _ in range(len(self._held))]  # other threads may append meanwhile
        passed = len(held)
        while not last and passed and not _passed(gpu, held[passed - 1]):  # those before a passed one have passed, too
            passed -= 1
        if not last:  # whole steps only
            later = (i for i, e in enumerate(held[:passed]) if isinstance(e, HeldSpan) and e.step > until)
            passed = next(later, passed)
        settled = []
        for entry in held[:passed]:
            if isinstance(entry, HeldSpan) and entry.marks is not None:
                at, took = gpu.read(*entry.marks)
                self.gpu_seconds[entry.name] += took * (1.0 if entry.name in PHASES else stands_for(entry.step))
                entry = entry._replace(about={**entry.about, "gpu_at": at, "gpu_for": took}, marks=None)
            if isinstance(entry, dict) or entry.written:
                settled.append(entry)
        self._held.extendleft(reversed([*settled, *held[passed:]]))

    def close(self) -> None:
        global _current
        with self._reading:
            self._settle(math.inf, last=True)
        self.flush(between_steps=True)
        self._gpu = None
        if self._file is not None:
            self._file.close()
            self._file = None
        if _current is self:
            _current = _DROPPED


def _passed(gpu: GpuClock, entry: HeldSpan | dict[str, Any]) -> bool:
    """Whether the device has passed the end of a span; False where it has no marks."""
    return isinstance(entry, HeldSpan) and entry.marks is not None and gpu.passed(entry.marks[1])


def _text(span: HeldSpan) -> str:
    """As JSON; json.dumps would take longer."""
    more = "".join(
        f', "{key}": {value:.6f}'
        if type(value) is float
        else f', "{key}": {value if type(value) is int else json.dumps(value, default=str)}'
        for key, value in span.about.items()
    )
    head = f'{{"span": "{span.name}", "step": {span.step}, "at": {span.at:.6f}, "for": {span.seconds:.6f}'
    return f"{head}{more}}}\n"


class _Span:
    __slots__ = ("about", "began", "events", "mark", "name", "outer")

    def __init__(self, events: Events, name: str, about: About):
        self.events, self.name, self.about = events, name, about

    def __enter__(self) -> None:
        self.mark = self.events._mark(self.name)
        self.outer = LIVE.phase(self.name)
        self.began = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        ended = time.perf_counter()
        marks = None if self.mark is None else (self.mark, self.mark.clock.now())
        LIVE.phase(self.outer)
        self.events.add(self.name, self.began, ended, self.about, marks)


_DROPPED = Events()
_current = _DROPPED


def current() -> Events:
    """The events of the run that is active in this process (``turns.py``); between runs, events that are dropped.

    For parts that have no reference to a run: ``with events.current().span("gather", bytes=n): ...``
    """
    return _current


def use(events: Events | None) -> None:
    """Let ``current()`` return ``events``; None: events that are dropped."""
    global _current
    _current = _DROPPED if events is None else events
