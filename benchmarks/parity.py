"""Does every plan train like one device?

    python benchmarks/parity.py
    python benchmarks/parity.py --models gpt2,resnet10 --plans "data=2;data=4"
    python benchmarks/parity.py --rounding      # what the order of summing alone does to one device

Trains every model of the zoo for 20 steps under every plan of ``TRIALS`` and compares with ``train_alone``, a
plain loop in this process: the loss of each step, the weights after the last (as one vector: a tensor whose
true gradient is zero differs by whatever rounding makes of it), and BatchNorm's running statistics likewise.
Exits with 1 if any run is further off than the limits.
"""

import argparse
import functools
import json
import math
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))  # ranks look the models up under the name benchmarks.zoo

from benchmarks.zoo import CASES, ZOO, Case, train_alone

STEPS, LEARNING_RATE = 20, 1e-3
LOSS_LIMIT, WEIGHT_LIMIT = 1e-5, 1e-4


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A plan, and data that does not make it easy."""

    plan: str
    axis: str = "data"

    samples: int = 30
    batch_size: int = 8
    """The last batch of an epoch has what is left: samples % batch_size."""

    @property
    def devices(self) -> int:
        return math.prod(int(degree) for key, degree in re.findall(r"(\w+)=(\d+)", self.plan) if key in DEGREES)


DEGREES = ("data", "shard", "tensor", "branch", "context", "expert", "pipeline")
"""Words of a plan whose numbers multiply to its devices."""

TRIALS = (
    Trial(plan="data=2", samples=32),  # batches of 8: four for each rank
    Trial(plan="data=3", samples=18),  # batches of 8, 8 and 2: uneven shares, and at last a rank with none
    Trial(plan="data=4", samples=30),  # batches of 8, 8, 8 and 6: two ranks with one, two with two
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How far a run is from one device."""

    model: str
    plan: str
    loss: float = math.inf
    weights: float = math.inf
    buffers: float = 0.0
    seconds: float = 0.0
    remarks: tuple[str, ...] = ()
    """Where it is too far off, or why it did not run."""

    @property
    def ok(self) -> bool:
        return self.loss <= LOSS_LIMIT and max(self.weights, self.buffers) <= WEIGHT_LIMIT

    def __str__(self) -> str:
        if not math.isfinite(self.loss + self.weights):
            return "FAIL"
        return f"{self.loss:.0e} / {self.weights:.0e} {'ok' if self.ok else 'FAIL'}"


Trained = tuple[list[float], nn.Module]


def fit(case: Case, trial: Trial) -> Trained:
    import meshfit

    result = meshfit.fit(
        case.build,
        case.data(trial.samples),
        loss=case.loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=LEARNING_RATE),
        batch_size=trial.batch_size,
        steps=STEPS,
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
        case, samples=trial.samples, batch_size=trial.batch_size, steps=STEPS, lr=LEARNING_RATE, flip=True
    )
    model = case.build()
    model.load_state_dict(state)
    return losses, model


@functools.cache
def reference(name: str, samples: int, batch_size: int) -> tuple[list[float], dict[str, Tensor]]:
    return train_alone(ZOO[name], samples=samples, batch_size=batch_size, steps=STEPS, lr=LEARNING_RATE)


def judge(case: Case, trial: Trial, train: Callable[[Case, Trial], Trained]) -> Outcome:
    """Train, and compare with one device. What ``train`` raises is an outcome, too."""
    try:
        losses, state = reference(case.name, trial.samples, trial.batch_size)
        start = time.perf_counter()
        got_losses, model = train(case, trial)
    except Exception as error:
        remarks = tuple(f"{type(error).__name__}: {error}".strip().splitlines())
        return Outcome(model=case.name, plan=trial.plan, remarks=remarks)
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
    got: dict[str, Tensor], want: dict[str, Tensor], names: list[str], scale: list[str] | None = None
) -> float:
    """``|got - want| / |want|`` over ``names`` as one vector; infinite where counters differ."""
    counters = [name for name in names if not want[name].is_floating_point()]
    if any(not torch.equal(got[name], want[name]) for name in counters):
        return math.inf
    off = sum((got[n].double() - want[n].double()).square().sum().item() for n in names if n not in counters)
    length = sum(want[n].double().square().sum().item() for n in scale or names if n not in counters)
    if math.isnan(off):
        return math.inf
    return math.sqrt(off / length) if length else (math.inf if off else 0.0)


def table(outcomes: list[Outcome], cases: list[Case], trials: list[Trial]) -> Table:
    at = {(outcome.model, outcome.plan): outcome for outcome in outcomes}
    rows = Table("model", *(f"{t.plan} ({t.samples} by {t.batch_size})" for t in trials), title="loss / weights")
    for case in cases:
        row = [at[case.name, trial.plan] for trial in trials]
        rows.add_row(case.name, *(str(o) if o.ok else f"[red]{o}[/red]" for o in row))
    return rows


def summary(outcomes: list[Outcome]) -> str:
    def worst(kind: str) -> str:
        furthest = max(outcomes, key=lambda outcome: getattr(outcome, kind))
        return f"{kind} {getattr(furthest, kind):.1e} ({furthest.model}, {furthest.plan})"

    good, limits = sum(outcome.ok for outcome in outcomes), f"{LOSS_LIMIT:.0e} / {WEIGHT_LIMIT:.0e}"
    return (
        f"{good} of {len(outcomes)} runs train like one device (limits {limits}); "
        f"worst: {worst('loss')}, {worst('weights')}, {worst('buffers')}"
    )


def record(outcome: Outcome) -> dict:
    """For JSON, which has no infinity: null is a run that did not end, or ended without numbers."""
    finite = {k: None if v == math.inf else v for k, v in asdict(outcome).items()}
    return finite | {"ok": outcome.ok}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(ZOO), help="names, with commas between")
    parser.add_argument("--axes", default="data", choices=sorted({trial.axis for trial in TRIALS}))
    parser.add_argument("--plans", help='plans, with semicolons between: "data=2;data=3"')
    parser.add_argument("--rounding", action="store_true", help="compare one device with itself, summing in reverse")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    options = parser.parse_args()

    if unknown := set(options.models.split(",")) - set(ZOO):
        parser.error(f"no model {', '.join(sorted(unknown))}; known: {', '.join(ZOO)}")
    cases = [case for case in CASES if case.name in options.models.split(",")]
    known = {trial.plan: trial for trial in TRIALS if trial.axis == options.axes}
    plans = [plan.strip() for plan in options.plans.split(";")] if options.plans else list(known)
    trials = [known.get(plan, Trial(plan=plan)) for plan in plans]

    console, progress = Console(), Console(stderr=True)
    outcomes = []
    for case in cases:
        for trial in trials:
            outcomes.append(judge(case, trial, sum_in_reverse if options.rounding else fit))
            progress.print(
                f"{case.name:16} {trial.plan:8} {outcomes[-1]} {outcomes[-1].seconds:.1f} s", highlight=False
            )

    if options.json:
        print(json.dumps([record(outcome) for outcome in outcomes], indent=1))
    else:
        console.print(table(outcomes, cases, trials))
        for outcome in (outcome for outcome in outcomes if not outcome.ok):
            told = "\n  ".join((f"{outcome.model}, {outcome.plan}", *outcome.remarks[:5]))
            console.print(told, markup=False, highlight=False, soft_wrap=True)
        console.print(summary(outcomes), highlight=False, soft_wrap=True)
    return 0 if all(outcome.ok for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
