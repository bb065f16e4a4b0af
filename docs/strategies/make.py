"""Makes the pages and pictures of this folder out of real trainings, so that they stay true.

    python docs/strategies/make.py                 all of them: some minutes on two cores
    python docs/strategies/make.py tensor branch   these alone; the index is left as it is

Each strategy trains a small model for 20 steps on CPU ranks of this machine. Pictures are drawn from the events that
the run wrote, numbers are taken from them; the words are in explained.py.
"""

import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # the ranks look things up there too

import placement
import torch
from explained import STRATEGIES, Strategy
from models import Shown

import meshfit
from meshfit.observe.compare import EQUAL, ComparedRun, compared
from meshfit.observe.ideal import ideal
from meshfit.observe.kinds import kind_of
from meshfit.observe.reading import Rank, RecordedRun, RecordedSpan, read
from meshfit.observe.timeline import StepRange, drawn, picture, step_bounds
from meshfit.units import size

HERE = Path(__file__).parent
STEPS, BATCH, WARM = 20, 12, 4
LOOP = 9.0
"""Seconds in which a picture is gone through."""


@dataclass(frozen=True)
class Made:
    strategy: Strategy
    run: RecordedRun
    row: ComparedRun
    """Held against the same training on one device."""
    beside: RecordedRun | None = None
    """Under another plan."""


def train(shown: Shown, plan: str, folder: Path, *, steps: int = STEPS) -> RecordedRun:
    """The run of ``plan``, as it was left in its folder."""
    torch.manual_seed(0)
    result = meshfit.fit(
        shown.build(),
        shown.data(),
        loss=shown.loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        batch_size=BATCH,
        steps=steps,
        plan=plan,
        devices="cpu",
        out=folder,
        progress=False,
    )
    assert result.folder is not None
    return read(result.folder)


def make(strategy: Strategy, runs: Path, alone: dict[str, RecordedRun], *, steps: int = STEPS) -> Made:
    """Train by it, and by one device if nobody has; ``alone`` keeps those."""
    shown = strategy.model
    if shown.name not in alone:
        alone[shown.name] = train(shown, "data=1", runs / f"alone{len(alone)}", steps=steps)
    run = train(shown, strategy.plan, runs / strategy.file, steps=steps)
    beside = train(shown, strategy.beside, runs / f"{strategy.file}-beside", steps=steps) if strategy.beside else None
    return Made(strategy, run, compared([alone[shown.name], run], ["one device", strategy.plan])[1], beside)


def at_work(rank: Rank) -> float:
    """Share of its time, after the first steps, in which a rank waited for nobody."""
    spans = [span for span in drawn(rank) if span.step > WARM]
    worked = sum(span.seconds for span in spans if not kind_of(span.name).waits)
    return worked / max(spans[-1].end - spans[0].at, 1e-9) if spans else 0.0


def quickest(run: RecordedRun, steps: int) -> StepRange | None:
    """The ``steps`` consecutive steps that took least: those that other work on the machine disturbed least."""
    bounds = step_bounds(run)
    firsts = [s for s in bounds if s > WARM and all(s + i in bounds for i in range(steps))]
    if not firsts:
        return None
    first = min(firsts, key=lambda s: bounds[s + steps - 1][1] - bounds[s][0])
    last = first + steps - 1
    return StepRange("quickest", bounds[first][0], bounds[last][1], first, last)


def write(made: Made, folder: Path) -> None:
    strategy, run = made.strategy, made.run
    window = quickest(run, strategy.steps)
    where = placement.placement(run, strategy.fill, strategy.samples, strategy.moved, strategy.gaps)
    (folder / f"{strategy.file}-placement.svg").write_text(where)
    (folder / f"{strategy.file}.svg").write_text(picture(run, window, moving=LOOP))
    if made.beside is not None:
        (folder / f"{strategy.file}-beside.svg").write_text(picture(made.beside, quickest(made.beside, 4)))
    elif window is not None and (best := without_waiting(run, window)) is not None:
        title = f"{strategy.plan}   the same work, nobody waiting for transfers or late ranks"
        (folder / f"{strategy.file}-beside.svg").write_text(picture(best, window, title=title))
    (folder / f"{strategy.file}.md").write_text(page(made))


def without_waiting(run: RecordedRun, window: StepRange) -> RecordedRun | None:
    """A pipeline's schedule with the measured time of each action; None for other plans."""
    found = ideal(run, list(range(window.first, window.last + 1)))
    if found is None:
        return None
    ranks = []
    for rank in run.ranks:
        spans = found.lanes.get(rank.rank, [])
        passes = []
        for step in dict.fromkeys(span.step for span in spans):
            of_step = [span for span in spans if span.step == step]
            first, last = min(s.at for s in of_step), max(s.end for s in of_step)
            passes.append(RecordedSpan("forward_backward", step, first, last - first))
        ranks.append(replace(rank, spans=[*passes, *spans]))
    return replace(run, ranks=ranks)


def page(made: Made) -> str:
    strategy = made.strategy
    return f"""# {strategy.name}: `{strategy.plan}`

{strategy.does}

![what lies where]({strategy.file}-placement.svg)

![{strategy.name}: {strategy.plan}]({strategy.file}.svg)

{strategy.look}
{below(made)}
{table(made)}

**When to choose it.** {strategy.choose}

```python
meshfit.fit(model, data, ..., plan="{strategy.plan}")
```

How it works, and what it does not take: [{strategy.more}](../{strategy.more}). [All strategies](README.md).
"""


def below(made: Made) -> str:
    """What is drawn below the run."""
    strategy = made.strategy
    if made.beside is not None:
        said = (
            f"Apart, under `{strategy.beside}`, workers do not wait for each other; their weights are some steps old:"
        )
    elif "pipeline" in made.run.words:
        said = "The same work as the schedule has it, if nobody waited for transfers or late ranks:"
    else:
        return ""
    return f"\n{said}\n\n![beside it]({strategy.file}-beside.svg)\n"


def table(made: Made) -> str:
    run, row = made.run, made.row
    held = lambda rank, kind: rank.facts.get("memory", {}).get(kind, 0)
    fullest = lambda kind: max(held(rank, kind) for rank in run.ranks)
    moved = ", ".join(f"{name.replace('_', '-')} {size(count)}" for name, count in (run.traffic or {}).items() if count)
    shares = [at_work(rank) for rank in [*run.ranks, *run.servers]]
    names = [f"rank {r.rank}" for r in run.ranks] + [f"server {s.rank}" for s in run.servers]
    worked = ", ".join(f"{name} {share:.0%}" for name, share in zip(names, shares, strict=True))
    cells = {
        "trained": f"{made.strategy.model.name}, {STEPS} steps of {BATCH} samples on {len(run.ranks)} CPU ranks",
        "weights on a device": size(fullest("weights")),
        "optimizer state on a device": size(fullest("optimizer")) if fullest("optimizer") else "none",
        "handed over in a step, by the rank with most": moved or "nothing",
        "time at work": worked,
        "losses against one device": "equal" if row.equal else f"{row.difference:.0e} relative",
    }
    lines = [f"| {name} | {value} |" for name, value in cells.items()]
    return "\n".join(["| measured in this run | |", "|---|---|", *lines])


def index(every: list[Made]) -> str:
    lines = [
        f"| [{made.strategy.name}]({made.strategy.file}.md) | `{made.strategy.plan}` "
        f"| {size(max(r.facts.get('memory', {}).get('weights', 0) for r in made.run.ranks))} "
        f"| {size(made.row.traffic)} | {'equal' if made.row.equal else f'{made.row.difference:.0e} relative'} "
        f"| {made.strategy.choose} |"
        for made in every
    ]
    rows = "\n".join(lines)
    return f"""# The strategies, by pictures of real runs

One page each: what it does, what lies on which device, the quickest steps of a real run in motion, what it cost there,
when to choose it. A model is drawn as four blocks; what a device holds of each is filled. In the timelines one lane is
one device (or server). Work fills a lane's height, waiting a third of it; the line below a lane is traffic under way;
dashed lines hand something from stage to stage.

| strategy | plan | weights on a device | handed over in a step | losses against one device | choose it when |
|---|---|---|---|---|---|
{rows}

"Equal" is within {EQUAL:.0e} in every one of {STEPS} steps. Models are small and ranks share the cores of one machine,
so times show who waits for whom, not how fast a strategy is: for that there is [benchmarks.md](../benchmarks.md), and
`meshfit compare` for a model of your own. All of it is made by `python docs/strategies/make.py`.
"""


def overview(every: list[Made]) -> str:
    """Four of them, for the first page."""
    made = {each.strategy.file: each for each in every}
    panels = []
    for file in ("all-reduce", "sharded", "tensor", "pipeline"):
        one = made[file].strategy
        drawn = placement.cards(made[file].run, one.fill, one.samples, one.moved, one.gaps)
        panels.append((f"{one.name}: {one.plan}", drawn))
    return placement.overview(panels)


def main(*wanted: str) -> None:
    if unknown := set(wanted) - {strategy.file for strategy in STRATEGIES}:
        sys.exit(f"there is no {', '.join(unknown)}: {', '.join(strategy.file for strategy in STRATEGIES)}")
    every, alone = [], dict[str, RecordedRun]()
    with tempfile.TemporaryDirectory() as runs:
        for strategy in STRATEGIES:
            if not wanted or strategy.file in wanted:
                every.append(make(strategy, Path(runs), alone))
                write(every[-1], HERE)
                drawn_bytes = (HERE / f"{strategy.file}.svg").stat().st_size
                print(f"  {strategy.file:14} {strategy.plan:48} {drawn_bytes:>7,} bytes", flush=True)
        if not wanted:
            (HERE / "README.md").write_text(index(every))
            (HERE.parent / "pictures" / "strategies.svg").write_text(overview(every))


if __name__ == "__main__":
    main(*sys.argv[1:])
