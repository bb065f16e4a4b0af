"""What does ``shard=n`` cost beside torch's own FSDP2, and what does it train that FSDP2 does not?

    python benchmarks/sharding.py
    python benchmarks/sharding.py --turns 0                  # no times
    python benchmarks/sharding.py --ranks 2 --models gpt2    # fewer

Three figures, on CPU ranks of one thread each:

    time     CPU and wall-clock time a step, ``fit(plan="shard=n")`` over a hand-written loop: ``fully_shard`` on each
             block and on the whole, fused AdamW, the same batches. The loops take turns (see overhead.py)
    memory   the most that lives at one time within a step: every storage that an operation makes or takes, once
    parity   which models of the zoo raw FSDP2 trains as one device does, within the limits of parity.py; and which of
             ``TRAPS``, small models with one odd thing each

FSDP2 is used as its documentation says: bottom-up; weights tied over blocks, and what no block holds, in the whole;
losses weighted by each rank's share, and gradients summed; BatchNorm made global in the way meshfit does; where that
does not train right, once more with ``set_reduce_scatter_unused_params``. Its blocks are once the units that
meshfit cuts the model into, and once what stands in the model's lists.
"""

import argparse
import os
import statistics
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[1]))  # ranks look things up under the name benchmarks.sharding

import meshfit
from benchmarks import against, parity
from benchmarks.gpu_single import Shape, loss_of, make_data, make_model
from benchmarks.overhead import Clock, in_turns
from benchmarks.zoo import CASES, CLASSES, ZOO, Case, batches, mean_loss, points, seeded, take
from meshfit.anatomy.flops import tensors
from meshfit.anatomy.record import TraceError
from meshfit.axes.data import batchnorm
from meshfit.axes.shard.units import traced, units
from meshfit.comm.group import RankGroup
from meshfit.data.loader import shares
from meshfit.job import Job
from meshfit.launch.devices import Devices
from meshfit.launch.local import LocalRanks
from meshfit.launch.world import World
from meshfit.run import Run

DEVICES = Devices("cpu", None)
TIMEOUT = 30.0
CHUNK, WARM_UP = 4, 4

GPT = Shape(vocabulary=2048, width=256, layers=4, heads=4, length=64, batch=4, sequences=64)
"""3.7 M parameters; ``batch`` is that of a rank."""


# The hand-written loop


def shard_by_hand(model: nn.Module, paths: list[str]) -> None:
    """``fully_shard`` on the modules at ``paths``, innermost first, and on the whole; gradients are summed."""
    for path in sorted(paths, key=lambda path: -path.count(".")):
        fully_shard(model.get_submodule(path))
    fully_shard(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot do otherwise


def steps_by_hand(shape: Shape, ranks: int, rank: int, steps: int, watch: Callable[[Any], Any]) -> Iterator[None]:
    model = make_model(shape)
    shard_by_hand(model, [f"blocks.{i}" for i in range(shape.layers)])
    optimizer = watch(torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
    inputs, targets = make_data(shape)
    every = batches(shape.sequences, shape.batch * ranks)
    for _ in range(steps):
        mine = next(every)[rank * shape.batch : (rank + 1) * shape.batch]
        loss = loss_of(model(inputs[mine]), targets[mine]) / ranks
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield


def train_by_hand(rank: int, shape: Shape, ranks: int, clock: Clock) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    store = f"file://{clock.folder}/store{clock.turn}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    for _ in steps_by_hand(shape, ranks, rank, clock.steps, clock.watch):
        pass
    dist.destroy_process_group()


def asked_of_meshfit(shape: Shape, ranks: int, steps: int, watch: Callable[[Any], Any]) -> dict[str, Any]:
    return {
        "model": make_model(shape),
        "data": make_data(shape),
        "loss": loss_of,
        "optimizer": lambda params: watch(torch.optim.AdamW(params, lr=1e-3)),
        "batch_size": shape.batch * ranks,
        "steps": steps,
        "plan": f"shard={ranks}",
        "devices": f"cpu:{ranks}",
        "shuffle": False,
    }


def train_by_meshfit(_: int, shape: Shape, ranks: int, clock: Clock) -> None:
    meshfit.fit(**asked_of_meshfit(shape, ranks, clock.steps, clock.watch), progress=False)


def start_meshfit(ranks: int, clock: Clock) -> Any:
    return mp.spawn(train_by_meshfit, (GPT, ranks, clock), join=False)


# Time and memory


def times(console: Console, ranks: int, turns: int) -> None:
    starts: dict[str, Callable[[Clock], Any]] = {
        "FSDP2": lambda clock: mp.spawn(train_by_hand, (GPT, ranks, clock), nprocs=ranks, join=False),
        "meshfit": partial(start_meshfit, ranks),
    }
    seen = in_turns(starts, ranks, chunks=turns, every=CHUNK, warm_up=WARM_UP)
    table = Table(title=f"ms a step, {ranks} ranks; {turns} times {CHUNK} steps of each loop")
    for column in ("", *starts, "meshfit over FSDP2"):
        table.add_column(column, justify="right")
    for index, what in enumerate(("CPU, all ranks", "wall-clock")):
        by_loop = {loop: [figures[index] for figures in seen[loop]] for loop in starts}
        middle = [f"{statistics.median(each) * 1e3:.1f}" for each in by_loop.values()]
        ratios = [ours / theirs for ours, theirs in zip(by_loop["meshfit"], by_loop["FSDP2"], strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4)
        table.add_row(what, *middle, f"{median:.3f} ({low:.2f} to {high:.2f})")
    console.print(table)


class Peak(TorchDispatchMode):
    """The most bytes alive at one time, of all storages that operations make or take."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._seen: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back here with the tensors it is made of
        out = func(*args, **(kwargs or {}))
        for tensor in tensors((args, kwargs, out)):
            if tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                if storage._cdata not in self._seen:
                    self._seen[storage._cdata] = StorageWeakRef(storage)
        self.most = max(self.most, self.now())
        return out

    def now(self) -> int:
        total = 0
        for key, ref in [*self._seen.items()]:
            storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)  # its size may have changed
            if storage is None:
                del self._seen[key]
            else:
                total += storage.nbytes()
        return total


def peak_of(steps: Iterator[Any]) -> tuple[int, int]:
    """Of the third step: at the most, and after it."""
    with Peak() as peak:
        for _ in range(3):
            peak.most = 0
            next(steps)
        return peak.most, peak.now()


def peak_by_hand(world: World, _: Any) -> tuple[int, int]:
    return peak_of(steps_by_hand(GPT, world.size, world.rank, 4, lambda optimizer: optimizer))


def peak_by_meshfit(world: World, _: Any) -> tuple[int, int]:
    from meshfit.loop import train

    job = Job(**asked_of_meshfit(GPT, world.size, 4, lambda optimizer: optimizer)).settled()
    return peak_of(train(Run(job, world)))


def peaks(console: Console, ranks: int) -> None:
    found = []
    for work in (peak_by_hand, peak_by_meshfit):
        with LocalRanks(work, size=ranks, devices=DEVICES) as running:
            found.append([f"{max(sizes) / 2**20:.2f}" for sizes in zip(*running.results, strict=True)])
    (hand, rest), (ours, our_rest) = found
    size = sum(p.numel() * p.element_size() for p in make_model(GPT).parameters()) / 2**20
    console.print(
        f"{ranks} ranks, {size:.1f} MiB of parameters: at most {ours} MiB live in a step under meshfit, {hand} under "
        f"FSDP2 ({float(ours) / float(hand):.3f} of it); between steps {our_rest} and {rest}",
        highlight=False,
    )


# Parity


def blocks_as_units(case: Case) -> list[str]:
    """The modules that meshfit gathers for; a unit with several entrances stays in the whole."""
    model = case.build().train()
    objective = lambda model, batch: mean_loss(case, model, batch)
    trace = traced(model, objective, take(case.data(4), torch.arange(4)))
    if isinstance(trace, TraceError):
        raise trace
    found = units(trace, tuple(name for name, _ in model.named_parameters()))
    return without_ties(model, [unit.entrances[0] for unit in found if len(unit.entrances) == 1 and unit.entrances[0]])


def blocks_in_lists(case: Case) -> list[str]:
    """What stands in the outermost lists of modules; without any, the model's own parts."""
    model = case.build()

    def visit(path: str, module: nn.Module) -> Iterator[str]:
        listed = isinstance(module, nn.ModuleList | nn.Sequential)
        for name, child in module.named_children():
            below = f"{path}.{name}" if path else name
            if listed and not isinstance(child, nn.ModuleList | nn.Sequential):
                yield below
            else:
                yield from visit(below, child)

    found = list(visit("", model)) or [name for name, _ in model.named_children()]
    held = [path for path in found if any(True for _ in model.get_submodule(path).parameters())]
    return without_ties(model, held)


def without_ties(model: nn.Module, paths: list[str]) -> list[str]:
    """Less those that share a parameter with another part of the model: it belongs to the whole."""
    uses = Counter(p for _, p in model.named_parameters(remove_duplicate=False))

    def apart(path: str) -> bool:
        own = Counter(p for _, p in model.get_submodule(path).named_parameters(remove_duplicate=False))
        return all(uses[p] == count for p, count in own.items())

    return [path for path in paths if apart(path)]


def fit_by_hand(paths: Callable[[Case], list[str]], unused: bool, case: Case, trial: parity.Trial) -> parity.Trained:
    """For ``parity.judge``."""
    found = paths(case)
    work = lambda world, _: rank_by_hand(case, trial, found, unused, world)
    with LocalRanks(work, size=trial.devices, devices=DEVICES, timeout=TIMEOUT) as ranks:
        for _ in ranks.messages(TIMEOUT):
            pass
        losses, state = ranks.results[0]
    model = case.build()
    model.load_state_dict(state)
    return losses, model


def rank_by_hand(
    case: Case, trial: parity.Trial, paths: list[str], unused: bool, world: World
) -> tuple[list[float], dict[str, Tensor]]:
    warnings.simplefilter("ignore")  # of outputs that are views: whether they matter is seen in the result
    model, data, losses = case.build().train(), case.data(trial.samples), []
    assert dist.group.WORLD is not None
    batchnorm.apply(model, RankGroup(dist.group.WORLD))
    shard_by_hand(model, paths)
    assert isinstance(model, FSDPModule)
    model.set_reduce_scatter_unused_params(unused)
    optimizer = torch.optim.AdamW(model.parameters(), lr=parity.LEARNING_RATE, fused=True)
    for _, index in zip(range(trial.steps), batches(trial.samples, trial.batch_size), strict=False):
        (mine,) = shares(len(index), world.rank, world.size, 1)
        batch, whole = take(data, index[mine]), take(data, index)
        share = case.weight_of(batch) / case.weight_of(whole)
        if (
            share == 0
        ):  # a mean over nothing is NaN, and so would the gradients be: a stand-in, whose loss weighs nothing
            batch = whole
        loss = mean_loss(case, model, batch) * share
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item())
    state = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()}
    return losses, {name: value.detach().clone() for name, value in state.items()}


# Models with one odd thing each


class Odd(nn.Module):
    """Four blocks between two linear layers; the others here change a block, or how it is called."""

    def __init__(self, block: Callable[[], nn.Module]):
        super().__init__()
        self.first, self.last = nn.Linear(8, 32), nn.Linear(32, CLASSES)
        self.blocks = nn.ModuleList(block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = self.call(block, x)
        return self.last(x)

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Scaled(Block):
    """Has a parameter without dims."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * super().forward(x)


class TwoKinds(Block):
    """Some of its parameters are doubles."""

    def __init__(self):
        super().__init__()
        self.up.double()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x).double())).float())


class Adapter(Block):
    """Frozen, beside a low-rank part that is trained."""

    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        self.a, self.b = nn.Linear(32, 2, bias=False), nn.Linear(2, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.b(self.a(x))


class Viewed(Block):
    """Returns a view of what it computed."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).unsqueeze(1).squeeze(1)


class Asking(Block):
    """Asks for a weight as an ``nn.Parameter``, by name."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(x, self.get_parameter("up.weight")) @ self.get_parameter("up.weight")


class InPlace(Odd):
    """Adds to what a block returned, in place."""

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        y = block(x)
        y += x
        return y


class Twice(Odd):
    """Calls each block twice."""

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(torch.tanh(block(x)))


class Borrowed(Odd):
    """Uses a block's weight beside its call, as for a penalty on weights."""

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        assert isinstance(block, Block)
        return block(x) + 0.1 * x @ block.down.weight @ block.up.weight


class Parts(Odd):
    """Calls the parts of a block, never the block."""

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        part = block.get_submodule
        return x + part("down")(torch.tanh(part("up")(part("norm")(x))))


def trap(name: str, build: Callable[[], nn.Module]) -> Case:
    return Case(name=name, build=seeded(build), data=points, loss=F.cross_entropy)


TRAPS = (
    trap("scalar parameter", lambda: Odd(Scaled)),
    trap("two dtypes in a block", lambda: Odd(TwoKinds)),
    trap("frozen and trained in a block", lambda: Odd(Adapter)),
    trap("nn.Parameter asked for by name", lambda: Odd(Asking)),
    trap("view returned", lambda: Odd(Viewed)),
    trap("view changed in place", lambda: InPlace(Viewed)),
    trap("block called twice", lambda: Twice(Block)),
    trap("weight used outside its block", lambda: Borrowed(Block)),
    trap("parts called, not the block", lambda: Parts(Block)),
)
ZOO.update({case.name: case for case in TRAPS})  # where parity looks its reference up


def why(outcome: parity.Outcome) -> str:
    """What went wrong, in a line; of an exception in a rank, how its traceback ends."""
    if outcome.seconds:
        return f"trains wrongly: {'; '.join(outcome.remarks)}"
    said = [line.strip() for line in outcome.remarks if line.strip()]
    return f"refuses: {'; '.join(said)}" if outcome.refused else f"raises: {said[-1]}"


def compare(console: Console, cases: Sequence[Case]) -> None:
    trial = next(trial for trial in parity.TRIALS if trial.plan == "shard=2")
    ways = {"units": blocks_as_units, "lists": blocks_in_lists}
    passed, reasons = Counter(), []
    table = Table("model", "meshfit", *(f"FSDP2, blocks: {way}" for way in ways), title=f"loss / weights, {trial.plan}")
    for case in cases:
        row = [parity.judge(case, trial, parity.fit)]
        if not row[0].ok:
            reasons.append(f"{case.name}, meshfit: {why(row[0])}")
        for way, paths in ways.items():
            tried = []
            for unused in (False, True):
                tried.append(parity.judge(case, trial, partial(fit_by_hand, paths, unused)))
                if tried[-1].ok:
                    break
            else:
                reasons.append(
                    f"{case.name}, {way}: {why(tried[0])}\n  set_reduce_scatter_unused_params: {why(tried[1])}"
                )
            row.append(tried[-1])
        for way, outcome in zip(("meshfit", *ways), row, strict=True):
            passed[way] += outcome.ok
        table.add_row(case.name, *(str(o) if o.ok else f"[red]{o}[/red]" for o in row))
    console.print(table)
    for reason in reasons:
        console.print(reason, markup=False, highlight=False, soft_wrap=True)
    counts = ", ".join(f"{way} {passed[way]}" for way in ("meshfit", *ways))
    console.print(f"of {len(cases)} models train like one device: {counts}", highlight=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4", help="worlds to measure time and memory in; empty: none")
    parser.add_argument("--turns", type=int, default=12, help="turns of each loop; 0: measure no times")
    names = ",".join(case.name for case in CASES)
    parser.add_argument("--models", default=names, help="to train with FSDP2, commas between; empty: none")
    parser.add_argument("--traps", action=argparse.BooleanOptionalAction, default=True)
    against.add_option(parser)
    asked = parser.parse_args()
    console = Console()
    console.width = max(console.width, 110)
    worlds = list(map(int, filter(None, asked.ranks.split(","))))
    if asked.against:
        how = {"chunks": asked.turns, "every": CHUNK, "warm_up": WARM_UP}
        starts = {n: partial(start_meshfit, n) for n in worlds}
        each = [against.ratio(console, asked.against, f"shard={n}", starts[n], n, **how) for n in worlds]
        return against.passed(console, each)
    for ranks in worlds:
        if asked.turns:
            times(console, ranks, asked.turns)
        peaks(console, ranks)
    for cases in ([case for case in CASES if case.name in asked.models.split(",")], TRAPS if asked.traps else ()):
        if cases:
            compare(console, cases)
    return 0


if __name__ == "__main__":
    from benchmarks import sharding  # all processes find its functions under this name

    sys.exit(sharding.main())
