"""Each rule names the situation it is for: in real runs where one can be made, in written ones otherwise."""

import json
import statistics
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import meshfit
from meshfit.events import Events
from meshfit.observe.kinds import PHASES
from meshfit.observe.page_data import page_data
from meshfit.observe.reading import read
from meshfit.observe.verdict import RULES, findings, verdict
from meshfit.units import percent
from tests.recorded import folder

X, Y = torch.randn(256, 8), torch.randint(4, (256,))


def found(path: Path) -> dict:
    return {finding.name: finding for finding in findings(read(path))}


def fit(out: Path, **asked) -> Path:
    defaults = {"loss": F.cross_entropy, "optimizer": torch.optim.SGD, "batch_size": 16, "steps": 40, "devices": "cpu"}
    data = asked.pop("data", (X, Y))
    model = asked.pop("model", lambda: nn.Linear(8, 4))
    result = meshfit.fit(model, data, out=out, **{**defaults, **asked})
    assert result.folder is not None
    return result.folder


class Slow(Dataset):
    def __len__(self) -> int:
        return 256

    def __getitem__(self, i: int):
        time.sleep(0.005)
        return X[i], Y[i]


def test_a_slow_dataset_is_input_bound(tmp_path: Path) -> None:
    names = found(fit(tmp_path / "run", data=Slow(), plan="data=2", steps=20))
    assert next(iter(names)) == "input-bound"
    assert names["input-bound"].lost > 0.5
    assert "waited" in names["input-bound"].evidence
    assert "workers" in names["input-bound"].change


def test_workers_are_counted_and_how_many_would_do(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", [{"data": 0.05, "forward_backward": 0.04}] * 2, sample={"workers": 2})
    first = findings(read(run))[0]
    assert first.name == "input-bound"
    assert first.change == "4 workers would hide it"
    assert str(first).startswith("input-bound: devices waited 50 % of the time for data, on 2 workers")


def test_workers_that_wait_for_their_server(tmp_path: Path) -> None:
    run = folder(
        tmp_path / "run", [{"forward_backward": 0.04, "update": 0.05, "exchange": 0.01}] * 2, plan="server=1 data=2"
    )
    names = found(run)
    assert next(iter(names)) == "server-bound"
    assert "60 % of the time for their server" in names["server-bound"].evidence
    assert "server=2" in names["server-bound"].change
    assert not {"optimizer-heavy", "exchange-exposed"} & names.keys()


def test_a_rank_that_sleeps_is_the_straggler(tmp_path: Path) -> None:
    def step(model, batch):
        inputs, targets = batch
        if dist.get_rank() == 1:
            time.sleep(0.06)
        return F.cross_entropy(model(inputs), targets)

    names = found(fit(tmp_path / "run", loss=None, step=step, plan="data=2", steps=20))
    assert "rank 1" in names["straggler"].evidence
    assert next(iter(names)) == "straggler"  # the others wait for it, not for traffic


def test_frequent_evaluation_is_named(tmp_path: Path) -> None:
    def slow(outputs, targets):
        time.sleep(0.002)
        return (outputs.argmax(1) == targets).float()

    run = fit(tmp_path / "run", valid=(X, Y), valid_every=2, metrics={"accuracy": slow}, steps=20)
    names = found(run)
    assert names["evaluation-heavy"].lost > 0.2
    assert "valid_every" in names["evaluation-heavy"].change


def test_a_slow_callback_is_caller_bound(tmp_path: Path) -> None:
    names = found(fit(tmp_path / "run", callbacks=lambda step: time.sleep(0.1), steps=12))
    assert names["caller-bound"].lost > 0.3


def test_tiny_steps_are_named(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", [{"forward_backward": 0.0006, "update": 0.0002}], step=0.001, plan="data=1")
    assert "1.0 ms" in found(run)["launch-bound"].evidence


def test_an_idle_gpu_is_launch_bound(tmp_path: Path) -> None:
    facts, sample = {"device": "cuda:0"}, {"gpu_use": 35}
    run = folder(tmp_path / "run", [{"forward_backward": 0.08}], facts=facts, sample=sample, plan="data=1")
    first = findings(read(run))[0]
    assert first.name == "launch-bound"
    assert "35 %" in first.evidence


def test_more_ranks_than_cores_are_named(tmp_path: Path) -> None:
    ranks = [{"forward_backward": 0.05, "exchange": 0.04}] * 4
    run = folder(tmp_path / "run", ranks, facts={"cores": 2, "threads": 1}, plan="data=4")
    assert "4 ranks with 4 threads share 2 cores" in found(run)["oversubscribed"].evidence


def test_traffic_that_nothing_hides_is_named(tmp_path: Path) -> None:
    ranks = [{"forward_backward": 0.06, "exchange": 0.03}] * 2
    first = findings(read(folder(tmp_path / "run", ranks, facts={"traffic": {"all_reduce": 2**20}})))[0]
    assert first.name == "exchange-exposed"
    assert "30 %" in first.evidence
    assert "1 MiB a step" in first.evidence
    assert "twice the batch" in first.change


def test_a_bubble_is_measured_and_more_microbatches_are_advised(tmp_path: Path) -> None:
    ranks = [{"forward_backward": 0.09, "update": 0.005}] * 2
    first = findings(read(folder(tmp_path / "run", ranks, within=STAGES, plan="pipeline=2 microbatches=4")))[0]
    assert first.name == "bubble"
    assert "30 %" in first.title
    assert "4 microbatches over 2 stages" in first.evidence
    assert first.change == "16 microbatches would leave about 6 %"


STAGES = [("forward", 0.0, 0.02, {"microbatch": 0}), ("backward", 0.04, 0.04, {"microbatch": 0})]


def test_more_microbatches_are_not_advised_where_batchnorm_would_see_others(tmp_path: Path) -> None:
    ranks = [{"forward_backward": 0.09, "update": 0.005}] * 2
    how = {"within": STAGES, "plan": "pipeline=2 microbatches=4"}
    change = found(folder(tmp_path / "norm", ranks, **how, facts={"batchnorms": 3}))["bubble"].change
    assert change.startswith("schedule=interleaved or zbv")
    assert "would change BatchNorm's statistics (another training)" in change
    few = found(folder(tmp_path / "few", ranks, **how, facts={"batch": 4}))["bubble"].change
    assert "microbatches would leave" not in few  # there are no more of them than samples


def test_a_run_says_whether_it_has_batchnorms(tmp_path: Path) -> None:
    model = lambda: nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    run = read(fit(tmp_path / "run", model=model, steps=2))
    assert run.fact("batchnorms") == 1


@pytest.mark.parametrize(
    ("plan", "ranks", "facts", "name"),
    [
        ("data=2", [{"forward_backward": 0.06, "exchange": 0.03}] * 2, {}, "exchange-exposed"),
        ("server=1 data=2", [{"forward_backward": 0.04, "update": 0.05}] * 2, {}, "server-bound"),
        ("data=2", [{"forward_backward": 0.06, "update": 0.035}] * 2, {}, "optimizer-heavy"),
        ("data=2", [{"forward_backward": 0.088}] * 2, {}, "compute-bound"),
    ],
)
def test_advice_that_makes_another_training_says_so(tmp_path: Path, plan: str, ranks, facts, name: str) -> None:
    change = found(folder(tmp_path / "run", ranks, plan=plan, facts=facts))[name].change
    for words in ("batch would", "larger batch", "compress=bf16", "staleness=2", "lower precision"):
        for part in change.split(";"):
            assert words not in part or part.endswith("(another training)"), part
    assert "(another training)" in change


def test_a_slow_first_step_is_on_neither_side(tmp_path: Path) -> None:
    """Recorded as a run does it: a thread flushes in the middle of steps, the first of which takes long."""
    (tmp_path / "run.json").write_text(json.dumps({"plan": "pipeline=2 microbatches=1", "seconds": 1.0}))
    (tmp_path / "metrics.jsonl").write_text("")
    for rank in range(2):
        events = Events(tmp_path / "events", rank)
        events.own_flushes = False
        for step in range(1, 9):
            events.step = step
            with events.span("data"):
                pass
            events.flush()
            with events.span("forward_backward"):
                time.sleep(0.004)
                with events.span("forward", microbatch=0):
                    time.sleep(0.2 if step == 1 else 0.003)
                events.flush()
                with events.span("backward", microbatch=0):
                    time.sleep(0.2 if step == 1 else 0.003)
                    events.flush()
            with events.span("update"):
                pass
        events.close()
    run = read(tmp_path)
    for rank in run.ranks:
        assert (rank.totals[0].first, rank.totals[0].last) == (1, 1)
        assert [total.first for total in rank.totals[1:]] == [total.last + 1 for total in rank.totals[:-1]]
        for total in rank.totals:  # phases fill their time at most, and hold what lies within them
            assert sum(total.by.get(name, 0.0) for name in PHASES) <= total.seconds + 1e-4
            assert total.by["forward"] + total.by["backward"] <= total.by["forward_backward"] + 1e-4
        assert rank.steady["forward"] < 0.2 < sum(total.by["forward"] for total in rank.totals)
    bars = [dict(bar["parts"]) for bar in page_data(run)["bars"]]
    waited = statistics.fmean(bar["receive"] for bar in bars)
    assert found(tmp_path)["bubble"].title == f"bubble {percent(waited)}"


def test_frequent_checkpoints_are_named(tmp_path: Path) -> None:
    ranks = [{"forward_backward": 0.06, "checkpoint": 0.03}] * 2
    assert found(folder(tmp_path / "run", ranks))["checkpoint-heavy"].change == "one in 15 would cost 2 %"


@pytest.mark.parametrize(
    "sample",
    [{"gpu_memory": 75 * 2**30, "gpu_total": 80 * 2**30}, {"memory": 63 * 2**30, "memory_total": 64 * 2**30}],
)
def test_memory_near_the_limit_is_named(tmp_path: Path, sample: dict) -> None:
    assert "of" in found(folder(tmp_path / "run", [{}], sample=sample))["memory"].evidence


def test_a_heavy_optimizer_is_named(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", [{"forward_backward": 0.06, "update": 0.035}] * 2)
    assert "35 %" in found(run)["optimizer-heavy"].evidence


def test_a_machine_that_is_busy_with_something_else_is_named(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", [{}] * 2, sample={"cores": [99.0, 98.0, 97.0, 99.0], "cpu": 60.0})
    assert "this run used 30 %" in found(run)["neighbours"].evidence


def test_a_slow_start_is_named(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", [{}], steps=20)
    text = (run / "metrics.jsonl").read_text()
    moved = [line.replace('"seconds": ', '"seconds": 1') for line in text.splitlines()]  # each ten seconds later
    (run / "metrics.jsonl").write_text("\n".join(moved) + "\n")
    assert "slow-start" in found(run)


def test_a_run_that_computes_is_compute_bound(tmp_path: Path) -> None:
    run = read(folder(tmp_path / "run", [{"forward_backward": 0.088}] * 2))
    (only,) = findings(run)
    assert (only.name, only.good) == ("compute-bound", True)
    assert verdict(run).startswith("compute-bound: CPUs computed 98 % of the time")


def test_a_run_without_steps_is_too_short_to_tell(tmp_path: Path) -> None:
    assert verdict(read(folder(tmp_path / "run", [], steps=0))) == "too short to tell"


def test_there_are_enough_rules() -> None:
    assert len(RULES) + 1 >= 12


def test_batchnorms_that_meet_in_every_layer_are_told_from_the_exchange(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", [{"forward_backward": 0.08}] * 2, within=[("meet", 0.01, 0.03, {})])
    assert "batchnorm=local" in found(run)["exchange-exposed"].change
    run = folder(
        tmp_path / "other", [{"forward_backward": 0.08}] * 2, within=[("meet", 0.01, 0.03, {})], plan="tensor=2"
    )
    assert found(run)["exchange-exposed"].change == "a smaller tensor= waits for fewer"
