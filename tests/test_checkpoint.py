"""Checkpoints: every byte written once, and read back under any plan."""

import json
import random
from collections import Counter, deque
from math import nan, prod
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from meshfit.checkpoint import CheckpointError, Saver, newest, restore, save
from meshfit.checkpoint.box import inside, overlap, runs, sizes, slabs, volume, whole
from meshfit.checkpoint.cadence import Cadence, Due
from meshfit.checkpoint.plain import decode, encode
from meshfit.checkpoint.ranks import Ranks
from meshfit.checkpoint.read import OnDisk
from meshfit.checkpoint.write import assign
from meshfit.errors import JobError
from meshfit.job import Job
from meshfit.launch.world import World
from meshfit.loop import train
from meshfit.run import Run
from tests import traps
from tests.distributed import distributed
from tests.few import diagonal
from tests.ranked import ADAMW, SGD, X, Y, built

cloudpickle.register_pickle_by_value(traps)


def begun(model: Any, plan: str = "data=1", **asked: Any) -> Run:
    """A run that has not taken a step: alone for "data=1", else with the other ranks of this test."""
    alone = plan.split()[0] == "data=1" and not any(key in plan for key in ("shard=", "tensor="))
    world = World(0 if alone else dist.get_rank(), 1 if alone else dist.get_world_size(), torch.device("cpu"))
    asked = {"data": (X, Y), "loss": F.mse_loss, "optimizer": ADAMW, "batch_size": 8, "steps": 9, "plan": plan, **asked}
    model = model if isinstance(model, nn.Module) else built(model)
    return Run(Job(**{"model": model, **asked}).training().settled(count=world.size, kind="cpu"), world)


def advance(run: Run, steps: int) -> list[float]:
    losses = []
    for step in train(run):
        losses.append(step.loss)
        if len(losses) == steps:
            break
    return losses


def state_of(run: Run) -> dict[str, Tensor]:
    """Everything of it that is tensors, whole."""
    found = run.placed.tensors()
    for name, state in run.optimizer_state().items():
        found |= {f"{name} {key}": value for key, value in state.items()}
    return found


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].shape == tensor.shape, name
        assert torch.equal(torch.view_as_real(got[name]) if tensor.is_complex() else got[name],
                           torch.view_as_real(tensor) if tensor.is_complex() else tensor), name  # fmt: skip


# Boxes


def test_a_range_of_elements_is_few_boxes_in_order() -> None:
    draw = random.Random(0)
    for _ in range(300):
        shape = [draw.randint(1, 5) for _ in range(draw.randint(0, 4))]
        start = draw.randint(0, prod(shape))
        stop = draw.randint(start, prod(shape))
        indices = torch.arange(prod(shape)).view(shape)
        boxes = list(runs(shape, start, stop))
        found = [i for box in boxes for i in indices[inside(whole(shape), box)].reshape(-1).tolist()]
        assert found == list(range(start, stop))
        assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_slabs_are_a_box_in_order() -> None:
    indices = torch.arange(3 * 4 * 5).view(3, 4, 5)
    for most in (1, 3, 7, 20, 60, 100):
        parts = list(slabs(whole((3, 4, 5)), most))
        assert [i for box in parts for i in indices[inside(whole((3, 4, 5)), box)].reshape(-1).tolist()] == list(
            range(60)
        )
        assert max(map(volume, parts)) <= max(most, 1)


def test_overlap() -> None:
    assert overlap(((0, 4), (2, 6)), ((2, 8), (0, 3))) == ((2, 4), (2, 3))
    assert overlap(((0, 4),), ((4, 8),)) is None
    assert overlap((), ()) == ()
    assert sizes(((1, 4), (2, 2))) == (3, 0)


# Who writes what


def test_every_box_is_written_once_and_evenly() -> None:
    shared = [(f"w{i}", "float32", (64,), ((0, 64),), False, 256) for i in range(40)]
    buffer = ("b", "float32", (4,), ((0, 4),), True, 16)
    ranks = [[*shared, buffer, ("own", "float32", (8,), ((r, r + 2),), False, 8)] for r in range(4)]
    chosen = assign(ranks)
    written = [ranks[r][i][:1] + ranks[r][i][3:4] for r in range(4) for i in chosen[r]]
    assert len(written) == len(set(written)) == 40 + 1 + 4
    assert {len(each) for each in chosen} <= {11, 12}
    assert 40 in chosen[0]


# Plain values


def test_settings_come_back_as_they_were() -> None:
    values = {
        "betas": (0.9, 0.999),
        "lr": 0.1 + 0.2,
        "milestones": Counter({3: 1, 9: 2}),
        "none": None,
        "nan": nan,
        "list": [1, (2, [3])],
        "last": deque([1, 2]),
        "seen": {1, 2},
        "bytes": b"\x00\xff",
        "tensor": torch.tensor([1.5, 2.5], dtype=torch.bfloat16),
        "empty": torch.empty(0, 3),
        "array": np.arange(6).reshape(2, 3),
        "number": np.float32(1.5),
        "dtype": torch.float16,
        "=odd": 1,
    }
    got = decode(json.loads(json.dumps(encode(values))))
    assert repr(got) == repr({**values, "number": 1.5})
    assert type(got["milestones"]) is Counter


def test_what_runs_is_not_saved() -> None:
    with pytest.raises(CheckpointError, match=r"groups.f cannot be saved: it is a function"):
        encode({"f": lambda: 0}, "groups")


# There and back


MODELS = {
    "tied": traps.Tied,
    "plain": traps.Plain,
    "odd": traps.Odd,
    "dtypes": traps.Dtypes,
    "integers": traps.NotFloating,
    "strides": traps.NonContiguous,
    "unused": traps.Unused,
    "conv": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 2, 2)),
        nn.Conv2d(2, 6, 3, padding=1).to(memory_format=torch.channels_last),
        nn.BatchNorm2d(6),
        nn.Flatten(),
        nn.Linear(24, 4),
    ),
}


@pytest.mark.parametrize(
    ("model", "plan"), diagonal(MODELS, ["data=2", "shard=2", "shard=2 zero=1", "shard=2 zero=2 microbatches=2"])
)
@distributed(world=2)
def test_there_and_back(model: str, plan: str, tmp_path: Path) -> None:
    """Saved and loaded under a plan; loaded alone from it, saved alone, loaded under it again: not a bit changes."""
    make = MODELS[model]
    run = begun(make, plan)
    advance(run, 2)
    want = state_of(run)
    save(run, tmp_path / "spread")
    again = begun(make, plan)
    restore(again, tmp_path / "spread")
    assert_same(state_of(again), want)
    assert again.step == 2
    alone = begun(make)
    restore(alone, tmp_path / "spread")
    assert_same(state_of(alone), want)
    assert alone.position.now(alone.step) == (0, 2)
    save(alone, tmp_path / f"alone{dist.get_rank()}")
    back = begun(make, plan)
    restore(back, tmp_path / "alone0")
    assert_same(state_of(back), want)
    assert advance(run, 3) == advance(again, 3)


@pytest.mark.parametrize("plan", ["tensor=2", "data=2 shard=2", "shard=4", "shard=2 tensor=2"])
@distributed(world=4, timeout=120)
def test_there_and_back_on_four(plan: str, tmp_path: Path) -> None:
    if plan == "tensor=2":
        plan = "data=2 tensor=2"
    run = begun(traps.Plain, plan)
    advance(run, 2)
    want = state_of(run)
    save(run, tmp_path / "spread")
    alone = begun(traps.Plain)
    restore(alone, tmp_path / "spread")
    assert_same(state_of(alone), want)
    save(alone, tmp_path / f"alone{dist.get_rank()}")
    back = begun(traps.Plain, plan)
    restore(back, tmp_path / "alone0")
    assert_same(state_of(back), want)
    if dist.get_rank() == 0:
        found = newest(tmp_path / "spread")
        held = [about["size"] for about in found.body["files"].values()]
        assert len(held) == 4
        assert max(held) < 0.6 * sum(held)  # copies share the work


@pytest.mark.parametrize("optimizer", ["sgd", "amsgrad", "adafactor", "groups", "rprop"])
def test_optimizers(optimizer: str, tmp_path: Path) -> None:
    def grouped(model: nn.Module) -> torch.optim.Optimizer:
        weights = [p for p in model.parameters() if p.dim() > 1]
        biases = [p for p in model.parameters() if p.dim() <= 1]
        return torch.optim.Adam([{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 1e-3}], lr=1e-2)

    make = {
        "sgd": SGD,
        "amsgrad": lambda params: torch.optim.AdamW(params, amsgrad=True),
        "adafactor": lambda params: torch.optim.Adafactor(params),
        "groups": grouped,
        "rprop": lambda params: torch.optim.Rprop(params),
    }[optimizer]
    run = begun(traps.Plain, optimizer=make)
    advance(run, 2)
    save(run, tmp_path)
    run.optimizer.param_groups[-1]["lr"] = 7.0
    again = begun(traps.Plain, optimizer=make)
    restore(again, tmp_path)
    assert_same(state_of(again), state_of(run))
    assert again.optimizer.param_groups[-1]["lr"] < 1
    run.optimizer.param_groups[-1]["lr"] = again.optimizer.param_groups[-1]["lr"]
    assert advance(again, 3) == advance(run, 3)


@pytest.mark.parametrize(
    "make",
    [
        lambda o, n: torch.optim.lr_scheduler.OneCycleLR(o, 1e-2, total_steps=n + 1),
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4]),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [torch.optim.lr_scheduler.LinearLR(o, 0.1), torch.optim.lr_scheduler.CosineAnnealingLR(o, 5)],
            milestones=[2],
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:The epoch parameter")
def test_schedules_average_best_and_random_numbers(make: Any, tmp_path: Path) -> None:
    how: dict[str, Any] = {"scheduler": make, "ema": 0.9, "valid": (X, Y), "valid_every": 1, "best": "-loss"}
    model = lambda: nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 4))
    run = begun(model, **how)
    advance(run, 3)
    save(run, tmp_path, metrics={"loss": [1.0, 0.5]})
    want = advance(run, 4)
    torch.manual_seed(9)
    again = begun(model, **how)
    found = restore(again, tmp_path)
    assert found.body["state"]["metrics"] == {"loss": [1.0, 0.5]}
    assert advance(again, 4) == want
    assert_same(state_of(again), state_of(run))
    for mine, theirs in zip(again.update.average.weights, run.update.average.weights, strict=True):
        assert torch.equal(mine, theirs)
    assert again.best.facts() == run.best.facts()
    assert_same(again.best.weights, run.best.weights)
    assert again.update.learning_rate == run.update.learning_rate


def test_streams_and_epochs_go_on_where_they_were(tmp_path: Path) -> None:
    stream = lambda: iter(list(zip(X, Y, strict=True)))
    for data in ((X, Y), stream):
        want = advance(run := begun(traps.Plain, data=data, steps=8), 8)
        assert run.position.now(run.step) == (2, 2)
        run = begun(traps.Plain, data=data, steps=8)
        got = advance(run, 3)
        assert run.position.now(run.step) == (1, 0)
        got += advance(run, 1)
        save(run, tmp_path / str(callable(data)))
        again = begun(traps.Plain, data=data, steps=8)
        restore(again, tmp_path / str(callable(data)))
        assert got + advance(again, 99) == want


def test_a_step_that_was_dropped_comes_again() -> None:
    run = begun(traps.Plain)
    batches = run.batches()
    run.step = 1
    next(batches)
    assert run.position.now(1) == (0, 0)
    assert run.position.now(2) == (0, 1)


@pytest.mark.parametrize("move", [False, True])
def test_offloaded_state(move: bool, tmp_path: Path) -> None:
    def offloaded() -> Run:
        run = begun(traps.Plain, "data=1 offload=optimizer")
        run.update.offload.each[0].move = move  # type: ignore[union-attr]
        return run

    run = offloaded()
    advance(run, 2)
    save(run, tmp_path)
    again = offloaded()
    restore(again, tmp_path)
    assert_same(state_of(again), state_of(run))
    assert advance(again, 2) == advance(run, 2)


def test_nothing_is_written_twice_or_over(tmp_path: Path) -> None:
    run = begun(traps.Tied)
    advance(run, 1)
    first, second = save(run, tmp_path), save(run, tmp_path)
    assert (Path(first).name, Path(second).name) == ("0001-step-1", "0002-step-1")
    assert sorted(p.name for p in Path(second).iterdir()) == ["manifest.json", "rank0.safetensors"]
    found = newest(tmp_path)
    assert found.name == "0002-step-1"
    names = found.named("model")
    assert "token.weight" in names
    assert "head.weight" not in names
    assert found.body["ties"] == {"head.weight": "token.weight", "other.weight": "token.weight"}
    from safetensors import safe_open

    with safe_open(Path(second) / "rank0.safetensors", "pt") as file:  # anyone can read it
        assert torch.equal(file.get_tensor("model/token.weight"), run.model.get_parameter("token.weight"))


def test_a_rank_reads_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = begun(lambda: nn.Sequential(nn.Linear(8, 4096), nn.Linear(4096, 4)))
    saver = Saver(tmp_path, block=4096)
    saver.save(run, wait=True)
    saver.close()
    tensors = OnDisk.of(newest(tmp_path))
    read = Counter()
    inner = tensors.files.read_into
    tensors.files.read_into = lambda name, at, into: read.update(bytes=len(into)) or inner(name, at, into)  # type: ignore
    room = torch.empty(100, 8)
    tensors.fill(room, ((1000, 1100), (0, 8)), tensors.stored["model/0.weight"])
    assert torch.equal(room, run.model[0].weight[1000:1100])  # type: ignore[index]
    assert read["bytes"] <= 3200 + 2 * 4096


# What does not fit


def refused(run: Run, path: Path) -> str:
    before = {name: t.clone() for name, t in state_of(run).items()}
    with pytest.raises(CheckpointError) as error:
        restore(run, path)
    assert_same(state_of(run), before)
    assert run.step == 0
    return str(error.value)


def test_what_does_not_fit_is_refused_and_nothing_is_loaded(tmp_path: Path) -> None:
    def make(width: int = 16, depth: int = 2) -> nn.Module:
        between = (nn.Linear(width, width) for _ in range(depth))
        return nn.Sequential(nn.Linear(8, width), *between, nn.Linear(width, 4))

    run = begun(make)
    advance(run, 1)
    save(run, tmp_path)
    said = refused(begun(lambda: make(24)), tmp_path)
    assert "0.weight has shape [24, 8] here, [16, 8] in the checkpoint" in said
    assert len(said.splitlines()) == 1 + 5 + 2
    assert "and 2 more" in said
    said = refused(begun(lambda: make(depth=3)), tmp_path)
    assert "4.weight is not in the checkpoint" in said
    said = refused(begun(lambda: make(depth=1)), tmp_path)
    assert "3.weight is in the checkpoint, and not in the model" in said
    assert "the optimizer is SGD here, AdamW in the checkpoint" in refused(begun(make, optimizer=SGD), tmp_path)
    said = refused(begun(lambda: make().double(), data=(X.double(), Y.double())), tmp_path)
    assert "0.weight is float64 here, float32 in the checkpoint" in said
    assert "the data is not that of the run" in refused(begun(make, data=(X[:10], Y[:10])), tmp_path)
    assert "batches of 3" in refused(begun(make, batch_size=3), tmp_path)
    assert "ema" in refused(begun(make, ema=0.9), tmp_path) or "average" in refused(begun(make, ema=0.9), tmp_path)
    scheduled = begun(make, scheduler=lambda o: torch.optim.lr_scheduler.ConstantLR(o))
    assert "the scheduler is ConstantLR here, none in the checkpoint" in refused(scheduled, tmp_path)


def test_partial_loading_lists_what_was_skipped(tmp_path: Path) -> None:
    run = begun(lambda: nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)))
    advance(run, 1)
    save(run, tmp_path)
    other = begun(lambda: nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(4, 4)), optimizer=SGD)
    restore(other, tmp_path, partial=True)
    skipped = [note for note in other.notes if "skipped" in note]
    assert len(skipped) == 3
    assert torch.equal(other.model[0].weight, run.model[0].weight)  # type: ignore[index]
    assert not other.optimizer.state


@distributed(world=2)
def test_ranks_refuse_together(tmp_path: Path) -> None:
    run = begun(traps.Plain, "shard=2")
    save(run, tmp_path)
    with pytest.raises(CheckpointError, match="does not fit this run: 1 difference"):
        restore(begun(traps.Plain, "shard=2", optimizer=SGD), tmp_path)
    dist.barrier()


# In the background


@distributed(world=2)
def test_training_goes_on_while_it_is_written(tmp_path: Path) -> None:
    run = begun(traps.Plain, "shard=2")
    saver = Saver(tmp_path, every=2, keep=2)
    states = {}
    for _ in train(run):
        if saver.after(run):
            states[run.step] = state_of(run)
    saver.close()
    assert sorted(states) == [2, 4, 6, 8]
    dist.barrier()
    found = newest(tmp_path)
    assert found.name == "0004-step-8"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0003-step-6", "0004-step-8", "lock"]
    for step in (6, 8):
        again = begun(traps.Plain, "shard=2")
        restore(again, tmp_path / f"{step // 2:04d}-step-{step}")
        assert_same(state_of(again), states[step])


# When


def test_cadence_is_read() -> None:
    assert Cadence.of(100) == Cadence.of("100 steps") == Cadence(steps=100)
    assert Cadence.of("10 minutes") == Cadence(seconds=600)
    assert Cadence.of("3%") == Cadence(share=0.03)
    assert Cadence.of(None) == Cadence()
    for wrong in (0, -1, "soon", "0 steps", "1.5 steps", True, "120%"):
        with pytest.raises(JobError):
            Cadence.of(wrong)


def simulated(cadence: Cadence, steps: int, each: float, blocked: float = 0.5) -> tuple[list[int], int]:
    """Steps after which it saves, by a clock of our own; and how often ranks talked."""
    now = [0.0]
    ranks, talks = Ranks(), [0]
    inner = ranks.gather
    ranks.gather = lambda word: talks.__setitem__(0, talks[0] + 1) or inner(word)  # type: ignore[method-assign]
    due, saved = Due(cadence, ranks, clock=lambda: now[0]), []
    for step in range(1, steps + 1):
        now[0] += each
        if due.now(step):
            saved.append(step)
            now[0] += blocked
            due.saved(blocked)
    return saved, talks[0]


def test_minutes() -> None:
    saved, talks = simulated(Cadence(seconds=60), 10_000, 0.1)
    assert all(590 <= b - a <= 610 for a, b in zip([0, *saved], saved, strict=False))
    assert talks < 100


def test_a_share_of_the_time() -> None:
    saved, _ = simulated(Cadence(share=0.03), 20_000, 0.1, blocked=0.5)
    assert 0.5 * len(saved) <= 0.031 * (2000 + 0.5 * len(saved))
    assert 0.5 * len(saved) >= 0.02 * 2000
