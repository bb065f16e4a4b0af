"""Is ``fit`` as fast, and as lean, as the best loop one would write by hand for one GPU?

    python benchmarks/gpu_single.py                              # about five minutes on one H200
    python benchmarks/gpu_single.py --variants compiled,meshfit --rounds 3
    python benchmarks/gpu_single.py --tiny                       # the same on a CPU, in small: to check the script

A 124M GPT, 32 sequences of 1,024 tokens a step, bf16 arithmetic over fp32 weights, fused AdamW, gradients
clipped to norm 1. Trained by

    eager        a plain loop
    compiled     a plain loop with torch.compile over model and loss together, batches copied from pinned
                 memory while the device works, nothing read back: the mark to meet
    accelerate   Accelerate's usual loop
    lightning    a LightningModule that compiles its model. Its gradient_clip_val refuses fused optimizers, so it
                 clips in configure_gradient_clipping
    meshfit      ``fit``, with everything at its default; told of 5,000 steps, and stopped when enough were timed

Each runs in a process of its own. Speed is taken after warm-up, between two synchronisations; memory is the
most that torch held allocated in the whole process.
"""

import argparse
import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.models import GPT, GptShape

SPEED_GOAL, MEMORY_GOAL = 0.98, 1.02
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Shape(GptShape):
    batch: int = 32
    sequences: int = 512
    warm_up: int = 30
    timed: int = 60

    @property
    def steps(self) -> int:
        return self.warm_up + self.timed


TINY = Shape(layers=2, width=64, heads=2, vocabulary=256, length=32, batch=4, sequences=64, warm_up=3, timed=6)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_optimizer(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def make_model(shape: Shape) -> GPT:
    torch.manual_seed(0)
    return GPT(shape)


def make_data(shape: Shape) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(shape.vocabulary, (shape.sequences, shape.length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def make_loader(shape: Shape) -> torch.utils.data.DataLoader:
    data = torch.utils.data.TensorDataset(*make_data(shape))
    pinned = DEVICE.type == "cuda"
    return torch.utils.data.DataLoader(data, batch_size=shape.batch, shuffle=True, pin_memory=pinned, drop_last=True)


@dataclass
class Clock:
    """Called after every step, with its number from 1; reads the time when warm-up and all are done."""

    shape: Shape
    read: list[float] = field(default_factory=list)

    def __call__(self, step: int) -> bool:
        """Whether that was the last step."""
        if step in (self.shape.warm_up, self.shape.steps):
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
            self.read.append(time.perf_counter())
        return step >= self.shape.steps

    @property
    def tokens_per_second(self) -> float:
        began, ended = self.read
        return self.shape.timed * self.shape.batch * self.shape.length / (ended - began)


@dataclass
class Trained:
    """What a variant gives back: the last step's loss, and what it has to say."""

    loss: float
    notes: list[str] = field(default_factory=list)


def by_hand(shape: Shape, clock: Clock, *, compiled: bool) -> Trained:
    model = make_model(shape).to(DEVICE)
    optimizer = make_optimizer(model.parameters())
    inputs, targets = make_data(shape)

    def objective(x: Tensor, y: Tensor) -> Tensor:
        return loss_of(model(x), y)

    def batches() -> Iterator[list[Tensor]]:
        while True:
            for ids in torch.randperm(shape.sequences).split(shape.batch):
                parts = [t[ids].pin_memory() if DEVICE.type == "cuda" else t[ids] for t in (inputs, targets)]
                yield [part.to(DEVICE, non_blocking=True) for part in parts]

    run = torch.compile(objective) if compiled else objective
    step, coming = 0, batches()
    x, y = next(coming)
    while True:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = run(x, y)
        x, y = next(coming)  # while the device works
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if clock(step):
            return Trained(loss.item())


def by_accelerate(shape: Shape, clock: Clock) -> Trained:
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", cpu=DEVICE.type == "cpu")
    model = make_model(shape)
    model, optimizer, loader = accelerator.prepare(model, make_optimizer(model.parameters()), make_loader(shape))
    step = 0
    while True:
        for x, y in loader:
            loss = loss_of(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if clock(step):
                return Trained(loss.item())


def by_lightning(shape: Shape, clock: Clock) -> Trained:
    import pytorch_lightning as L

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.compile(make_model(shape))
            self.last = torch.zeros(())

        def training_step(self, batch, index):
            x, y = batch
            loss = loss_of(self.model(x), y)
            self.last = loss.detach()
            return loss

        def configure_optimizers(self):
            return make_optimizer(self.parameters())

        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            nn.utils.clip_grad_norm_(self.parameters(), 1.0)

    class Timer(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            clock(trainer.global_step)

    module = Module()
    trainer = L.Trainer(
        max_steps=shape.steps,
        accelerator="gpu" if DEVICE.type == "cuda" else "cpu",
        devices=1,
        precision="bf16-mixed",
        callbacks=[Timer()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, make_loader(shape))
    return Trained(module.last.item())


def by_meshfit(shape: Shape, clock: Clock) -> Trained:
    import meshfit

    result = meshfit.fit(
        make_model(shape),
        make_data(shape),
        loss=loss_of,
        optimizer=make_optimizer,
        batch_size=shape.batch,
        steps=5000,
        clip=1.0,
        plan="auto precision=bf16",
        devices=1,
        progress=False,
        each_step=[lambda step: "stop" if clock(step.step) else None],
    )
    return Trained(result.history[-1].loss, result.notes)


VARIANTS: dict[str, Callable[[Shape, Clock], Trained]] = {
    "eager": functools.partial(by_hand, compiled=False),
    "compiled": functools.partial(by_hand, compiled=True),
    "accelerate": by_accelerate,
    "lightning": by_lightning,
    "meshfit": by_meshfit,
}


def measure(name: str, shape: Shape) -> dict:
    """Train by one variant, in this process."""
    clock = Clock(shape)
    trained = VARIANTS[name](shape, clock)
    held = torch.cuda.max_memory_allocated() / 2**30 if DEVICE.type == "cuda" else None
    return {"speed": clock.tokens_per_second, "memory": held, **asdict(trained)}


def measure_apart(name: str, tiny: bool) -> dict:
    """``measure`` in a process of its own; {"problem": ...} if it fails."""
    began = time.perf_counter()
    command = [sys.executable, __file__, "--variant", name, *(["--tiny"] if tiny else [])]
    ran = subprocess.run(command, capture_output=True, text=True)
    seconds = time.perf_counter() - began
    lines = ran.stdout.strip().splitlines()
    if ran.returncode == 0 and lines:
        return {**json.loads(lines[-1]), "wall": seconds}
    said = [line for line in ran.stderr.strip().splitlines() if line and not line.startswith(" ")]
    if "ModuleNotFoundError" not in (said or [""])[-1]:
        print(ran.stderr, file=sys.stderr)
    return {"problem": (said or [f"exit code {ran.returncode}"])[-1]}


def show(console: Console, rounds: dict[str, list[dict]], tiny: bool) -> None:
    """The table, and meshfit against the compiled loop."""
    best = {name: max(ran, key=lambda r: r["speed"]) for name, seen in rounds.items() if (ran := _ran(seen))}
    mark = best.get("compiled", {})
    table = Table(title="a tiny GPT: the speeds mean nothing" if tiny else "124M GPT on one device, best of the rounds")
    for column in ("variant", "ktok/s", "of compiled", "peak GiB", "of compiled", "last loss", "wall s"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    ratios: dict[str, list[float | None]] = {}
    for name, seen in rounds.items():
        if name not in best:
            table.add_row(name, seen[0]["problem"])
            continue
        got = best[name]
        ratios[name] = [got[k] / mark[k] if got[k] and mark.get(k) else None for k in ("speed", "memory")]
        speed, memory = (f"{r:.3f}" if r else "" for r in ratios[name])
        held = f"{got['memory']:.2f}" if got["memory"] else ""
        table.add_row(
            name, f"{got['speed'] / 1e3:.1f}", speed, held, memory, f"{got['loss']:.4f}", f"{got['wall']:.0f}"
        )
    console.print(table)
    for note in best.get("meshfit", {}).get("notes", []):
        console.print(f"meshfit notes: {note}")
    speed, memory = ratios.get("meshfit", [None, None])
    if speed and not tiny:
        console.print(f"speed, meshfit over compiled: {speed:.3f}, goal >= {SPEED_GOAL}: {_word(speed >= SPEED_GOAL)}")
    if memory and not tiny:
        kept = _word(memory <= MEMORY_GOAL)
        console.print(f"memory, meshfit over compiled: {memory:.3f}, goal <= {MEMORY_GOAL}: {kept}")


def _ran(seen: list[dict]) -> list[dict]:
    return [one for one in seen if "problem" not in one]


def _word(kept: bool) -> str:
    return "PASS" if kept else "FAIL"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", default=",".join(VARIANTS), help="which to run, of %(default)s")
    parser.add_argument("--rounds", type=int, default=1, help="times each is run, taking turns")
    parser.add_argument("--tiny", action="store_true", help="a small shape")
    parser.add_argument("--json", help="also write every round here")
    parser.add_argument("--variant", choices=list(VARIANTS), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    shape = TINY if asked.tiny else Shape()
    if asked.variant:
        print(json.dumps(measure(asked.variant, shape)))
        return
    names = asked.variants.split(",")
    if unknown := set(names) - VARIANTS.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(VARIANTS)}")
    rounds: dict[str, list[dict]] = {name: [] for name in names}
    console = Console()
    for _ in range(asked.rounds):
        for name in names:
            rounds[name].append(measure_apart(name, asked.tiny))
            console.print(f"{name}: {rounds[name][-1]}", highlight=False, soft_wrap=True)
    show(console, rounds, asked.tiny)
    if asked.json:
        with open(asked.json, "w") as file:
            json.dump(rounds, file, indent=1)


if __name__ == "__main__":
    main()
