"""Where a run's time went and what to change: rules over a recording, each with its evidence and an estimate.

A rule looks at one thing and says nothing, or a ``Finding``. ``lost`` is the share of the time that would be won if
what it found were gone. The run's verdict is the finding with the most to win; compute-bound where there is little.

Advice keeps the training as it is where it can. What would make another training of it (a larger batch, less
precision, stale gradients; microbatches, where there is BatchNorm) says so.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from meshfit.cost import size
from meshfit.data.source import STAGES
from meshfit.observe.reading import Rank, Recording, phase_shares

WORTH = 0.05
"""Shares below this are not worth a word."""
ANOTHER = "(another training)"
"""Beside advice after which the weights are not those that this plan trains."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that held the run back; or, with ``good``, that it is as it should be."""

    name: str
    title: str
    evidence: str
    change: str
    lost: float = 0.0
    """Share of the time."""
    good: bool = False

    @property
    def faster(self) -> float:
        """How many times as fast it would be without."""
        return 1.0 / max(1.0 - self.lost, 0.05)

    def __str__(self) -> str:
        return f"{self.title}: {self.evidence}; {self.change}" if self.change else f"{self.title}: {self.evidence}"


Rule = Callable[[Recording], Finding | None]


def findings(run: Recording) -> list[Finding]:
    """All that was found, what matters most first. Never empty for a run that took a step."""
    if not any(rank.totals for rank in run.ranks):
        return []
    found = [finding for rule in RULES if (finding := rule(run)) is not None]
    found.sort(key=lambda finding: -finding.lost)
    if not found or found[0].lost < 0.15:
        calm = _compute_bound(run)
        if calm is not None:
            found = [calm, *found]
    return found


def verdict(run: Recording) -> str:
    """One sentence."""
    found = findings(run)
    return str(found[0]) if found else "too short to tell"


def _input_bound(run: Recording) -> Finding | None:
    share = run.share("data")
    if share < WORTH:
        return None
    seen = [count for rank in run.ranks for _, count in rank.series("workers")]
    workers = int(run.fact("data_workers", 0) or max(seen, default=0))
    idle = _idle_cores(run)
    who = f"on {workers} workers" if workers else "read by the training process itself"
    busy = 1.0 - share
    if workers:
        need = math.ceil(workers * (busy + share) / max(busy, 0.05))
        change = f"{max(need, workers + 1)} workers would hide it"
    elif idle is not None and idle < 1.0:
        change = "the CPUs are full: make reading a sample cheaper, or cache what it gives"
    else:
        change = "read ahead in workers, or make a sample cheaper to read"
    stages = {name: took for name, took in (run.fact("data") or {}).items() if name in STAGES}
    what = f"data, most of it to {max(stages, key=lambda name: stages[name])}" if len(stages) > 1 else "data"
    evidence = f"devices waited {percent(share)} of the time for {what}, {who}"
    return Finding(name="input-bound", title="input-bound", evidence=evidence, change=change, lost=share)


def _bubble(run: Recording) -> Finding | None:
    stages = int(run.words.get("pipeline", 1))
    if stages < 2:
        return None
    staged = [r for r in run.ranks if r.wall and ("forward" in r.steady or "backward" in r.steady)]
    shares = [_between_actions(rank) / rank.wall for rank in staged]
    share = statistics.fmean(shares) if shares else 0.0
    if share < WORTH:
        return None
    now = int(run.words.get("microbatches") or run.fact("microbatches", 1) or 1)
    would = (stages - 1) / (now + stages - 1)
    evidence = f"devices stood idle {percent(share)} of the time between {now} microbatches over {stages} stages"
    more = min(max(4 * now, 4 * stages), _samples_a_share(run))
    if _batchnorms(run):
        change = f"{_another_schedule(run)}; more microbatches would change BatchNorm's statistics {ANOTHER}"
    elif more > now:
        would = (stages - 1) / (more + stages - 1)
        change = f"{more} microbatches would leave about {percent(would)}"
    else:
        change = f"{_another_schedule(run)}; there are no more microbatches than samples"
    return Finding(
        name="bubble", title=f"bubble {percent(share)}", evidence=evidence, change=change, lost=max(0.0, share - would)
    )


def _another_schedule(run: Recording) -> str:
    """What shortens a bubble and leaves the training as it is."""
    stages, usual = int(run.words.get("pipeline", 1)), run.words.get("schedule", "1f1b") in ("1f1b", "gpipe")
    fewer = f"pipeline={stages // 2} beside twice the data= waits less" if stages > 2 else "data= instead has none"
    return f"schedule=interleaved or zbv leaves less, {fewer}" if usual else fewer


def _batchnorms(run: Recording) -> bool:
    """Whether the model has BatchNorm, whose statistics are those of each microbatch."""
    return any(rank.facts.get("batchnorms") for rank in run.ranks)


def _samples_a_share(run: Recording) -> int:
    """Of a batch, on each rank that reads data: there cannot be more microbatches."""
    shares = math.prod(int(run.words.get(axis, 1)) for axis in ("data", "shard"))
    return int(run.fact("batch", 0) or 0) // max(1, shares) or 10**9


WAITS = ("exchange", "gather", "meet")


def _exposed(run: Recording) -> Finding | None:
    """What the rank that waits least still waits: the others wait for it, and that is another finding."""
    if len(run.ranks) < 2 or "server" in run.words:
        return None
    waited = {r.rank: [r.steady.get(name, 0.0) / r.wall for name in WAITS] for r in run.ranks if r.wall}
    least = min(waited.values(), key=sum, default=[0.0])
    share = sum(least)
    if share < WORTH:
        return None
    moved = sum((run.traffic or {}).values())
    what = f", {size(moved)} a step" if moved else ""
    pipelined = int(run.words.get("pipeline", 1)) > 1
    change = f"twice the batch would bring it to about {percent(share / (2 - share))} {ANOTHER}"
    if pipelined and not _batchnorms(run):
        change = "more microbatches a step hide it"
    if least[-1] > share / 2:  # in the middle of passes: a larger batch has more of it
        inside = [word for word in ("tensor", "context", "expert") if word in run.words]
        change = (
            f"a smaller {inside[0]}= waits for fewer"
            if inside
            else f"that is BatchNorm, in every layer; batchnorm=local spares it, with each rank's statistics {ANOTHER}"
        )
    elif "shard" not in run.words and "tensor" not in run.words:
        change += "; fewer and larger devices keep the training as it is"
    evidence = f"every device waited at least {percent(share)} of the time for traffic that nothing hid{what}"
    return Finding(name="exchange-exposed", title="exchange exposed", evidence=evidence, change=change, lost=share / 2)


def _straggler(run: Recording) -> Finding | None:
    work = {rank.rank: _work(rank) for rank in run.ranks if rank.wall}
    if len(work) < 2 or int(run.words.get("pipeline", 1)) > 1:
        return None
    slowest = max(work, key=lambda rank: work[rank])
    others = statistics.median(took for rank, took in work.items() if rank != slowest)
    if others <= 0 or work[slowest] < 1.15 * others or work[slowest] - others < WORTH:
        return None
    name = next((r.facts.get("host") for r in run.ranks if r.rank == slowest), "")
    where, times = f" on {name}" if name else "", work[slowest] / others
    evidence = f"rank {slowest}{where} works {times:.2f} times as long as the others, which wait"
    change = "look at what else runs there, or at its share of the data"
    return Finding(
        name="straggler", title="one slow rank", evidence=evidence, change=change, lost=work[slowest] - others
    )


def _evaluation(run: Recording) -> Finding | None:
    share = run.share("evaluate")
    if share < 2 * WORTH:
        return None
    evidence = f"{percent(share)} of the time went to evaluation"
    times = math.ceil(share / WORTH)
    change = (
        f"valid_every {times} times as large, or a part of the validation data, would make it {percent(share / times)}"
    )
    return Finding(
        name="evaluation-heavy", title="evaluation-heavy", evidence=evidence, change=change, lost=share - WORTH
    )


def _checkpoint(run: Recording) -> Finding | None:
    share = run.share("checkpoint")
    if share < WORTH:
        return None
    saved = [span for rank in run.ranks[:1] for span in rank.spans if span.name == "checkpoint"]
    each = f", {statistics.fmean(s.seconds for s in saved):.1f} s each" if saved else ""
    times = math.ceil(share / 0.02)
    evidence = f"{percent(share)} of the time went to checkpoints{each}"
    change = f"one in {times} would cost 2 %"
    return Finding(
        name="checkpoint-heavy", title="checkpoint-heavy", evidence=evidence, change=change, lost=share - 0.02
    )


def _memory(run: Recording) -> Finding | None:
    for rank in run.ranks:
        total = max((v for _, v in rank.series("gpu_total")), default=0.0)
        most = max((v for _, v in rank.series("gpu_memory")), default=0.0)
        if total and most > 0.92 * total:
            evidence = f"rank {rank.rank}'s device held {size(most)} of {size(total)} at its most"
            others = "recompute= or shard=" if _batchnorms(run) else "recompute=, shard= or more microbatches"
            change = f"{others} before the next larger model or batch"
            return Finding(name="memory", title="memory near the limit", evidence=evidence, change=change)
    for rank in run.ranks:
        total = max((v for _, v in rank.series("memory_total")), default=0.0)
        most = max((v for _, v in rank.series("memory")), default=0.0)
        if total and most > 0.92 * total:
            evidence = f"{rank.facts.get('host', 'the machine')} had {size(most)} of {size(total)} in use"
            change = f"fewer ranks or workers on it, shard=, or a smaller batch {ANOTHER}"
            return Finding(name="memory", title="memory near the limit", evidence=evidence, change=change)
    return None


def _launch_bound(run: Recording) -> Finding | None:
    step, gpu = run.step_seconds, run.fact("device", "").startswith("cuda")
    use = [u for rank in run.ranks if (u := rank.mean("gpu_use")) is not None]
    shares = max(1, len(run.ranks))
    samples = int(run.fact("batch", 0) or 0) / shares / max(1, int(run.fact("microbatches", 1) or 1))
    if gpu and use and statistics.fmean(use) < 60 and run.share("data") < WORTH:
        evidence = f"the GPU worked {statistics.fmean(use):.0f} % of the time and nothing else kept it waiting"
        change = f"compile=whole or block, or a larger batch {ANOTHER}, so that it has more to do for each launch"
        return Finding(
            name="launch-bound",
            title="launch-bound",
            evidence=evidence,
            change=change,
            lost=1 - statistics.fmean(use) / 100,
        )
    if not gpu and 0 < step < 0.003:
        fixed = min(0.9, 0.0006 / step)
        evidence = f"a step takes {step * 1e3:.1f} ms for {samples:.0f} samples a device: most of it is not arithmetic"
        return Finding(
            name="launch-bound",
            title="tiny steps",
            evidence=evidence,
            change=f"a larger batch would cost little more time {ANOTHER}",
            lost=fixed,
        )
    return None


def _oversubscribed(run: Recording) -> Finding | None:
    if run.fact("device", "cpu").startswith("cuda"):
        return None
    by_host: dict[str, list[Rank]] = defaultdict(list)
    for rank in run.ranks:
        by_host[rank.facts.get("host", "")].append(rank)
    for ranks in by_host.values():
        threads, cores = sum(int(r.facts.get("threads", 1)) for r in ranks), int(ranks[0].facts.get("cores", 0))
        if cores and threads > cores:
            evidence = f"{len(ranks)} ranks with {threads} threads share {cores} cores"
            change = f"{cores} ranks would be as fast, and wait less for each other"
            return Finding(
                name="oversubscribed",
                title="CPUs oversubscribed",
                evidence=evidence,
                change=change,
                lost=run.share("exchange") / 2,
            )
    return None


def _others(run: Recording) -> Finding | None:
    """The machine is busy, and not with this run."""
    for rank in run.ranks:
        cores = [statistics.fmean(s.values["cores"]) for s in rank.samples[1:] if s.values.get("cores")]
        if not cores:
            continue
        here = [r for r in run.ranks if r.facts.get("host") == rank.facts.get("host")]
        count = max(len(s.values["cores"]) for s in rank.samples if s.values.get("cores"))
        ours = sum(use for r in here if (use := r.mean("cpu")) is not None) / count
        busy = statistics.fmean(cores)
        if busy > 85 and busy - ours > 25:
            evidence = f"the CPUs were {busy:.0f} % busy, and this run used {ours:.0f} %"
            return Finding(
                name="neighbours",
                title="a busy machine",
                evidence=evidence,
                change="something else runs there: its time is this run's loss",
                lost=(busy - ours) / 200,
            )
    return None


def _server(run: Recording) -> Finding | None:
    """A worker's optimizer is its servers': what it waits for in exchange and update is them."""
    share = run.share("exchange") + run.share("update")
    servers = int(run.words.get("server", 0))
    if not servers or share < 2 * WORTH:
        return None
    change = f"server={2 * servers} shares their work; compress=bf16 halves what goes up {ANOTHER}"
    if "staleness" not in run.words:
        change += f"; staleness=2 lets workers go on without each other {ANOTHER}"
    who = "their server" if servers == 1 else f"their {servers} servers"
    evidence = f"workers waited {percent(share)} of the time for {who}, and through them for each other"
    return Finding(name="server-bound", title="server-bound", evidence=evidence, change=change, lost=share / 2)


def _optimizer(run: Recording) -> Finding | None:
    share = run.share("update")
    if share < 0.2 or "server" in run.words:
        return None
    change = f"shard= gives each device a part of it; a larger batch takes fewer of them {ANOTHER}"
    evidence = f"{percent(share)} of the time went to the optimizer"
    return Finding(name="optimizer-heavy", title="optimizer-heavy", evidence=evidence, change=change, lost=share / 2)


def _caller(run: Recording) -> Finding | None:
    share = statistics.fmean([phase_shares(rank)["other"] for rank in run.ranks[:1]] or [0.0])
    if share < 2 * WORTH:
        return None
    evidence = (
        f"{percent(share)} of the time passed between the phases of a step, in callbacks or the caller's own loop"
    )
    return Finding(
        name="caller-bound",
        title="caller-bound",
        evidence=evidence,
        change="do less after each step, or not after every one",
        lost=share,
    )


def _start(run: Recording) -> Finding | None:
    known = [step for step in run.steps if "seconds" in step]
    if len(known) < 3 or known[-1]["seconds"] < 1.0:
        return None
    share = (known[0]["seconds"] - run.step_seconds) / known[-1]["seconds"]
    if share < 0.2:
        return None
    evidence = f"the first step took {known[0]['seconds']:.1f} s of {known[-1]['seconds']:.1f} s in all"
    return Finding(
        name="slow-start", title="slow start", evidence=evidence, change="longer runs do not feel it", lost=share / 2
    )


def _compute_bound(run: Recording) -> Finding | None:
    share = run.share("forward_backward") + run.share("update")
    if share < 0.5:
        return None
    use = [u for rank in run.ranks if (u := rank.mean("gpu_use")) is not None]
    more = f", the GPU at work {statistics.fmean(use):.0f} % of it" if use else ""
    if run.of_peak is not None:
        more += f", at {percent(run.of_peak)} of their peak"
    kind = "GPUs" if run.fact("device", "").startswith("cuda") else "CPUs"
    change = f"faster or more devices would help, or lower precision {ANOTHER}" if share > 0.8 else ""
    evidence = f"{kind} computed {percent(share)} of the time{more}"
    return Finding(name="compute-bound", title="compute-bound", evidence=evidence, change=change, good=True)


RULES: tuple[Rule, ...] = (
    _input_bound,
    _bubble,
    _exposed,
    _straggler,
    _evaluation,
    _checkpoint,
    _memory,
    _launch_bound,
    _oversubscribed,
    _others,
    _server,
    _optimizer,
    _caller,
    _start,
)


def _between_actions(rank: Rank) -> float:
    """Seconds of forward_backward in which a rank of a pipeline did neither."""
    actions = sum(rank.steady.get(name, 0.0) for name in ("forward", "backward", "weight"))
    return max(0.0, rank.steady.get("forward_backward", 0.0) - actions)


def _work(rank: Rank) -> float:
    """Share of the time in which a rank does its own part, and waits for nobody but its data."""
    return sum(rank.steady.get(name, 0.0) for name in ("data", "forward_backward", "update")) / rank.wall


def _idle_cores(run: Recording) -> float | None:
    seen = [
        100 * len(s.values["cores"]) - sum(s.values["cores"])
        for r in run.ranks
        for s in r.samples
        if s.values.get("cores")
    ]
    return statistics.fmean(seen) / 100 if seen else None


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"
