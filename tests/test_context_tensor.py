"""Positions split over context ranks, and each rank's positions over tensor ranks between regions (sequence=split)."""

from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshfit
from benchmarks import parity
from benchmarks.zoo import ZOO
from meshfit.axes.context.find import SavedBytes
from meshfit.axes.context.piece import Piece
from meshfit.axes.tensor.sliced import SlicedTensor, local_of
from meshfit.job import Job
from meshfit.launch.world import World
from meshfit.plan import Plan
from meshfit.run import Run
from tests.distributed import distributed
from tests.few import more
from tests.test_tensor_step import CLASSES, Block, Model, built

BOTH = "context=2 tensor=2 sequence=split"

LIKE_ONE_DEVICE = {
    f"{BOTH} attention=gather": "gpt2",  # zigzag chunks
    f"{BOTH} attention=ulysses": "llama",
    BOTH: "vit",  # 17 positions: 9 and 8, then 5 and 4
}
MORE = {
    f"{BOTH} recompute=full microbatches=2": "tied-gpt",
    f"data=2 {BOTH}": "gpt2",
    f"shard=2 {BOTH}": "llama",
    "context=3 tensor=2 sequence=split": "bert",
    f"{BOTH} recompute=selective": "t5",
    f"{BOTH} pipeline=2 schedule=interleaved microbatches=2": "llama",
}


@pytest.mark.parametrize(
    ("plan", "name"),
    [*LIKE_ONE_DEVICE.items(), *(more(*cell) for cell in MORE.items())],
)
def test_trains_like_one_device(plan: str, name: str) -> None:
    outcome = parity.judge(ZOO[name], parity.Trial(plan=plan, samples=18, steps=4), parity.fit)
    assert outcome.ok, outcome


def test_predicts_like_one_device() -> None:
    case = ZOO["tied-gpt"]
    model, data = case.build().eval(), case.data(10)
    want = meshfit.predict(model, data, batch_size=4)
    got = meshfit.predict(model, data, batch_size=4, plan=BOTH, devices="cpu:4")
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def stepped(plan: str, build: Any, data: Any, loss: Any, blocks: type[nn.Module]) -> tuple[list[Any], int]:
    """What blocks return in a step on this rank, and the bytes that it keeps for backward."""
    how, seen = Plan.parse(plan), []
    given = {"loss": loss, "optimizer": torch.optim.AdamW, "batch_size": 4, "steps": 1}
    job = Job(model=build, data=data, plan=how, **given).settled(count=4, kind="cpu")
    run = Run(job, World(dist.get_rank(), how.devices, torch.device("cpu")))
    for module in run.placed.model.modules():
        if isinstance(module, blocks):
            module.register_forward_hook(lambda module, args, out: seen.append(out))
    (batch,) = islice(run.batches(), 1)
    saved = SavedBytes(run.placed.model)
    with saved:
        run.schedule(batch)
    return seen, saved.bytes


def given_text(samples: int = 4) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, CLASSES, (samples, 33), generator=torch.Generator().manual_seed(3))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def mean_loss(out: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(out.flatten(0, 1), targets.flatten())


@distributed(world=4)
def test_each_of_four_ranks_has_a_quarter_between_regions() -> None:
    seen, kept = stepped(BOTH, built, given_text(), mean_loss, Block)
    assert len(seen) == 2
    for out in seen:
        assert isinstance(out, Piece)
        assert isinstance(out.local, SlicedTensor)
        assert (out.shape[1], out.local.shape[1], local_of(out.local).shape[1]) == (32, 16, 8)
    seen, whole = stepped(f"{BOTH[:-5]}whole", built, given_text(), mean_loss, Block)
    assert all(type(out.local) is Tensor for out in seen)
    assert kept < 0.9 * whole


@distributed(world=4)
def test_logits_are_split_by_positions_and_classes() -> None:
    seen, _ = stepped(BOTH, built, given_text(), mean_loss, Model)
    (logits,) = seen
    assert isinstance(logits, Piece)
    assert isinstance(logits.local, SlicedTensor)
    assert local_of(logits.local).shape == (4, 16, CLASSES // 2)


@distributed(world=4)
def test_every_rank_drops_its_own() -> None:
    """Of dropout between regions no two ranks draw alike; afterwards all go on alike."""

    def build() -> nn.Module:
        model = built(0.5)
        nn.init.ones_(model.token.weight)  # type: ignore[union-attr,arg-type]
        return model

    seen, _ = stepped(BOTH, build, given_text(), mean_loss, nn.Dropout)
    first = seen[0]  # of the embeddings
    assert isinstance(first, Piece)
    every: list[Any] = [None] * 4
    dist.all_gather_object(every, local_of(first.local).detach() == 0)  # type: ignore[arg-type]
    assert all(0.3 < float(each.float().mean()) < 0.7 for each in every)
    assert len({tuple(each.flatten().tolist()) for each in every}) == 4
    dist.all_gather_object(every, float(torch.rand(())))
    assert len(set(every)) == 1
