"""What a checkpoint costs: python benchmarks/checkpoint.py

A model of 100 million parameters and its AdamW state, cut over two ranks, saved and loaded by meshfit, by torch.save
(of the whole, gathered on the first rank) and by torch's DCP and DCP async (from FSDP2), one after another in the same
processes. Seconds that training waits, until it is on disk, to load; and of a rank's CPU in them; and the most memory
above what was there. A load is into a run whose optimizer has not stepped yet, as when one is resumed. The first time
of each, which allocates and imports, counts for memory alone.
"""

import argparse
import gc
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from meshfit.checkpoint import Saver, restore
from meshfit.drive import everywhere
from meshfit.job import Job
from meshfit.launch.world import World
from meshfit.loop import train
from meshfit.run import Run

cloudpickle.register_pickle_by_value(sys.modules[__name__])

WIDTH = 2048


def stack(parameters: float) -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(round(parameters / WIDTH**2))))


@contextmanager
def watched(found: dict[str, float]) -> Iterator[None]:
    """Puts into ``found``: seconds, those of this process's CPU, and the most memory above what there was, in MB."""
    process, over = psutil.Process(), threading.Event()
    before, most = process.memory_info().rss, [0]

    def watch() -> None:
        while not over.wait(0.005):
            most[0] = max(most[0], process.memory_info().rss - before)

    thread = threading.Thread(target=watch)
    thread.start()
    began, cpu = time.perf_counter(), time.process_time()
    try:
        yield
    finally:
        found["seconds"], found["cpu"] = time.perf_counter() - began, time.process_time() - cpu
        over.set()
        thread.join()
        found["MB"] = most[0] / 1e6


def settle() -> None:
    """Nothing of what came before is still on its way to the disk."""
    gc.collect()
    dist.barrier()
    os.sync()
    dist.barrier()


class Meshfit:
    def __init__(self, job: Job, world: World, folder: Path):
        self.folder, self.run = folder, Run(job, world)
        next(iter(train(self.run)))
        self.saver = Saver(folder, keep=1)
        self.saver.begin(self.run)

    def save(self) -> float:
        began = time.perf_counter()
        self.saver.save(self.run)
        blocked = time.perf_counter() - began
        self.saver.wait()
        return blocked

    def load(self) -> None:
        restore(self.run, self.folder)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.run.optimizer.each[0]


class Sharded:
    """FSDP2, and how its state is saved."""

    options = StateDictOptions(flatten_optimizer_state_dict=True)

    def __init__(self, parameters: float, folder: Path):
        self.folder, self.saved = folder, 0
        self.model = stack(parameters)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))  # also where there is a GPU
        for layer in self.model.children():
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.model(torch.randn(2, WIDTH)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        weights, moments = get_state_dict(self.model, self.optimizer, options=self.options)
        return {"model": weights, "optim": moments}

    def put(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
            options=self.options,
        )

    @property
    def at(self) -> Path:
        return self.folder / str(self.saved)

    def tidy(self) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(self.folder / str(self.saved - 1), ignore_errors=True)


class DCP(Sharded):
    def save(self) -> float:
        began = time.perf_counter()
        self.saved += 1
        dcp.save(self.state(), checkpoint_id=self.at)
        return time.perf_counter() - began

    def load(self) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=self.at)
        self.put(state)


class DCPAsync(DCP):
    def __init__(self, parameters: float, folder: Path):
        super().__init__(parameters, folder)
        self.group = dist.new_group(backend="gloo")

    def save(self) -> float:
        began = time.perf_counter()
        self.saved += 1
        future: Any = dcp.async_save(self.state(), checkpoint_id=self.at, process_group=self.group)
        blocked = time.perf_counter() - began
        future.result()
        return blocked


class Gathered(Sharded):
    """All of it on the first rank, by torch.save; every rank reads the whole file and takes its part."""

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)

    def save(self) -> float:
        began = time.perf_counter()
        state = self.state()
        if dist.get_rank() == 0:
            self.folder.mkdir(exist_ok=True)
            torch.save(state, self.folder / "whole.pt")
        return time.perf_counter() - began

    def load(self) -> None:
        self.put(torch.load(self.folder / "whole.pt", weights_only=True, mmap=True))


TOOLS = {"meshfit": None, "torch.save": Gathered, "DCP": DCP, "DCP async": DCPAsync}


def work(job: Job, world: World, *, folder: Path, asked: argparse.Namespace) -> dict[str, Any]:
    """Each in turn, again and again: what else the machine does meets all of them."""
    tools: dict[str, Any] = {
        name: Meshfit(job, world, folder / name) if kind is None else kind(asked.parameters, folder / name)
        for name, kind in TOOLS.items()
        if name in asked.tools.split(",")
    }
    seen: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in tools}
    for _ in range(asked.times + 1):
        for name, tool in tools.items():
            for act in ("save", "load"):
                if act == "load":
                    tool.optimizer.state.clear()
                settle()
                found: dict[str, float] = {}
                with watched(found):
                    blocked = getattr(tool, act)()
                    dist.barrier()
                if act == "save":
                    seen[name]["blocked"].append(blocked)
                for key, value in found.items():
                    seen[name][f"{act} {key}"].append(value)
            if isinstance(tool, Sharded):
                tool.tidy()
    return {
        name: {key: max(values) if "MB" in key else statistics.median(values[1:]) for key, values in found.items()}
        for name, found in seen.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=float, default=100e6)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=os.environ.get("TMPDIR")))
    job = Job(
        **{
            "model": partial(stack, asked.parameters),
            "data": (torch.randn(8, WIDTH), torch.randn(8, WIDTH)),
            "loss": F.mse_loss,
            "optimizer": torch.optim.AdamW,
            "batch_size": 2 * asked.ranks,
            "steps": 1,
            "plan": f"shard={asked.ranks}",
            "devices": f"cpu:{asked.ranks}",
        }
    ).training()
    try:
        every = everywhere(job.settled(), partial(work, folder=folder, asked=asked))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{asked.parameters:.0e} parameters and AdamW's state over {asked.ranks} ranks; median of {asked.times}")
    print(f"{'':>10}   training waits   on disk    (CPU)      load    (CPU)   memory for a save, for a load")
    rows = {}
    for name in every[0]:
        row = rows[name] = {key: max(each[name][key] for each in every) for key in every[0][name]}
        save, load = (f"{row[f'{act} seconds']:6.2f} s {row[f'{act} cpu']:6.2f} s" for act in ("save", "load"))
        memory = f"{row['save MB']:6.0f} MB {row['load MB']:6.0f} MB"
        print(f"{name:>10}   {row['blocked']:12.2f} s  {save}  {load}  {memory}")
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
