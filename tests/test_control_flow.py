"""Models whose samples, or random numbers, decide what runs: ranks with other samples may run other things, and ranks
that share samples run the same."""

import random
import sys
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import meshfit
from meshfit.axes.shard.lockstep import GATHER, SCATTER, Lockstep, Meeting, _ahead
from meshfit.errors import PlanError
from tests import traps
from tests.distributed import distributed
from tests.few import every_other
from tests.ranked import SGD, X, Y, assert_alike, built, trained

cloudpickle.register_pickle_by_value(traps)
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Uneven(traps.Plain):
    """Blocks of different sizes: one cannot be taken for another."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(traps.Block() for _ in range(4))
        for i, block in enumerate(self.blocks):
            block.up, block.down = nn.Linear(traps.WIDTH, 8 + 5 * i), nn.Linear(8 + 5 * i, traps.WIDTH)


class Drops(Uneven):
    """Drops layers at random, by a generator of its own that no trace can see, on each rank others."""

    def between(self, i: int, block: nn.Module, x: Tensor) -> Tensor:
        draws = self.__dict__.setdefault("draws", random.Random(dist.get_rank()))
        return x if self.training and draws.random() < 0.4 else block(x)


class Loops(Uneven):
    """One rank runs the blocks more often, and in the second step more often than in the first."""

    def forward(self, x: Tensor) -> Tensor:
        self.__dict__["steps"] = steps = self.__dict__.get("steps", 0) + torch.is_grad_enabled()
        x = self.first(x)
        for _ in range(1 + dist.get_rank() % 2 * steps):
            for block in list(self.blocks)[: 4 - dist.get_rank()]:
                x = block(x)
        return self.last(x)


@pytest.mark.parametrize(
    ("make", "plan"),
    every_other(
        [Drops, Loops], ["shard=2", "shard=2 microbatches=2 recompute=full", "shard=2 zero=2", "shard=2 zero=1"]
    ),
)
@distributed(world=2)
def test_sharded_units_are_gathered_in_each_ranks_own_order(make: Any, plan: str) -> None:
    """They train as with whole copies, which do not have to meet."""
    like = "data=2 microbatches=2" if "microbatches" in plan else "data=2"
    want, got = (trained(built(make), each, steps=5)[0].placed.tensors() for each in (like, plan))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


class Skips(Uneven):
    """From the second step on one rank leaves a block out: what was agreed on in the first does not hold there."""

    def forward(self, x: Tensor) -> Tensor:
        self.__dict__["steps"] = steps = self.__dict__.get("steps", 0) + torch.is_grad_enabled()
        x = self.first(x)
        for block in list(self.blocks)[: 3 if steps > 1 and dist.get_rank() == 3 else 4]:
            x = block(x)
        return self.last(x)


@pytest.mark.parametrize(
    ("make", "plan"), [(Drops, "data=2 shard=2"), (Loops, "data=2 shard=2"), (Skips, "data=2 shard=2 zero=2")]
)
@distributed(world=4)
def test_and_over_several_copies(make: Any, plan: str) -> None:
    want, got = (trained(built(make), each, steps=4)[0].placed.tensors() for each in ("data=4", plan))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


class Halts(Uneven):
    """Each sample is done after some blocks; the rest are not run when all are. ``exits``: in evaluation alone."""

    exits = False

    def forward(self, x: Tensor) -> Tensor:
        depth = x[:, :1].abs() * 2
        x = self.first(x)
        for i, block in enumerate(self.blocks):
            going = depth > i
            if not going.any() and not (self.exits and self.training):
                break
            x = torch.where(going, block(x), x)
        return self.last(x)


class Exits(Halts):
    exits = True


@pytest.mark.parametrize(
    ("make", "plan"), every_other([Halts, Exits], ["data=2", "shard=2", "shard=2 zero=1", "tensor=2"])
)
@distributed(world=2)
def test_adaptive_depth_trains_like_one_device(make: Any, plan: str) -> None:
    # sorted by depth, so that ranks differ; evaluated after every step
    by_depth = X[:, 0].abs().argsort()
    data = (X[by_depth], Y[by_depth])
    how: dict[str, Any] = {"data": data, "shuffle": False, "valid": data, "valid_every": 1, "optimizer": SGD}
    assert_alike(make, plan, **how)


class Chance(Uneven):
    """Drops layers at random, by Python's own generator."""

    def between(self, i: int, block: nn.Module, x: Tensor) -> Tensor:
        return x if self.training and random.random() < 0.4 else block(x)


@distributed(world=2)
def test_layers_dropped_by_pythons_random_numbers() -> None:
    """Ranks that share no samples draw their own, as copies do. Those that share them would have to draw the same, in
    the proof that they compute the same, too: refused."""
    want, got = (trained(built(Chance), each)[0].placed.tensors() for each in ("data=2", "shard=2"))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    with pytest.raises(PlanError, match="random numbers of Python"):
        trained(built(Chance), "tensor=2")


def test_early_exits_in_evaluation_and_prediction_under_zero_3() -> None:
    by_depth = X[:, 0].abs().argsort()
    x, y, model = X[by_depth], Y[by_depth], built(Exits).eval()
    with torch.no_grad():
        want = F.mse_loss(model(x), y)
        outputs = model(x)
    measured = meshfit.evaluate(model, (x, y), loss=F.mse_loss, batch_size=6, plan="shard=2", devices="cpu")
    assert measured["loss"] == pytest.approx(float(want), rel=1e-5)
    got = meshfit.predict(model, x, batch_size=6, plan="shard=2", devices="cpu")
    torch.testing.assert_close(got, outputs, atol=1e-6, rtol=1e-5)


# The order itself


def gathers(*units: int) -> list[Meeting]:
    return [Meeting(GATHER, unit) for unit in units]


def played(lockstep: Lockstep, word: str, *units: int) -> None:
    lockstep.begin(word)
    for unit in units:
        lockstep.turn(GATHER, unit)
    lockstep.end()


@distributed(world=2)
def test_ranks_serve_each_other_and_agree_on_what_comes_next() -> None:
    served: list[Meeting] = []
    lockstep, first = Lockstep(dist.group.WORLD, served.append, ahead=False), dist.get_rank() == 0
    played(lockstep, "train", *((0, 1, 3) if first else (0, 2)))
    assert served == (gathers(2) if first else gathers(1, 3))
    played(lockstep, "train", *((0, 1, 3) if first else (0, 2)))  # another pass with the same weights: its own script
    script = lockstep._scripts["train", "train"]
    lockstep.reset()
    played(lockstep, "train", 0, 4)  # what is not in the script is said
    both: list[Any] = [None, None]
    dist.all_gather_object(both, (script, lockstep._scripts))
    assert both[0] == both[1]
    lockstep.reset()
    played(lockstep, "train", 0, 4)
    assert lockstep._scripts["train", ""] == gathers(0, 4)  # and what nobody wants any more is left out


def test_gathers_ahead_of_their_use() -> None:
    script = [
        *gathers(0, 1, 2),
        Meeting(SCATTER, 2),
        *gathers(1),
        Meeting(SCATTER, 1),
        *gathers(0),
        Meeting(SCATTER, 0),
    ]
    ahead = [*gathers(0, 1, 2, 1), Meeting(SCATTER, 2), *gathers(0), Meeting(SCATTER, 1), Meeting(SCATTER, 0)]
    assert _ahead(script) == ahead
