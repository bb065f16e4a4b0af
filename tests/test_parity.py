"""Real models train over ranks as on one device: one plan for each model here, all by all in the benchmark."""

import pytest

from benchmarks import parity, zoo

DIAGONAL = [(case, parity.TRIALS[i % len(parity.TRIALS)]) for i, case in enumerate(zoo.CASES)]


@pytest.mark.parametrize(("case", "trial"), DIAGONAL, ids=[f"{case.name}-{trial.plan}" for case, trial in DIAGONAL])
def test_trains_like_one_device(case: zoo.Case, trial: parity.Trial) -> None:
    outcome = parity.judge(case, trial, parity.fit)
    assert outcome.ok, outcome


def test_the_limits_are_above_rounding() -> None:
    """One device against itself, adding in another order, stays well within them."""
    case = next(case for case in zoo.CASES if case.name == "gpt2")
    assert parity.judge(case, parity.TRIALS[0], parity.sum_in_reverse).ok
