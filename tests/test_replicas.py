"""Ranks that hold the same part of a model hold the same bits; one that does not, or is slow, is named."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import meshfit
from meshfit.checkpoint import manifest
from meshfit.checkpoint.files import open_files
from meshfit.drive.restart import last_right, put_suspects_aside
from meshfit.errors import Died
from meshfit.launch.compare import ReplicaDifference, Replicas, stragglers
from meshfit.live import Digest, Live, Seen, StepTimes, read
from meshfit.plan import Plan
from meshfit.run.replicas import mixed, total
from tests.command import TORCHRUN, run
from tests.few import more

cloudpickle.register_pickle_by_value(sys.modules[__name__])
SEEN = Seen(step=9, since=0.0, ticks=1, kind=0, phase="", collectives=[], times=[], digests=[])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.uint8])
def test_every_flipped_bit_changes_the_digest(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(3, 7).to(dtype)  # not a whole number of words
    before = mixed([0, int(total(tensor))])
    assert mixed([0, int(total(tensor.t().contiguous().t()))]) == before  # whatever its strides
    flat = tensor.view(-1).view(torch.uint8)
    for byte in range(0, flat.numel(), 3):
        for bit in range(8):
            flat[byte] ^= 1 << bit
            assert mixed([0, int(total(tensor))]) != before
            flat[byte] ^= 1 << bit
    assert mixed([1, 2]) != mixed([2, 1])
    assert int(total(torch.ones(9)[1:])) == int(total(torch.ones(8)))  # from any place in memory


def told(*digests: tuple[int, int, int]) -> Seen:
    """Steps, and digests of weights and of the optimizer's state."""
    return SEEN._replace(digests=[Digest(step, 5, weights, 6, state) for step, weights, state in digests])


def test_the_replica_that_differs_is_found() -> None:
    replicas, same = Replicas(), [told((1, 7, 8)) for _ in range(3)]
    assert replicas.look(dict(enumerate(same)), 3) is None
    late = {0: told((1, 7, 8), (16, 9, 9)), 1: told((1, 7, 8), (16, 9, 9)), 2: told((1, 7, 8))}
    assert replicas.look(late, 3) is None  # not all have come there
    late[1] = told((1, 7, 8), (16, 9, 2))
    late[2] = told((1, 7, 8), (16, 9, 9))
    assert replicas.look(late, 3) == ReplicaDifference(16, 1, "optimizer state", (1,), (0, 1, 2))


def test_two_replicas_have_no_majority_and_parts_of_others_are_not_compared() -> None:
    replicas = Replicas()
    assert replicas.look({0: told((1, 7, 8)), 1: told((1, 7, 8))}, 2) is None
    found = replicas.look({0: told((2, 7, 8)), 1: told((2, 6, 8))}, 2)
    assert found is not None
    assert found.odd == ()
    apart = {rank: SEEN._replace(digests=[Digest(1, rank + 1, rank, 0, 0)]) for rank in range(4)}
    assert Replicas().look(apart, 4) is None


def test_a_second_training_in_one_process_is_not_compared_with_the_first() -> None:
    live = [Live(), Live()]

    def train(rank: int, value: int) -> Seen:
        training = live[rank].begin()
        for i, step in enumerate((1, 16, 32)):
            live[rank].digested(Digest(step, training, value, 0, 0), i)
        seen = read(bytes(live[rank].memory))
        assert seen is not None
        return seen

    replicas = Replicas()
    first = [train(rank, 7) for rank in range(2)]
    assert replicas.look(dict(enumerate(first)), 2) is None
    assert replicas.look({0: train(0, 8), 1: first[1]}, 2) is None  # rank 1 has not come to the second yet
    second = {0: train(0, 8), 1: train(1, 8)}
    assert replicas.look(second, 2) is None
    assert not replicas.never


def test_replicas_that_never_were_equal_are_no_corruption() -> None:
    replicas = Replicas()
    for step in (1, 16):
        assert replicas.look({0: told((step, 7, 8)), 1: told((step, 6, 8))}, 2) is None
    assert replicas.never == {"weights"}


def steps(**own: float) -> Seen:
    """20 of them, alike."""
    each = {"data": 0.001, "compute": 0.05, "update": 0.002, "waits": 0.1, "whole": 0.15} | own
    return SEEN._replace(times=[StepTimes(step, **each) for step in range(1, 21)])


def test_a_straggler_is_one_that_others_of_its_kind_outrun() -> None:
    seen = {0: steps(), 1: steps(), 2: steps(compute=0.15)}
    (one,) = stragglers(seen)
    assert one.rank == 2
    assert "in steps 9 to 20 it worked 153 ms a step, they 53 ms (2.9 times)" in str(one)
    assert "mostly in compute" in str(one)
    assert not stragglers(seen | {2: steps(compute=0.085)})
    assert stragglers(seen | {2: steps(compute=0.085)}, {2: one})  # not fast yet
    assert not stragglers({0: steps(), 1: steps(compute=0.15)._replace(kind=1)})  # another stage: other work
    short = seen[2]._replace(times=seen[2].times[:8])
    assert not stragglers(seen | {2: short})


class Marred(nn.Module):
    """In one rank a bit of a weight flips, once; or it is slow for some steps."""

    def __init__(self, *, flips: int = 0, slow: range = range(0), rank: int = 1):
        super().__init__()
        self.layer, self.rank, self.flips, self.slow, self.calls = nn.Linear(4, 1), rank, flips, slow, 0

    def forward(self, x):
        self.calls += self.training
        if dist.is_initialized() and dist.get_rank() == self.rank:
            if self.flips and self.calls == self.flips and not Path("flipped").exists():
                Path("flipped").touch()
                self.layer.weight.data.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 20)
            time.sleep(0.2 if self.calls in self.slow else 0.0)
        time.sleep(0.05)
        return self.layer(x)


def fit(model: nn.Module, **asked):
    torch.manual_seed(0)
    data = torch.randn(48, 4), torch.randn(48, 1)
    given = {"loss": F.mse_loss, "optimizer": lambda p: torch.optim.AdamW(p, lr=0.1), "batch_size": 12, "steps": 40}
    return meshfit.fit(model, data, devices="cpu", **{"plan": "data=3", **given, **asked})


def test_a_flipped_bit_is_traced_to_its_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Died) as caught:
        fit(Marred(flips=10), check_replicas=4)
    assert caught.value.headline in (
        f"rank 1 holds other {what} than ranks 0 and 2 after step 12" for what in ("weights", "optimizer state")
    )
    assert "were equal after step 8" in str(caught.value)


def test_and_the_run_goes_on_from_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints that may hold what is wrong are put aside, and the end is that of a run without the fault."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    marred, clean = Marred(flips=10), Marred()
    clean.load_state_dict(marred.state_dict())
    heard = []
    how = {"checkpoint": 3, "keep": 6, "check_replicas": 16, "steps": 24, "callbacks": heard.append}
    result = fit(marred, out=tmp_path / "run", **how)
    assert any("restarted from step 9: rank 1 holds other" in note for note in result.notes)
    right = fit(clean, steps=24).history
    assert [step.loss for step in result.history] == [step.loss for step in right]
    assert {step.step: step.loss for step in heard} == {step.step: step.loss for step in right}  # later ones count
    for mine, theirs in zip(marred.parameters(), clean.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_checkpoints_of_after_the_last_agreement_are_put_aside(tmp_path: Path) -> None:
    fit(Marred(), plan="data=1", out=tmp_path / "run", checkpoint=2, keep=4, steps=6)
    files = open_files(tmp_path / "run" / "checkpoints")
    before = [each.step for each in manifest.complete(files)]
    error = Died("rank 1 holds other weights")
    put_suspects_aside(files, last_right(error, Plan()))
    assert [each.step for each in manifest.complete(files)] == before == [6, 4, 2]
    error.agreed = 4
    put_suspects_aside(files, last_right(error, Plan()))
    assert [each.step for each in manifest.complete(files)] == [4, 2]
    assert len(list((tmp_path / "run" / "checkpoints").glob("suspect-*"))) == 1


def test_a_slow_rank_is_named_and_the_run_goes_on(capfd: pytest.CaptureFixture[str]) -> None:
    result = fit(Marred(slow=range(15, 40)), steps=40)
    assert result.steps == 40
    (named,) = [note for note in result.notes if "is slower than the others" in note]
    assert named.startswith("rank 1 ")
    assert int(named.partition("in steps ")[2].split()[2]) <= 15 + 20
    assert "mostly in compute" in named
    assert "meshfit: rank 1 is slower than the others" in capfd.readouterr().err


PLANS = ["data=2", "data=2 shard=2", "data=2 tensor=2", "data=2 pipeline=2", "shard=2", "data=2 precision=bf16-true"]


@pytest.mark.parametrize("plan", [more(plan) for plan in PLANS])
def test_healthy_replicas_are_equal_under_every_plan(plan: str, capfd: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 1)
    )
    if "tensor" in plan or "pipeline" in plan:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(4)), nn.Linear(4, 1))
    result = fit(model, plan=plan, check_replicas=1, steps=30, clip=1.0)
    assert result.steps == 30
    assert "not been equal" not in capfd.readouterr().err
    assert plan != "shard=2" or any("no two ranks hold the same" in note for note in result.notes)


SCRIPT = """
import sys
sys.path.insert(0, {root!r})
import torch
from tests.test_replicas import Marred, fit
torch.manual_seed(0)
how = {{"plan": "auto", "out": "run", "checkpoint": 3, "keep": 6, "check_replicas": 16, "steps": 24}}
result = fit(Marred(flips={flips}), resume={resume}, **how)
print("losses", [step.loss for step in result.history])
"""


def test_under_torchrun_the_next_start_goes_on_from_before_it(tmp_path: Path) -> None:
    """Whoever starts the ranks again says resume=True, and knows nothing of a bit that flipped."""

    def train(*how: str, flips: int = 0, resume: bool = False) -> subprocess.CompletedProcess[str]:
        asked = {"root": str(Path(__file__).parents[1]), "flips": flips, "resume": resume}
        (tmp_path / "train.py").write_text(SCRIPT.format(**asked))
        return run(*how, "train.py", folder=tmp_path, timeout=180)

    def losses(ended: subprocess.CompletedProcess[str]) -> list[float]:
        assert ended.returncode == 0, ended.stderr
        return json.loads(re.findall(r"losses (.*)", ended.stdout)[0])

    marred = train("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", flips=10)
    assert marred.returncode != 0
    assert "hold different weights after step 12" in marred.stderr
    again = losses(train(*TORCHRUN, resume=True))
    assert again == losses(train(*TORCHRUN))[-len(again) :]
    assert len(again) == 24 - 9
