"""Whether a model keeps the documents of a packed row apart: tried before training, since most do by their positions,
and one that does not would train on other texts than it was given, without a word."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshfit.axes.buffers.watch import buffers_kept, modes_kept
from meshfit.data import tree
from meshfit.errors import JobError, PlanError
from meshfit.generators import Generators
from meshfit.loss.objective import Objective, check_scalar
from meshfit.plan import Plan

NEAR = 1e-4
ROWS = 2


def check(objective: Objective, model: nn.Module, few: Mapping[str, Tensor]) -> None:
    """Refuse a model in which other tokens of a row's first document change the loss of its last one."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    document = (few["position_ids"] == 0).cumsum(1)
    several = ((document > 1) & (few["labels"] != -100)).any(1)  # rows with labels in a document after the first
    document = document[several][:ROWS].to(device)
    batch = {key: value[several][:ROWS].to(device) for key, value in few.items()}
    if not len(batch["input_ids"]):
        return
    last = document.masked_fill(batch["labels"] == -100, 0).amax(1)  # of each row, with labels
    batch["labels"] = batch["labels"].masked_fill(document != last[:, None], -100)
    tokens = batch["input_ids"]
    other = torch.where(document == 1, tokens.roll(1, 1).flip(1).roll(1, 0), tokens)
    values = [_loss(objective, model, {**batch, "input_ids": ids}) for ids in (tokens, other)]
    if abs(values[0] - values[1]) > NEAR * max(abs(values[0]), 1e-6):
        raise JobError(
            f"pack=: {type(model).__name__} does not keep the documents of a row apart",
            f"with other tokens in the first document, the loss of the last is {values[1]:.6g}, not {values[0]:.6g}",
            "attention must stop where position_ids start anew, as Hugging Face's models with them do",
            "without pack=, samples are padded: batch_tokens= with length= keeps padding low",
        )


def check_flash(plan: Plan) -> None:
    """Refuse plans that do not hand a flash-attention kernel the lengths of documents."""
    if plan.partitions_modules or plan.context > 1:
        raise PlanError(
            f"{plan}: pack= with a flash-attention kernel needs the lengths of documents in every layer",
            "pipeline=, branch= and context= run a recording, or a part of each row, and do not pass them on",
            'attn_implementation="sdpa" takes the documents as a mask, and works under this plan',
        )


def _loss(objective: Objective, model: nn.Module, batch: Any) -> float:
    start = Generators(next(iter(batch.values())).device)
    try:
        with torch.no_grad(), buffers_kept(model), modes_kept(model):
            model.eval()
            loss = objective(model, tree.map_tensors(torch.clone, batch))
    finally:
        start.restore()
    loss = loss[0] / loss[1] if isinstance(loss, tuple | list) else loss
    return float(check_scalar(loss))
