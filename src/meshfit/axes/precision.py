"""The arithmetic of forward and backward, and the precision in which weights are held.

    fp32          as the model is built
    bf16          matrix products, grouped ones too, and convolutions in bfloat16 (autocast)
    fp16          likewise in float16; the loss is scaled so that small gradients survive, and the scale follows
                  overflows: halved when a gradient overflows (the step is skipped), doubled after 2,000 good steps
    fp8           as bf16, and products of linear layers in 8 bits: see fp8.py
    bf16-true     as bf16, and weights of two dims or more are held in bfloat16: no fp32 master copy. The optimizer
                  steps them in fp32, and what comes out is rounded stochastically: see rounded_step.py
    bf16-compute  everything in bfloat16, without autocast, from weights in fp32: see bf16_compute.py

What stays fp32 under bf16 and fp16: weights, gradients, optimizer state, BatchNorm statistics, softmax, norms, losses
and sums, and the gradients of weights on their way between ranks. But on CUDA torch's autocast takes the log-softmax
inside ``F.cross_entropy`` in the precision of the logits: a loss that wants fp32 says ``logits.float()``. Activations
with their gradients, and weights that are gathered for products, travel as the products take them. The scale is the
same on every rank, because all of them see the same summed gradients. Under bf16-true gradients are accumulated and
summed in fp32 too, though their parameters are not.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from meshfit.anatomy.trace import Parameter
from meshfit.axes.axis import Applied, Axis
from meshfit.axes.bf16_compute import WORD as BF16_COMPUTE
from meshfit.axes.bf16_compute import Bf16Compute
from meshfit.axes.fp8 import LinearInFp8, check_device
from meshfit.errors import PlanError
from meshfit.plan import Plan
from meshfit.torch_private.kernels import grouped_products_in_autocast
from meshfit.torch_private.optimizers import update_loss_scale_
from meshfit.torch_private.tensors import set_grad_dtype

if TYPE_CHECKING:
    from meshfit.axes.place import Placed
    from meshfit.plan_cost import Costing

BF16_WORDS = ("bf16", "bf16-true", "fp8", BF16_COMPUTE)
DTYPES = {**dict.fromkeys(BF16_WORDS, torch.bfloat16), "fp16": torch.float16}
WITHOUT_AUTOCAST = ("fp32", BF16_COMPUTE)


@dataclass(frozen=True)
class Precision:
    word: str = "fp32"

    @property
    def dtype(self) -> torch.dtype:
        """Of matrix products."""
        return DTYPES.get(self.word, torch.float32)

    def arithmetic(self, device: torch.device) -> AbstractContextManager:
        """A context in which operations run in this precision."""
        if self.word in WITHOUT_AUTOCAST:
            return nullcontext()
        return self._autocast(device)

    @contextmanager
    def _autocast(self, device: torch.device) -> Iterator[None]:
        linear = LinearInFp8() if self.word == "fp8" else nullcontext()
        with self.prepared(device), torch.autocast(device.type, DTYPES[self.word]), linear:
            yield

    def prepared(self, device: torch.device) -> AbstractContextManager[None]:
        """A context in which ``arithmetic`` is entered fast: around a whole training."""
        if self.word == "fp8":
            check_device(device)
        grouped = self.dtype == torch.bfloat16 and device.type == "cuda" and self.word not in WITHOUT_AUTOCAST
        return grouped_products_in_autocast() if grouped else nullcontext()

    @contextmanager
    def rounded_once(self) -> Iterator[None]:
        """Weights that several ``arithmetic`` use within it are rounded once, not once in each, and one copy of them is
        kept. They must not change meanwhile, nor be used first where gradients are off."""
        if self.word in WITHOUT_AUTOCAST:
            yield
            return
        torch.autocast_increment_nesting()
        try:
            yield
        finally:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()


class PrecisionAxis(Axis):
    """``precision=bf16-true``: the model's fp32 weights in bf16. ``bf16-compute``: copies of them, for each step."""

    word = "precision"

    def on(self, plan: Plan, model: nn.Module, device: str) -> bool:
        return plan.precision in ("bf16-true", BF16_COMPUTE)

    def refuse(self, plan: Plan, model: nn.Module) -> None:
        if plan.precision != "fp8":
            return
        usual = Plan()
        words = ("tensor", "context", "expert", "branch", "recompute", "server")
        stated = [f"{word}={getattr(plan, word)}" for word in words if getattr(plan, word) != getattr(usual, word)]
        stated += [f"compile={plan.compile}"] * (plan.compile not in ("auto", "none"))
        if stated:
            raise PlanError(
                f"{plan}: precision=fp8 does not go with {stated[0]} yet",
                "scales are of whole rows, taken in a forward of the model's own linear layers",
                f"{replace(plan, precision='bf16')} works, and fp8 under data, shard and pipeline",
            )

    def apply(self, placed: "Placed", finding: Any) -> Applied:
        return Bf16Compute(placed) if placed.plan.precision == BF16_COMPUTE else Narrowed(placed.model)

    def cost(self, costing: "Costing", finding: Any) -> None:
        if costing.plan.precision == BF16_COMPUTE:
            return

        def narrowed(p: Parameter) -> Parameter:
            if p.dtype == "float32" and len(p.shape) > 1:
                p = replace(p, dtype="bfloat16", bytes=p.bytes // 2)
            return replace(p, stepped="float32") if p.dtype == "bfloat16" else p

        parameters = {name: narrowed(p) for name, p in costing.trace.parameters.items()}
        costing.trace = replace(costing.trace, parameters=parameters)


class Narrowed(Applied):
    """fp32 parameters of two dims or more in bf16, but for those of recurrent layers, whose kernels take one dtype.
    Norms, biases and buffers stay fp32: they are small, and sums over a batch."""

    def __init__(self, model: nn.Module):
        self.model = model
        recurrent = {p for module in model.modules() if isinstance(module, nn.RNNBase) for p in module.parameters()}
        self.parameters = [
            p for p in model.parameters() if p.dim() > 1 and p.dtype == torch.float32 and p not in recurrent
        ]
        self._cast(torch.bfloat16)
        self.in_bf16 = [p for p in model.parameters() if p.dtype == torch.bfloat16 and p.requires_grad]
        for p in self.in_bf16:  # the user's own too
            set_grad_dtype(p, torch.float32)

    @torch.no_grad()
    def _cast(self, dtype: torch.dtype) -> None:
        for p in self.parameters:
            p.grad = None
            p.data = p.data.to(dtype)

    def undo(self) -> None:
        self._cast(torch.float32)
        for p in self.in_bf16:
            p.grad = None
            set_grad_dtype(p, p.dtype)


class LossScale:
    """The loss scale of fp16, kept on the device: the host does not wait for it."""

    def __init__(self, device: torch.device, *, start: float = 2.0**16, growth_interval: int = 2000):
        self.value = torch.full((), start, device=device)
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device)
        self._interval = growth_interval

    def update(self, overflow: torch.Tensor) -> None:
        """Halve after an overflow (1.0), double after enough steps without."""
        update_loss_scale_(self.value, self._good_steps, overflow.float(), 2.0, 0.5, self._interval)
