"""What a rank keeps for backward is what the cost of the plan says."""

import gc
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist

from benchmarks.anatomy_live import LiveBytes
from benchmarks.zoo import ZOO, mean_loss
from meshfit.anatomy import trace
from meshfit.axes.tensor.axis import split_model, tensor_cost
from meshfit.axes.tensor.plan import plan_tensor
from tests.distributed import distributed

NEAR = 0.2
"""Found: from 1% (gpt2, vit) to 15% (tied-gpt, whose loss is outside of the model's own trace)."""


@distributed(world=2)
def assert_kept(jobs: dict[str, tuple[bytes, int]]) -> None:
    torch.set_num_threads(1)
    wrong = {}
    for name, (plan, said) in jobs.items():
        case = ZOO[name]
        model, batch = case.build().train(), case.data(4)
        split_model(model, pickle.loads(plan), dist.group.WORLD)
        with warnings.catch_warnings(), LiveBytes() as live:
            warnings.simplefilter("ignore")
            loss = mean_loss(case, model, batch)
        graph = loss.view_as(loss).grad_fn
        del loss
        gc.collect()
        if abs(live.bytes - said) > NEAR * said:
            wrong[name] = said, live.bytes
        del graph
    assert not wrong, wrong


@pytest.mark.parametrize("by_rows", [False, True])
def test_activations_of_a_rank(by_rows: bool) -> None:
    jobs = {}
    for name in ("gpt2", "llama", "vit", "tied-gpt"):
        case = ZOO[name]
        batch = case.data(4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plan = plan_tensor(
                case.build(), lambda m, case=case, batch=batch: mean_loss(case, m, batch), 2, by_rows=by_rows
            )
            full = trace(case.build(), batch if case.loss is None else batch[0])
        after, _ = tensor_cost(full, plan)
        jobs[name] = pickle.dumps(plan), after.cost.kept
        assert after.cost.flops < 0.62 * full.cost.flops, name
    assert_kept(jobs=jobs)
