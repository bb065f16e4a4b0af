"""Does every plan train like one device?

    python benchmarks/parity.py
    python benchmarks/parity.py --axes shard    # or tensor, schedule, exchange, more, all
    python benchmarks/parity.py --models gpt2,resnet10 --plans "data=2;data=4"
    python benchmarks/parity.py --rounding      # what the order of summing alone does to one device
    python benchmarks/parity.py --zoo wide      # models of many more libraries, by `make wide`; --part 1/4

Trains every model of the zoo for 20 steps under every plan of ``TRIALS`` and compares with ``train_alone``, a
plain loop in this process: the loss of each step, the weights after the last (as one vector: a tensor whose
true gradient is zero differs by whatever rounding makes of it), and BatchNorm's running statistics likewise.

A plan that meshfit refuses, with its reason, before it trains is no failure, but it is no success either. Exits
with 1 if any run raised or is further off than the limits, or if fewer than 95 % of all passed.
"""

import argparse
import functools
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import meshfit
from meshfit.axes.data.batchnorm import batch_norms
from meshfit.axes.expert.balance import balanced
from meshfit.errors import MeshfitError, NonFiniteError, RankError
from meshfit.plan import Plan

sys.path.insert(0, str(Path(__file__).parents[1]))  # ranks look the models up under the name benchmarks.zoo

from benchmarks import tensor_table, zoo_experts
from benchmarks.zoo import CASES, ZOO, Case, train_alone
from benchmarks.zoo_branches import BRANCHES
from benchmarks.zoo_wide import WIDE, WideCase

EVERY = {case.name: case for case in (*CASES, *zoo_experts.CASES, *BRANCHES.values(), *WIDE)}
"""Beside the zoo's, models that only trials which name them train."""

MIXTURES = ("mixtral", *(case.name for case in zoo_experts.CASES))

SCHEDULES = ("sequential", "gpipe", "1f1b", "interleaved", "zbv", "dualpipev")
STEPS, LEARNING_RATE, SGD_LEARNING_RATE = 20, 1e-3, 2e-2
LOSS_LIMIT, WEIGHT_LIMIT = 1e-5, 1e-4
GOAL = 0.95
"""Share of all runs that must pass; refusals are in the whole."""

COLUMNS, WIDTH = 5, 128
"""Plans beside each other in a table, and what that takes."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A plan, and data that does not make it easy."""

    plan: str
    axis: str = "data"

    samples: int = 30
    batch_size: int = 8
    """The last batch of an epoch has what is left: samples % batch_size."""

    steps: int = STEPS

    models: tuple[str, ...] = tuple(ZOO)
    """Those that it is for."""

    @property
    def microbatches(self) -> int:
        """BatchNorm is over each of them by itself, on one device too."""
        found = re.search(r"microbatches=(\d+)", self.plan)
        return int(found[1]) if found else 1

    @property
    def axes(self) -> set[str]:
        """Words of the plan that spread a model."""
        return {key for key, _ in re.findall(r"(\w+)=(\d+)", self.plan) if key in (*DEGREES, "server")}

    @property
    def averaged(self) -> bool:
        """Whether weights are averaged after each step."""
        return "exchange=local" in self.plan

    @property
    def devices(self) -> int:
        return math.prod(int(degree) for key, degree in re.findall(r"(\w+)=(\d+)", self.plan) if key in DEGREES)


DEGREES = ("data", "shard", "tensor", "branch", "context", "expert", "pipeline")
"""Words of a plan whose numbers multiply to its devices."""

WITH_SEQUENCES = ("gpt2", "llama", "mixtral", "bert", "t5", "vit", "tied-gpt", "token-sum")

TRIALS = (
    Trial(plan="data=2", samples=32),  # batches of 8: four for each rank
    Trial(plan="data=3", samples=18),  # batches of 8, 8 and 2: uneven shares, and at last a rank with none
    Trial(plan="data=4", samples=30),  # batches of 8, 8, 8 and 6: two ranks with one, two with two
    Trial(axis="shard", plan="shard=2 zero=1", samples=32),
    Trial(axis="shard", plan="shard=2 zero=2", samples=32),
    Trial(axis="shard", plan="shard=2", samples=32),
    Trial(axis="shard", plan="shard=3", samples=18),  # batches of 8, 8 and 2
    Trial(axis="shard", plan="shard=4", samples=30),  # batches of 8, 8, 8 and 6
    Trial(axis="shard", plan="data=2 shard=2", samples=30),
    Trial(axis="shard", plan="shard=2 recompute=full", samples=32),
    Trial(axis="shard", plan="shard=2 recompute=selective", samples=32),
    Trial(axis="shard", plan="shard=2 offload=optimizer", samples=32),
    Trial(axis="shard", plan="shard=2 offload=parameters", samples=32),
    Trial(axis="tensor", plan="tensor=2", samples=18),
    Trial(axis="tensor", plan="tensor=4", samples=18),
    Trial(axis="tensor", plan="data=2 tensor=2", samples=30),
    Trial(axis="tensor", plan="shard=2 tensor=2", samples=30),
    Trial(axis="tensor", plan="tensor=2 sequence=split", samples=18),
    *(Trial(axis="schedule", plan=f"pipeline=2 schedule={word} microbatches=4") for word in SCHEDULES),
    *(Trial(axis="schedule", plan=f"pipeline=4 schedule={word} microbatches=8") for word in SCHEDULES),
    Trial(axis="schedule", plan="data=2 pipeline=2 microbatches=2"),
    Trial(axis="schedule", plan="shard=2 pipeline=2 microbatches=2"),
    Trial(axis="schedule", plan="tensor=2 pipeline=2 microbatches=2"),
    Trial(axis="schedule", plan="data=2 tensor=2 pipeline=2 microbatches=2"),
    Trial(axis="schedule", plan="tensor=2 sequence=split pipeline=2 microbatches=2"),
    Trial(axis="schedule", plan="context=2 pipeline=2 microbatches=2", models=WITH_SEQUENCES),
    Trial(
        axis="schedule",
        plan="context=2 tensor=2 sequence=split pipeline=2 microbatches=2",
        models=WITH_SEQUENCES,
    ),
    Trial(axis="more", plan="context=2", samples=30, models=WITH_SEQUENCES),
    Trial(axis="more", plan="context=3", samples=18, models=WITH_SEQUENCES),  # sequences of 16 and 17: uneven parts
    Trial(axis="more", plan="context=4", samples=30, models=WITH_SEQUENCES),
    Trial(axis="more", plan="data=2 context=2", samples=18, models=WITH_SEQUENCES),  # batches of 8, 8 and 2
    Trial(axis="more", plan="shard=2 context=2", samples=30, models=WITH_SEQUENCES),
    Trial(axis="more", plan="context=2 tensor=2", samples=30, models=WITH_SEQUENCES),
    Trial(axis="more", plan="context=2 tensor=2 sequence=split", samples=18, models=WITH_SEQUENCES),
    Trial(axis="exchange", plan="server=1 data=3", samples=18),  # batches of 8, 8 and 2
    Trial(axis="exchange", plan="server=2 data=2", samples=32),
    Trial(axis="exchange", plan="server=1 data=2", batch_size=7),  # batches of 7 and at last 2: uneven shares
    Trial(axis="exchange", plan="server=1 data=2 tensor=2"),
    Trial(axis="exchange", plan="server=1 data=2 pipeline=2 microbatches=2"),
    Trial(axis="exchange", plan="server=2 data=2 shard=2"),
    Trial(axis="exchange", plan="server=1 data=2 context=2", models=WITH_SEQUENCES),
    Trial(axis="exchange", plan="server=1 data=2 expert=2", samples=17, models=MIXTURES),
    Trial(axis="exchange", plan="server=1 data=2 branch=2", models=tuple(BRANCHES)),
    Trial(axis="exchange", plan="data=2 exchange=local", samples=32),  # by SGD, and beside all-reduce: see ``averaged``
    Trial(axis="more", plan="data=2", samples=18, models=("mixtral-balanced",)),
    Trial(axis="more", plan="expert=2", samples=32, models=MIXTURES),
    Trial(axis="more", plan="expert=4", samples=30, models=MIXTURES),
    Trial(axis="more", plan="data=2 expert=2", samples=17, models=MIXTURES),  # at last three ranks without a sample
    Trial(axis="more", plan="shard=2 expert=2", samples=30, models=MIXTURES),
    Trial(axis="more", plan="expert=2 tensor=2", samples=17, models=MIXTURES),
    Trial(axis="more", plan="data=2 expert=2 tensor=2", samples=30, models=MIXTURES),
    Trial(axis="more", plan="shard=2 expert=2 tensor=2", samples=30, models=MIXTURES),
    Trial(axis="more", plan="data=2 pipeline=2 microbatches=2", samples=17, models=("mixtral-balanced",)),
    Trial(axis="more", plan="expert=2 pipeline=2 microbatches=2", samples=17, models=MIXTURES),
    Trial(axis="more", plan="expert=2 pipeline=2 schedule=zbv microbatches=4", samples=30, models=MIXTURES),
    Trial(axis="more", plan="data=2 expert=2 pipeline=2 microbatches=2", samples=17, models=MIXTURES),
    Trial(axis="more", plan="shard=2 expert=2 pipeline=2 microbatches=2", samples=30, models=MIXTURES),
    Trial(axis="more", plan="expert=2 tensor=2 pipeline=2 microbatches=2", samples=17, models=MIXTURES),
    Trial(axis="more", plan="expert=2 context=2", samples=17, models=("mixtral", "mixtral-balanced", "expert-list")),
    Trial(axis="more", plan="branch=2", models=tuple(BRANCHES)),  # the last batch of an epoch has 6 samples
    Trial(axis="more", plan="branch=2 data=2", models=tuple(BRANCHES)),
    Trial(axis="more", plan="branch=2 microbatches=2", models=tuple(BRANCHES)),
)
"""Of 30 samples in batches of 8, the last of an epoch has 6: uneven microbatches, and fewer of them."""

WIDE_TRIALS = tuple(
    Trial(axis="wide", plan=plan, samples=20, steps=6, models=tuple(case.name for case in WIDE))
    for plan in (
        "data=2",
        "shard=2",
        "tensor=2",
        "pipeline=2 microbatches=2",
        "context=2",
        "server=1 data=2",
        "data=2 tensor=2",
        "shard=2 pipeline=2 microbatches=2",
    )
)
"""For the wider zoo: batches of 8, 8 and 4."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How far a run is from one device."""

    model: str
    plan: str
    loss: float = math.inf
    weights: float = math.inf
    buffers: float = 0.0
    seconds: float = 0.0
    refused: bool = False
    """Whether meshfit said beforehand that it cannot."""
    applies: bool = True
    """Whether the case said beforehand that the plan is for it."""
    remarks: tuple[str, ...] = ()
    """Where it is too far off, or why it did not run."""

    @property
    def ok(self) -> bool:
        return self.loss <= LOSS_LIMIT and max(self.weights, self.buffers) <= WEIGHT_LIMIT

    def __str__(self) -> str:
        if not math.isfinite(self.loss + self.weights):
            return "refused" if self.refused else "FAIL"
        return f"{self.loss:.0e} / {self.weights:.0e} {'ok' if self.ok else 'FAIL'}"


Trained = tuple[list[float], nn.Module]


def fit(case: Case, trial: Trial) -> Trained:
    sgd = trial.averaged or trial.plan == SUMMED
    result = meshfit.fit(
        case.build,
        case.data(trial.samples),
        loss=case.loss,
        optimizer=lambda parameters: (
            torch.optim.SGD(parameters, lr=SGD_LEARNING_RATE)
            if sgd
            else torch.optim.AdamW(parameters, lr=LEARNING_RATE)
        ),
        batch_size=trial.batch_size,
        steps=trial.steps,
        plan=trial.plan,
        devices=f"cpu:{trial.devices}",
        shuffle=False,
        seed=0,
        progress=False,
    )
    return [step.loss for step in result.history], result.model


def sum_in_reverse(case: Case, trial: Trial) -> Trained:
    """One device again, with the samples of each batch in reverse."""
    losses, state = train_alone(
        case, samples=trial.samples, batch_size=trial.batch_size, steps=trial.steps, lr=LEARNING_RATE, flip=True
    )
    model = case.build()
    model.load_state_dict(state)
    return losses, model


@functools.cache
def reference(
    name: str, samples: int, batch_size: int, steps: int = STEPS, parts: int = 1
) -> tuple[list[float], dict[str, Tensor]]:
    return train_alone(EVERY[name], samples=samples, batch_size=batch_size, steps=steps, lr=LEARNING_RATE, parts=parts)


SUMMED = "data=2 batchnorm=local"
"""What weights averaged after every step of SGD come to: gradients summed. BatchNorm is over a rank's own samples."""


def averaged(case: Case, trial: Trial) -> tuple[list[float], dict[str, Tensor]]:
    """All-reduce in place of one device. Losses are then a rank's own, and BatchNorm's statistics are averaged too:
    what is compared is the weights."""
    losses, model = fit(case, replace(trial, plan=SUMMED))
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


def judge(case: Case, trial: Trial, train: Callable[[Case, Trial], Trained]) -> Outcome:
    """Train, and compare with one device. What ``train`` raises is an outcome, too."""
    try:
        if trial.averaged:
            start = time.perf_counter()
            _, state = averaged(case, trial)
            got = dict(train(case, trial)[1].named_parameters())
            off, seconds = distance(got, state, list(state)), time.perf_counter() - start
            return Outcome(model=case.name, plan=trial.plan, loss=0.0, weights=off, seconds=seconds)
        alone = case.build()
        parts = trial.microbatches if batch_norms(alone) or balanced(alone) else 1  # of each microbatch by itself
        losses, state = reference(case.name, trial.samples, trial.batch_size, trial.steps, parts)
        start = time.perf_counter()
        got_losses, model = train(case, trial)
    except Exception as error:
        remarks = tuple(f"{type(error).__name__}: {error}".strip().splitlines())
        refused = isinstance(error, MeshfitError) and not isinstance(error, RankError | NonFiniteError)
        return Outcome(model=case.name, plan=trial.plan, refused=refused, remarks=remarks)
    seconds = time.perf_counter() - start
    got = model.state_dict()
    if len(got_losses) != len(losses) or got.keys() != state.keys():
        odd = sorted(got.keys() ^ state.keys())
        remark = f"{len(got_losses)} losses for {len(losses)} steps; names that only one side has: {odd}"
        return Outcome(model=case.name, plan=trial.plan, seconds=seconds, remarks=(remark,))
    parameters = [name for name, _ in model.named_parameters()]
    buffers = [name for name, _ in model.named_buffers() if name in state]
    off = [abs(a - b) / abs(b) if math.isfinite(a) else math.inf for a, b in zip(got_losses, losses, strict=True)]
    outcome = Outcome(
        model=case.name,
        plan=trial.plan,
        loss=max(off),
        weights=distance(got, state, parameters),
        buffers=distance(got, state, buffers),
        seconds=seconds,
    )
    if outcome.ok:
        return outcome
    remarks = []
    if outcome.loss > LOSS_LIMIT:
        first = next(i for i, o in enumerate(off) if o > LOSS_LIMIT)
        pair = f"{got_losses[first]:.9g}, alone {losses[first]:.9g}"
        remarks.append(f"loss first off at step {first + 1}: {pair}; worst {outcome.loss:.1e}")
    for kind, names in (("weights", parameters), ("buffers", buffers)):
        if getattr(outcome, kind) > WEIGHT_LIMIT:
            far = sorted(names, key=lambda name: -distance(got, state, [name], scale=names))[:3]
            each = ", ".join(f"{name} {distance(got, state, [name]):.1e}" for name in far)
            remarks.append(f"{kind} {getattr(outcome, kind):.1e}, most of it in: {each}")
    return Outcome(**{**asdict(outcome), "remarks": tuple(remarks)})


def distance(
    got: Mapping[str, Tensor], want: Mapping[str, Tensor], names: list[str], scale: list[str] | None = None
) -> float:
    """``|got - want| / |want|`` over ``names`` as one vector; infinite where counters differ."""
    counters = [name for name in names if not (want[name].is_floating_point() or want[name].is_complex())]
    if any(not torch.equal(got[name], want[name]) for name in counters):
        return math.inf
    exact = lambda tensor: torch.view_as_real(tensor.cdouble()) if tensor.is_complex() else tensor.double()
    off = sum((exact(got[n]) - exact(want[n])).square().sum().item() for n in names if n not in counters)
    length = sum(exact(want[n]).square().sum().item() for n in scale or names if n not in counters)
    if math.isnan(off):
        return math.inf
    return math.sqrt(off / length) if length else (math.inf if off else 0.0)


def tables(outcomes: list[Outcome], cases: list[Case], trials: list[Trial]) -> Iterator[Table]:
    at = {(outcome.model, outcome.plan): outcome for outcome in outcomes}
    for first in range(0, len(trials), COLUMNS):
        some = trials[first : first + COLUMNS]
        rows = Table("model", title="loss / weights")
        for t in some:
            rows.add_column("\n".join((*t.plan.split(), f"({t.samples} by {t.batch_size})")), no_wrap=True)
        for case in cases:
            row = [at.get((case.name, trial.plan)) for trial in some]
            if any(row):
                rows.add_row(case.name, *("" if o is None else str(o) if o.ok else f"[red]{o}[/red]" for o in row))
        yield rows


def summary(outcomes: list[Outcome]) -> str:
    ran = [outcome for outcome in outcomes if not outcome.refused]

    def worst(kind: str) -> str:
        furthest = max(ran, key=lambda outcome: getattr(outcome, kind))
        return f"{kind} {getattr(furthest, kind):.1e} ({furthest.model}, {furthest.plan})"

    passed, limits = sum(outcome.ok for outcome in outcomes), f"{LOSS_LIMIT:.0e} / {WEIGHT_LIMIT:.0e}"
    counts = f"{len(outcomes) - len(ran)} refused, {len(ran) - passed} failed"
    text = f"{passed} of {len(outcomes)} runs train like one device (limits {limits}), {counts}"
    if apply := [outcome for outcome in outcomes if not outcome.applies]:
        others = [outcome for outcome in outcomes if outcome.applies]
        right = sum(outcome.ok for outcome in others)
        text += (
            f"; where the plan applies {right} of {len(others)}, elsewhere {sum(o.ok for o in apply)} of {len(apply)}"
        )
    return f"{text}; worst: {worst('loss')}, {worst('weights')}, {worst('buffers')}" if ran else text


def kept(outcomes: list[Outcome]) -> bool:
    """Whether all that ran passed, and enough of those that apply ran."""
    apply = [outcome for outcome in outcomes if outcome.applies]
    passed = sum(outcome.ok for outcome in apply)
    return all(outcome.ok or outcome.refused for outcome in outcomes) and passed >= GOAL * len(apply)


def record(outcome: Outcome) -> dict:
    """For JSON, which has no infinity: null is a run that did not end, or ended without numbers."""
    finite = {k: None if v == math.inf else v for k, v in asdict(outcome).items()}
    return finite | {"ok": outcome.ok}


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--models", help="names, with commas between")
    parser.add_argument("--zoo", default="first", choices=["first", "wide"])
    parser.add_argument("--part", default="1/1", help="i/n: every n-th model from the i-th on")
    parser.add_argument("--axes", default="data", choices=["all", *sorted({trial.axis for trial in TRIALS})])
    parser.add_argument("--plans", help='plans, with semicolons between: "data=2;data=3"')
    parser.add_argument("--rounding", action="store_true", help="compare one device with itself, summing in reverse")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    options = parser.parse_args()

    wide = options.zoo == "wide"
    names = [case.name for case in WIDE] if wide else list(EVERY)
    asked = options.models.split(",") if options.models else names
    if unknown := set(asked) - set(EVERY):
        parser.error(f"no model {', '.join(sorted(unknown))}; known: {', '.join(EVERY)}")
    cases = [case for case in EVERY.values() if case.name in asked]
    part, parts = map(int, options.part.split("/"))
    cases = cases[part - 1 :: parts]
    trials = list(WIDE_TRIALS) if wide else [trial for trial in TRIALS if options.axes in ("all", trial.axis)]
    if options.plans:
        known = {trial.plan: trial for trial in reversed(trials)}
        plans = [plan.strip() for plan in options.plans.split(";")]
        models = tuple(asked if options.models or wide else ZOO)
        trials = [replace(known.get(plan, Trial(plan=plan)), models=models) for plan in plans]

    console, progress = Console(), Console(stderr=True)
    console.width = max(console.width, WIDTH)
    outcomes = []
    for case in cases:
        for trial in trials:
            if case.name not in trial.models:
                continue
            applies = not isinstance(case, WideCase) or trial.axes <= case.axes
            outcomes.append(replace(judge(case, trial, sum_in_reverse if options.rounding else fit), applies=applies))
            progress.print(
                f"{case.name:16} {trial.plan:27} {outcomes[-1]} {outcomes[-1].seconds:.1f} s", highlight=False
            )

    if options.json:
        print(json.dumps([record(outcome) for outcome in outcomes], indent=1))
    else:
        for each in tables(outcomes, cases, trials):
            console.print(each)
        for outcome in (outcome for outcome in outcomes if not outcome.ok):
            told = "\n  ".join((f"{outcome.model}, {outcome.plan}", *outcome.remarks[:5]))
            console.print(told, markup=False, highlight=False, soft_wrap=True)
        console.print(summary(outcomes), highlight=False, soft_wrap=True)
    if options.axes == "tensor" and not (options.json or options.plans):
        zoo = [case for case in cases if case.name in ZOO]
        for plan in map(Plan.parse, ("tensor=2", "tensor=2 sequence=split")):
            console.print(tensor_table.table(tensor_table.rows(zoo, plan), plan))
    return 0 if kept(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
