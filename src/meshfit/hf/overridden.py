"""What a subclass of ``Trainer`` says for itself, as people write it for the original: ``compute_loss`` is the step of
the training. Any other method of the original that it replaces would never be called, and is refused by name."""

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from meshfit.errors import JobError

CALLED = ("compute_loss", "train", "predict", "save_model", "log_metrics", "save_metrics", "save_state")
"""By this Trainer, or by its user."""

LOADER = "train_dataset= and data_collator= say what a batch is; meshfit.fit(model, loader) takes a DataLoader as it is"
INSTEAD = {
    **dict.fromkeys(("get_train_dataloader", "get_eval_dataloader", "get_test_dataloader"), LOADER),
    **dict.fromkeys(("_get_train_sampler", "_get_eval_sampler"), LOADER),
    "create_optimizer": "optimizers=(an optimizer, or a function of the model that makes one, None)",
    "create_scheduler": "optimizers=(optimizer, lambda optimizer, steps: LambdaLR(optimizer, ...))",
    "create_optimizer_and_scheduler": "optimizers=(optimizer, lambda optimizer, steps: LambdaLR(optimizer, ...))",
    "training_step": "compute_loss is run, and returns the loss that is to be differentiated",
    "prediction_step": "compute_loss(..., return_outputs=True) says what an evaluation measures",
    "evaluation_loop": "compute_metrics= is given all predictions and labels",
    "evaluate": "evaluations while it trains do not call it: give what it adds as compute_metrics=",
    "log": "callbacks=[a function of a meshfit.Step], or of a TrainerCallback on_log",
}


def refuse_overrides(trainer: Any, ours: type) -> None:
    from transformers import Trainer as Original

    kinds = type(trainer).__mro__[: type(trainer).__mro__.index(ours)]
    for name in (name for kind in kinds for name in vars(kind)):
        called = name in CALLED or (name == "evaluate" and trainer.args.eval_strategy == "no")
        if hasattr(Original, name) and not name.startswith("__") and not called:
            raise JobError(
                f"{type(trainer).__name__} defines {name}, which is not called",
                INSTEAD.get(name, "meshfit.fit has what a training of its own needs: step=, callbacks=, optimizer="),
            )


def steps_of(trainer: Any) -> tuple[Any, Any]:
    """``compute_loss`` as meshfit's step, and as that of evaluations. Ranks run it on a copy of the trainer, without
    its data."""
    alone = copy.copy(trainer)
    for name in trainer.kept_here:
        vars(alone).pop(name, None)
    return partial(_step, alone), partial(_step, alone, outputs=True)


def _step(trainer: Any, model: nn.Module, batch: Mapping[str, Any], outputs: bool = False) -> Any:
    vars(trainer)["model"] = model  # while it computes: self.model.config, say
    try:
        said = trainer.compute_loss(model, dict(batch), **({"return_outputs": True} if outputs else {}))
    finally:
        del vars(trainer)["model"]
    return (said[0], {}, said[1]) if outputs else said
