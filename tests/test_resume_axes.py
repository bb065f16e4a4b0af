"""Checkpoints of plans that cut experts, branches or sequences: on under one device, and back, like a plain loop."""

from functools import partial
from pathlib import Path

import cloudpickle
import pytest
import torch

import meshfit
from benchmarks import parity, zoo_branches, zoo_experts
from benchmarks.zoo import Case
from meshfit.plan import Plan
from tests.few import more

cloudpickle.register_pickle_by_value(zoo_experts)
cloudpickle.register_pickle_by_value(zoo_branches)


def there_and_back(case: Case, trial: parity.Trial, *, out: Path) -> parity.Trained:
    """A third of the steps under the plan, one on one device, and the last under the plan again."""
    losses: list[float] = []
    for third, plan in ((1, trial.plan), (2, "data=1"), (3, trial.plan)):
        result = meshfit.fit(
            case.build,
            case.data(trial.samples),
            loss=case.loss,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=parity.LEARNING_RATE),
            batch_size=trial.batch_size,
            steps=trial.steps * third // 3,
            plan=plan,
            devices=f"cpu:{Plan.parse(plan).devices}",
            shuffle=False,
            seed=0,
            out=out,
            checkpoint=100,
            resume=True,
        )
        assert result.history[0].step == len(losses) + 1
        losses += [step.loss for step in result.history]
    return losses, result.model


@pytest.mark.parametrize(
    ("plan", "name"),
    [
        ("expert=2", "qwen-moe"),  # experts are slices of one parameter
        more("expert=2", "expert-list"),  # modules in a list, and a tied head
        more("data=2 expert=2", "gpt-oss"),
        more("branch=2", "clip"),
        more("branch=2", "tied-heads"),
        ("branch=2", "siamese"),  # a tower that both branches use
        more("context=2", "tied-gpt"),
        ("context=2 tensor=2", "tied-gpt"),
        more("context=2 tensor=2", "llama"),
    ],
)
def test_there_and_back(plan: str, name: str, tmp_path: Path) -> None:
    trial = parity.Trial(plan=plan, samples=20, steps=9)  # batches of 8, 8 and 4
    outcome = parity.judge(parity.EVERY[name], trial, partial(there_and_back, out=tmp_path / "run"))
    assert outcome.ok, outcome
