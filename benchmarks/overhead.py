"""What does ``fit`` cost beside a hand-written DDP loop?

    python benchmarks/overhead.py
    python benchmarks/overhead.py --rounds 8 --starts 0     # CPU time of a step alone
    python benchmarks/overhead.py --profile                 # where rank 0's time goes, in both loops

Two figures, on two CPU ranks of one thread each:

    CPU time a step   of both ranks and all their threads, meshfit over raw DDP; limit 1.05
    first step        from the start of ``python script.py`` to the first finished step; limit +0.5 s

The raw loop is what a user would write, once with AdamW as it comes and once with fused=True. meshfit lets
torch's optimizers take their fused kernel, so the fused loop is the fair one to be held against. Rounds
alternate between the loops, and CPU time is read every 50 steps, by a hook on the optimizer, the same in all:
other work on the machine disturbs all alike, and the quickest reading of each is the least disturbed.
"""

import argparse
import cProfile
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import meshfit

RANKS, CHUNK, WARM_UP = 2, 50, 50
CPU_LIMIT, START_LIMIT = 1.05, 0.5


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained: the same in every loop."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    """Of one sample."""
    batch: int
    """Samples a rank and step."""
    samples: int = 4096
    classes: int = 10

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build()

    def data(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(self.samples, *self.shape, generator=generator)
        return inputs, torch.randint(self.classes, (self.samples,), generator=generator)


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Reads CPU and wall-clock time in a rank after each ``every`` steps, and leaves them in ``folder``."""

    folder: str
    steps: int
    every: int
    warm_up: int
    profile: bool = False

    def watch(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Called in the rank, where it makes its optimizer: one thread from here on, and the clock runs."""
        torch.set_num_threads(1)
        readings: list[tuple[float, float]] = []
        profiler = cProfile.Profile()
        done = 0

        def after_step(*_: object) -> None:
            nonlocal done
            done += 1
            if done < self.warm_up or (done - self.warm_up) % self.every:
                return
            readings.append((time.process_time(), time.perf_counter()))
            rank = dist.get_rank() if dist.is_initialized() else 0
            if self.profile and rank == 0 and done == self.warm_up:
                profiler.enable()
            if done == self.steps:
                profiler.disable()
                if self.profile and rank == 0:
                    profiler.dump_stats(f"{self.folder}/profile")
                Path(self.folder, f"rank{rank}.json").write_text(json.dumps(readings))

        optimizer.register_step_post_hook(after_step)
        return optimizer

    def chunks(self, ranks: int) -> list[tuple[float, float]]:
        """For each ``every`` steps: CPU seconds a step, summed over ranks, and wall-clock seconds a step."""
        read = [json.loads(Path(self.folder, f"rank{rank}.json").read_text()) for rank in range(ranks)]
        spent = [[(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(r)] for r in read]
        return [(sum(c for c, _ in at) / self.every, at[0][1] / self.every) for at in zip(*spent, strict=True)]


def train_raw(rank: int, task: Task, ranks: int, clock: Clock, fused: bool | None) -> None:
    """One rank of the loop that a user would write by hand."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    model = task.model()
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{clock.folder}/store", rank=rank, world_size=ranks)
        model = DistributedDataParallel(model)
    optimizer = clock.watch(torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused))
    inputs, targets = task.data()
    generator = torch.Generator().manual_seed(0)
    step = 0
    while step < clock.steps:
        for ids in torch.randperm(task.samples, generator=generator).split(task.batch * ranks):
            mine = ids[rank * task.batch : (rank + 1) * task.batch]
            loss = F.cross_entropy(model(inputs[mine]), targets[mine])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step == clock.steps:
                break
    if ranks > 1:
        dist.destroy_process_group()


def train_meshfit(_: int, task: Task, ranks: int, clock: Clock) -> None:
    """The same training by ``fit``, called in the process that calls this."""
    meshfit.fit(
        task.model(),
        task.data(),
        loss=F.cross_entropy,
        optimizer=lambda params: clock.watch(torch.optim.AdamW(params, lr=1e-3)),
        batch_size=task.batch * ranks,
        steps=clock.steps,
        plan=f"data={ranks}",
        devices=f"cpu:{ranks}",
        progress=False,
    )


def perceptron() -> nn.Module:
    """Eighteen parameter tensors, 0.4 M numbers: a step takes about 5 ms of one core."""
    blocks = [nn.Sequential(nn.GELU(), nn.Linear(256, 256)) for _ in range(5)]
    head = nn.Sequential(nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 10))
    return nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 256), *blocks, head)


PERCEPTRON = Task(build=perceptron, shape=(128,), batch=64)

LOOPS = {
    "raw DDP": lambda clock: mp.spawn(train_raw, (PERCEPTRON, RANKS, clock, None), nprocs=RANKS),
    "raw DDP, fused": lambda clock: mp.spawn(train_raw, (PERCEPTRON, RANKS, clock, True), nprocs=RANKS),
    "meshfit": lambda clock: train_meshfit(0, PERCEPTRON, RANKS, clock),
}


def cpu_time(console: Console, rounds: int, steps: int) -> bool:
    """Print CPU time a step of each loop; whether meshfit is within the limit."""
    chunks: dict[str, list[tuple[float, float]]] = {name: [] for name in LOOPS}
    for turn in range(rounds):
        for name in list(LOOPS) if turn % 2 == 0 else reversed(LOOPS):
            with tempfile.TemporaryDirectory() as folder:
                clock = Clock(folder=folder, steps=steps + WARM_UP, every=CHUNK, warm_up=WARM_UP)
                LOOPS[name](clock)
                chunks[name] += clock.chunks(RANKS)
    table = Table(title=f"CPU ms a step, both ranks; {rounds} rounds of {steps} steps")
    for column in ("loop", "least", "median", "wall-clock ms", "meshfit over it: least", "median"):
        table.add_column(column, justify="left" if column == "loop" else "right")
    least = {name: min(c for c, _ in seen) * 1e3 for name, seen in chunks.items()}
    median = {name: statistics.median(c for c, _ in seen) * 1e3 for name, seen in chunks.items()}
    for name, seen in chunks.items():
        ratios = (f"{least['meshfit'] / least[name]:.3f}", f"{median['meshfit'] / median[name]:.3f}")
        wall = statistics.median(w for _, w in seen) * 1e3
        table.add_row(name, f"{least[name]:.2f}", f"{median[name]:.2f}", f"{wall:.2f}", *ratios)
    console.print(table)
    ratio = least["meshfit"] / least["raw DDP, fused"]
    console.print(f"least CPU time over fused raw DDP's: {ratio:.3f}, limit {CPU_LIMIT}: {verdict(ratio <= CPU_LIMIT)}")
    return ratio <= CPU_LIMIT


SCRIPT = """
import time
import torch
from torch import nn
from torch.nn import functional as F

def build():
    return nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 10))

def optimizer(params):
    return torch.optim.AdamW(params, lr=1e-3)

inputs, targets = torch.randn(4096, 128), torch.randint(10, (4096,))
"""
MESHFIT_SCRIPT = (
    SCRIPT
    + """
import meshfit
def first(step):
    print(time.time(), flush=True)
    return "stop"
meshfit.fit(build(), (inputs, targets), loss=F.cross_entropy, optimizer=optimizer, batch_size=128, steps=100,
            plan="data=2", devices="cpu:2", callbacks=[first])
"""
)
RAW_SCRIPT = (
    SCRIPT
    + """
import sys
import torch.distributed as dist
def train(rank):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=rank, world_size=2)
    model = nn.parallel.DistributedDataParallel(build())
    adamw = optimizer(model.parameters())
    F.cross_entropy(model(inputs[rank::64]), targets[rank::64]).backward()
    adamw.step()
    if rank == 0:
        print(time.time(), flush=True)
    dist.destroy_process_group()
if __name__ == "__main__":
    torch.multiprocessing.spawn(train, nprocs=2)
"""
)


def first_step(console: Console, starts: int) -> bool:
    """Print seconds to the first step of two scripts; whether meshfit's is within the limit."""
    seconds: dict[str, list[float]] = {"raw DDP, spawn": [], "meshfit": []}
    for turn in range(starts):
        pairs = list(zip(seconds, (RAW_SCRIPT, MESHFIT_SCRIPT), strict=True))
        for name, text in pairs if turn % 2 == 0 else reversed(pairs):
            with tempfile.TemporaryDirectory() as folder:
                script = Path(folder, "script.py")
                script.write_text(text)
                began = time.time()
                ran = subprocess.run([sys.executable, str(script), folder], capture_output=True, text=True, check=True)
                seconds[name].append(float(ran.stdout.split()[0]) - began)
    table = Table(title=f"seconds to the first finished step, {starts} starts each")
    for column in ("script", "least", "median"):
        table.add_column(column, justify="left" if column == "script" else "right")
    for name, seen in seconds.items():
        table.add_row(name, f"{min(seen):.2f}", f"{statistics.median(seen):.2f}")
    console.print(table)
    later = statistics.median(seconds["meshfit"]) - statistics.median(seconds["raw DDP, spawn"])
    console.print(f"first step later by {later:+.2f} s, limit {START_LIMIT:+} s: {verdict(later <= START_LIMIT)}")
    return later <= START_LIMIT


def profile(console: Console, steps: int, lines: int) -> None:
    """Print where rank 0 spends its time, by cProfile: which itself slows Python's calls, and no kernel."""
    for name in ("raw DDP, fused", "meshfit"):
        with tempfile.TemporaryDirectory() as folder:
            LOOPS[name](Clock(folder=folder, steps=steps + WARM_UP, every=steps, warm_up=WARM_UP, profile=True))
            console.rule(f"{name}: rank 0, {steps} steps")
            stats = pstats.Stats(f"{folder}/profile", stream=sys.stdout)
        stats.strip_dirs().sort_stats("tottime").print_stats(lines)


def verdict(kept: bool) -> str:
    return "[green]PASS[/green]" if kept else "[red]FAIL[/red]"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each loop; 0: do not measure CPU time")
    parser.add_argument("--steps", type=int, default=300, help="steps a round, a multiple of 50")
    parser.add_argument("--starts", type=int, default=5, help="starts of each script; 0: do not measure the first step")
    parser.add_argument("--profile", action="store_true", help="profile rank 0 instead of measuring")
    parser.add_argument("--lines", type=int, default=40, help="lines of a profile")
    asked = parser.parse_args()
    console = Console()
    if asked.profile:
        profile(console, asked.steps, asked.lines)
        return 0
    kept = [cpu_time(console, asked.rounds, asked.steps)] if asked.rounds else []
    kept += [first_step(console, asked.starts)] if asked.starts else []
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
