"""A run that hangs ends with a verdict: which rank stands where, who waits for whom, what to do."""

import itertools
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import meshfit
from meshfit.errors import DataError, Died, JobError
from meshfit.launch.heartbeat import Beat, step_under_way
from meshfit.launch.stalls import Stall
from meshfit.launch.verdict import mismatch, verdict
from meshfit.live import SIZE, WHOLE, CalledCollective, Digest, Live, Seen, StepTimes, history, read
from tests.command import run
from tests.few import more

cloudpickle.register_pickle_by_value(sys.modules[__name__])
BEAT = Beat(number=1, rank=0, pid=7, host="n", state="waits", still=9.0, step=9, slowest=1.0, stack="")
SEEN = Seen(step=9, since=0.0, ticks=1, kind=0, phase="exchange", collectives=[], times=[], digests=[])


def test_what_a_rank_writes_is_read() -> None:
    live = Live()
    memory = memoryview(bytearray(SIZE))
    live.step(3)
    live.move(memory)  # what was written before comes along
    live.kind(2)
    assert live.phase("forward") == ""
    for i in range(40):
        live.collective("0", "0-3", "all_reduce", f"float32 [{i}]")
    live.timed(StepTimes(7, 0.5, 1.0, 0.25, 0.125, 2.0))
    live.digested(Digest(64, 1, -(2**60), 2, 3), 9)
    seen = read(bytes(memory))
    assert seen is not None
    assert (seen.step, seen.kind, seen.phase) == (3, 2, "forward")
    assert [one.number for one in seen.collectives] == list(range(25, 41))
    assert str(seen.collectives[-1]) == "all_reduce number 40 of float32 [39] over ranks 0-3"
    assert seen.times == [StepTimes(7, 0.5, 1.0, 0.25, 0.125, 2.0)]
    assert seen.digests == [Digest(64, 1, -(2**60), 2, 3)]
    for i in range(30):
        live.digested(Digest(i + 1, 1, 2, 3, 4), i)
    seen = read(bytes(memory))
    assert seen is not None
    assert [digest.step for digest in seen.digests] == [1, *range(24, 31)]  # the first stays
    assert read(b"") is None


def called(*of: str) -> list[CalledCollective]:
    """By a rank, in one group, one a step."""
    live = Live()
    live.move(memoryview(bytearray(WHOLE)))
    for step, each in enumerate(of, 1):
        live.step(step)
        op, _, what = each.partition(" ")
        live.collective("0", "0-2", op, what)
    return history(bytes(live.memory))


def calls(*of: str) -> Seen:
    """A rank that has called them."""
    return SEEN._replace(collectives=called(*of))


def test_a_collective_that_is_another_on_one_rank_is_found() -> None:
    same = called("all_reduce float32 [4]", "all_reduce float32 [8]")
    assert mismatch({0: same, 1: same, 2: called("all_reduce float32 [4]")}) is None  # it is behind, no more
    other = called("all_reduce float32 [4]", "all_gather float32 [8]")
    assert mismatch({0: same, 1: other, 2: same}) == (
        "ranks call different collectives: ranks 0 and 2: all_reduce of float32 [8]; rank 1: all_gather of float32 [8]",
        "number 2 over ranks 0-2",
        2,
    )
    assert mismatch({0: same, 1: called("all_reduce float32 [5]")})
    assert not mismatch({0: called("all_to_all int64 [4]"), 1: called("all_to_all int64 [6]")})  # as they may


def test_a_collective_that_was_another_long_ago_is_found() -> None:
    """As NCCL may go on with what came of it, and nobody looks at the moment."""
    whole = ["all_reduce float32 [4]"] * 500
    same, other = called(*whole), called(*whole[:30], "broadcast float32 [4]", *whole[31:])
    found = mismatch({0: same, 1: other})
    assert found is not None
    assert (found.headline.partition(": ")[2], found.step) == (
        "rank 0: all_reduce of float32 [4]; rank 1: broadcast of float32 [4]",
        31,
    )
    late = mismatch({0: same[-16:], 1: other[-16:]})  # as between hosts, which send their last ones alone
    assert late is not None
    assert late.headline == "ranks 0 and 1 have called different collectives"
    assert late.where.startswith("before number 485 over ranks 0-2")
    assert late.step == 0
    shifted = mismatch({0: same[-16:], 1: called(*whole[:-1], "broadcast float32 [4]")[-16:]})
    assert shifted is not None
    assert shifted.step == 500  # up to its last they were alike
    later = mismatch({0: same[-16:], 1: [*other[-16:-1], other[-1]._replace(op="broadcast")][-1:]})
    assert later is not None
    assert later.where.endswith("for rank 0: all_reduce of float32 [4]; rank 1: broadcast of float32 [4]")
    assert later.step == 0  # it need not be the first


def test_a_collective_of_the_same_kind_in_another_step_is_another() -> None:
    """One too many, of which no later one differs but in the step that it is called in."""
    same = called(*["all_reduce float32 [4]"] * 4)
    more = [*same[:2], *(one._replace(step=one.step - 1, chain=one.chain + 1) for one in same[2:])]
    found = mismatch({0: same, 1: more})
    assert found is not None
    assert found.headline.endswith(
        ": rank 0: all_reduce of float32 [4] in step 3; rank 1: all_reduce of float32 [4] in step 2"
    )
    assert (found.where, found.step) == ("number 3 over ranks 0-2", 2)


def test_a_collective_that_others_never_came_to_is_found_at_the_end() -> None:
    ahead, behind = called(*["all_reduce float32 [4]"] * 3), called(*["all_reduce float32 [4]"] * 2)
    assert mismatch({0: ahead, 1: behind}) is None
    assert mismatch({0: ahead, 1: behind}, ended=True) == (
        "rank 0 called more collectives than rank 1",
        "number 3 over ranks 0-2: all_reduce of float32 [4], to which rank 1 never came",
        3,
    )


def test_those_that_wait_are_told_with_what_they_wait_for() -> None:
    stall = Stall(1, "busy", 9.0, Beat(**{**vars_of(BEAT), "rank": 1, "state": "busy", "spot": "a.py, line 3, in f"}))
    ahead, behind = calls("all_reduce float32 [4]", "all_reduce float32 [8]"), calls("all_reduce float32 [4]")
    heard = dict.fromkeys((0, 2), (BEAT, 0.1)) | {1: (stall.beat, 0.1)}
    said = verdict([stall], heard, {0: ahead, 1: behind._replace(phase="forward"), 2: ahead})
    assert said[0] == "rank 1 hangs in step 9"
    assert "it stands in forward, at a.py, line 3, in f" in said[1]
    assert said[2] == (
        "ranks 0 and 2 wait in exchange, at all_reduce number 2 of float32 [8] over ranks 0-2, "
        "to which rank 1 has not come"
    )


def vars_of(beat: Beat) -> dict:
    return {name: getattr(beat, name) for name in beat.__slots__}


class Odd(nn.Module):
    """Does something else, once, on one of the ranks."""

    def __init__(self, how, at: int = 6, rank: int = 1):
        super().__init__()
        self.layer, self.how, self.at, self.rank, self.calls = nn.Linear(4, 1), how, at, rank, 0

    def forward(self, x):
        self.calls += self.training
        if step_under_way() == self.at and dist.is_initialized() and dist.get_rank() == self.rank:
            self.how()
        return self.layer(x)


class HangsInEvaluation(Odd):
    """In the second one, on one of the ranks."""

    def forward(self, x):
        self.calls += self.training
        if not self.training and dist.is_initialized() and dist.get_rank() == self.rank and self.calls >= self.at:
            self.how()
        return self.layer(x)


class SlowToEvaluate(Odd):
    """Of the batches of an evaluation none takes long, all together do."""

    def forward(self, x):
        if not self.training and self.calls >= 5:
            time.sleep(0.9)
        return super().forward(x)


def stop_myself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def loop_for_ever() -> None:
    while True:
        torch.ones(4).sum()


def sleep_for_ever() -> None:
    time.sleep(10**6)


def keep_the_lock() -> None:
    sum(itertools.repeat(0, 10**11))  # C code that does not let other threads run


def call_another() -> None:
    dist.broadcast(torch.ones(3), 0)


def give_another_shape() -> None:
    dist.all_reduce(torch.ones(7))


def fit(how, *, plan: str = "data=2", data=None, **asked):
    data = (torch.randn(32, 4), torch.randn(32, 1)) if data is None else data
    given = {"loss": F.mse_loss, "optimizer": lambda p: torch.optim.SGD(p, lr=0.1), "batch_size": 8, "steps": 12}
    model = nn.Sequential(nn.Linear(4, 4), how if isinstance(how, nn.Module) else Odd(how))
    return meshfit.fit(model, data, devices="cpu", plan=plan, **{"hang_timeout": "4 s", **given, **asked})


HANGS = "rank 1 hangs in step 6"
DIFFERENT = "ranks call different collectives: rank 0: all_reduce of float32 [73]; rank 1: "


@pytest.mark.parametrize(
    ("how", "headline", "says"),
    [
        (stop_myself, HANGS, "it is stopped (by SIGSTOP, or a debugger)"),
        (loop_for_ever, HANGS, "in loop_for_ever of 1 (Odd)"),
        more(keep_the_lock, HANGS, "in keep_the_lock"),
        (call_another, f"{DIFFERENT}broadcast of float32 [3]", "rank 1 waits in forward, at broadcast number"),
        (give_another_shape, f"{DIFFERENT}all_reduce of float32 [7]", "look for an if by rank"),
    ],
)
def test_a_run_that_hangs_ends_with_a_verdict(how, headline: str, says: str) -> None:
    began = time.monotonic()
    with pytest.raises(Died) as caught:
        fit(how)
    assert caught.value.headline == headline
    assert says in str(caught.value)
    assert caught.value.step == 6
    assert time.monotonic() - began < 400  # not the 600 s that a collective waits
    if headline == HANGS:
        assert "it stands in forward" in str(caught.value)
        assert "rank 0 waits in exchange, at all_reduce number" in str(caught.value)
        assert "to which rank 1 has not come" in str(caught.value)


class SlowAndOdd(Odd):
    """It takes its time in each step, and is odd once, in whichever run comes to it first."""

    def __init__(self, path: Path, how):
        super().__init__(lambda: path.exists() or (path.touch(), how()))

    def forward(self, x):
        time.sleep(0.1)
        return super().forward(x)


def test_a_collective_too_many_leaves_nothing_behind(tmp_path: Path) -> None:
    """It is one that the others call as well, a little later. So nothing breaks, but steps get gradients of others."""
    results = []
    for how in (lambda: dist.all_reduce(torch.ones(73)), lambda: None):
        torch.manual_seed(0)
        data, odd = (torch.randn(32, 4), torch.randn(32, 1)), SlowAndOdd(tmp_path / f"done-{len(results)}", how)
        folder = tmp_path / f"run-{len(results)}"
        results.append(fit(odd, data=data, out=folder, checkpoint=4, keep=9, steps=30))
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == list(range(1, 31))
        assert [line["loss"] for line in lines] == [step.loss for step in results[-1].history]
    mixed_up, clean = results
    (said,) = [note for note in mixed_up.notes if "restarted" in note]
    assert said.startswith("restarted from step 4: ")  # ranks wait for each other, or are found to call different ones
    assert [step.loss for step in mixed_up.history] == [step.loss for step in clean.history]
    for mine, theirs in zip(mixed_up.model.parameters(), clean.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def sum_beside_my_mate() -> None:
    """In the group of the ranks that are one worker."""
    from torch.distributed.distributed_c10d import _world

    mates = [group for group in _world.pg_map if dist.get_world_size(group) == 2][-1]
    dist.all_reduce(torch.ones(4), group=mates)


def test_within_a_worker_of_servers_too(tmp_path: Path) -> None:
    odd = SlowAndOdd(tmp_path / "done", sum_beside_my_mate)
    result = fit(odd, plan="server=1 data=2 shard=2", out=tmp_path / "run", checkpoint=4, keep=9, steps=30)
    (said,) = [note for note in result.notes if "restarted" in note]
    how = "wait for each other in step 6|have called different collectives"
    assert re.fullmatch(f"restarted from step 4: ranks (0 and 1|2 and 3) ({how})", said)
    assert result.steps == 30


VALID = torch.randn(32, 4), torch.randn(32, 1)  # four batches


@pytest.mark.parametrize("how", [loop_for_ever, more(sleep_for_ever)])
def test_a_hang_in_an_evaluation_is_found_like_one_in_a_step(how) -> None:
    with pytest.raises(Died) as caught:
        fit(HangsInEvaluation(how), valid=VALID, valid_every=4)
    assert caught.value.headline == "rank 1 hangs in step 8"
    assert "it stands in evaluate" in str(caught.value)


def test_slow_but_healthy_is_left_alone() -> None:
    """A first step, an evaluation and a callback longer than ``hang_timeout``. On a busy machine any step may be so
    by chance: not in each of three runs."""
    first = SlowToEvaluate(lambda: time.sleep(3.0), at=1)
    held = [lambda step: time.sleep(3.0 if step.step == 4 else 0.0)]
    for left in (2, 1, 0):
        try:
            result = fit(first, hang_timeout="2 s", steps=5, valid=VALID, valid_every=5, each_step=held)
        except Died:
            assert left, "in each of three runs"
        else:
            assert result.steps == 5
            break


def test_a_hung_worker_of_a_server_is_ended_and_the_others_go_on(capfd: pytest.CaptureFixture[str]) -> None:
    result = fit(stop_myself, plan="server=1 data=2", steps=30, valid=VALID, valid_every=30)
    assert result.steps == 30
    told = capfd.readouterr().err
    assert "rank 1 hangs" in told
    assert "it is ended, and the others go on" in told
    assert any("rank 1 hangs" in note for note in result.notes)


def test_an_evaluation_may_take_longer_than_workers_of_servers_wait() -> None:
    """The servers hear that it gets on."""
    model = SlowToEvaluate(lambda: None)
    result = fit(model, plan="server=1 data=2", steps=12, timeout=2, hang_timeout="60 s", valid=VALID, valid_every=6)
    assert result.steps == 12
    assert not any("was lost" in note for note in result.notes)


@pytest.mark.more
def test_a_leader_that_hangs_in_an_evaluation_is_ended_and_another_evaluates() -> None:
    result = fit(HangsInEvaluation(loop_for_ever, rank=0), plan="server=1 data=2", valid=VALID, valid_every=4)
    assert result.steps == 12
    assert any("rank 0 hangs in step 8" in note for note in result.notes)
    assert [step.step for step in result.history if step.valid] == [4, 8, 12]


TORCHRUN = """
import sys
sys.path.insert(0, {root!r})
from tests.test_hangs import fit, stop_myself
fit(stop_myself, plan="auto")
"""


def test_under_torchrun_the_first_rank_ends_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TORCHRUN.format(root=str(Path(__file__).parents[1])))
    ended = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script, timeout=180)
    assert ended.returncode != 0
    assert "meshfit: rank 1 hangs" in ended.stderr
    assert "to which rank 1 has not come" in ended.stderr


def test_what_is_no_time_is_refused() -> None:
    with pytest.raises(JobError, match="hang_timeout='soon' is not"):
        fit(stop_myself, hang_timeout="soon")


class Samples(Dataset):
    """A process that reads one of them is stopped, or killed."""

    def __init__(self, number: int):
        self.number = number

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int):
        if i == 40:
            os.kill(os.getpid(), self.number)
        return torch.full((4,), i / 64), torch.ones(1)


@pytest.mark.parametrize(
    ("number", "says"),
    [(signal.SIGSTOP, "is stopped, and has not answered for"), more(signal.SIGKILL, "ended with code -9")],
)
def test_a_reader_of_data_that_is_stopped_or_killed_is_named(number: int, says: str) -> None:
    with pytest.raises(DataError) as caught:
        fit(nn.Linear(4, 1), data=Samples(number), shuffle=False, workers="1 processes")
    assert caught.value.headline.startswith("data worker 0 (process ")
    assert says in caught.value.headline
    assert "it was at samples 40" in str(caught.value)
