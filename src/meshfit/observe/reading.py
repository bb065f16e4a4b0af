"""A run's folder, read into values: of a finished run, or of one that is still training.

All times are seconds since the first rank began, on one clock. Ranks of one machine share a clock. That of another
machine is shifted so that the ends of "exchange", which all ranks leave together, coincide in the median.
"""

import json
import os
import socket
import statistics
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from meshfit.errors import JobError
from meshfit.launch.peak import peak_flops
from meshfit.observe.kinds import PHASES

STEPS_READ = 20_000
"""At most; of longer runs evenly spaced ones. The first, the last and those with an evaluation are always read."""

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RecordedSpan:
    """``name`` from ``at`` for ``seconds``: by the device's clock where it is a GPU."""

    name: str
    step: int
    at: float
    seconds: float
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def end(self) -> float:
        return self.at + self.seconds


@dataclass(frozen=True, slots=True)
class Total:
    """Seconds by span over about a second."""

    at: float
    seconds: float
    first: int
    last: int
    by: dict[str, float]
    moved: dict[str, list[int]] = field(default_factory=dict)
    """Calls and bytes, by collective."""


@dataclass(frozen=True)
class Rank:
    """What one rank, or model server, recorded."""

    rank: int
    facts: dict[str, Any]
    spans: list[RecordedSpan]
    totals: list[Total]
    samples: list[tuple[float, dict[str, Any]]]
    """Use of the machine, at a time."""
    instants: list[Line]
    scalars: list[Line]

    @property
    def _steady_totals(self) -> list[Total]:
        trained = [total for total in self.totals if total.last > 0]  # not those before the first step
        later = trained[1:]
        return later if any("forward_backward" in total.by for total in later) else trained

    @cached_property
    def steady(self) -> dict[str, float]:
        """Seconds by span without the first step; by the device's clock where it has one."""
        found: dict[str, float] = defaultdict(float)
        for total in self._steady_totals:
            for name, took in total.by.items():
                found[name] += took
        on_gpu = {name.removeprefix("gpu "): took for name, took in found.items() if name.startswith("gpu ")}
        return {name: took for name, took in found.items() if not name.startswith("gpu ")} | on_gpu

    @cached_property
    def wall(self) -> float:
        """Seconds that ``steady`` covers: never less than its phases, which do not overlap."""
        return max(sum(total.seconds for total in self._steady_totals), sum(self.steady.get(n, 0.0) for n in PHASES))

    def share(self, *names: str) -> float:
        """Share of the time spent in spans ``names``."""
        return sum(self.steady.get(name, 0.0) for name in names) / max(self.wall, 1e-9)

    @property
    def idle(self) -> float:
        """Share of the time in which a rank of a pipeline was in a pass, and ran no action of it."""
        return max(0.0, self.share("forward_backward") - self.share("forward", "backward", "weight"))

    @cached_property
    def phase_shares(self) -> dict[str, float]:
        """Share of the time by phase; what no phase covers is "other". They add up to 1."""
        found = {name: self.share(name) for name in PHASES if self.steady.get(name)}
        return {**found, "other": max(0.0, 1.0 - sum(found.values()))}

    @cached_property
    def moved(self) -> dict[str, int]:
        """Bytes handed to collectives in all steps, by name."""
        found: Counter[str] = Counter()
        for total in self.totals:
            if total.last:  # not those before the first step
                found.update({name: count for name, (_, count) in total.moved.items()})
        return dict(found)

    def series(self, key: str) -> list[tuple[float, float]]:
        return [(at, float(values[key])) for at, values in self.samples if values.get(key) is not None]

    def mean(self, key: str) -> float | None:
        """Of a sampled number; without the first sample, if there are others."""
        values = [value for _, value in self.series(key)]
        values = values[1:] if len(values) > 2 else values
        return statistics.fmean(values) if values else None

    def most(self, key: str) -> float:
        return max((value for _, value in self.series(key)), default=0.0)

    @property
    def peak_memory(self) -> float:
        """Bytes of the GPU, or else of the process."""
        return self.most("gpu_peak") or self.most("rss")


@dataclass(frozen=True)
class RecordedRun:
    """A run, up to its last step so far."""

    folder: Path
    about: dict[str, Any]
    """The content of run.json."""
    steps: list[Line]
    ranks: list[Rank]
    machines: list[dict[str, Any]]
    began: float = 0.0
    """Seconds since 1970."""
    servers: list[Rank] = field(default_factory=list)

    @property
    def plan(self) -> str:
        return str(self.about.get("plan", "?"))

    @property
    def words(self) -> dict[str, str]:
        """The plan's words: {"data": "2", ...}."""
        return dict(word.split("=", 1) for word in self.plan.split() if "=" in word)

    def degree(self, axis: str) -> int:
        return int(self.words.get(axis, 1))

    @property
    def on_gpu(self) -> bool:
        return str(self.fact("device", "")).startswith("cuda")

    @property
    def state(self) -> str:
        """finished; failed: a rank recorded an error; cut: its processes, on this machine, are gone; or running."""
        if "seconds" in self.about:
            return "finished"
        if self.error:
            return "failed"
        here = [r.facts["pid"] for r in self.ranks if r.facts.get("host") == socket.gethostname() and "pid" in r.facts]
        return "cut" if here and not any(map(psutil.pid_exists, here)) else "running"

    @property
    def error(self) -> str | None:
        for rank in self.ranks:
            for instant in rank.instants:
                if instant["instant"] == "error":
                    said = instant.get("said") or [""]
                    return f"rank {rank.rank}: {instant.get('what')}: {said[0]}"
        return None

    def values(self, name: str, of: str = "") -> list[tuple[float, float]]:
        """(step, value) of a number in metrics.jsonl; ``of`` "values": that the step function logs, "valid": of
        evaluations."""
        lines = ((step["step"], step.get(of, {}) if of else step) for step in self.steps)
        return [(float(step), float(line[name])) for step, line in lines if name in line]

    @property
    def last_step(self) -> int:
        return self.steps[-1]["step"] if self.steps else 0

    @cached_property
    def rate(self) -> float:
        """Samples a second, without the first tenth of the steps."""
        known = [step for step in self.steps if "samples" in step]
        if len(known) < 2:
            return known[0]["samples"] / max(known[0]["seconds"], 1e-9) if known else 0.0
        first, last = known[len(known) // 10], known[-1]
        return (last["samples"] - first["samples"]) / max(last["seconds"] - first["seconds"], 1e-9)

    @property
    def flops(self) -> float | None:
        """A second, over all devices, of the model's forward and backward; what is recomputed does not count."""
        each = self.about.get("flops_a_sample")
        return each * self.rate if each and self.rate else None

    @property
    def of_peak(self) -> float | None:
        """Share of the devices' peak, where that is known."""
        precision = self.words.get("precision", "fp32")
        peaks = [peak_flops(str(r.facts.get("device_name", "")), precision) for r in self.ranks]
        return self.flops / sum(peak or 0.0 for peak in peaks) if self.flops and peaks and all(peaks) else None

    @property
    def tokens(self) -> int:
        """A sample; 0 where it has none."""
        return int(self.fact("tokens", 0) or 0)

    @cached_property
    def traffic(self) -> dict[str, float] | None:
        """Bytes a step that a rank hands to collectives, by name, on the rank with most: counted where they are
        called, else as the plan's cost predicts. None where it is not known."""
        if moved := [rank.moved for rank in self.ranks if rank.moved]:
            most = max(moved, key=lambda by_name: sum(by_name.values()))
            return {name: count / max(self.last_step, 1) for name, count in most.items()}
        return self.fact("traffic") or ({} if len(self.ranks) < 2 else None)

    def fact(self, name: str, default: Any = None) -> Any:
        return next((rank.facts[name] for rank in self.ranks if name in rank.facts), default)

    @cached_property
    def step_seconds(self) -> float:
        """Mean of a step, without the first tenth of them, evaluation and checkpoints."""
        known = [step for step in self.steps if "seconds" in step]
        if not known:
            return 0.0
        first, last = known[len(known) // 10], known[-1]
        if first is last:
            return last["seconds"] / max(last["step"], 1)
        training = 1 - min(self.share("evaluate", "checkpoint"), 0.99)
        return (last["seconds"] - first["seconds"]) * training / (last["step"] - first["step"])

    def share(self, *names: str) -> float:
        """Share of the ranks' time spent in spans ``names``: their mean."""
        shares = [rank.share(*names) for rank in self.ranks if rank.wall > 0]
        return statistics.fmean(shares) if shares else 0.0

    @cached_property
    def bubble(self) -> float:
        """Share of the time in which ranks of a pipeline were idle: their mean."""
        staged = [r for r in self.ranks if r.wall and ("forward" in r.steady or "backward" in r.steady)]
        return statistics.fmean(r.idle for r in staged) if staged and self.degree("pipeline") > 1 else 0.0


class Reader:
    """Reads a folder, and, each time it is asked again, what was added since."""

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)
        if not (self.folder / "run.json").is_file():
            raise JobError(f"{self.folder} holds no run", "a run with out= writes run.json there")
        self._files: dict[Path, tuple[int, int, list[Line]]] = {}

    def read(self) -> RecordedRun:
        logs, events = self._logs("rank"), self.folder / "events"
        began = min((log[0]["time"] for log in logs), default=0.0)
        return RecordedRun(
            self.folder,
            _json(self.folder / "run.json"),
            _thin(self._lines(self.folder / "metrics.jsonl")),
            [_rank(log, offset) for log, offset in zip(logs, _clock_offsets(logs, began), strict=True)],
            [_json(path) for path in sorted(events.glob("machine-*.json"))],
            began,
            [_rank(log, log[0]["time"] - began) for log in self._logs("server")],
        )

    def _logs(self, of: str) -> list[list[Line]]:
        paths = sorted((self.folder / "events").glob(f"{of}*.jsonl"), key=lambda path: (len(path.stem), path.stem))
        return [log for path in paths if (log := self._lines(path)) and "rank" in log[0]]

    def _lines(self, path: Path) -> list[Line]:
        number, offset, known = self._files.get(path, (0, 0, []))
        try:
            with path.open("rb") as file:
                if (now := os.fstat(file.fileno()).st_ino) != number:  # another file: steps were taken back
                    number, offset, known = now, 0, []
                file.seek(offset)
                fresh = file.read()
        except OSError:
            return known
        whole = fresh[: fresh.rfind(b"\n") + 1]  # the last line may not be complete yet
        for line in whole.splitlines():
            try:
                known.append(json.loads(line))
            except ValueError:  # a machine that went down leaves half a line
                continue
        self._files[path] = (number, offset + len(whole), known)
        return known


def read(folder: Path | str) -> RecordedRun:
    """The run in ``folder``."""
    return Reader(folder).read()


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def _clock_offsets(logs: list[list[Line]], began: float) -> list[float]:
    """What to add to each rank's times."""
    offsets = [log[0]["time"] - began for log in logs]
    by_host: dict[str, float] = {}
    hosts = [next((e["facts"]["host"] for e in log if "host" in e.get("facts", {})), "") for log in logs]
    for host, log, offset in zip(hosts, logs, offsets, strict=True):
        if host not in by_host:
            want, got = _exchange_ends(logs[0], offsets[0]), _exchange_ends(log, offset)
            by_host[host] = statistics.median([want[step] - got[step] for step in want.keys() & got.keys()] or [0.0])
    return [offset + by_host[host] for offset, host in zip(offsets, hosts, strict=True)]


def _exchange_ends(log: list[Line], offset: float) -> dict[int, float]:
    spans = [line for line in log if line.get("span") == "exchange"]
    return {e["step"]: e.get("gpu_at", e["at"]) + e.get("gpu_for", e["for"]) + offset for e in spans}


def _rank(log: list[Line], offset: float) -> Rank:
    rank = Rank(log[0]["rank"], {}, [], [], [], [], [])
    for line in log[1:]:
        at = line.get("gpu_at", line.get("at", 0.0)) + offset
        if "span" in line:
            about = {k: v for k, v in line.items() if k not in ("span", "step", "at", "for", "gpu_at", "gpu_for")}
            rank.spans.append(RecordedSpan(line["span"], line["step"], at, line.get("gpu_for", line["for"]), about))
        elif "totals" in line:
            first, last = line["steps"]
            rank.totals.append(Total(at, line["for"], first, last, line["totals"], line.get("moved", {})))
        elif "sample" in line:
            rank.samples.append((at, line["sample"]))
        elif "facts" in line:
            memory = {**rank.facts.get("memory", {}), **line["facts"].get("memory", {})}
            rank.facts.update(line["facts"], memory=memory)
        elif "instant" in line:
            rank.instants.append({**line, "at": at})
        elif "scalar" in line:
            rank.scalars.append({**line, "at": at})
    rank.spans.sort(key=lambda span: span.at)
    return rank


def _thin(steps: list[Line]) -> list[Line]:
    stride = max(1, -(-len(steps) // STEPS_READ))
    return [s for i, s in enumerate(steps) if i % stride == 0 or i == len(steps) - 1 or "valid" in s]
