"""What limited a run's speed, and what to change: rules over a recorded run, each with evidence and an estimate.

A rule looks at one thing and returns a ``Finding``, or None. ``lost`` is the share of the time that would be saved if
that one thing were gone. The run's verdict is the finding that loses most; compute-bound where none loses much.

Advice keeps the training as it is where it can. What would change the trained weights (a larger batch, less precision,
stale gradients; microbatches, where there is BatchNorm) is marked as another training.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from meshfit.data.source import STAGES
from meshfit.observe.reading import Rank, RecordedRun
from meshfit.units import percent, size

WORTH = 0.05
"""Shares below this are not reported."""
ANOTHER = "(another training)"
"""Beside advice after which the weights are not those that this plan trains."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that limited the run's speed; with ``good``, that nothing did."""

    name: str
    evidence: str
    change: str
    lost: float = 0.0
    """Share of the time."""
    heading: str = ""
    """Instead of the name."""
    good: bool = False

    @property
    def title(self) -> str:
        return self.heading or self.name

    @property
    def faster(self) -> float:
        """How many times as fast it would be without."""
        return 1.0 / max(1.0 - self.lost, 0.05)

    def __str__(self) -> str:
        return f"{self.title}: {self.evidence}; {self.change}" if self.change else f"{self.title}: {self.evidence}"


def findings(run: RecordedRun) -> list[Finding]:
    """All findings, those that lose most first. Never empty for a run that took a step."""
    if not any(rank.totals for rank in run.ranks):
        return []
    found = [finding for rule in RULES if (finding := rule(run)) is not None]
    found.sort(key=lambda finding: -finding.lost)
    calm = _compute_bound(run) if not found or found[0].lost < 0.15 else None
    return found if calm is None else [calm, *found]


def verdict(run: RecordedRun) -> str:
    """The first finding, as one sentence."""
    found = findings(run)
    return str(found[0]) if found else "too short to tell"


def _input_bound(run: RecordedRun) -> Finding | None:
    share = run.share("data")
    if share < WORTH:
        return None
    workers = int(run.fact("data_workers", 0) or max(rank.most("workers") for rank in run.ranks))
    busy = max(1.0 - share, 0.05)
    if workers:
        change = f"{max(math.ceil(workers * (busy + share) / busy), workers + 1)} workers would hide it"
    elif (idle := _idle_cores(run)) is not None and idle < 1.0:
        change = "all CPU cores are busy: make a sample cheaper to read, or cache it"
    else:
        change = "read ahead in workers, or make a sample cheaper to read"
    who = f"on {workers} workers" if workers else "read by the training process itself"
    stages = {name: took for name, took in (run.fact("data") or {}).items() if name in STAGES}
    what = f"data, most of it to {max(stages, key=lambda name: stages[name])}" if len(stages) > 1 else "data"
    return Finding("input-bound", f"devices waited {percent(share)} of the time for {what}, {who}", change, share)


def _bubble(run: RecordedRun) -> Finding | None:
    stages, share = run.degree("pipeline"), run.bubble
    if share < WORTH:
        return None
    now = int(run.words.get("microbatches") or run.fact("microbatches", 1) or 1)
    left = lambda microbatches: (stages - 1) / (microbatches + stages - 1)
    more = min(max(4 * now, 4 * stages), _samples_a_rank(run))
    if _batchnorms(run):
        more = now
        change = f"{_another_schedule(run)}; more microbatches would change BatchNorm's statistics {ANOTHER}"
    elif more > now:
        change = f"{more} microbatches would leave about {percent(left(more))}"
    else:
        change = f"{_another_schedule(run)}; there are no more microbatches than samples"
    evidence = f"devices were idle {percent(share)} of the time between {now} microbatches over {stages} stages"
    lost = max(0.0, share - left(max(more, now)))
    return Finding("bubble", evidence, change, lost, f"bubble {percent(share)}")


def _another_schedule(run: RecordedRun) -> str:
    """What shortens a bubble and keeps the training as it is."""
    stages, usual = run.degree("pipeline"), run.words.get("schedule", "1f1b") in ("1f1b", "gpipe")
    fewer = f"pipeline={stages // 2} beside twice the data= waits less" if stages > 2 else "data= instead has none"
    return f"schedule=interleaved or zbv leaves less, {fewer}" if usual else fewer


def _batchnorms(run: RecordedRun) -> bool:
    """Whether the model has BatchNorm, whose statistics are those of each microbatch."""
    return any(rank.facts.get("batchnorms") for rank in run.ranks)


def _samples_a_rank(run: RecordedRun) -> int:
    """Of a batch, on each rank that reads data: there cannot be more microbatches."""
    return int(run.fact("batch", 0) or 0) // (run.degree("data") * run.degree("shard")) or 10**9


WAITS = ("exchange", "gather", "meet")


def _exposed(run: RecordedRun) -> Finding | None:
    """What the rank that waits least still waits: the others wait for that rank, which is another finding."""
    waited = [rank for rank in run.ranks if rank.wall]
    if len(run.ranks) < 2 or "server" in run.words or not waited:
        return None
    least = min(waited, key=lambda rank: rank.share(*WAITS))
    share = least.share(*WAITS)
    if share < WORTH:
        return None
    change = f"twice the batch would bring it to about {percent(share / (2 - share))} {ANOTHER}"
    if run.degree("pipeline") > 1 and not _batchnorms(run):
        change = "more microbatches a step hide it"
    if least.share("meet") > share / 2:  # in the middle of passes: a larger batch has more of it
        inside = [word for word in ("tensor", "context", "expert") if word in run.words]
        change = f"that is BatchNorm, in every layer; batchnorm=local avoids it, with each rank's statistics {ANOTHER}"
        change = f"a smaller {inside[0]}= waits for fewer" if inside else change
    elif "shard" not in run.words and "tensor" not in run.words:
        change += "; fewer and larger devices keep the training as it is"
    moved = sum((run.traffic or {}).values())
    evidence = f"every device waited at least {percent(share)} of the time for traffic that nothing hid"
    evidence += f", {size(moved)} a step" if moved else ""
    return Finding("exchange-exposed", evidence, change, share / 2, "exchange exposed")


def _straggler(run: RecordedRun) -> Finding | None:
    work = {rank.rank: rank.share("data", "forward_backward", "update") for rank in run.ranks if rank.wall}
    if len(work) < 2 or run.degree("pipeline") > 1:
        return None
    slowest = max(work, key=lambda rank: work[rank])
    others = statistics.median(took for rank, took in work.items() if rank != slowest)
    if others <= 0 or work[slowest] < 1.15 * others or work[slowest] - others < WORTH:
        return None
    host = next((r.facts.get("host") for r in run.ranks if r.rank == slowest), "")
    rank, times = f"rank {slowest} on {host}" if host else f"rank {slowest}", work[slowest] / others
    evidence = f"{rank} works {times:.2f} times as long as the others, which wait"
    change = "look for other processes there, or at its share of the data"
    return Finding("straggler", evidence, change, work[slowest] - others, "one slow rank")


def _evaluation(run: RecordedRun) -> Finding | None:
    share = run.share("evaluate")
    if share < 2 * WORTH:
        return None
    times = math.ceil(share / WORTH)
    less = f"valid_every {times} times as large, or a part of the validation data"
    change = f"{less}, would make it {percent(share / times)}"
    return Finding("evaluation-heavy", f"{percent(share)} of the time went to evaluation", change, share - WORTH)


def _checkpoint(run: RecordedRun) -> Finding | None:
    share = run.share("checkpoint")
    if share < WORTH:
        return None
    saved = [span.seconds for rank in run.ranks[:1] for span in rank.spans if span.name == "checkpoint"]
    each = f", {statistics.fmean(saved):.1f} s each" if saved else ""
    evidence = f"{percent(share)} of the time went to checkpoints{each}"
    return Finding("checkpoint-heavy", evidence, f"one in {math.ceil(share / 0.02)} would cost 2 %", share - 0.02)


def _memory(run: RecordedRun) -> Finding | None:
    heading = "memory near the limit"
    for rank in run.ranks:
        most, total = rank.most("gpu_memory"), rank.most("gpu_total")
        if total and most > 0.92 * total:
            evidence = f"rank {rank.rank}'s device held at most {size(most)} of {size(total)}"
            others = "recompute= or shard=" if _batchnorms(run) else "recompute=, shard= or more microbatches"
            return Finding("memory", evidence, f"{others} before the next larger model or batch", heading=heading)
        most, total = rank.most("memory"), rank.most("memory_total")
        if total and most > 0.92 * total:
            evidence = f"{rank.facts.get('host', 'the machine')} had {size(most)} of {size(total)} in use"
            change = f"fewer ranks or workers on it, shard=, or a smaller batch {ANOTHER}"
            return Finding("memory", evidence, change, heading=heading)
    return None


def _launch_bound(run: RecordedRun) -> Finding | None:
    step, use = run.step_seconds, _gpu_use(run)
    if run.on_gpu and use is not None and use < 60 and run.share("data") < WORTH:
        evidence = f"the GPU worked {use:.0f} % of the time and nothing else kept it waiting"
        change = f"compile=whole or block, or a larger batch {ANOTHER}, so that it has more to do for each launch"
        return Finding("launch-bound", evidence, change, 1 - use / 100)
    if not run.on_gpu and 0 < step < 0.003:
        microbatches = len(run.ranks) * max(1, int(run.fact("microbatches", 1) or 1))
        samples = int(run.fact("batch", 0) or 0) / microbatches
        evidence = f"a step takes {step * 1e3:.1f} ms for {samples:.0f} samples a device: most of it is not arithmetic"
        change = f"a larger batch would cost little more time {ANOTHER}"
        return Finding("launch-bound", evidence, change, min(0.9, 0.0006 / step), "tiny steps")
    return None


def _oversubscribed(run: RecordedRun) -> Finding | None:
    by_host: dict[str, list[Rank]] = defaultdict(list)
    for rank in run.ranks if not run.on_gpu else ():
        by_host[rank.facts.get("host", "")].append(rank)
    for ranks in by_host.values():
        threads, cores = sum(int(r.facts.get("threads", 1)) for r in ranks), int(ranks[0].facts.get("cores", 0))
        if cores and threads > cores:
            evidence = f"{len(ranks)} ranks with {threads} threads share {cores} cores"
            change = f"{cores} ranks would be as fast, and wait less for each other"
            return Finding("oversubscribed", evidence, change, run.share("exchange") / 2, "CPUs oversubscribed")
    return None


def _neighbours(run: RecordedRun) -> Finding | None:
    """Whether the machine is busy with something else."""
    for rank in run.ranks:
        cores = [values["cores"] for _, values in rank.samples if values.get("cores")]
        if len(cores) < 2:
            continue
        here = [r for r in run.ranks if r.facts.get("host") == rank.facts.get("host")]
        ours = sum(use for r in here if (use := r.mean("cpu")) is not None) / max(map(len, cores))
        busy = statistics.fmean(map(statistics.fmean, cores[1:]))
        if busy > 85 and busy - ours > 25:
            evidence = f"the CPUs were {busy:.0f} % busy, and this run used {ours:.0f} %"
            change = "something else runs there, and takes time from this run"
            return Finding("neighbours", evidence, change, (busy - ours) / 200, "a busy machine")
    return None


def _server(run: RecordedRun) -> Finding | None:
    """A worker's optimizer runs on its servers: in exchange and update it waits for them."""
    share, servers = run.share("exchange", "update"), int(run.words.get("server", 0))
    if not servers or share < 2 * WORTH:
        return None
    change = f"server={2 * servers} shares their work; compress=bf16 halves what is sent to them {ANOTHER}"
    if "staleness" not in run.words:
        change += f"; staleness=2 lets workers step without waiting for each other {ANOTHER}"
    who = "their server" if servers == 1 else f"their {servers} servers"
    evidence = f"workers waited {percent(share)} of the time for {who}, and through them for each other"
    return Finding("server-bound", evidence, change, share / 2)


def _optimizer(run: RecordedRun) -> Finding | None:
    share = run.share("update")
    if share < 0.2 or "server" in run.words:
        return None
    change = f"shard= gives each device a part of it; a larger batch takes fewer of them {ANOTHER}"
    return Finding("optimizer-heavy", f"{percent(share)} of the time went to the optimizer", change, share / 2)


def _caller(run: RecordedRun) -> Finding | None:
    share = run.ranks[0].phase_shares["other"]
    if share < 2 * WORTH:
        return None
    evidence = f"{percent(share)} of the time passed between steps, in callbacks or the caller's own loop"
    return Finding("caller-bound", evidence, "do less after each step, or not after every one", share)


def _start(run: RecordedRun) -> Finding | None:
    known = [step["seconds"] for step in run.steps if "seconds" in step]
    if len(known) < 3 or known[-1] < 1.0:
        return None
    share = (known[0] - run.step_seconds) / known[-1]
    if share < 0.2:
        return None
    evidence = f"the first step took {known[0]:.1f} s of {known[-1]:.1f} s in all"
    return Finding("slow-start", evidence, "in a longer run it matters less", share / 2, "slow start")


def _compute_bound(run: RecordedRun) -> Finding | None:
    share = run.share("forward_backward", "update")
    if share < 0.5:
        return None
    evidence = f"{'GPUs' if run.on_gpu else 'CPUs'} computed {percent(share)} of the time"
    if (use := _gpu_use(run)) is not None:
        evidence += f", the GPU at work {use:.0f} % of it"
    if run.of_peak is not None:
        evidence += f", at {percent(run.of_peak)} of their peak"
    change = f"faster or more devices would help, or lower precision {ANOTHER}" if share > 0.8 else ""
    return Finding("compute-bound", evidence, change, good=True)


RULES: tuple[Callable[[RecordedRun], Finding | None], ...] = (
    _input_bound,
    _bubble,
    _exposed,
    _straggler,
    _evaluation,
    _checkpoint,
    _memory,
    _launch_bound,
    _oversubscribed,
    _neighbours,
    _server,
    _optimizer,
    _caller,
    _start,
)


def _gpu_use(run: RecordedRun) -> float | None:
    """In percent, in the mean over ranks."""
    use = [u for rank in run.ranks if (u := rank.mean("gpu_use")) is not None]
    return statistics.fmean(use) if use else None


def _idle_cores(run: RecordedRun) -> float | None:
    seen = [values["cores"] for rank in run.ranks for _, values in rank.samples if values.get("cores")]
    return statistics.fmean(len(cores) - sum(cores) / 100 for cores in seen) if seen else None
