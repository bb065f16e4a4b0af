"""Blocks compiled one by one, inside whatever else acts on the model. Traced by dynamo and taken apart by autograd as
in earnest; the kernels are torch's own (aot_eager), since generating others takes half a minute."""

import functools
from typing import Any

import pytest
import torch

import meshfit
from benchmarks.zoo import ZOO
from meshfit.axes.compile import compilable
from meshfit.axes.shard.units import traced
from meshfit.loss.objective import Objective


@pytest.mark.filterwarnings("ignore")  # dynamo looks at what it warns of itself
@pytest.mark.parametrize("plan", ["compile=block", "recompute=full compile=block", "offload=parameters compile=block"])
def test_compiled_blocks_train_alike(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    plain = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", lambda forward: compiled.append(forward) or plain(forward))
    case = ZOO["tied-gpt"]
    verdict = meshfit.verify(
        case.build(),
        case.data(16),
        loss=case.loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        batch_size=8,
        steps=3,
        plan=plan,
    )
    assert verdict.equal
    assert len(compiled) >= 2  # at least the two blocks


def test_blocks_with_a_global_batchnorm_are_left_alone() -> None:
    case = ZOO["resnet10"]
    trace = traced(case.build(), Objective(case.loss), case.data(4), device="cpu")
    assert not isinstance(trace, Exception)
    norms = [path for path, kind in trace.kinds.items() if "BatchNorm" in kind]
    alone, spread = (compilable(trace, global_batchnorm=spread) for spread in (False, True))
    assert any(norm.startswith(path) for path in alone for norm in norms)
    assert not any(norm.startswith(path) for path in spread for norm in norms)
