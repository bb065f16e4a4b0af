"""Save under one plan, go on under another: python benchmarks/reshard.py

Ten steps under A, a checkpoint, ten more under B, for all pairs, against twenty on one device: the largest difference
in loss, and whether the samples came in the same order. Then the same plan on both sides with dropout and augmentation,
killed and resumed, against never stopped: SHA-256 over weights, optimizer, scheduler, random states and position.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

from meshfit.checkpoint import restore, save
from meshfit.checkpoint.state import random_states
from meshfit.data import memory
from meshfit.data.draw import SampleRandom
from meshfit.drive import begin, everywhere
from meshfit.errors import MeshfitError
from meshfit.job import Job
from meshfit.launch.world import World
from meshfit.loop import train
from meshfit.plan import Plan
from meshfit.run import Run

cloudpickle.register_pickle_by_value(sys.modules[__name__])

PLANS = (
    "data=1",
    "data=2",
    "shard=4",
    "shard=2 zero=1",
    "tensor=2",
    "shard=2 tensor=2",
    "pipeline=2 schedule=1f1b microbatches=2",
    "pipeline=2 schedule=interleaved microbatches=2",
    "pipeline=2 shard=2 microbatches=2",
    "server=1 data=2",
)
SAME = (
    "data=2",
    "shard=2",
    "shard=2 zero=1",
    "tensor=2",
    "pipeline=2 microbatches=2",
    "data=4",
    "shard=4",
    "data=2 shard=2",
    "shard=2 tensor=2",
    "pipeline=2 data=2 microbatches=2",
)
HALF, STEPS, BATCH = 10, 20, 8
VOCABULARY, WIDTH, LENGTH, SAMPLES = 32, 32, 12, 60  # 60 samples in batches of 8: short batches, and epochs that end
LIMIT = 1e-5


class Block(nn.Module):
    def __init__(self, dropout: float):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, 8)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(mixed))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """A small transformer; ``tied``: its embedding is its head."""

    def __init__(self, tied: bool, dropout: float = 0.0):
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("scale", torch.ones(WIDTH))
        if tied:
            self.head.weight = self.token.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x) * self.scale).flatten(0, 1)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets.flatten())


def words() -> tuple[Tensor, Tensor]:
    drawn = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    return drawn[:, :-1], drawn[:, 1:]


def noisy(batch: tuple[Tensor, Tensor], draw: SampleRandom) -> tuple[Tensor, Tensor]:
    """One of five of a sample's words is another."""
    ids, targets = batch
    other = draw.integers(0, VOCABULARY, LENGTH)
    return torch.where(draw.uniform(LENGTH) < 0.2, other, ids), targets


def job_of(plan: str, model: Any, **more: Any) -> Job:
    asked = {
        "model": model,
        "data": words(),
        "loss": loss,
        "optimizer": lambda params: torch.optim.AdamW(params, lr=3e-3, weight_decay=0.1),
        "scheduler": lambda optimizer, _: OneCycleLR(optimizer, 3e-3, total_steps=STEPS + 1),
        "batch_size": BATCH,
        "steps": STEPS,
        "clip": 1.0,
        "plan": plan,
        "devices": f"cpu:{Plan.parse(plan).devices}",
    }
    return Job(**{**asked, **more}).training()


def tapped(run: Run) -> None:
    """Puts aside which samples came."""
    batches, seen = run.batches, []
    run.captured["ids"] = seen

    def told() -> Iterator[Any]:
        for batch in batches():
            seen.append(batch.ids.tolist())
            yield batch

    run.batches = told  # type: ignore[method-assign]


def went(plan: str, model: Any, **how: Any) -> tuple[list[float], list[list[int]]]:
    """Losses and samples of a training as ``fit`` drives it, step by step."""
    with begin(job_of(plan, model, **how), lockstep=False, tap=tapped) as training:
        losses = [step.loss for step in training]
    assert training.outcome is not None
    return losses, training.outcome.captured["ids"]


def segment(
    job: Job, world: World, *, source: str | None, into: str | None, until: int, killed: tuple[int, int] | None = None
) -> dict[str, Any]:
    """One rank's training from ``source`` to step ``until``: its losses, what it was at the end.

    ``killed``: after which step, and which rank."""
    random.seed(world.rank)  # nobody else seeds these
    np.random.seed(world.rank)
    run = Run(job, world)
    if source is not None:
        restore(run, source)
    losses = []
    for step in train(run):
        losses.append(step.loss)
        if step.step == HALF and into is not None:
            save(run, into)
        if (step.step, world.rank) == killed:
            os.kill(os.getpid(), signal.SIGKILL)
        if step.step >= until:
            break
    return {"losses": losses, "digest": digest(run)}


def digest(run: Run) -> str:
    """Of all that a run is."""
    found = hashlib.sha256()
    for name, p in run.model.named_parameters():
        found.update(name.encode())
        for tensor in (p, *(t for _, t in sorted(run.optimizer.state.get(p, {}).items()) if isinstance(t, Tensor))):
            found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    for _, buffer in run.model.named_buffers():
        found.update(buffer.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    for _, state in sorted(random_states(run).items()):
        found.update(state.numpy().tobytes())
    if run.update.scheduler is not None:
        found.update(repr(sorted(run.update.scheduler.state_dict().items())).encode())
    found.update(repr((run.step, run.samples, run.position.now(run.step))).encode())
    return found.hexdigest()


def ran(plan: str, model: Any, **how: Any) -> dict[str, Any]:
    """The first rank's word; the digests of all."""
    job = job_of(plan, model, data=memory(words()).map(noisy))
    results = everywhere(job.settled(), partial(segment, **how))
    return {**results[0], "digest": [each["digest"] for each in results]}


def pairs(folder: Path, plans: Sequence[str], tied: bool) -> Iterator[dict[str, Any]]:
    model = partial(GPT, tied)
    losses, ids = went("data=1", model)
    first = {a: went(a, model, steps=HALF, out=folder / a, checkpoint=HALF) for a in plans}
    for a, b in product(plans, plans):
        more, others = went(b, model, resume=folder / a)
        apart = max(abs(x - y) for x, y in zip(first[a][0] + more, losses, strict=True))
        order = first[a][1] + others == ids
        yield {"from": a, "to": b, "tied": tied, "loss": apart, "order": order, "ok": apart <= LIMIT and order}


def identical(folder: Path, plan: str) -> Iterator[dict[str, Any]]:
    """With dropout and augmentation: killed after the save and resumed, against never stopped."""
    model, last = partial(GPT, False, 0.2), Plan.parse(plan).devices - 1
    whole = ran(plan, model, source=None, into=None, until=STEPS)
    for killed in ((HALF + 1, 0), (HALF + 7, last)):
        into = str(folder / f"{plan} {killed}")
        try:
            ran(plan, model, source=None, into=into, until=STEPS, killed=killed)
            died = False
        except MeshfitError:
            died = True
        resumed = ran(plan, model, source=into, into=None, until=STEPS)
        same = whole["digest"] == resumed["digest"] and whole["losses"][HALF:] == resumed["losses"]
        step, rank = killed
        yield {"plan": plan, "rank": rank, "step": step, "died": died, "identical": same, "ok": died and same}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", nargs="*", default=list(PLANS))
    parser.add_argument("--same", nargs="*", default=list(SAME))
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    folder, began, rows = Path(tempfile.mkdtemp()), time.perf_counter(), []
    try:
        for tied in (False, True):
            for row in pairs(folder / str(tied), asked.plans, tied):
                rows.append(row)
                kind = "tied" if tied else "untied"
                told = "same order" if row["order"] else "OTHER ORDER"
                print(f"{row['from']:>46} -> {row['to']:<46} {kind:>6}  loss {row['loss']:.1e}  {told}", flush=True)
        good = [row["ok"] for row in rows]
        worst = max((row["loss"] for row in rows), default=0.0)
        print(f"{sum(good)} of {len(good)} pairs within {LIMIT:.0e}, largest {worst:.1e}", flush=True)
        for plan in asked.same:
            for row in identical(folder, plan):
                rows.append(row)
                told = f"rank {row['rank']} killed after step {row['step']}, resumed"
                print(f"{plan:>46}  {told}: {'identical' if row['ok'] else row}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{sum(row['ok'] for row in rows)} of {len(rows)} in {time.perf_counter() - began:.0f} s")
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=1))
    sys.exit(0 if all(row["ok"] for row in rows) else 1)


if __name__ == "__main__":
    main()
