"""Where each tensor lives. One file per axis, each a verb on a plain module, in place, keeping names.

They are applied in this order:

1. replicate    every rank starts from the same weights; BatchNorm is made global before anything wraps a call
2. precision    decides the arithmetic inside a forward; nothing about the weights
3. compile      last: it sees the model as the steps before left it

``check`` says what a model cannot take, in the caller, before any process starts.
"""

from torch import nn

from meshfit.errors import JobError, PlanError
from meshfit.layout.batchnorm import batch_norms
from meshfit.plan import Plan


def check(plan: Plan, model: nn.Module) -> None:
    """Refuse what ``model`` cannot take, with the nearest plan that works."""
    norms = batch_norms(model)
    if norms and plan.data > 1 and plan.batchnorm == "global" and plan.compile == "whole":
        raise PlanError(
            f"{plan}: this model cannot be compiled whole",
            f"its {len(norms)} BatchNorms talk to the other ranks in the middle of the forward",
            f"{str(plan).replace(' compile=whole', '')} works; so does batchnorm=local beside compile=whole",
        )
    if not any(p.requires_grad for p in model.parameters()):
        count = sum(1 for _ in model.parameters())
        raise JobError("there is nothing to train", f"all {count} parameters of the model are frozen")
    sparse = [name for name, module in model.named_modules() if getattr(module, "sparse", False)]
    if sparse and plan.data > 1:
        raise PlanError(
            f"{plan}: {sparse[0] or 'the model'} makes sparse gradients, which are not summed over ranks",
            "sparse=False works under every plan; data=1 works as it is",
        )
    lazy = [name for name, p in model.named_parameters() if isinstance(p, nn.UninitializedParameter)]
    if lazy:
        raise PlanError(
            f"{lazy[0]} has no shape yet: it is a lazy parameter", "run the model once on a batch before fit"
        )
