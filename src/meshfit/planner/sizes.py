"""Predictions for a decoder that is described by its sizes: a ``Predictor`` of models that nobody here has the code of.

Weights are held as meshfit holds them: in fp32 and stepped in place, beside copies that autocast has rounded; cut over
``shard=``, in 16 bits on every device and in fp32 at their owners (zero=1 and 2), or at their owners alone (zero=3).
"""

from dataclasses import replace
from functools import lru_cache

from torch import nn

from meshfit.axes.compile.axis import CompileAxis
from meshfit.errors import PlanError
from meshfit.plan import Plan
from meshfit.planner.cluster import Cluster
from meshfit.planner.decoder import Decoder, Degrees
from meshfit.planner.memory import rank_memory
from meshfit.planner.prediction import Limits, Prediction, StepMemory, phases
from meshfit.planner.software import MESHFIT
from meshfit.planner.step import StepModel, StepWork
from meshfit.planner.transformer import step_work
from meshfit.schedule.actions import usual_chunks

RECOMPUTED = {"none": "none", "selective": "cheap", "full": "full"}
SHORTEST = 4096
"""Tokens of a sequence that each device keeps at least under ``context=``."""


class DecoderPredictor:
    """Of ``model``, with sequences of ``length`` tokens."""

    def __init__(self, model: Decoder, cluster: Cluster, length: int):
        self.model, self.cluster, self.length = model, cluster, length
        self.steps = StepModel(cluster, MESHFIT)
        self.memory = lru_cache(maxsize=65536)(self._memory)

    @property
    def limits(self) -> Limits:
        m = self.model
        heads = ((m.heads, "heads"), (m.kv_heads or m.heads, "heads of keys and values"), (m.ffn, "channels"))
        divided = {"tensor": heads if m.latent is None else heads[:1], "context": ((self.length, "tokens"),)}
        most = {"pipeline": (m.layers, "layers"), "context": (max(1, self.length // SHORTEST), "pieces of a sequence")}
        if m.experts is not None:
            divided["expert"] = ((m.experts.count, "experts"),)
        return Limits(divided=divided, most=most, stages=m.layers)

    def degrees(self, plan: Plan, batch: int) -> Degrees:
        parts = plan.shares * plan.microbatches
        CompileAxis().refuse(plan, nn.Module())
        if batch % parts:
            raise PlanError(f"a batch of {batch} does not divide into the {parts} parts of {plan}")
        return Degrees(
            length=self.length,
            batch=batch,
            microbatch=batch // parts,
            data=plan.shares,
            shard=plan.shard,
            zero=plan.zero if plan.shard > 1 else 0,
            tensor=plan.tensor,
            sequence=plan.tensor > 1 and plan.sequence != "whole",
            pipeline=plan.pipeline,
            chunks=plan.chunks or (usual_chunks(plan.schedule) if plan.pipeline > 1 else 1),
            context=plan.context,
            expert=plan.expert,
            schedule=plan.schedule,
            precision=plan.precision.removesuffix("-true").removesuffix("-compute"),
            recompute=RECOMPUTED[plan.recomputed_blocks],
            head_loss=plan.head_loss,
        )

    def work(self, plan: Plan, batch: int) -> StepWork:
        return step_work(self.model, self.degrees(plan, batch), MESHFIT)

    def _memory(self, plan: Plan, batch: int) -> StepMemory:
        d, last = self.degrees(plan, batch), plan.pipeline - 1
        rounded = plan.shard > 1 and plan.zero < 3 and plan.precision != "fp32"  # on every device, fp32 at the owners
        software = replace(MESHFIT, master=True) if rounded else MESHFIT
        ranks = {0, min(1, last), last}  # the first keeps most microbatches, the last its logits
        most = max((rank_memory(self.model, d, software, rank) for rank in ranks), key=lambda m: m.allocated)
        held = dict(most.held)
        if plan.shard == 1 and plan.precision in ("bf16", "bf16-compute", "fp16", "fp8"):
            held["rounded"] = held["weights"] / 2
        if plan.precision == "bf16-true":
            held |= {"weights": held["weights"] / 2, "gradients": held["gradients"] / 2}
        if plan.states == "bf16":
            held["optimizer"] /= 2
        for kind, word in (("optimizer", "optimizer"), ("weights", "parameters"), ("optimizer", "parameters")):
            if plan.offloads(word):
                held[kind] = 0.0
        if plan.offloads("activations"):
            held["activations"] /= max(1, self.model.layers // plan.pipeline)  # the layer at hand
        return StepMemory(held, most.stage)

    def at_least(self, plan: Plan, batch: int) -> float:
        return self.steps.at_least(self.work(plan, batch)) + self._copied(plan, batch)

    def _copied(self, plan: Plan, batch: int) -> float:
        """Seconds of copies between device and host, both ways, a step; none of them is hidden."""
        if plan.offload == "none":
            return 0.0
        here, all_of_it = self.memory(plan, batch).held, self.memory(replace(plan, offload="none"), batch).held
        moved = sum(all_of_it[kind] - here[kind] for kind in ("optimizer", "weights"))
        moved += (all_of_it["activations"] - here["activations"]) * plan.microbatches
        return 2 * moved / self.cluster.accelerator.pcie

    def __call__(self, plan: Plan, batch: int) -> Prediction:
        work, memory = self.work(plan, batch), self.memory(plan, batch)
        step, copied = self.steps(work), self._copied(plan, batch)
        passing = (held := dict(memory.held)).pop("passing")
        return Prediction(
            plan=plan,
            batch=batch,
            seconds=step.seconds + copied,
            items=step.items | ({"offload": copied} if copied else {}),
            memory=memory,
            kinds=phases(held, passing),
            capacity=self.cluster.accelerator.memory,
            work=work,
        )
