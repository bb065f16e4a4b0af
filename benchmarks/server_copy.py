"""How close to a plain copy is pushing gradients to a model server of this host, and pulling weights?

    python benchmarks/server_copy.py [--megabytes 100] [--tries 30]

A server in a process of its own, one worker here. Push: from the worker's word that its gradient is there until the
server has it in its own memory and has said so. Pull: from the worker's question until the server's weights are in the
worker's parameters. Both against ``copy_`` of as many bytes between two buffers of this process; medians, with the
tries of all three taking turns. Exits with 1 if either takes more than 1.5 times the copy.
"""

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.served import SECRET
from meshfit.exchange.protocol import StepScalars
from meshfit.server.keeper import Keeper
from meshfit.server.server import Server
from meshfit.server.settings import ServerSettings
from meshfit.server.worker import Worker

LIMIT = 1.5


def model(megabytes: int) -> nn.Module:
    """Ten layers of equal size."""
    width = int((megabytes * 1e6 / 10 / 4) ** 0.5)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(10)))


def serve(address: str, megabytes: int) -> None:
    Keeper.square = lambda self: 0.0  # the norm of a gradient is no part of moving it
    whole = model(megabytes)
    keeper = Keeper(whole, torch.optim.SGD(whole.parameters(), lr=0.0))
    Server(keeper, ServerSettings(workers=1), address=address, secret=SECRET).join()


def timed(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--tries", type=int, default=30)
    parser.add_argument("--tcp", action="store_true", help="over loopback, as between hosts, not through memory")
    asked = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{folder}/server" if not asked.tcp else "tcp:127.0.0.1:47311"
        process = multiprocessing.get_context("spawn").Process(
            target=serve, args=(address, asked.megabytes), daemon=True
        )
        process.start()
        worker = Worker(model(asked.megabytes), [address], SECRET, id=0)
        size = worker.connections[0].parcel.bytes
        source, target = (torch.ones(size, dtype=torch.uint8) for _ in range(2))

        def push() -> None:
            worker.arm(StepScalars(0.0, 1.0))
            worker.finish()

        took: dict[str, list[float]] = {"copy": [], "push": [], "pull": []}
        for i in range(asked.tries + 3):
            each = {"copy": timed(lambda: target.copy_(source)), "push": timed(push), "pull": timed(worker.pull)}
            worker._drop()
            worker._ask_place()
            if i >= 3:
                for name, seconds in each.items():
                    took[name].append(seconds)
        worker.remove()
        process.terminate()
        process.join()

    medians = {name: statistics.median(seconds) for name, seconds in took.items()}
    print(f"{size / 1e6:.0f} MB, medians of {asked.tries}, {torch.get_num_threads()} threads")
    for name, seconds in medians.items():
        rate, times = size / seconds / 1e9, seconds / medians["copy"]
        print(f"{name:5} {seconds * 1e3:7.2f} ms  {rate:6.1f} GB/s  {times:.2f} x copy")
    return int(max(medians["push"], medians["pull"]) > LIMIT * medians["copy"] and not asked.tcp)


if __name__ == "__main__":
    sys.exit(main())
