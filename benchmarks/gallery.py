"""Does every example of the gallery train like one device?

    python benchmarks/gallery.py
    python benchmarks/gallery.py --only gan,speech --plans "data=2; tensor=2"
    python benchmarks/gallery.py --whole     # each script as it is, to its end: what it prints, and how long it takes

Trains each example for a few steps on one device and under three plans that suit it, and compares the loss of every
step, the weights and buffers after the last, and what the evaluation measures. Where a difference is beyond the limits,
``verify`` decides whether it is rounding. A plan that is refused says why. Exits with 1 if any run raised or differs.
"""

import argparse
import importlib
import math
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table

import meshfit
from meshfit.errors import MeshfitError, NonFiniteError, RankError

sys.path.insert(0, str(Path(__file__).parents[1]))  # ranks look the examples up under the name examples.gan

GALLERY = {
    "image_classification": "pipeline=2",
    "segmentation": "pipeline=2",
    "detection": "tensor=2",
    "text_classification": "tensor=2",
    "language_model": "context=2",
    "translation": "tensor=2",
    "speech": "server=1 data=2",
    "diffusion": "pipeline=2",
    "gan": "tensor=2",
    "contrastive": "branch=2",
    "lora": "tensor=2",
    "mixture_of_experts": "expert=2",
    "distillation": "pipeline=2",
    "preferences": "pipeline=2",
}
"""The plan that each is tried under beside ``data=2`` and ``shard=2``."""

STEPS = 6
LOSS_LIMIT, WEIGHT_LIMIT = 1e-5, 1e-4


@dataclass(frozen=True)
class Outcome:
    example: str
    plan: str
    word: str
    """equal, equal in fp64, refused, different, or raised."""
    said: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.word.startswith(("equal", "refused"))


def train(name: str, plan: str, steps: int = STEPS) -> meshfit.Result:
    return importlib.import_module(f"examples.{name}").train(plan=plan, devices="cpu", steps=steps, progress=False)


def relative(got: list[float], want: list[float]) -> float:
    return max((abs(a - b) / max(abs(b), 1e-8) for a, b in zip(got, want, strict=True)), default=0.0)


def apart(got: meshfit.Result, want: meshfit.Result) -> tuple[float, float, float]:
    """Largest relative difference of a loss and of an evaluation; norm of the weights' and buffers', of their norm."""
    losses = relative([step.loss for step in got.history], [step.loss for step in want.history])
    measured = relative([got.metrics[name] for name in want.metrics], list(want.metrics.values()))
    ours, theirs = (
        torch.cat([tensor.double().flatten() for tensor in result.model.state_dict().values()])
        for result in (got, want)
    )
    weights = float((ours - theirs).norm() / theirs.norm())
    return losses, measured, weights if math.isfinite(weights) else math.inf


def judge(name: str, plan: str, alone: meshfit.Result) -> Outcome:
    start = time.perf_counter()
    try:
        result = train(name, plan)
        losses, measured, weights = apart(result, alone)
        word, said = "equal", f"loss {losses:.0e}, evaluation {measured:.0e}, weights {weights:.0e}"
        if not (losses <= LOSS_LIMIT and weights <= WEIGHT_LIMIT):
            with mock.patch.object(meshfit, "fit", _verify):
                verdict: meshfit.Verdict = train(name, plan)  # type: ignore[assignment]
            word = f"equal in {verdict.decided_in}" if verdict.equal else verdict.answer
            said += "; verify: " + ", ".join(f"{row.name} {row.difference:.0e}" for row in verdict.rows)
    except MeshfitError as error:
        word = "raised" if isinstance(error, RankError | NonFiniteError) else "refused"
        said = str(error)
    except Exception as error:
        word, said = "raised", f"{type(error).__name__}: {error}"
    return Outcome(name, plan, word, said, time.perf_counter() - start)


def _verify(*args, progress: bool, **asked) -> meshfit.Verdict:
    return meshfit.verify(*args, **asked)


def run_whole(name: str) -> bool:
    """The script itself, under its own plan. The seconds of all its processes show what two quiet cores would take."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    script = Path(__file__).parents[1] / "examples" / f"{name}.py"
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True)
    after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - start
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"== {name}: {wall:.0f} s, {busy:.0f} s of processors\n{ran.stdout}{ran.stderr}", flush=True)
    return ran.returncode == 0


def main() -> None:
    asked = argparse.ArgumentParser(description="Does every example of the gallery train like one device?")
    asked.add_argument("--only", default=",".join(GALLERY), help="examples, separated by commas")
    asked.add_argument("--plans", help='in place of its own three: "data=2; tensor=2"')
    asked.add_argument("--whole", action="store_true", help="run the scripts themselves, to their end")
    args = asked.parse_args()
    if args.whole:
        ended = [run_whole(name) for name in args.only.split(",")]
        sys.exit(not all(ended))
    outcomes: list[Outcome] = []
    for name in args.only.split(","):
        plans = ["data=2", "shard=2", GALLERY[name]]
        if args.plans:
            plans = [plan.strip() for plan in args.plans.split(";")]
        alone = train(name, "data=1")
        for plan in plans:
            outcomes.append(judge(name, plan, alone))
            print(
                f"{name:22}{plan:18}{outcomes[-1].word:14}{outcomes[-1].seconds:5.0f} s  {outcomes[-1].said}",
                flush=True,
            )
    table = Table(box=None, header_style="bold", title=f"{STEPS} steps against one device", title_justify="left")
    for column in ("example", "plan", "", "difference, or reason"):
        table.add_column(column, overflow="fold")
    for outcome in outcomes:
        table.add_row(outcome.example, outcome.plan, outcome.word, outcome.said)
    Console(width=140 if not sys.stdout.isatty() else None).print("\n", table)
    counted = {word: sum(outcome.word.startswith(word) for outcome in outcomes) for word in ("equal", "refused")}
    print(f"\n{counted['equal']} equal, {counted['refused']} refused, of {len(outcomes)}")
    sys.exit(not all(outcome.ok for outcome in outcomes))


if __name__ == "__main__":
    main()
