"""What lives between two steps is the same each time, and what was tried before the first is gone.

Cycles through autograd's graph (a node that holds what holds it) and through tables of weak keys are no garbage to
Python: tensors in them stay for good.
"""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshfit
from benchmarks import nccl
from meshfit.events import current
from meshfit.launch.heartbeat import step_under_way
from tests.few import more

FIRST, LAST = 4, 7
SMALL = 256
"""Bytes that may come and go: a number of the step before that has not been read yet."""


def live() -> tuple[int, int]:
    """How many tensors there are after a collection, and bytes behind them."""
    gc.collect()
    found: dict[int, int] = {}
    for each in gc.get_objects():
        if type(each) in (Tensor, nn.Parameter) and each.layout is torch.strided and not each.is_meta:
            storage = each.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return len(found), sum(found.values())


@pytest.mark.parametrize(
    ("plan", "model"),
    [
        more("data=2", "gpt"),
        more("data=2 microbatches=2", "batchnorm"),
        more("data=2", "contrast"),
        more("data=2 exchange=diloco every=2", "gpt"),
        ("shard=2 recompute=full", "gpt"),
        more("shard=2 zero=2", "gpt"),
        more("shard=2 offload=optimizer", "gpt"),
        more("shard=2 offload=parameters", "gpt"),
        more("shard=2 offload=activations precision=bf16-compute", "gpt"),
        ("tensor=2 sequence=whole", "gpt"),
        more("tensor=2 sequence=split precision=bf16", "gpt"),
        more("tensor=2 recompute=selective", "gpt"),
        more("context=2 attention=ulysses", "gpt"),
        ("context=2 attention=gather", "gpt"),
        more("context=2 recompute=full", "gpt"),
        ("expert=2", "mixture"),
        more("expert=2", "deepseek"),
        more("expert=2 recompute=full", "mixture"),
        more("branch=2", "ensemble"),
        more("pipeline=2 microbatches=4", "gpt"),
        more("pipeline=2 schedule=zbv microbatches=4", "gpt"),
        more("pipeline=2 schedule=dualpipev microbatches=4", "gpt"),
        more("pipeline=2 schedule=interleaved microbatches=4", "gpt"),
    ],
)
def test_nothing_is_left_behind(plan: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHFIT_CACHE", str(tmp_path / "cache"))  # where no plan is kept
    case = nccl.cases()[model]

    class Noted(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            if (step := step_under_way()) >= FIRST:
                count, size = live()
                Path(tmp_path, f"{current().rank}-{step}").write_text(f"{count} {size}")
            return super().step(closure)

    meshfit.fit(
        case.build(),
        case.data(32),
        loss=case.loss,
        optimizer=lambda parameters: Noted(parameters, lr=1e-3),
        batch_size=8,
        steps=LAST,
        plan=f"{plan} compile=none",
        progress=False,
    )
    held = {
        rank: [tuple(map(int, Path(tmp_path, f"{rank}-{step}").read_text().split())) for step in range(FIRST, LAST + 1)]
        for rank in range(2)
    }
    for rank, each in held.items():
        sizes = [size for _, size in each]
        assert max(sizes) - min(sizes) <= SMALL, f"rank {rank} holds more and more: {each}"
    assert held[0][0][1] < 1.25 * held[1][0][1], f"the first rank has kept what it tried: {held}"
