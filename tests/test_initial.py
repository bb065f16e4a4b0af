"""Weights that are in files are read by each rank, its part, and not made or sent: for ``weights=`` and ``resume=``."""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from meshfit.checkpoint import save
from meshfit.checkpoint.files import Files
from meshfit.checkpoint.resume import saved
from meshfit.checkpoint.weights import load_weights
from meshfit.deferred import Deferred
from meshfit.job import Job
from meshfit.launch.world import World
from meshfit.loop import train
from meshfit.run import Run
from tests.distributed import distributed
from tests.ranked import X, Y

cloudpickle.register_pickle_by_value(sys.modules[__name__])

PLANS = ["data=2", "shard=2", "tensor=2", "pipeline=2"]


class Net(nn.Module):
    def __init__(self, out: int = 4):
        super().__init__()
        self.first, self.second = nn.Linear(8, 64), nn.Linear(64, 8)
        self.tied = nn.Linear(8, 64, bias=False)
        self.tied.weight = self.first.weight
        self.norm, self.head = nn.BatchNorm1d(64), nn.Linear(64, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.tied(self.second(F.relu(self.first(x))))))


def run_of(model: Any, plan: str, folder: Path | None = None, **asked: Any) -> Run:
    world = World(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    adamw = lambda params: torch.optim.AdamW(params, lr=1e-2)
    given = {"data": (X, Y), "loss": F.mse_loss, "optimizer": adamw, "batch_size": 8, "steps": 4, "plan": plan}
    job = Job(**{"model": model, **given, **asked}).training().settled(count=world.size, kind="cpu")
    return Run(job, world, folder=folder, same=False)


class Watched:
    """Which parameters a rank makes, and how many bytes it reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.made: list[torch.Tensor] = []
        self.read: Counter = Counter()
        values, inner = Deferred.values, Files.read_into

        def noted(deferred: Deferred, *given: Any, **how: Any) -> Any:
            for p, value in values(deferred, *given, **how):
                self.made += [p] if "besides" in how else []  # else it is a model to try plans on
                yield p, value

        def counted(files: Any, name: str, at: int, into: Any) -> int:
            self.read["bytes"] += len(into)
            return inner(files, name, at, into)

        monkeypatch.setattr(Deferred, "values", noted)
        monkeypatch.setattr(Files, "read_into", counted)


@pytest.mark.parametrize("plan", PLANS)
@distributed(world=2, timeout=120)
def test_resume_makes_no_weights_first(plan: str, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        watched = Watched(patch)
        whole = run_of(Net, plan)
        assert watched.made or dist.get_rank()
        losses = [step.loss for step in train(whole)]
        weights = whole.placed.tensors()
        first = run_of(Net, plan, steps=2)
        list(train(first))
        save(first, tmp_path / "run")
        watched.made.clear()
        again = run_of(Net, plan, resume=tmp_path / "run")
        assert again.initial is not None
        assert len(list(again.initial.read)) == len(list(Net().parameters()))
        assert not watched.made
        with saved(again, None):
            for p in again.model.parameters():
                assert p.isfinite().all()
            rest = [step.loss for step in train(again)]
    assert rest == losses[2:]
    for name, tensor in again.placed.tensors().items():
        assert torch.equal(tensor, weights[name]), name


@distributed(world=2, timeout=120)
def test_of_a_damaged_checkpoint_initial_weights_are_made(tmp_path: Path) -> None:
    first = run_of(Net, "shard=2")
    want = first.placed.tensors()
    where = Path(save(first, tmp_path / "run"))
    dist.barrier()
    if dist.get_rank() == 0:
        content = bytearray((where / "rank1.safetensors").read_bytes())
        content[-9] ^= 1
        content[len(content) // 3] ^= 1
        (where / "rank1.safetensors").write_bytes(content)
    dist.barrier()
    again = run_of(Net, "shard=2", resume=tmp_path / "run")
    assert again.initial is not None
    assert again.initial.checkpoint is None
    for name, tensor in again.placed.tensors().items():
        assert torch.equal(tensor, want[name]), name


@pytest.mark.parametrize("plan", PLANS)
@distributed(world=2, timeout=120)
def test_each_rank_reads_its_part(plan: str, tmp_path: Path) -> None:
    torch.manual_seed(9)
    pretrained = Net(3)
    from safetensors.torch import save_model

    path = tmp_path / f"{dist.get_rank()}.safetensors"
    save_model(pretrained, str(path))

    def build() -> nn.Module:
        model = Net()
        load_weights(model, path, partial=True)  # another head
        return model

    torch.manual_seed(0)
    want = build()
    with pytest.MonkeyPatch.context() as patch:
        watched = Watched(patch)
        run = run_of(build, plan)
        assert len(watched.made) == (2 if dist.get_rank() == 0 else 0)
        if plan == "shard=2" and dist.get_rank() == 1:  # the first reads all of a small model, to try things on
            assert watched.read["bytes"] < 0.75 * path.stat().st_size
    got = run.placed.tensors()
    for name, tensor in want.state_dict().items():
        assert torch.equal(got[name], tensor), name


def test_random_numbers_after_the_last_that_counts_are_not_drawn(tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    torch.save({f"{i}.{name}": t for i in (1, 2) for name, t in nn.Linear(4, 4).state_dict().items()}, path)

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        load_weights(model, path, partial=True)
        return model

    deferred = Deferred(build)
    assert set(deferred.sources) == set(deferred.model[1:].parameters())
    program = deferred._program([deferred._recorder.view(p).storage for p in deferred.model[0].parameters()])
    assert sum(op.generator is not None for op, _ in program.ops) == 2
    assert {p for p, _ in deferred.values(besides=deferred.sources)} == set(deferred.model[0].parameters())


class Synchronised(nn.Module):
    """Adds the squares of its inputs over all ranks by itself, where it was built beside others."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.alone = nn.Linear(8, 4), not dist.is_initialized()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.detach().square().mean()
        if not self.alone:
            dist.all_reduce(scale)
        return self.layer(x) / (1 + 0 * scale)


@pytest.mark.parametrize("plan", ["data=2", "shard=2"])
@distributed(world=2, timeout=120)
def test_a_function_builds_what_it_builds_for_one_device(plan: str) -> None:
    """Libraries look at whether others are there: vector-quantize-pytorch builds sums over all ranks in."""
    run = run_of(Synchronised, plan)
    assert sum(1 for _ in train(run)) == 4
    assert next(iter(run.model.modules())).alone
    assert dist.is_initialized()
    run.close()
