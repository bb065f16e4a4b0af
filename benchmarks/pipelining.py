"""Which models does torch's own pipeline frontend cut in two, beside ``pipeline=2``?

    python benchmarks/pipelining.py
    python benchmarks/pipelining.py --models gpt2,vit

``torch.distributed.pipelining.pipeline`` exports a model as one graph and splits it before the modules it is told. Each
model of the zoo is tried with the modules around its middle, until one gives two stages whose outputs are those of the
model, in eval mode. Nothing is sent and nothing trained: this is about cutting alone. meshfit's column says whether
``pipeline=2`` finds a cut; that it trains like one device is what ``parity.py --axes schedule`` shows.
"""

import argparse
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint, pipeline
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.zoo import CASES, Case, take
from meshfit.axes.pipeline.stages import Pipeline
from meshfit.loss.objective import Objective, split

TRIES = 6
SAMPLES = 4


def middle_modules(model: nn.Module) -> list[str]:
    """Modules with parameters, those nearest to half of all parameters first."""
    total, before, found = sum(p.numel() for p in model.parameters()), 0, []
    seen: set[int] = set()
    for path, module in model.named_modules():
        own = [p for p in module.parameters(recurse=False) if id(p) not in seen]
        if path and any(True for _ in module.parameters()):
            found.append((abs(before - total / 2), path.count("."), path))
        before += sum(p.numel() for p in own)
        seen.update(map(id, own))
    return [path for _, _, path in sorted(found)]


def arguments(case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    batch = take(case.data(SAMPLES), torch.arange(SAMPLES))
    inputs = batch if case.loss is None else split(batch)[0]
    if isinstance(inputs, dict):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, tuple | list) else ((inputs,), {})


def numbers(made: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor) and leaf.is_floating_point())


@torch.no_grad()
def results(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    return list(numbers(model(*args, **kwargs)))


def by_torch(case: Case) -> str:
    args, kwargs = arguments(case)
    want = results(case.build().eval(), args, kwargs)
    why = ""
    for path in middle_modules(case.build())[:TRIES]:
        try:
            pipe = pipeline(case.build().eval(), args, kwargs, split_spec={path: SplitPoint.BEGINNING})
            if pipe.num_stages != 2:
                why = why or f"{pipe.num_stages} stages"
                continue
            got = results(pipe, args, kwargs)
        except Exception as error:
            why = why or f"{type(error).__name__}: {' '.join(str(error).split())[:70]}"
            continue
        alike = len(got) == len(want) and all(a.shape == b.shape for a, b in zip(got, want, strict=True))
        if alike and all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(got, want, strict=True)):
            return "equal"
        why = why or "its two stages give something else than the model"
    return why


def by_meshfit(case: Case) -> str:
    axis = Pipeline(degree=2, microbatches=2)
    batch = take(case.data(SAMPLES), torch.arange(SAMPLES))
    try:
        axis.find(case.build().train(), Objective(case.loss), batch, device="cpu")
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:70]}"
    return "cut"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="", help="names, commas between; empty: all")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    names = set(filter(None, asked.models.split(",")))
    cases = [case for case in CASES if not names or case.name in names]
    table, good = Table("model", "torch.distributed.pipelining", "pipeline=2"), [0, 0]
    for case in cases:
        said = by_torch(case), by_meshfit(case)
        good = [count + (word in ("equal", "cut")) for count, word in zip(good, said, strict=True)]
        table.add_row(case.name, *said)
        print(case.name, *said, sep="  ", file=sys.stderr)
    console = Console(width=140)
    console.print(table)
    console.print(f"of {len(cases)} models: torch {good[0]}, meshfit {good[1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
