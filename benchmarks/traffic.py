"""Bytes that each way from gradients to weights moves, a step and worker: counted, computed, and by the textbook.

    python benchmarks/traffic.py [--width 512] [--workers 3]

*payload* is what is handed to the transport, counted while it runs; *cost()* what the strategy says it would be: the
two must be equal. *wire* is what one device sends (and for a server: a worker sends and receives) by the textbook for P
bytes of weights: all-reduce in a ring 2P(n-1)/n; a server P up and P down; local steps 1/h of all-reduce. Exits with 1
if payload and cost() differ anywhere, or the payload is more than 1 % above P where the textbook says P.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.served import SECRET
from meshfit.exchange.allreduce import AllReduce
from meshfit.exchange.local import Local, Outer
from meshfit.exchange.serving import cost as server_cost
from meshfit.exchange.serving.build import keep
from meshfit.exchange.serving.server import Server, Terms
from meshfit.exchange.serving.worker import Served, Worker
from meshfit.exchange.update import Update
from meshfit.launch.devices import Devices
from meshfit.launch.local import Ranks
from meshfit.launch.world import World

STEPS, EVERY = 16, 8
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Way:
    """One way to exchange, and what the textbook says of it."""

    name: str
    servers: int = 0
    local: bool = False
    outer: bool = False
    compress: str = "none"
    tcp: bool = False

    def textbook(self, size: float, n: int) -> tuple[str, float]:
        """In words and bytes: what one worker moves over the network a step."""
        if self.servers:
            part = {"none": 1.0, "int8": 0.25}.get(self.compress, 0.5)
            return "P up + P down" if part == 1 else f"P/{1 / part:.0f} up + P down", size * (1 + part)
        ring = 2 * size * (n - 1) / n
        return ("2P(n-1)/n / h", ring / EVERY) if self.local else ("2P(n-1)/n", ring)


WAYS = (
    Way("all-reduce"),
    Way("server=1", servers=1),
    Way("server=1, over TCP", servers=1, tcp=True),
    Way("server=2", servers=2),
    Way("server=1 compress=bf16", servers=1, compress="bf16"),
    Way("server=1 compress=int8", servers=1, compress="int8"),
    Way(f"exchange=local every={EVERY}", local=True),
    Way(f"exchange=diloco every={EVERY}", local=True, outer=True),
)


def model(width: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def run(exchange: Any, update: Any, net: nn.Module, width: int) -> None:
    for _ in range(STEPS):
        loss = net(torch.randn(2, width)).square().mean()
        exchange.arm(loss.item(), 2.0, stop=False, broken=False)
        loss.backward()
        riders = exchange.finish()
        update(exchange.gradients, riders.loss, 1.0, exchange.norm)
        exchange.clear()


def counted(act: Callable[[], None]) -> int:
    """Bytes given to all_reduce while ``act`` runs."""
    moved, plain = [0], dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        moved[0] += tensor.numel() * tensor.element_size()
        return plain(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce
    try:
        act()
    finally:
        dist.all_reduce = plain
    return moved[0]


@dataclass(frozen=True)
class Work:
    """What a rank does: the first ``workers`` train, the others serve."""

    way: Way
    workers: int
    width: int
    addresses: list[str]

    def __call__(self, world: World, channel: Any) -> tuple[float, float, float, int] | None:
        """Payload, cost() and bytes on the socket a step; bytes of optimizer state."""
        torch.manual_seed(world.rank)
        group = dist.new_group(list(range(self.workers)))
        way, net = self.way, model(self.width)
        if world.rank >= self.workers:
            index = world.rank - self.workers
            keeper = keep(net, optimizer, index=index, servers=way.servers)
            terms = Terms(workers=self.workers, total=STEPS, index=index, compress=way.compress)
            server = Server(keeper, terms, address=self.addresses[index], secret=SECRET)
            server.join(120)
            server.close()
            return None
        if way.servers:
            worker = Worker(net, self.addresses, SECRET, id=world.rank, compress=way.compress)
            lines = worker.lines
            before = sum(line.moved_down for line in lines), sum(_socket(line.wire) for line in lines)
            run(worker, Served(worker), net, self.width)
            moved = sum(line.moved_up + line.moved_down for line in lines) - before[0]
            wire = sum(_socket(line.wire) for line in lines) - before[1]
            cost = sum(server_cost.worker(net, servers=way.servers, compress=way.compress).moved.values())
            worker.remove()
            return moved / STEPS, cost, wire / STEPS, 0
        assert isinstance(group, dist.ProcessGroup)
        update = Update(optimizer(net.parameters()))
        if way.local:
            exchange = Local(net, group, CPU, every=EVERY, outer=Outer() if way.outer else None)
        else:
            exchange = AllReduce(net.parameters(), group, CPU)
        moved = counted(lambda: run(exchange, update, net, self.width))
        state = sum(t.nbytes for s in update.optimizer.state.values() for t in s.values() if hasattr(t, "nbytes"))
        return moved / STEPS, sum(exchange.cost().moved.values()) / (EVERY if way.local else 1), 0.0, state


def _socket(wire: Any) -> int:
    return wire.sent_all + wire.received_all


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--workers", type=int, default=3)
    asked = parser.parse_args()
    size = sum(p.nbytes for p in model(asked.width).parameters())
    table = Table(title=f"bytes a step and worker; P = {size:,}, n = {asked.workers} workers, h = {EVERY}")
    for column in ("", "payload", "cost()", "of P", "through sockets", "textbook, on the wire", "bytes", "state"):
        table.add_column(column, justify="left" if column in ("", "textbook, on the wire") else "right", no_wrap=True)
    good = True
    for way in WAYS:
        with tempfile.TemporaryDirectory() as folder:
            addresses = [f"tcp:127.0.0.1:{47320 + i}" if way.tcp else f"unix:{folder}/{i}" for i in range(way.servers)]
            work = Work(way, asked.workers, asked.width, addresses)
            with Ranks(work, size=asked.workers + way.servers, devices=Devices("cpu", None)) as ranks:
                payload, cost, wire, state = ranks.results[0]
        words, textbook = way.textbook(size, asked.workers)
        whole = size * (textbook / size if way.servers else 1 / EVERY if way.local else 1)
        good &= payload == cost and payload <= whole * 1.01
        sockets = "-" if not way.servers else f"{wire:,.0f}"
        row = (f"{payload:,.0f}", f"{cost:,.0f}", f"{payload / size:.3f}", sockets, words, f"{textbook:,.0f}")
        table.add_row(way.name, *row, f"{state / size:.1f} P")
    console = Console()
    console.width = max(console.width, 150)
    console.print(table)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
