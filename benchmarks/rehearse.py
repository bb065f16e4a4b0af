"""Do rehearsals find what would fail on a cluster, and let pass what would not?

    python benchmarks/rehearse.py                     # ten good plans and thirteen broken ones: some minutes
    python benchmarks/rehearse.py --only "128"        # those whose names say so

Good plans, 128 ranks among them, must rehearse without a problem, in at most 30 s each on two cores (where others use
the machine: 60 s of CPU time, of all processes together). Broken ones must be caught, with the rank and the
cause. Exits with 0 if all is so, 1 if not.
"""

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import meshfit
from benchmarks import zoo, zoo_branches, zoo_experts
from benchmarks.models import Llama, LlamaShape, token_loss
from benchmarks.one_of_eight import SMALL
from meshfit.launch.warm import warm

SECONDS, CORES = 30.0, 2
X, Y = torch.randn(512, 16, generator=torch.Generator().manual_seed(0)), torch.zeros(512, 4)
ZOO = {case.name: case for case in (*zoo.CASES, *zoo_experts.CASES, *zoo_branches.CASES)}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def mlp() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(8)]
    return nn.Sequential(*layers, nn.Linear(16, 4))


MLP: dict[str, Any] = {"model": mlp, "data": (X, Y), "loss": nn.functional.mse_loss, "optimizer": adamw}
MLP |= {"batch_size": 128, "steps": 100}


def llama(shape: LlamaShape) -> dict[str, Any]:
    ids = torch.randint(shape.vocabulary, (256, shape.length + 1), generator=torch.Generator().manual_seed(0))
    data = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    return {**MLP, "model": lambda: Llama(shape), "data": data, "loss": token_loss, "batch_size": 64}


def of_zoo(name: str) -> dict[str, Any]:
    case = ZOO[name]
    how = {} if case.loss is None else {"loss": case.loss}
    return {"model": case.build(), "data": case.data(64), "optimizer": adamw, "batch_size": 32, "steps": 9, **how}


@dataclass(frozen=True)
class Good:
    name: str
    plan: str
    on: str
    asked: Callable[[], dict[str, Any]] = field(default=lambda: MLP)


@dataclass(frozen=True)
class Broken:
    name: str
    plan: str
    on: str
    change: Callable[[], dict[str, Any]]
    says: str
    """Words of the cause."""
    ranks: tuple[int, ...] = ()
    """That are named; none: the plan itself is refused."""


GPT = LlamaShape(layers=12, width=384, heads=8, key_heads=8, inner=1024, vocabulary=8000, length=32)

GOOD = (
    Good("data", "data=8", "8xH100"),
    Good("shard", "shard=8", "8xH100"),
    Good("tensor", "data=4 tensor=2", "8xH100"),
    Good("pipeline", "data=2 pipeline=4", "8xA100-80GB"),
    Good("zbv", "pipeline=4 schedule=zbv microbatches=8", "4xA100-80GB"),
    Good("context", "shard=2 context=2", "4xH100", lambda: of_zoo("tied-gpt")),
    Good("expert", "data=2 expert=2", "4xH100", lambda: of_zoo("expert-list")),
    Good("branch", "data=2 branch=2", "4xH100", lambda: of_zoo("two-decoders")),
    Good("128 ranks, with values", "data=4 tensor=8 pipeline=4", "16x8xH100", lambda: llama(SMALL)),
    Good("128 ranks, by shapes", "data=4 shard=8 pipeline=4", "16x8xH100", lambda: llama(GPT)),
)


# What is broken


class AlwaysOnRankZero(nn.Module):
    """Its first rank tells the others something that they do not listen to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        if dist.is_initialized() and dist.get_rank() == 0:
            dist.all_reduce(torch.ones(5000))
        return self.layer(x)


SHARE = 16
"""Samples of a rank of eight."""


class OwnSize(nn.Module):
    """One rank sums another size than the others."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == SHARE:  # not where the first rank tries the model, by itself
            dist.all_reduce(torch.ones(6000 if dist.get_rank() == 5 else 5000))
        return self.layer(x)


class NotHeard(nn.Module):
    """One rank waits for an object that nobody sends."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        if dist.is_initialized() and dist.get_rank() == 2:
            dist.broadcast_object_list([None], src=0)
        return self.layer(x)


class Locked(nn.Module):
    """Cannot be sent to ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.lock = nn.Linear(16, 4), threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Files(torch.utils.data.Dataset):
    """One of its files is gone."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        if i == 60:
            torch.load(f"/nowhere/sample-{i}.pt")
        return X[i], Y[i]


def own_file() -> nn.Module:
    """Under torchrun every rank reads a file of its own; that of rank 9 is gone."""
    if os.environ.get("RANK") == "9":
        torch.load("/nowhere/part-9.pt")
    return mlp()


def own_width() -> nn.Module:
    width = 48 if os.environ.get("RANK") == "15" else 32
    return nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, 4))


def last_one_raises(model: nn.Module, batch: Any) -> Tensor:
    if dist.is_initialized() and dist.get_rank() == 7:
        raise ValueError("not on the last rank")
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def no_loss(model: nn.Module, batch: Any) -> Any:
    return "0.5"


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 36000), nn.ReLU(), nn.Linear(36000, 36000), nn.ReLU(), nn.Linear(36000, 4))


def deep() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(8192, 8192), nn.Tanh()) for _ in range(34)]
    return nn.Sequential(nn.Linear(16, 8192), *blocks, nn.Linear(8192, 4))


BROKEN = (
    Broken("a collective on rank 0 alone", "data=8", "8xH100", lambda: {"model": AlwaysOnRankZero}, "5000", (0,)),
    Broken("another size on one rank", "data=8", "8xH100", lambda: {"model": OwnSize}, "6000", (5,)),
    Broken("an object that nobody sends", "data=4", "4xH100", lambda: {"model": NotHeard}, "broadcast", (2,)),
    Broken("a rank does not fit", "data=2", "2xT4", lambda: {"model": wide}, "does not fit", (0, 1)),
    Broken("a stage does not fit", "pipeline=2 cut=31", "2xT4", lambda: {"model": deep}, "stage 0 does not fit", (0,)),
    Broken("a degree that does not divide", "data=8", "8xH100", lambda: {"batch_size": 6}, "batch_size=8 works"),
    Broken("another number of devices", "data=24", "2x8xH100", dict, "needs 24 devices but there are 16"),
    Broken("a sample's file is gone", "data=4", "4xH100", lambda: {"data": Files()}, "sample-60.pt", (2,)),
    Broken("a rank's file is gone", "data=16", "2x8xH100", lambda: {"model": own_file}, "part-9.pt", (9,)),
    Broken("another model on one rank", "data=16", "2x8xH100", lambda: {"model": own_width}, "another model", (15,)),
    Broken("a step raises", "data=8", "8xH100", lambda: {"step": last_one_raises, "loss": None}, "last rank", (7,)),
    Broken("no loss", "data=2", "2xH100", lambda: {"step": no_loss, "loss": None}, "loss"),
    Broken("cannot be sent to ranks", "data=2", "2xH100", lambda: {"model": Locked()}, "lock"),
)  # fmt: skip


def let_through(case: Good) -> meshfit.Rehearsal:
    return meshfit.rehearse(**{**case.asked(), "plan": case.plan}, on=case.on)


def caught(case: Broken) -> tuple[str, bool]:
    """What was said of a broken plan, and whether that names the cause and the ranks."""
    try:
        found = meshfit.rehearse(**{**MLP, **case.change(), "plan": case.plan}, on=case.on)
    except meshfit.MeshfitError as error:
        return str(error), not case.ranks and case.says in str(error)
    named = [problem for problem in found.problems if case.says in str(problem)]
    ranks = {rank for problem in named for rank in problem.ranks}
    return "\n".join(map(str, found.problems)), bool(named) and set(case.ranks) <= ranks


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", default="")
    only, wrong = options.parse_args().only, 0
    warm()
    for case in (case for case in GOOD if only in case.name):
        found = let_through(case)
        late = min(found.seconds, found.cpu / CORES) > SECONDS
        wrong += bool(found.problems) or late
        word = "BAD " if found.problems else "LATE" if late else "ok  "
        ran = f"{len(found.ran)} of {found.plan.devices} ranks run"
        print(f"{word} {found.seconds:6.1f} s {found.cpu:6.1f} s of CPU  {case.name}: {found.plan}, {ran}", flush=True)
        for problem in found.problems:
            print(f"      {problem}")
    for case in (case for case in BROKEN if only in case.name):
        began = time.monotonic()
        said, right = caught(case)
        wrong += not right
        first = said.replace("\n", "\n               ")
        print(f"{'ok  ' if right else 'BAD '} {time.monotonic() - began:6.1f} s  {case.name}", flush=True)
        print(f"               {first}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
