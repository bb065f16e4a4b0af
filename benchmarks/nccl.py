"""Several NCCL ranks on one GPU: does every plan train like one device, and does none hang?

    python benchmarks/nccl.py                                      # needs a GPU; one is enough
    python benchmarks/nccl.py --part 1/2 --out nccl.jsonl          # some of the cells; results are appended
    python benchmarks/nccl.py --show nccl.jsonl                    # the table of what is there, and its exit code
    python benchmarks/nccl.py --backend gloo --only "pipeline=2"   # the same cells on CPU ranks

NCCL takes each rank for a host of its own (NCCL_HOSTID), so several may share a GPU. They talk over sockets: speed
means nothing here, but communicators, streams, order, dtypes and deadlocks are the real ones.

A cell trains a small model for six steps in ranks that stay, as torchrun's would, and compares every loss and all
weights with a plain loop on one device. Pipelines and hybrids run again with CUDA_DEVICE_MAX_CONNECTIONS=1: one queue
for all kernels of a rank. A cell that takes longer than 60 s is cut, and where each rank stood is printed.

Exits with 0 if every cell is equal, 1 if one is not, 4 if there is no GPU: then nothing was run.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.nccl_ranks import NOT_RUN, World, at_work, failure, gpu

CELL_SECONDS = 60.0
LOSS_LIMIT, WEIGHT_LIMIT = 1e-5, 1e-4  # as in parity.py
STEPS, SAMPLES, BATCH, LEARNING_RATE = 6, 22, 8, 1e-3  # batches of 8, 8 and 6: the last has fewer microbatches
SCHEDULES = ("sequential", "gpipe", "1f1b", "interleaved", "zbv", "dualpipev")


@dataclass(frozen=True)
class Cell:
    """One training. ``how``: "train", "evaluate" after every second step too, or "resume" half way."""

    plan: str
    model: str = "gpt"
    how: str = "train"
    one_queue: bool = False
    """CUDA_DEVICE_MAX_CONNECTIONS=1."""

    @property
    def world(self) -> int:
        degrees = ("data", "shard", "tensor", "branch", "context", "expert", "pipeline")
        words = [word.split("=") for word in self.plan.split()]
        return math.prod(int(value) for key, value in words if key in degrees)

    def __str__(self) -> str:
        notes = [self.model, *([self.how] if self.how != "train" else []), *(["one queue"] if self.one_queue else [])]
        return f"{self.plan} ({', '.join(notes)})"


def cells() -> list[Cell]:
    found = []
    for n in (2, 3, 4):
        found += [Cell(f"data={n}"), Cell(f"shard={n}"), Cell(f"shard={n} zero=2"), Cell(f"shard={n} zero=1")]
        found += [Cell(f"tensor={n} sequence=whole"), Cell(f"tensor={n} sequence=split"), Cell(f"context={n}")]
        found += [Cell(f"expert={n}", "mixture")] if n != 3 else []  # it has four experts
        found += [Cell(f"branch={n}", "ensemble")] if n < 4 else []  # and that three members
    found += [Cell("expert=2", "mixtral-balanced"), Cell("data=2", "mixtral-balanced"), Cell("expert=2", "deepseek")]
    found += [Cell(f"context=2 attention={word}") for word in ("gather", "ulysses")]
    compiled = ("data=2 compile=whole", "shard=2 compile=block", "pipeline=2 microbatches=4 compile=block")
    compiled += ("tensor=2 sequence=whole compile=block", "tensor=2 sequence=split compile=block")
    compiled += ("context=2 compile=block",)
    found += [*(Cell(plan) for plan in compiled), Cell("expert=2 compile=block", "mixture")]
    found += [Cell("data=2", "batchnorm"), Cell("shard=2 recompute=full"), Cell("shard=2 offload=optimizer")]
    whole = ("data=2", "shard=2 microbatches=2", "pipeline=2 microbatches=4", "data=2 pipeline=2 microbatches=2")
    found += [Cell(plan, "contrast") for plan in whole]
    schedules = [(n, word, _microbatches(word, n)) for n in (2, 3, 4) for word in SCHEDULES]
    many = [f"pipeline={n} schedule={word} microbatches={count}" for n, word, count in schedules]
    many += [
        "data=2 tensor=2",
        "shard=2 tensor=2",
        "data=2 shard=2",
        "data=2 context=2",
        "shard=2 context=2",
        "context=2 tensor=2 sequence=whole",
        "context=2 tensor=2 sequence=split",
        "data=2 pipeline=2 microbatches=4",
        "data=2 pipeline=2 schedule=zbv microbatches=4",
        "shard=2 pipeline=2 microbatches=4",
        "tensor=2 pipeline=2 microbatches=4",
        "tensor=2 sequence=split pipeline=2 microbatches=4",
        "context=2 pipeline=2 microbatches=4",
        "context=2 pipeline=2 schedule=zbv microbatches=4",
    ]
    mixed = [Cell(plan) for plan in many] + [Cell("data=2 expert=2", "mixture"), Cell("data=2 branch=2", "ensemble")]
    for beside in ("tensor=2", "pipeline=2 microbatches=4", "pipeline=2 schedule=zbv microbatches=4"):
        mixed.append(Cell(f"expert=2 {beside}", "mixture"))
    mixed.append(Cell("expert=2 context=2", "mixtral-balanced"))  # most of the mixture's activations are its experts'
    mixed += [Cell(f"branch=2 {beside}", "ensemble") for beside in ("shard=2", "tensor=2")]
    mixed += [Cell("branch=2 expert=2", "two-mixtures"), Cell("branch=2 context=2", "tied-heads")]
    mixed += [Cell("branch=2 tensor=2 sequence=split", "tied-heads")]
    mixed += [Cell("branch=2 pipeline=2 microbatches=4", "siamese")]
    found += mixed
    found += [Cell(plan) for plan in ("data=2 tensor=2 pipeline=2 microbatches=4", "data=2 shard=2 tensor=2")]
    found += [Cell(plan) for plan in ("shard=2 tensor=2 pipeline=2 microbatches=4", "data=2 shard=2 context=2")]
    found += [Cell(f"expert=2 tensor=2 {beside}", "mixture") for beside in ("shard=2", "pipeline=2 microbatches=4")]
    for cell in mixed:  # pipelines with messages that no buffer of NCCL's can hold: both ends must come
        planned = "tensor" in cell.plan or "context" in cell.plan  # the planning of that takes a minute
        large = "pipeline" in cell.plan and not planned and cell.model == "gpt"
        found.append(Cell(cell.plan, "wide" if large else cell.model, one_queue=True))
    for how in ("evaluate", "resume"):
        found += [Cell(plan, how=how) for plan in ("data=2", "shard=2", "tensor=2", "pipeline=2 microbatches=4")]
        found += [Cell("expert=2", "mixture", how), Cell("branch=2", "ensemble", how)]
        found += [Cell("pipeline=3 schedule=interleaved microbatches=4", how=how)]
        found += [Cell("pipeline=4 schedule=zbv microbatches=4", how=how), Cell("shard=2 tensor=2", how=how)]
        found += [Cell("data=2 pipeline=2 microbatches=2", how=how)]
    return sorted(found, key=lambda cell: (cell.one_queue, cell.world))


def _microbatches(word: str, ranks: int) -> int:
    return {"dualpipev": 2 * ranks, "interleaved": 4 if ranks != 3 else 6}.get(word, 4)


# In a rank


def cases() -> dict[str, Any]:
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn

    from benchmarks import compose, zoo, zoo_branches, zoo_experts

    class Block(nn.Module):
        def __init__(self, width: int, heads: int, mlp: nn.Module):
            super().__init__()
            self.heads, self.mlp = heads, mlp
            self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
            self.norms = nn.ModuleList((nn.LayerNorm(width), nn.LayerNorm(width)))

        def forward(self, x: Tensor) -> Tensor:
            batch, length, width = x.shape
            parts = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, width // self.heads)
            q, k, v = (part.transpose(1, 2) for part in parts.unbind(2))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
            return x + self.mlp(self.norms[1](x))

    class GPT(nn.Module):
        """Its head is its embedding: first and last stage of a pipeline share a weight."""

        def __init__(self, layers: int, mixture: bool = False, width: int = 48, heads: int = 12):
            super().__init__()
            mlp = lambda: nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            self.token, self.place = nn.Embedding(zoo.VOCABULARY, width), nn.Embedding(zoo.LENGTH, width)
            make = (lambda: zoo_experts.Chosen(width)) if mixture else mlp
            self.blocks = nn.ModuleList(Block(width, heads, make()) for _ in range(layers))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, zoo.VOCABULARY, bias=False)
            nn.init.normal_(self.token.weight, std=0.1)
            self.head.weight = self.token.weight

        def forward(self, ids: Tensor) -> Tensor:
            x = self.token(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    class Wide(nn.Module):
        """Of two samples 2 MB cross from stage to stage: twice what NCCL's buffers hold."""

        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(8))
            self.head = nn.Linear(1024, 4)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + layer(x).tanh()
            return self.head(x)

    def wide(n: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(0)
        return torch.randn(n, 256, 1024, generator=draw), torch.randn(n, 256, 4, generator=draw)

    def contrast(outputs: Tensor, targets: Tensor) -> Tensor:
        """Of the whole batch: each sample against all others."""
        away = outputs @ outputs.T / outputs.shape[1] - 1e3 * torch.eye(len(outputs), device=outputs.device)
        same = (targets[:, None] == targets[None]).float()
        return -(away.log_softmax(1) * (same - same.diag().diag())).sum(1).mean()

    def deep() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)), nn.Linear(8, 16))

    text: dict[str, Any] = {"data": zoo.next_tokens, "loss": zoo_experts.token_loss, "weight_of": zoo.labels_kept}
    cnn = zoo.ZOO["batchnorm-cnn"]
    return {
        "gpt": zoo.Case(name="gpt", build=zoo.seeded(lambda: GPT(8)), **text),
        "mixture": zoo.Case(name="mixture", build=zoo.seeded(lambda: GPT(2, mixture=True)), **text),
        "wide": zoo.Case(name="wide", build=zoo.seeded(Wide), data=wide, loss=F.mse_loss),
        "contrast": zoo.Case(name="contrast", build=zoo.seeded(deep), data=zoo.points, loss=contrast),
        "ensemble": zoo_branches.BRANCHES["ensemble"],
        **{name: compose.CASES[name] for name in ("two-mixtures", "tied-heads", "siamese")},
        **{case.name: case for case in zoo_experts.CASES if case.name in ("mixtral-balanced", "deepseek")},
        "batchnorm": zoo.Case(name="batchnorm", build=cnn.build, data=cnn.data, loss=cnn.loss),
    }


def alone(case: Any, device: Any) -> tuple[list[float], dict[str, Any], float]:
    """Losses, weights, and the loss over all samples after the last step, of a plain loop on one device."""
    import torch

    from benchmarks import zoo
    from meshfit.data.tree import to_device

    model, data = case.build().train().to(device), zoo.take(case.data(SAMPLES), torch.arange(SAMPLES))
    data = to_device(data, device)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE), []
    for _, index in zip(range(STEPS), zoo.batches(SAMPLES, BATCH), strict=False):
        loss = zoo.mean_loss(case, model, zoo.take(data, index.to(device)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weights = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        valid = zoo.mean_loss(case, model.eval(), data).item()
    return losses, weights, valid


def train(cell: Cell, case: Any, folder: Path) -> tuple[list[float], Any, float | None]:
    """The same by the plan: losses, the model, and the last evaluation's loss."""
    import torch

    import meshfit

    data, plan = case.data(SAMPLES), cell.plan if "compile" in cell.plan else f"{cell.plan} compile=none"
    asked: dict[str, Any] = {
        "loss": case.loss,
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=LEARNING_RATE),
        "batch_size": BATCH,
        "plan": plan,
        "shuffle": False,
        "progress": False,
    }
    if cell.how == "evaluate":
        asked |= {"valid": data, "valid_every": 2}
    if cell.how == "resume":
        half = meshfit.fit(case.build(), data, steps=STEPS // 2, out=folder, checkpoint=1, **asked)
        result = meshfit.fit(case.build(), data, steps=STEPS, out=folder, checkpoint=1, resume=True, **asked)
        losses = [step.loss for step in (*half.history, *result.history)]
    else:
        result = meshfit.fit(case.build(), data, steps=STEPS, **asked)
        losses = [step.loss for step in result.history]
    return losses, result.model, result.metrics["loss"] if cell.how == "evaluate" else None


def compared(cell: Cell, case: Any, folder: Path, wanted: tuple[list[float], dict[str, Any], float]) -> dict[str, Any]:
    losses, model, valid = train(cell, case, folder)
    want, weights, want_valid = wanted
    got = {name: value.detach().cpu() for name, value in model.state_dict().items()}
    some = [name for name, value in weights.items() if value.is_floating_point()]
    off = sum((got[n].double() - weights[n].double()).square().sum().item() for n in some)
    pairs = [*zip(losses, want, strict=True), *([(valid, want_valid)] if valid is not None else [])]
    return {
        "loss": max(abs(a - b) / abs(b) for a, b in pairs),
        "weights": math.sqrt(off / sum(weights[n].double().square().sum().item() for n in some)),
    }


def rank() -> None:
    """Cells come one after the other; what each came to goes back."""
    with at_work() as (world, asked):
        known, references = cases(), {}

        def train_cell(said: dict[str, Any]) -> dict[str, Any]:
            cell = Cell(**said["cell"])
            case = known[cell.model]
            if cell.model not in references:
                references[cell.model] = alone(case, world.device)
            return compared(cell, case, Path(said["folder"]), references[cell.model])

        asked(train_cell)


# In the caller


def measure(chosen: list[Cell], backend: str, seconds: float) -> Iterator[dict[str, Any]]:
    world: World | None = None
    kind: tuple[int, bool] | None = None
    for cell in chosen:
        if world is None or kind != (cell.world, cell.one_queue):
            if world is not None:
                world.close()
            kind = (cell.world, cell.one_queue)
            world = World(__file__, cell.world, backend, one_queue=cell.one_queue)
            heard, ready = world.ready()
            if not ready:
                world.close()
                world = None
                yield {**asdict(cell), "world": cell.world, "backend": backend, **heard[0]}
                continue
        start = time.perf_counter()
        heard, goes_on = world.run({"cell": asdict(cell), "folder": world.new_folder()}, seconds)
        answer = heard[0] | {"weights": max(said["weights"] for said in heard)} if "error" not in heard[0] else heard[0]
        answer.setdefault("seconds", time.perf_counter() - start)
        if not goes_on:
            world.close()
            world = None
        yield {**asdict(cell), "world": cell.world, "backend": backend, **answer}
    if world is not None:
        world.close()


def equal(row: dict[str, Any]) -> bool:
    return "error" not in row and row["loss"] <= LOSS_LIMIT and row["weights"] <= WEIGHT_LIMIT


def shown(row: dict[str, Any]) -> str:
    cell = Cell(**{key: row[key] for key in ("plan", "model", "how", "one_queue")})
    text = f"{cell.world} ranks  {cell!s:<78}"
    if "error" in row:
        return f"{text}  FAIL  {failure(row)}"
    return f"{text}  {row['loss']:.0e}  {row['weights']:.0e}  {row['seconds']:5.1f} s  {'ok' if equal(row) else 'FAIL'}"


def summary(rows: list[dict[str, Any]], backend: str) -> str:
    passed, ran = sum(map(equal, rows)), [row for row in rows if "error" not in row]
    worst = {kind: max((row[kind] for row in ran), default=math.nan) for kind in ("loss", "weights")}
    cut = sum("cut after" in row.get("error", "") for row in rows)
    return (
        f"{passed} of {len(rows)} cells over {backend} train like one device (limits {LOSS_LIMIT:.0e} /"
        f" {WEIGHT_LIMIT:.0e}), {cut} hung; worst: loss {worst['loss']:.1e}, weights {worst['weights']:.1e}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--backend", choices=["nccl", "gloo"], default="nccl")
    parser.add_argument("--part", default="1/1", help="1/2: the first half of the cells")
    parser.add_argument("--worlds", help="numbers of ranks, with commas between")
    parser.add_argument("--only", help="cells whose line has this in it")
    parser.add_argument("--seconds", type=float, default=CELL_SECONDS, help="a cell that takes longer is cut")
    parser.add_argument("--out", type=Path, help="append what each cell came to, a line of JSON each")
    parser.add_argument("--show", type=Path, help="run nothing: print what such a file holds")
    options = parser.parse_args()
    if options.rank:
        rank()
        return 0
    if options.show:
        rows = [json.loads(line) for line in options.show.read_text().splitlines()]
        rows = list({(row["plan"], row["model"], row["how"], row["one_queue"]): row for row in rows}.values())
        print(*map(shown, rows), summary(rows, rows[0]["backend"]), sep="\n")
        return 0 if all(map(equal, rows)) else 1
    chosen = [cell for cell in cells() if not options.worlds or str(cell.world) in options.worlds.split(",")]
    chosen = [cell for cell in chosen if not options.only or options.only in str(cell)]
    i, n = map(int, options.part.split("/"))
    chosen = chosen[len(chosen) * (i - 1) // n : len(chosen) * i // n]
    if options.backend == "nccl" and not gpu():
        print(f"NOT RUN: {len(chosen)} cells need a GPU, and there is none here (--backend gloo: on CPU ranks)")
        return NOT_RUN
    if options.backend == "gloo":
        chosen = [cell for cell in chosen if not cell.one_queue]
    rows = []
    for row in measure(chosen, options.backend, options.seconds):
        rows.append(row)
        print(shown(row), flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
    print(summary(rows, options.backend))
    return 0 if rows and all(map(equal, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
