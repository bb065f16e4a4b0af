"""Real models train over ranks as on one device: one plan for each model here, all by all in the benchmark."""

from dataclasses import replace

import pytest

from benchmarks import parity, zoo
from tests.few import few, more

OVER_DATA = [trial for trial in parity.TRIALS if trial.axis == "data"]

SHARDED = {  # each plan once, with a model that does not make it easy
    "shard=2 zero=1": "t5",
    "shard=2 zero=2": "mixtral",
    "shard=2": "gpt2",
    "shard=3": "batchnorm-cnn",
    "shard=4": "token-sum",
    "data=2 shard=2": "partial",
    "shard=2 recompute=full": "vit",
    "shard=2 recompute=selective": "convnext",
    "shard=2 offload=optimizer": "masked-lambda",
    "shard=2 offload=parameters": "lstm",
}


@pytest.mark.parametrize(
    "name", few(zoo.ZOO, "gpt2", "mixtral", "t5", "batchnorm-cnn", "partial", "token-sum", "masked")
)
def test_trains_like_one_device(name: str) -> None:
    trial = OVER_DATA[[*zoo.ZOO].index(name) % len(OVER_DATA)]
    outcome = parity.judge(zoo.ZOO[name], replace(trial, steps=6), parity.fit)
    assert outcome.ok, outcome


SELDOM = {"shard=2", "shard=2 zero=1", "shard=3", "shard=2 offload=optimizer"}


@pytest.mark.parametrize(
    ("plan", "name"), [more(plan, name) if plan in SELDOM else (plan, name) for plan, name in SHARDED.items()]
)
def test_trains_like_one_device_sharded(plan: str, name: str) -> None:
    """Six steps: batches of all sizes that an epoch has, more than once."""
    trial = next(trial for trial in parity.TRIALS if trial.plan == plan)
    outcome = parity.judge(zoo.ZOO[name], replace(trial, steps=6), parity.fit)
    assert outcome.ok, outcome


def test_every_sharded_plan_is_tried() -> None:
    assert [*SHARDED] == [trial.plan for trial in parity.TRIALS if trial.axis == "shard"]


def test_a_refusal_is_no_failure() -> None:
    """But no success either: fewer than 95 % passing do not keep the promise."""

    def refuses(case: zoo.Case, trial: parity.Trial) -> parity.Trained:
        return parity.fit(case, replace(trial, plan="shard=2 zero=7"))

    def breaks(case: zoo.Case, trial: parity.Trial) -> parity.Trained:
        raise ValueError("broken")

    case, trial = zoo.ZOO["two-inputs"], replace(OVER_DATA[0], steps=1)
    passed, refused, failed = (parity.judge(case, trial, train) for train in (parity.fit, refuses, breaks))
    assert (refused.refused, failed.refused) == (True, False)
    assert "zero=7" in refused.remarks[0]
    assert parity.kept([passed] * 19 + [refused])
    assert not parity.kept([passed] * 18 + [refused] * 2)
    assert not parity.kept([passed] * 99 + [failed])


def test_the_limits_are_above_rounding() -> None:
    """One device against itself, adding in another order, stays well within them."""
    case = next(case for case in zoo.CASES if case.name == "gpt2")
    assert parity.judge(case, replace(OVER_DATA[0], steps=6), parity.sum_in_reverse).ok
