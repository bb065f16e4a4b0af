"""What does ``fit`` cost beside a hand-written DDP loop?

    python benchmarks/overhead.py
    python benchmarks/overhead.py --turns 60 --starts 0      # CPU time of a step alone
    python benchmarks/overhead.py --against REV             # CPU time of a step, beside that of an earlier revision
    python benchmarks/overhead.py --profile                 # where rank 0's time goes, in both loops

Two figures, on two CPU ranks of one thread each:

    CPU time a step   of both ranks and all their threads, meshfit over raw DDP; limit 1.05
    first step        from the start of ``python script.py`` to the first finished step; limit +0.5 s

The raw loop is what a user would write, once with AdamW as it comes and once with fused=True. meshfit lets
torch's optimizers take their fused kernel, so the fused loop is the fair one to be held against. The loops take
turns, 50 steps each, so that other work on the machine disturbs all alike; the ratio is the median over turns.
Time is read by a hook on the optimizer, the same in all.
"""

import argparse
import cProfile
import json
import os
import pstats
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1]))

import meshfit
from benchmarks import against

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
    """Reads CPU and wall-clock time in the ranks of one loop, chunk by chunk, in turns with other loops.

    A rank starts a chunk when every rank has ended the one before it, of another loop; the loops' order changes
    each time. Ranks tell each other by files in ``folder``, and wait outside of what is timed.
    """

    folder: str
    turn: int = 0
    turns: int = 1
    ranks: int
    chunks: int
    every: int
    """Steps a chunk."""
    warm_up: int
    profile: bool = False

    @property
    def steps(self) -> int:
        return self.warm_up + self.chunks * self.every

    def watch(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Called in the rank, where it makes its optimizer: one thread from here on, and the clock runs."""
        torch.set_num_threads(1)
        spent: list[tuple[float, float]] = []
        profiler = cProfile.Profile()
        done, began = 0, (0.0, 0.0)

        def after_step(*_: object) -> None:
            nonlocal done, began
            done += 1
            if done < self.warm_up or (done - self.warm_up) % self.every:
                return
            ended = time.process_time(), time.perf_counter()
            rank = dist.get_rank() if dist.is_initialized() else 0
            profiler.disable()
            chunk = (done - self.warm_up) // self.every
            if chunk == 0:
                self._path(f"warm{self.turn}", rank).touch()
                self._wait([f"warm{turn}" for turn in range(self.turns)])
            else:
                spent.append((ended[0] - began[0], ended[1] - began[1]))
                self._path(self._place(chunk - 1), rank).touch()
            if chunk == self.chunks:
                self._path(f"spent{self.turn}", rank).write_text(json.dumps(spent))
                if self.profile and rank == 0:
                    profiler.dump_stats(f"{self.folder}/profile")
                return
            if place := self._place(chunk):
                self._wait([place - 1])
            if self.profile and rank == 0:
                profiler.enable()
            began = time.process_time(), time.perf_counter()

        optimizer.register_step_post_hook(after_step)
        return optimizer

    def _place(self, chunk: int) -> int:
        """Where a chunk stands in the sequence of all loops' chunks."""
        return chunk * self.turns + (self.turn + chunk) % self.turns

    def _path(self, what: object, rank: int) -> Path:
        return Path(self.folder, f"{what}.{rank}")

    def _wait(self, awaited: list) -> None:
        deadline = time.monotonic() + 300
        for path in [self._path(what, rank) for what in awaited for rank in range(self.ranks)]:
            while not path.exists():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{path.name}: another loop has not come so far")
                time.sleep(0.002)

    def read(self) -> list[tuple[float, float]]:
        """For each chunk: CPU seconds a step, summed over ranks, and wall-clock seconds a step."""
        by_rank = [json.loads(self._path(f"spent{self.turn}", rank).read_text()) for rank in range(self.ranks)]
        return [(sum(c for c, _ in at) / self.every, at[0][1] / self.every) for at in zip(*by_rank, strict=True)]


LOOPS = ("raw DDP", "raw DDP, fused", "meshfit")


def side_by_side(
    loops: tuple[str, ...], task: Task, ranks: int, *, chunks: int, every: int, warm_up: int, profiled: str = ""
) -> dict[str, list[tuple[float, float]]]:
    """Train by all loops, a chunk of one after a chunk of another; what ``Clock.read`` says of each."""

    def start(loop: str, clock: Clock) -> Any:
        if loop == "meshfit":
            return mp.spawn(train_meshfit, (task, ranks, clock), join=False)
        fused = True if loop.endswith("fused") else None
        return mp.spawn(train_raw, (task, ranks, clock, fused), nprocs=ranks, join=False)

    starts = {loop: partial(start, loop) for loop in loops}
    return in_turns(starts, ranks, chunks=chunks, every=every, warm_up=warm_up, profiled=profiled)


def in_turns(
    starts: dict[str, Callable[[Clock], Any]],
    ranks: int,
    *,
    chunks: int,
    every: int,
    warm_up: int,
    profiled: str = "",
) -> dict[str, list[tuple[float, float]]]:
    """The same for any loops: each by what starts its processes, given its clock."""
    with tempfile.TemporaryDirectory() as folder:
        clocks = [
            Clock(folder=folder, turn=i, turns=len(starts), ranks=ranks, chunks=chunks, every=every, warm_up=warm_up)
            for i in range(len(starts))
        ]
        if profiled:
            clocks = [replace(clock, profile=True) for clock in clocks]
        running = [start(clock) for start, clock in zip(starts.values(), clocks, strict=True)]
        try:
            pending = running
            while pending:
                pending = [processes for processes in pending if not processes.join(timeout=0.2)]
        finally:
            for process in [process for processes in running for process in processes.processes]:
                process.terminate()  # left over where another has failed
        if profiled:
            shutil.copy(f"{folder}/profile", profiled)
        return {loop: clock.read() for loop, clock in zip(starts, clocks, strict=True)}


def train_raw(rank: int, task: Task, ranks: int, clock: Clock, fused: bool | None) -> None:
    """One rank of the loop that a user would write by hand."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    model = task.model()
    if ranks > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{clock.folder}/store{clock.turn}", rank=rank, world_size=ranks
        )
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


def cpu_time(console: Console, chunks: int) -> bool:
    """Print CPU time a step of each loop; whether meshfit is within the limit."""
    seen = side_by_side(LOOPS, PERCEPTRON, RANKS, chunks=chunks, every=CHUNK, warm_up=WARM_UP)
    table = Table(title=f"CPU ms a step, both ranks; {chunks} times {CHUNK} steps of each loop")
    for column in ("loop", "least", "median", "wall-clock ms", "meshfit over it", "by least"):
        table.add_column(column, justify="left" if column == "loop" else "right")
    ratios = {loop: [m / c for (m, _), (c, _) in zip(seen["meshfit"], seen[loop], strict=True)] for loop in LOOPS}
    least = {loop: min(c for c, _ in seen[loop]) for loop in LOOPS}
    for loop in LOOPS:
        cpu, wall = (statistics.median(figures) * 1e3 for figures in zip(*seen[loop], strict=True))
        low, middle, high = statistics.quantiles(ratios[loop], n=4)
        ratio = f"{middle:.3f} ({low:.2f} to {high:.2f})"
        by_least = f"{least['meshfit'] / least[loop]:.3f}"
        table.add_row(loop, f"{least[loop] * 1e3:.2f}", f"{cpu:.2f}", f"{wall:.2f}", ratio, by_least)
    console.print(table)
    ratio = statistics.median(ratios["raw DDP, fused"])
    console.print(f"CPU time over fused raw DDP: {ratio:.3f}, limit {CPU_LIMIT}: {verdict(ratio <= CPU_LIMIT)}")
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
            plan="data=2", devices="cpu:2", each_step=[first])
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
    for loop in ("raw DDP, fused", "meshfit"):
        with tempfile.NamedTemporaryFile() as file:
            side_by_side((loop,), PERCEPTRON, RANKS, chunks=1, every=steps, warm_up=WARM_UP, profiled=file.name)
            console.rule(f"{loop}: rank 0, {steps} steps")
            pstats.Stats(file.name, stream=sys.stdout).strip_dirs().sort_stats("tottime").print_stats(lines)


def verdict(kept: bool) -> str:
    return "[green]PASS[/green]" if kept else "[red]FAIL[/red]"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=30, help="turns of each loop; 0: do not measure CPU time")
    parser.add_argument("--starts", type=int, default=5, help="starts of each script; 0: do not measure the first step")
    parser.add_argument("--profile", action="store_true", help="profile rank 0 instead of measuring")
    parser.add_argument("--lines", type=int, default=40, help="lines of a profile")
    against.add_option(parser)
    asked = parser.parse_args()
    console = Console()
    if asked.against:
        start = lambda clock: mp.spawn(train_meshfit, (PERCEPTRON, RANKS, clock), join=False)
        how = {"chunks": asked.turns, "every": CHUNK, "warm_up": WARM_UP}
        return against.passed(console, [against.ratio(console, asked.against, "perceptron", start, RANKS, **how)])
    if asked.profile:
        profile(console, 300, asked.lines)
        return 0
    kept = [cpu_time(console, asked.turns)] if asked.turns else []
    kept += [first_step(console, asked.starts)] if asked.starts else []
    return 0 if all(kept) else 1


if __name__ == "__main__":
    from benchmarks import overhead  # all processes find its classes under this name

    sys.exit(overhead.main())
