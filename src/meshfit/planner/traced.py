"""The work of a step of any module on one device, from one forward and backward on meta tensors: nothing is computed.

Operations are those that ``anatomy.cost.Meter`` lists. Under a plan: see ``predict``.
"""

from collections.abc import Callable

from torch import Tensor, nn

from meshfit.anatomy.cost import Meter
from meshfit.anatomy.operations import Streaming
from meshfit.planner.software import Software
from meshfit.planner.work import StageWork, StepWork


def traced_work(
    model: nn.Module,
    loss: Callable[[nn.Module], Tensor],
    *,
    precision: str = "bf16",
    microbatches: int = 1,
    software: Software | None = None,
) -> StepWork:
    """A step of ``model``, which is on meta. ``loss(model)`` is the loss of one microbatch, on meta inputs;
    ``precision`` that of its products where they are in fp32."""
    software = software or Software("eager")
    rounds = "" if precision == "fp32" else "each"
    with Meter([*model.parameters(), *model.buffers()], rounds=rounds, precision=precision) as meter:
        meter.start(0)
        found = loss(model)
        meter.stop()
        meter.reach([found])
    cost = meter.costs[0]
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return StepWork(
        stages=(StageWork(cost.forward, cost.backward),),
        microbatches=microbatches,
        update=(Streaming(software.passes * trained, 20),),
        model_flops=microbatches * sum(op.flops for op in (*cost.forward, *cost.backward)),
    )
