"""Does every pair of axes compose?

    python benchmarks/compose.py
    python benchmarks/compose.py --only pipeline,expert     # pairs and triples with both
    python benchmarks/compose.py --pairs                    # without the triples

Trains models that have what the axes need, under every pair of the seven axes (with tensor=2 also sequence=split) and a
dozen triples, each axis at degree two, and compares losses and weights with one device, as ``parity.py`` does. A pair
is *equal* if all its models are, *refused* if the plan is refused before it trains, with the property that it hurts.
Exits with 1 if any run raised or differs.
"""

import argparse
import itertools
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))  # ranks look the models up under the name benchmarks.compose

from benchmarks import parity
from benchmarks.zoo import Case
from meshfit.plan import DEGREES

STEPS, SAMPLES, BATCH = 4, 20, 8

NEEDS = {
    "context": ("llama", "bert", "mixtral", "t5"),
    "expert": ("mixtral", "olmoe", "expert-list", "two-mixtures"),
    "branch": ("clip", "siamese", "tied-heads", "two-mixtures"),
}
"""Axes for which a model must have something: sequences, experts, branches."""

PLAIN = ("llama", "vit", "mixtral", "siamese")
"""For axes that take any model."""

BOTH = {("context", "expert"): ("mixtral", "olmoe", "expert-list"), ("branch", "context"): ("clip", "tied-heads")}
BOTH |= {("branch", "expert"): ("two-mixtures",)}
"""Models with what both of two such axes need."""

TRIPLES = {
    "data pipeline tensor": "llama",
    "data shard tensor": "llama",
    "shard pipeline tensor": "mixtral",
    "data context pipeline": "llama",
    "context tensor pipeline": "llama",
    "data expert tensor": "mixtral",
    "data expert pipeline": "mixtral",
    "shard expert tensor": "olmoe",
    "expert tensor pipeline": "mixtral",
    "data shard expert": "expert-list",
    "data branch pipeline": "siamese",
    "shard branch tensor": "tied-heads",
    "data shard context": "bert",
}


class TwoMixtures(nn.Module):
    """Two towers, each with mixtures of experts, whose outputs are compared."""

    def __init__(self) -> None:
        super().__init__()
        towers: list[Any] = [parity.EVERY["mixtral"].build() for _ in range(2)]
        self.left, self.right = (tower.model for tower in towers)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.left(left).last_hidden_state.mean(1) - self.right(right).last_hidden_state.mean(1)


def two_mixtures() -> Case:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return TwoMixtures()

    def data(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        drawn = torch.Generator().manual_seed(1)
        ids = torch.randint(2, 40, (2, n, 12), generator=drawn)
        return (ids[0], ids[1]), torch.randn(n, 1, generator=drawn)

    loss = lambda outputs, targets: (outputs.square().mean(1, keepdim=True) - targets).square().mean()
    return Case(name="two-mixtures", build=build, data=data, loss=loss)


CASES = parity.EVERY | {"two-mixtures": two_mixtures()}
parity.EVERY.update(CASES)


SPLIT = "tensor sequence=split"


def plan_of(axes: Iterable[str]) -> str:
    words = [f"{axis}=2" for axis in DEGREES if axis in axes]
    words += ["tensor=2 sequence=split"] if SPLIT in axes else []
    return " ".join([*words, *(["microbatches=2"] if "pipeline" in axes else [])])


def models_of(pair: tuple[str, ...]) -> tuple[str, ...]:
    asking = tuple(sorted(axis for axis in pair if axis in NEEDS))
    return BOTH.get(asking, ()) if len(asking) == 2 else NEEDS[asking[0]] if asking else PLAIN  # type: ignore[arg-type]


def judged(axes: tuple[str, ...], models: Iterable[str]) -> list[parity.Outcome]:
    trial = parity.Trial(plan=plan_of(axes), samples=SAMPLES, batch_size=BATCH, steps=STEPS)
    found = []
    for name in models:
        found.append(parity.judge(CASES[name], trial, parity.fit))
        print(f"{trial.plan:44} {name:14} {found[-1]}  {'' if found[-1].ok else ' '.join(found[-1].remarks)[:160]}")
        sys.stdout.flush()
    return found


def cell(outcomes: list[parity.Outcome]) -> str:
    if any(not outcome.ok and not outcome.refused for outcome in outcomes):
        return "[red]FAIL[/]"
    equal = sum(outcome.ok for outcome in outcomes)
    return f"{equal} equal" if equal == len(outcomes) else "refused" if not equal else f"{equal} of {len(outcomes)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--only", default="", help="axes that a plan must have: pipeline,expert")
    parser.add_argument("--pairs", action="store_true", help="without the triples")
    asked = parser.parse_args()
    only = set(filter(None, asked.only.split(",")))
    found: dict[tuple[str, ...], list[parity.Outcome]] = {}
    for pair in itertools.combinations(DEGREES, 2):
        if only <= set(pair):
            found[pair] = judged(pair, models_of(pair))
    for axis in (axis for axis in DEGREES if axis != "tensor" and only <= {axis, "tensor"}):
        found[axis, SPLIT] = judged((axis, SPLIT), models_of((axis, SPLIT)))
    for words, model in {} if asked.pairs else TRIPLES.items():
        if only <= set(words.split()):
            found[tuple(words.split())] = judged(tuple(words.split()), [model])
    table = Table("", *DEGREES, title="pairs of axes, each at degree 2: models that train like one device")
    for i, row in enumerate((*DEGREES, SPLIT)):
        pairs = [(axis, row) for axis in DEGREES[:i]]
        table.add_row(row, *(cell(found[pair]) if pair in found else "" for pair in pairs), *[""] * (7 - i))
    console = Console(width=120)
    console.print(table)
    every = [outcome for outcomes in found.values() for outcome in outcomes]
    equal, refused = sum(o.ok for o in every), sum(o.refused for o in every)
    worst = max((o for o in every if o.ok), key=lambda o: o.weights, default=None)
    console.print(f"{equal} of {len(every)} equal, {refused} refused, {len(every) - equal - refused} failed")
    if worst is not None:
        console.print(f"worst: loss {max(o.loss for o in every if o.ok):.1e}, weights {worst.weights:.1e}")
    for outcome in every:
        if outcome.refused:
            console.print(f"refused: {outcome.model}, {outcome.remarks[0]}")
    return 0 if equal + refused == len(every) else 1


if __name__ == "__main__":
    from benchmarks.compose import main as run  # ranks find the models by this name

    sys.exit(run())
