"""A run's folder as values: what the rest of this room looks at. Reads a finished run, or one under way.

All times are seconds since the first rank began, on one clock. Ranks of one machine share it. Those of another are
moved so that the ends of "exchange", which ranks leave together, coincide in the median.
"""

import json
import socket
import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from meshfit.errors import JobError
from meshfit.launch.peak import peak_flops
from meshfit.observe.kinds import PHASES

STEPS_READ = 20_000
"""At most; of longer runs evenly spaced ones. The first, the last and those with an evaluation are always there."""


@dataclass(frozen=True, slots=True)
class Span:
    """``name`` from ``at`` for ``seconds``: the device's own times where it is a GPU."""

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


@dataclass(frozen=True, slots=True)
class Sample:
    """Use of the machine at a moment."""

    at: float
    values: dict[str, Any]


@dataclass(frozen=True)
class Rank:
    """What one rank left."""

    rank: int
    facts: dict[str, Any]
    spans: list[Span]
    totals: list[Total]
    samples: list[Sample]
    instants: list[dict[str, Any]]
    scalars: list[dict[str, Any]]

    @cached_property
    def seconds(self) -> dict[str, float]:
        """By span, of all steps: by the device's clock where it has one."""
        found: dict[str, float] = defaultdict(float)
        for total in self.totals:
            for name, took in total.by.items():
                found[name] += took
        return _by_device(found)

    @property
    def _steady_totals(self) -> list[Total]:
        begun = [total for total in self.totals if total.last > 0]  # not what came before the training
        later = begun[1:]
        return later if any("forward_backward" in total.by for total in later) else begun

    @cached_property
    def steady(self) -> dict[str, float]:
        """Seconds by span without the first step, in which everything is new."""
        found: dict[str, float] = defaultdict(float)
        for total in self._steady_totals:
            for name, took in total.by.items():
                found[name] += took
        return _by_device(found)

    @cached_property
    def wall(self) -> float:
        """Seconds that ``steady`` is about: never less than its phases, which do not overlap."""
        return max(sum(total.seconds for total in self._steady_totals), sum(self.steady.get(n, 0.0) for n in PHASES))

    def series(self, key: str) -> list[tuple[float, float]]:
        return [(s.at, float(s.values[key])) for s in self.samples if s.values.get(key) is not None]

    def mean(self, key: str) -> float | None:
        """Of a sampled number; without the first sample, if there are others."""
        values = [value for _, value in self.series(key)]
        values = values[1:] if len(values) > 2 else values
        return statistics.fmean(values) if values else None


def _by_device(found: dict[str, float]) -> dict[str, float]:
    known = {name[4:] for name in found if name.startswith("gpu ")}
    host = {name: took for name, took in found.items() if not name.startswith("gpu ") and name not in known}
    return host | {name: found[f"gpu {name}"] for name in known}


@dataclass(frozen=True)
class Recording:
    """A run, as far as it has come."""

    folder: Path
    about: dict[str, Any]
    """What run.json says."""
    steps: list[dict[str, Any]]
    ranks: list[Rank]
    machines: list[dict[str, Any]]
    began: float = 0.0
    """Seconds since 1970."""
    servers: list[Rank] = field(default_factory=list)
    """What model servers left."""

    @property
    def plan(self) -> str:
        return str(self.about.get("plan", "?"))

    @property
    def words(self) -> dict[str, str]:
        """The plan's words: {"data": "2", ...}."""
        return dict(word.split("=", 1) for word in self.plan.split() if "=" in word)

    @property
    def state(self) -> str:
        """finished, failed (a rank said so), cut (its processes are gone, as far as this machine can tell), running."""
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

    @cached_property
    def rate(self) -> float:
        """Samples a second, without the first tenth of the steps."""
        known = [step for step in self.steps if "samples" in step]
        if len(known) < 2:
            return known[0]["samples"] / max(known[0]["seconds"], 1e-9) if known else 0.0
        first, last = known[len(known) // 10], known[-1]
        if first is last:
            first = known[0]
        return (last["samples"] - first["samples"]) / max(last["seconds"] - first["seconds"], 1e-9)

    @property
    def flops(self) -> float | None:
        """A second, over all devices: what the model's own forward and backward take, whatever is computed twice."""
        each = self.about.get("flops_a_sample")
        return each * self.rate if each and self.rate else None

    @property
    def of_peak(self) -> float | None:
        """Of what its devices could do, where that is known."""
        peaks = [
            peak_flops(str(r.facts.get("device_name", "")), self.words.get("precision", "fp32")) for r in self.ranks
        ]
        total = sum(peak or 0.0 for peak in peaks)
        return self.flops / total if self.flops and peaks and all(peaks) else None

    @property
    def tokens(self) -> int:
        """A sample; 0 where it has none."""
        return int(self.fact("tokens", 0) or 0)

    @cached_property
    def traffic(self) -> dict[str, float] | None:
        """Bytes a step that a rank hands to collectives, by name, on the rank with most: counted where they are
        called, else as the plan's cost says. None: nobody knows."""
        found: list[dict[str, float]] = []
        steps = self.steps[-1]["step"] if self.steps else 0
        for rank in self.ranks:
            sums: dict[str, float] = defaultdict(float)
            for total in rank.totals:
                for name, (_, count) in total.moved.items():
                    sums[name] += count / max(steps, 1)
            if sums:
                found.append(dict(sums))
        if found:
            return max(found, key=lambda sums: sum(sums.values()))
        return self.fact("traffic") or ({} if len(self.ranks) < 2 else None)

    def fact(self, name: str, default: Any = None) -> Any:
        return next((rank.facts[name] for rank in self.ranks if name in rank.facts), default)

    @cached_property
    def step_seconds(self) -> float:
        """Of one optimizer step in the mean, without the first tenth of them; evaluation and checkpoints apart."""
        known = [step for step in self.steps if "seconds" in step]
        if not known:
            return 0.0
        first, last = known[len(known) // 10], known[-1]
        if first is last:
            return last["seconds"] / max(last["step"], 1)
        apart = sum(self.share(name) for name in ("evaluate", "checkpoint"))
        return (last["seconds"] - first["seconds"]) * (1 - min(apart, 0.99)) / (last["step"] - first["step"])

    def share(self, name: str) -> float:
        """Of the ranks' time that went to ``name``, in the mean over ranks."""
        shares = [rank.steady.get(name, 0.0) / rank.wall for rank in self.ranks if rank.wall > 0]
        return statistics.fmean(shares) if shares else 0.0


class Reader:
    """Reads a folder, and what was added since, each time it is asked."""

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)
        if not (self.folder / "run.json").is_file():
            raise JobError(f"{self.folder} holds no run", "a run with out= writes run.json there")
        self._files: dict[Path, tuple[int, list[dict[str, Any]]]] = {}

    def read(self) -> Recording:
        about = _json(self.folder / "run.json")
        logs, serving = self._logs("rank"), self._logs("server")
        began = min((log[0]["time"] for log in logs), default=0.0)
        moves = _moves(logs, began)
        ranks = [_rank(log, move) for log, move in zip(logs, moves, strict=True)]
        machines = [_json(path) for path in sorted((self.folder / "events").glob("machine-*.json"))]
        steps = _thin(self._lines(self.folder / "metrics.jsonl"))
        servers = [_rank(log, log[0]["time"] - began) for log in serving]
        return Recording(self.folder, about, steps, ranks, machines, began, servers)

    def _logs(self, of: str) -> list[list[dict[str, Any]]]:
        paths = sorted((self.folder / "events").glob(f"{of}*.jsonl"), key=_number)
        return [log for path in paths if (log := self._lines(path)) and "rank" in log[0]]

    def _lines(self, path: Path) -> list[dict[str, Any]]:
        offset, known = self._files.get(path, (0, []))
        try:
            with path.open("rb") as file:
                file.seek(offset)
                fresh = file.read()
        except OSError:
            return known
        whole = fresh[: fresh.rfind(b"\n") + 1]  # the last line may still be in the making
        for line in whole.splitlines():
            try:
                known.append(json.loads(line))
            except ValueError:  # a machine that went down leaves half a line
                continue
        self._files[path] = (offset + len(whole), known)
        return known


def read(folder: Path | str) -> Recording:
    """The run in ``folder``."""
    return Reader(folder).read()


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def _number(path: Path) -> int:
    digits = path.stem.removeprefix("rank").removeprefix("server")
    return int(digits) if digits.isdigit() else 0


def _moves(logs: list[list[dict[str, Any]]], began: float) -> list[float]:
    """What to add to each rank's times."""
    hosts = [next((e["facts"]["host"] for e in log if "host" in e.get("facts", {})), "") for log in logs]
    plain = [log[0]["time"] - began for log in logs]
    by_host: dict[str, float] = {}
    for host, log, move in zip(hosts, logs, plain, strict=True):
        if host not in by_host:
            by_host[host] = 0.0 if not by_host else _apart(logs[0], plain[0], log, move)
    return [move + by_host[host] for move, host in zip(plain, hosts, strict=True)]


def _apart(first: list[dict[str, Any]], first_move: float, other: list[dict[str, Any]], move: float) -> float:
    def ends(log: list[dict[str, Any]], by: float) -> dict[int, float]:
        spans = [e for e in log if e.get("span") == "exchange"]
        return {e["step"]: e.get("gpu_at", e["at"]) + e.get("gpu_for", e["for"]) + by for e in spans}

    mine, theirs = ends(first, first_move), ends(other, move)
    gaps = [mine[step] - theirs[step] for step in mine.keys() & theirs.keys()]
    return statistics.median(gaps) if gaps else 0.0


def _rank(log: list[dict[str, Any]], move: float) -> Rank:
    facts: dict[str, Any] = {}
    spans, totals, samples, instants, scalars = [], [], [], [], []
    for line in log[1:]:
        at = line.get("at", 0.0) + move
        if "span" in line:
            about = {k: v for k, v in line.items() if k not in ("span", "step", "at", "for", "gpu_at", "gpu_for")}
            if "gpu_at" in line:
                at = line["gpu_at"] + move
            spans.append(Span(line["span"], line["step"], at, line.get("gpu_for", line["for"]), about))
        elif "totals" in line:
            first, last = line["steps"]
            totals.append(Total(at, line["for"], first, last, line["totals"], line.get("moved", {})))
        elif "sample" in line:
            samples.append(Sample(at, line["sample"]))
        elif "facts" in line:
            facts |= {k: v for k, v in line["facts"].items() if k != "memory"}
            facts["memory"] = {**facts.get("memory", {}), **line["facts"].get("memory", {})}
        elif "instant" in line:
            instants.append({**line, "at": at})
        elif "scalar" in line:
            scalars.append({**line, "at": at})
    spans.sort(key=lambda span: span.at)
    return Rank(log[0]["rank"], facts, spans, totals, samples, instants, scalars)


def _thin(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if len(steps) <= STEPS_READ:
        return list(steps)
    stride = -(-len(steps) // STEPS_READ)
    return [s for i, s in enumerate(steps) if i % stride == 0 or i == len(steps) - 1 or "valid" in s]


def phase_shares(rank: Rank) -> dict[str, float]:
    """Shares of a rank's time by phase; what no phase holds is "other". They add up to 1."""
    found = {name: rank.steady[name] / max(rank.wall, 1e-9) for name in PHASES if rank.steady.get(name)}
    return {**found, "other": max(0.0, 1.0 - sum(found.values()))}
