"""Ranks that die, raise or leave are started again from the newest checkpoint. Real processes, really killed."""

import contextlib
import functools
import json
import os
import re
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from meshfit.checkpoint import CheckpointError
from meshfit.checkpoint.manifest import Manifest
from meshfit.drive import feed
from meshfit.drive.restart import Tries, last_right
from meshfit.errors import Died, MeshfitError, PlanError, RankError
from meshfit.events import current
from meshfit.launch.devices import find
from meshfit.launch.heartbeat import step_under_way
from meshfit.plan import Plan
from meshfit.plan_devices import on_fewer
from meshfit.step import Step
from tests.command import Forked
from tests.few import more
from tests.test_resume import fit, weights


def ranks() -> list[psutil.Process]:
    """Of this process, in order: what its template has forked."""
    below = psutil.Process().children(recursive=True)
    return sorted((each for each in below if each.ppid() != os.getpid()), key=lambda each: each.create_time())


def wait_for_checkpoint(run: Path, step: int) -> None:
    """Saves end in a thread: until that of ``step`` has."""
    until = time.monotonic() + 60
    while not list(run.glob(f"checkpoints/*-step-{step}/manifest.json")) and time.monotonic() < until:
        time.sleep(0.005)


def killing(run: Path, *faults: tuple[int, int, int]) -> Callable[[Step], None]:
    """After each step, rank; once, when the checkpoint of a step is there."""
    left = list(faults)

    def kill(step: Step) -> None:
        if left and step.step == left[0][0]:
            _, rank, saved = left.pop(0)
            if saved:
                wait_for_checkpoint(run, saved)
            ranks()[rank].kill()

    return kill


def failing(fail: Callable[[], Any], run: Path | None = None, *, once: bool = False) -> Callable[..., Any]:
    """A loss in which rank 1 fails in step 8, once or each time, when there is a checkpoint of step 5 in ``run``."""
    failed = None if run is None else run.with_name("failed")

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        second = dist.is_initialized() and dist.get_rank() == 1
        if second and step_under_way() == 8 and not (once and failed is not None and failed.exists()):
            if run is not None and failed is not None:
                wait_for_checkpoint(run, 5)
                failed.touch()
            fail()
        return F.mse_loss(outputs, targets)

    return loss


def kill_me() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raises() -> None:
    raise ValueError("the true cause")


@pytest.mark.parametrize(
    "plan",
    [
        "data=2",
        more("shard=2"),
        more("tensor=2"),
        more("pipeline=2 microbatches=2"),
    ],
)
def test_killed_ranks_are_started_again_and_nothing_is_lost(
    plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[int] = []
    run = fit(
        tmp_path / "run",
        steps=30,
        plan=plan,
        checkpoint=5,
        each_step=[lambda step: seen.append(step.step), killing(tmp_path / "run", (3, 1, 0), (12, 0, 10), (23, 1, 20))],
    )
    never = fit(steps=30, plan=plan)
    assert [step.loss for step in run.history] == [step.loss for step in never.history]
    assert [step.samples for step in run.history] == [step.samples for step in never.history]
    for name, tensor in weights(never).items():
        assert torch.equal(weights(run)[name], tensor), name
    assert seen == list(range(1, 31))  # each once, whatever was computed again
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == seen
    assert [line["seconds"] for line in lines] == sorted(line["seconds"] for line in lines)
    killed = "rank {} was killed by signal 9 (SIGKILL)"
    noted = [note for note in run.notes if note.startswith("restarted")]
    assert noted == [
        f"restarted from {place}: {killed.format(rank)}"
        for place, rank in (("the beginning", 1), ("step 10", 0), ("step 20", 1))
    ]
    assert "meshfit: started again from step 10" in capsys.readouterr().err
    assert {path.name for path in (tmp_path / "run").glob("events*")} == {"events", "events-1", "events-2", "events-3"}


def test_the_template_of_the_ranks_may_be_killed_too(tmp_path: Path) -> None:
    def kill(step: Step) -> None:
        if step.step == 8 and not killed:
            wait_for_checkpoint(tmp_path / "run", 5)
            killed.append(ranks()[0].parent())
            killed[0].kill()

    killed: list[Any] = []
    run = fit(tmp_path / "run", steps=12, plan="data=2", checkpoint=5, each_step=[kill])
    wanted = r"restarted from step \d+: the process that ranks are forked from has ended"  # ranks go on while it ends
    assert any(re.fullmatch(wanted, note) for note in run.notes), run.notes
    assert [step.step for step in run.history] == list(range(1, 13))


def test_what_is_raised_once_is_survived(tmp_path: Path) -> None:
    loss = failing(raises, tmp_path / "run", once=True)
    run = fit(tmp_path / "run", steps=12, plan="data=2", checkpoint=5, loss=loss)
    assert "restarted from step 5: rank 1 raised ValueError: the true cause" in run.notes
    never = fit(steps=12, plan="data=2")
    for name, tensor in weights(never).items():
        assert torch.equal(weights(run)[name], tensor), name


def test_what_is_raised_again_in_the_same_step_ends_it(tmp_path: Path) -> None:
    seen: list[int] = []
    loss = failing(raises, tmp_path / "run")
    with pytest.raises(RankError) as caught:
        fit(tmp_path / "run", steps=12, plan="data=2", checkpoint=5, loss=loss, each_step=lambda s: seen.append(s.step))
    error = caught.value
    assert error.headline == "rank 1 raised ValueError: the true cause"
    assert error.facts == ("in step 8", "started again from step 5, it failed again in step 8")
    assert "in raises" in error.trace
    assert seen == list(range(1, 8))


@pytest.mark.parametrize("asked", [{"checkpoint": 100}, {"checkpoint": 5, "restarts": 0}, {}])
def test_what_is_raised_without_a_checkpoint_ends_it_as_ever(asked: dict[str, Any], tmp_path: Path) -> None:
    loss = failing(raises, tmp_path / "run" if asked.get("checkpoint") == 5 else None)
    with pytest.raises(RankError, match="rank 1 raised ValueError: the true cause") as caught:
        fit(tmp_path / "run", steps=12, plan="data=2", loss=loss, **asked)
    assert caught.value.facts == ("in step 8",)


def test_deaths_without_progress_end_it_and_the_first_cause_comes_first(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    starts.mkdir()

    def die() -> None:
        n = len(list(starts.iterdir()))
        (starts / str(n)).touch()
        sys.exit(0) if n == 0 else kill_me()

    with pytest.raises(RankError) as caught:
        fit(tmp_path / "run", steps=12, plan="data=2", checkpoint=5, loss=failing(die, tmp_path / "run"), restarts=2)
    assert caught.value.headline == "rank 1 left at step 8 with exit code 0 before its work was done"
    assert caught.value.facts[-3] == "started again 2 times from step 5, it came to no newer checkpoint"
    assert all("then: rank 1 was killed by signal 9 (SIGKILL)" in fact for fact in caught.value.facts[-2:])
    assert len(list(starts.iterdir())) == 3


def test_a_rank_that_is_out_of_memory_is_named(tmp_path: Path) -> None:
    def hunger() -> None:
        used = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))
        torch.ones(2**30)

    loss = failing(hunger, tmp_path / "run", once=True)
    run = fit(tmp_path / "run", steps=12, plan="data=2", checkpoint=5, loss=loss)
    assert any("restarted from step 5: rank 1 ran out of memory" in note for note in run.notes), run.notes


# Decided without a process


def newest(step: int) -> Manifest:
    return Manifest(None, f"{step // 10:04}-step-{step}", {"step": step})  # type: ignore[arg-type]


def raised(step: int) -> RankError:
    error = RankError("rank 1 raised ValueError: the true cause")
    error.step = step
    return error


def test_progress_forgives_what_was_before() -> None:
    tries = Tries(2)
    for step in (10, 10, 20, 20, 30, 30):
        tries.failed(Died("killed"), newest(step))
    with pytest.raises(Died, match="started again 2 times from step 30"):
        tries.failed(Died("killed"), newest(30))


def test_raised_in_another_step_is_another_failure() -> None:
    tries = Tries(3)
    tries.failed(raised(12), newest(10))
    tries.failed(raised(13), newest(10))
    with pytest.raises(RankError, match="failed again in step 12"):
        tries.failed(raised(12), newest(10))
    tries = Tries(3)
    tries.failed(raised(21), newest(10))  # the save of step 20 had not ended
    with pytest.raises(RankError, match="failed again in step 21"):
        tries.failed(raised(21), newest(20))


@pytest.mark.parametrize("error", [CheckpointError("the disk is full"), MeshfitError("no checkpoint yet")])
def test_refusals_are_final(error: MeshfitError) -> None:
    with pytest.raises(type(error)):
        Tries(3).failed(error, newest(10) if isinstance(error, CheckpointError) else None)


# Devices that go and come


def test_steps_of_a_server_that_missed_a_worker_are_told_again() -> None:
    error = RankError("rank 0 raised ValueError")
    synchronous, apart = Plan(server=1, data=2), Plan(server=1, data=2, staleness=2)
    assert [last_right(error, plan) for plan in (synchronous, apart)] == [None, None]  # not in a step
    error.step = 7
    assert [last_right(error, plan) for plan in (synchronous, apart, Plan(data=2))] == [6, None, None]
    died = Died("replicas differ")
    died.step, died.agreed = 9, 3
    assert [last_right(died, plan) for plan in (synchronous, apart, Plan(data=2))] == [3, 3, 3]


def test_fewer_devices_change_data_and_shard_alone() -> None:
    fitted = {
        ("data=8", 5): "data=5",
        ("shard=8 zero=2", 3): "shard=3 zero=2",
        ("shard=4", 1): "data=1",
        ("data=2 shard=4", 7): "shard=4",
        ("data=2 shard=4", 3): "shard=3",
        ("data=4 tensor=2", 7): "data=3 tensor=2",
        ("pipeline=2", 8): "pipeline=2",
    }
    for (plan, devices), want in fitted.items():
        assert str(on_fewer(Plan.parse(plan), devices)) == want
    assert str(on_fewer(Plan.parse("data=8 microbatches=2"), 8, batch=9)) == "data=4 microbatches=2"
    with pytest.raises(PlanError, match="3 devices are left, and data=2 x tensor=4 needs 4"):
        on_fewer(Plan.parse("data=2 tensor=4"), 3)


def test_a_range_of_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MESHFIT_DEVICES", str(tmp_path / "count"))
    assert find("cpu:2..8").count == 8  # nobody says how many
    (tmp_path / "count").write_text("5\n")
    assert find("cpu:2..8").count == 5
    monkeypatch.setenv("MESHFIT_DEVICES", "1")
    with pytest.raises(PlanError, match=r"devices='cpu:2\.\.8' but there are 1 here"):
        find("cpu:2..8")
    with pytest.raises(PlanError, match="no range"):
        find("4..2")
    with pytest.raises(PlanError, match="server=1 does not go with a range of devices"):
        fit(plan="server=1 data=2", devices="cpu:1..3")


def test_devices_go_and_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three, then two, then three: each sample as on one device, the batch the one of the first start."""
    count = tmp_path / "count"
    count.write_text("3")
    monkeypatch.setenv("MESHFIT_DEVICES", str(count))

    def change(step: Step) -> None:
        if step.step == 12 and count.read_text() == "3":
            wait_for_checkpoint(tmp_path / "run", 10)
            count.write_text("2")
            ranks()[1].kill()
        elif step.step == 20:
            count.write_text("3")
        time.sleep(0.05)

    asked: dict[str, Any] = {"plan": "auto", "devices": "cpu:2..4", "batch_size": "2/device", "checkpoint": 5}
    run = fit(tmp_path / "run", steps=80, each_step=[change], **asked)
    alone = fit(steps=80)  # of six samples a batch
    assert run.batch_size == 6
    assert [step.step for step in run.history] == list(range(1, 81))
    assert [step.samples for step in run.history] == [step.samples for step in alone.history]
    assert [step.loss for step in run.history] == pytest.approx([step.loss for step in alone.history], rel=1e-4)
    noted = [note for note in run.notes if note.startswith("restarted")]
    assert noted[0] == "restarted from step 10 as data=2, after data=3: rank 1 was killed by signal 9 (SIGKILL)"
    assert "as data=3, after data=2: devices that came back" in noted[1]
    assert str(run.plan) == "data=3"
    count.write_text("2")
    resumed = fit(tmp_path / "run", steps=82, resume=True, **asked)
    assert (str(resumed.plan), resumed.batch_size) == ("data=2", 6)


def test_no_step_before_a_checkpoint_is_missing(tmp_path: Path) -> None:
    """Ranks report a few steps at a time; those that a checkpoint holds nobody would report again."""
    inner = failing(kill_me, tmp_path / "run", once=True)

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        feed.FEED_SECONDS = 1000.0  # in the rank
        return inner(outputs, targets)

    run = fit(tmp_path / "run", steps=12, plan="data=2", checkpoint=5, loss=loss)
    assert any(note.startswith("restarted from step 5") for note in run.notes), run.notes
    assert [step.step for step in run.history] == list(range(1, 13))


def test_no_step_of_a_worker_that_fails_is_missing(tmp_path: Path) -> None:
    """Asynchronous workers report their own steps. Of one that raised, those that a checkpoint of another holds."""
    mark = tmp_path / "mark"

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        feed.FEED_SECONDS = 1000.0  # in the rank
        if current().rank == 1 and step_under_way() > 12 and torch.is_grad_enabled() and not mark.exists():
            until = time.monotonic() + 60
            while not list(tmp_path.glob("run/checkpoints/*-step-5/manifest.json")) and time.monotonic() < until:
                time.sleep(0.005)
            mark.touch()
            raise ValueError("once")
        return F.mse_loss(outputs, targets)

    asked: dict[str, Any] = {"steps": 40, "plan": "server=1 data=2 staleness=2"}
    run, whole = fit(tmp_path / "run", loss=loss, checkpoint=5, **asked), fit(**asked)
    assert any(note.startswith("restarted from step ") for note in run.notes), run.notes
    assert [step.step for step in run.history] == list(range(1, 41))
    seen = [step.samples for step in run.history]
    assert sorted(set(seen)) == seen
    assert seen[-1] == whole.history[-1].samples
    assert all(step.loss > 0 and step.grad_norm > 0 and step.taken for step in run.history)


def test_a_device_on_which_ranks_die_again_is_left_out(tmp_path: Path) -> None:
    def die() -> None:
        if dist.get_world_size() == 2:
            kill_me()

    asked: dict[str, Any] = {"plan": "shard=2", "devices": "cpu:1..2", "checkpoint": 5}
    run = fit(tmp_path / "run", steps=12, loss=failing(die, tmp_path / "run"), **asked)
    killed = "rank 1 was killed by signal 9 (SIGKILL)"
    noted = [note for note in run.notes if note.startswith("restarted")]
    assert noted == [f"restarted from step 5: {killed}", f"restarted from step 5 as data=1, after shard=2: {killed}"]
    alone = fit(steps=12)
    assert [step.loss for step in run.history] == pytest.approx([step.loss for step in alone.history], rel=1e-4)


def test_one_device_in_a_rank_of_its_own(tmp_path: Path) -> None:
    """It is the last of its range, and tried again though a rank has died on it twice in a row."""
    failed = tmp_path / "failed"
    failed.mkdir()

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if step_under_way() == 8 and len(deaths := list(failed.iterdir())) < 2:
            wait_for_checkpoint(tmp_path / "run", 5)
            (failed / str(len(deaths))).touch()
            kill_me()
        return F.mse_loss(outputs, targets)

    run = fit(tmp_path / "run", steps=12, devices="cpu:1..1", checkpoint=5, loss=loss)
    killed = "restarted from step 5: rank 0 was killed by signal 9 (SIGKILL)"
    assert [note for note in run.notes if note.startswith("restarted")] == [killed, killed]
    alone = fit(steps=12, devices="cpu:1..1")
    for name, tensor in weights(alone).items():
        assert torch.equal(weights(run)[name], tensor), name


# The caller dies

TRAINING = """
import sys
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.test_resume import fit
fit(Path({out!r}), steps=100_000, plan="data=2", checkpoint=20, workers="1 processes")
"""


def test_nothing_of_a_run_outlives_its_caller(tmp_path: Path) -> None:
    """The template, the ranks, their readers of data: five processes."""
    out, script = tmp_path / "run", tmp_path / "train.py"
    script.write_text(TRAINING.format(root=str(Path(__file__).parents[1]), out=str(out)))
    caller = Forked(script)
    wait_for_checkpoint(out, 20)
    below = psutil.Process(caller.pid).children(recursive=True)
    caller.kill()
    caller.communicate()
    _, alive = psutil.wait_procs(below, timeout=15)  # 5 s on a machine that is not busy
    assert len(below) >= 5, below
    assert not [each for each in alive if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


class Leaves(torch.optim.SGD):
    """In its 20th step, once."""

    def __init__(self, params: Any, mark: Path):
        super().__init__(params, lr=1e-2)
        self.mark, self.steps = mark, 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        if self.steps == 20 and not self.mark.exists():
            self.mark.touch()
            sys.exit(0)
        return super().step(closure)


@pytest.mark.parametrize("plan", ["server=1 data=2", "server=1 data=2 staleness=2"])
def test_an_optimizer_that_leaves_in_a_server_loses_no_step(plan: str, tmp_path: Path) -> None:
    """It ended the thread of one worker, whose gradient was never applied."""
    asked: dict[str, Any] = {"steps": 40, "plan": plan, "checkpoint": 5, "scheduler": None}
    run = fit(tmp_path / "run", optimizer=lambda params: Leaves(params, tmp_path / "mark"), **asked)
    whole = fit(steps=40, optimizer=lambda params: Leaves(params, tmp_path), plan=plan, scheduler=None)
    assert len([note for note in run.notes if note.startswith("restarted from step ")]) == 1, run.notes
    told = [step.step for step in run.history]
    assert told == sorted(set(told))
    assert told[-1] == 40
    assert run.history[-1].samples == whole.history[-1].samples


def leave_slowly(run: Path) -> None:
    """The server hears of it before the caller does: when the others have saved step 10."""
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(number))) as end:
            if "server" in str(end.getpeername()):
                end.shutdown(socket.SHUT_RDWR)
    wait_for_checkpoint(run, 10)
    sys.exit(0)


def test_steps_without_a_worker_that_left_do_not_count(tmp_path: Path) -> None:
    """The others stepped on, and saved, before it was known that it had not died of something that they may survive."""

    def loss(mark: Path, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        time.sleep(0.05)
        if step_under_way() == 8 and torch.is_grad_enabled() and current().rank == 1 and not mark.exists():
            mark.touch()
            leave_slowly(tmp_path / "run")
        return F.mse_loss(outputs, targets)

    asked: dict[str, Any] = {"steps": 40, "plan": "server=1 data=2", "ema": None}
    run = fit(tmp_path / "run", loss=functools.partial(loss, tmp_path / "mark"), checkpoint=5, keep=9, **asked)
    whole = fit(loss=functools.partial(loss, tmp_path), **asked)
    (said,) = [note for note in run.notes if note.startswith("restarted from step ")]
    assert re.fullmatch(r"restarted from step 5: rank 1 left at step 8 with exit code 0 before its work was done", said)
    assert list((tmp_path / "run" / "checkpoints").glob("suspect-*-step-10"))
    assert [step.loss for step in run.history] == [step.loss for step in whole.history]
    for name, tensor in weights(whole).items():
        assert torch.equal(weights(run)[name], tensor)
