"""Optimizers by plans: the same losses and weights as on one device, or a refusal that says why.

    python benchmarks/optimizers.py [--steps 8] [--only traffic]

A GPT of two blocks in fp64, so that a difference is one of the training and not of rounding (torch's own Muon
orthogonalises in bfloat16 even so: its limit is wider). *equal* is the largest difference of a weight after the last
step, of the largest weight. Then Muon under shard=4: what a rank hands to the collectives in a step, beside AdamW, and
how often each matrix is orthogonalised, by all ranks together. Exits with 1 where something is neither equal nor
refused, where Muon moves more than 4/3 of AdamW's bytes or other than cost() says, or a matrix is orthogonalised more
than once a step.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import meshfit
from benchmarks import matrix_optimizers
from benchmarks.matrix_optimizers import LAMB, SOAP, Distance, Muon, Shampoo
from meshfit.anatomy.trace import Trace
from meshfit.axes.shard.units import traced
from meshfit.drive import begin
from meshfit.errors import MeshfitError
from meshfit.job import Job
from meshfit.plan_cost import cost
from meshfit.run import Run

WIDTH, TOKENS, VOCABULARY, SAMPLES = 32, 12, 40, 16
PLANS = ("data=2", "shard=2", "tensor=2", "pipeline=2")
LIMIT, ROUNDED = 1e-6, 5e-2


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        # no biases: that of keys has a gradient of zero, and some optimizers make steps of its rounding
        self.q, self.k, self.v, self.proj = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        heads = [each(y).unflatten(2, (4, -1)).transpose(1, 2) for each in (self.q, self.k, self.v)]
        y = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.proj(y)
        return x + self.down(F.gelu(self.up(self.second(x))))


class GPT(nn.Module):
    def __init__(self, width: int = WIDTH, blocks: int = 2):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(outputs: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(outputs[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def beside(make: Callable[..., torch.optim.Optimizer]) -> Callable[[nn.Module], list[torch.optim.Optimizer]]:
    """``make`` for the matrices of the blocks, AdamW for the rest, as Muon is used."""

    def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
        matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and name.startswith("blocks")]
        rest = [p for p in model.parameters() if not any(p is one for one in matrices)]
        return [make(matrices), torch.optim.AdamW(rest, lr=1e-3)]

    return optimizers


OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3),
    "SGD, momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-3),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
    "Muon + AdamW": beside(Muon),
    "torch's Muon + AdamW": beside(lambda params: torch.optim.Muon(params, lr=0.02)),
    "Shampoo": Shampoo,
    "SOAP + AdamW": beside(SOAP),
    "LAMB": LAMB,
    "one step size for all": Distance,
    "LBFGS": lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=4),
}


def data() -> Tensor:
    return torch.randint(VOCABULARY, (3 * SAMPLES, TOKENS), generator=torch.Generator().manual_seed(1))


def job(plan: str, optimizer: Any, steps: int, **model: int) -> Job:
    torch.manual_seed(0)
    ids = data()
    built = GPT(**model).double()
    how: dict[str, Any] = {"loss": loss, "optimizer": optimizer, "plan": plan, "devices": "cpu", "steps": steps}
    return Job(model=built, data=(ids, ids), batch_size=SAMPLES, clip=1.0, **how)


def trained(plan: str, optimizer: Any, steps: int) -> nn.Module:
    asked = job(plan, optimizer, steps)
    how = {
        name: getattr(asked, name) for name in ("loss", "optimizer", "plan", "devices", "steps", "batch_size", "clip")
    }
    return meshfit.fit(asked.model, asked.data, progress=False, **how).model


@torch.no_grad()
def off(one: nn.Module, other: nn.Module) -> float:
    both = list(zip(one.parameters(), other.parameters(), strict=True))
    return float(max((a - b).abs().max() for a, b in both) / max(b.abs().max() for _, b in both))


@dataclass(frozen=True)
class Count:
    """Looks into a run: bytes a step, counted and by ``cost()``, and matrices orthogonalised by all ranks."""

    steps: int
    width: int
    blocks: int

    def __call__(self, run: Run) -> None:
        at = Counter[str]()
        matrix_optimizers.ORTHOGONALISED.clear()  # by the trial of the optimizer

        def total() -> int:
            return sum(size for _, size in run.events.traffic.values())

        def stepped(correction: Any) -> None:
            at[str(run.step)] = total()

        def ended() -> None:
            every: list[Any] = [None] * run.world.size
            moved = (at[str(self.steps - 1)] - at["0"]) / (self.steps - 1)  # from gradients to gradients
            dist.all_gather_object(every, list(matrix_optimizers.ORTHOGONALISED))
            run.captured["orthogonalised"] = sum(map(len, every)) / self.steps
            dist.all_gather_object(every, (moved, self.foretold(run)))  # which tries the optimizer once more
            run.captured["moved"] = max(counted for counted, _ in every)
            run.captured["foretold"] = all(counted == said for counted, said in every)

        run.tap, run.at_end = stepped, ended

    def foretold(self, run: Run) -> int:
        model, content = GPT(self.width, self.blocks).double(), next(iter(run.loader.epoch(0))).microbatches[0].content
        trace = traced(model, run.job.objective, content, device="cpu", plan=run.plan)
        assert isinstance(trace, Trace)
        how: dict[str, Any] = {"found": run.placed.found, "place": run.mesh.place}
        return sum(cost(run.plan, trace, run.job.make_optimizer(model), **how).moved.values())


def traffic(console: Console, steps: int = 5) -> bool:
    found = {}
    for name in ("AdamW", "Muon + AdamW"):
        asked = job("shard=4", OPTIMIZERS[name], steps, width=64, blocks=4)
        training = begin(asked, lockstep=False, tap=Count(steps, 64, 4))
        list(training)
        assert training.outcome is not None
        found[name] = training.outcome.captured
    matrices = sum(p.dim() == 2 for p in GPT(64, 4).blocks.parameters())
    more = found["Muon + AdamW"]["moved"] / found["AdamW"]["moved"]
    times = found["Muon + AdamW"]["orthogonalised"] / matrices
    console.print(f"shard=4, bytes a rank and step: AdamW {found['AdamW']['moved']:,.0f}, ", end="")
    console.print(f"Muon + AdamW {found['Muon + AdamW']['moved']:,.0f}: {more:.3f} times")
    console.print(f"each of {matrices} matrices is orthogonalised {times:g} times a step, by all ranks together")
    foretold = all(each["foretold"] for each in found.values())
    console.print(f"what each rank moves is {'what' if foretold else 'NOT what'} cost() says, to the byte")
    return more <= 4 / 3 and times == 1 and foretold


def table(console: Console, steps: int) -> bool:
    rows, right = Table("optimizer", *PLANS), True
    refusals = []
    for name, optimizer in OPTIMIZERS.items():
        alone = trained("data=1", optimizer, steps)
        cells = []
        for plan in PLANS:
            try:
                apart = off(trained(plan, optimizer, steps), alone)
            except MeshfitError as error:
                cells.append("refused")
                refusals.append(f"{error.headline}; {error.facts[0]}")
                continue
            limit = ROUNDED if "torch's Muon" in name else LIMIT
            right &= apart <= limit
            cells.append(f"{apart:.0e} {'equal' if apart <= limit else 'DIFFERS'}")
        rows.add_row(name, *cells)
        console.print(name, *cells)
    console.print(rows)
    for line in refusals:
        console.print(line, soft_wrap=True)
    return right


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--only", choices=("table", "traffic"))
    asked = parser.parse_args()
    out = Console()
    good = asked.only == "traffic" or table(out, asked.steps)
    good &= asked.only == "table" or traffic(out)
    sys.exit(not good)
