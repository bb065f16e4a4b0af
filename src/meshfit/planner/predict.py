"""Seconds and bytes of any module under any plan: trace x plan x cluster.

    trace       one forward and backward on meta tensors, its operations listed (``axes.shard.units.traced``): of two
                batches, from which those of all others follow
    plan        what its axes act on (``axes.find``) and cost (``plan_cost``): what each rank of the pipeline then runs,
                holds and says
    cluster     seconds of those operations and collectives (``StepModel``), the pipeline's schedule simulated

    predictor = TracedPredictor(model, objective, batch, optimizer, Cluster.of("8xH100"))
    predictor(Plan.parse("shard=8 precision=bf16"), 64).seconds

What is traced and found is kept by what it depends on, so the first plan of a layout takes seconds, further ones
milliseconds. ``tensor=``, ``context=`` and ``expert=`` are found by trials, which need a model with weights in memory.
For one on meta, of Hugging Face, the first two are found on a narrow stand-in (``narrow``).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from math import ceil, prod
from typing import Any

import torch
from torch import nn

from meshfit.anatomy.operations import FusedAttention
from meshfit.anatomy.probe_optimizer import StateBytes, state_bytes
from meshfit.anatomy.record import TraceError
from meshfit.anatomy.samples import Unlike, at_samples
from meshfit.anatomy.trace import Trace
from meshfit.axes.compile.axis import compilable
from meshfit.axes.compile.saved import Kept, after_compile, kept_by_compiled
from meshfit.axes.context.plan import ContextPlan
from meshfit.axes.find import Study
from meshfit.axes.kept import kept_path, read_kept, write_kept
from meshfit.axes.order import ORDER
from meshfit.axes.pipeline.stages import FoundStages, pipeline_of
from meshfit.axes.refuse import check
from meshfit.axes.shard.units import traced
from meshfit.axes.tensor.axis import splits_sequence
from meshfit.axes.tensor.program import Program, program_of
from meshfit.data import tree
from meshfit.errors import PlanError
from meshfit.optimizers import Optimizers
from meshfit.plan import Plan
from meshfit.plan_cost import Costing, costed
from meshfit.planner.cluster import Cluster
from meshfit.planner.narrow import NarrowModel, narrowed
from meshfit.planner.plan_work import plan_work
from meshfit.planner.prediction import CONTEXT, Limits, Prediction, StepMemory, phases
from meshfit.planner.software import MESHFIT
from meshfit.planner.step import StepModel, StepWork

SIZES = (11, 13)
"""Samples of the two batches that are traced. Primes: rows of a batch are then seldom as many as channels."""

FINE = 1e-9
"""Share of all parameters below which modules are taken as a whole where operations are split: they are opened."""

TRIED = ("tensor", "context", "expert", "branch")
"""Axes that are found by trials on the model."""


class TracedPredictor:
    """Of one model and its loss, ``objective(model, batch)``; ``batch`` is a sample batch of any size. Model and batch
    may be on meta."""

    def __init__(
        self,
        model: nn.Module,
        objective: Callable[[nn.Module, Any], Any],
        batch: Any,
        optimizer: torch.optim.Optimizer | Optimizers,
        cluster: Cluster,
        *,
        device: str = "cuda",
    ):
        self.model, self.objective, self.batch, self.optimizer = model, objective, batch, optimizer
        self.cluster, self.device = cluster, device
        self.steps = StepModel(cluster, MESHFIT)
        self._traces: dict[Any, Trace] = {}
        self._made: dict[Any, Any] = {}

    def __call__(self, plan: Plan, batch: int) -> Prediction:
        """A step of ``batch`` samples over all devices. ``PlanError`` where the plan cannot be."""
        ranks, work = self._costed(plan, batch), self._work(plan, batch)
        time = self.steps(work)
        loudest = max(ranks, key=lambda costing: sum(c.bytes * c.count for c in costing.total.collectives)).total
        return Prediction(
            plan=plan,
            batch=batch,
            seconds=time.seconds,
            items=time.items,
            memory=self.memory(plan, batch),
            capacity=self.cluster.accelerator.memory,
            kinds=self._phases(plan, batch),
            collectives=loudest.collectives,
            work=work,
        )

    def memory(self, plan: Plan, batch: int) -> StepMemory:
        """On the device that has most, in the phase in which it has most."""
        held = max(self._phases(plan, batch).values(), key=lambda kind: sum(kind.values()))
        return StepMemory(held, context=CONTEXT if self.device == "cuda" else 0.0)

    def _phases(self, plan: Plan, batch: int) -> dict[str, dict[str, float]]:
        most = max(self._costed(plan, batch), key=lambda costing: costing.total.most).total
        return phases(most.held, most.passed)

    def at_least(self, plan: Plan, batch: int) -> float:
        """Seconds that ``__call__`` will not go below."""
        return self.steps.at_least(self._work(plan, batch))

    @cached_property
    def limits(self) -> Limits:
        """What the model lets the axes be, as far as a trace tells."""
        trace = self._trace(Plan(precision="bf16"), SIZES[0])
        blocks = sum(len(block.paths) for block in trace.blocks if len(block.paths) > 1)
        heads = {op.heads for e in trace.events for op in e.cost.forward if isinstance(op, FusedAttention)}
        tried = bool(heads) and (not self._on_meta or self._small is not None)
        divided = {"tensor": tuple((count, "heads") for count in sorted(heads))} if tried else {}
        if self.tokens and tried:
            divided["context"] = ((self.tokens, "tokens of a sequence"),)
        most = {"pipeline": (blocks, "blocks")} if blocks else {}
        return Limits(divided=divided, most=most, stages=max(1, blocks))

    @cached_property
    def tokens(self) -> int:
        """Of a sample: positions of its first input of whole numbers; 0: samples are no sequences."""
        whole = [t for t in tree.tensors(self.batch) if t.dim() > 1 and not t.is_floating_point()]
        return prod(whole[0].shape[1:]) if whole else 0

    # The trace

    @property
    def _on_meta(self) -> bool:
        return any(p.is_meta for p in self.model.parameters())

    def _taken(self, samples: int) -> Any:
        """A batch of so many samples, on meta."""
        there = max((len(t) for t in tree.tensors(self.batch) if t.dim()), default=0)
        sized = lambda t: t.new_empty((samples, *t.shape[1:]), device="meta") if t.dim() and len(t) == there else t
        return tree.map_tensors(sized, self.batch)

    def _trace(self, plan: Plan, samples: int) -> Trace:
        """Of a microbatch, in the plan's precision; finer where operations are split."""
        fine = plan.tensor > 1
        how = (plan.precision, plan.cuts, fine)
        if (*how, samples) not in self._traces:
            for size in SIZES:
                if (*how, size) not in self._traces:
                    self._traces[*how, size] = self._traced(plan, size, fine)
            first, second = (self._traces[*how, size] for size in SIZES)
            try:
                found = at_samples(first, SIZES[0], second, SIZES[1], samples)
            except Unlike:
                found = self._traced(plan, samples, fine)
            self._traces[*how, samples] = found
        return self._traces[*how, samples]

    def _traced(self, plan: Plan, samples: int, fine: bool) -> Trace:
        def made() -> Trace:
            how: dict[str, Any] = {"share": FINE} if fine else {}
            how |= {"device": self.device, "plan": plan, "operations": True}
            found = traced(self.model, self.objective, self._taken(samples), **how)
            if isinstance(found, TraceError):
                raise PlanError("the model cannot be traced", found.headline, *found.facts)
            return found

        return self._once(made, "traces", plan.precision, plan.cuts, fine, samples, kept=Trace)

    def _once(self, make: Callable[[], Any], *key: Any, kept: type | None = None) -> Any:
        """What ``make`` returns, by ``key``; on disk too, where ``kept`` says of what class it is."""
        if key not in self._made:
            path = None if kept is None else kept_path(key[0], *self._known, *key[1:], self.device)
            found = None if kept is None else read_kept(path, kept)
            if found is None:
                found = make()
                write_kept(path, found)
            self._made[key] = found
        return self._made[key]

    @cached_property
    def _known(self) -> tuple[nn.Module, Program | None]:
        """What is kept of the model on disk is kept by this."""
        return self.model, program_of(self.model, self.objective, self._taken(SIZES[0]))

    def _compiled(self, plan: Plan, trace: Trace, samples: int) -> Trace:
        """With what compiled code keeps. Blocks that are computed again keep their inputs, and parts that other axes
        split are taken as in eager mode, which keeps more."""
        split = any(getattr(plan, word) > 1 for word in TRIED)
        if plan.compile not in ("whole", "block") or plan.recomputed_blocks != "none" or split:
            return trace
        norms = [path for path, kind in trace.kinds.items() if "BatchNorm" in kind and plan.joins_batchnorms]
        blocks = compilable(trace, norms) if plan.compile == "block" else ()
        if plan.compile == "block" and not blocks:
            return trace
        first, second = (self._kept_by_compiled(plan, blocks, size) for size in SIZES)
        share = (samples - SIZES[0]) / (SIZES[1] - SIZES[0])
        line = lambda a, b: max(0, round(a + share * (b - a)))
        kept = {path: (line(a, b), line(c, d)) for path, (a, c) in first.items() for b, d in [second[path]]}
        return after_compile(trace, kept)

    def _kept_by_compiled(self, plan: Plan, blocks: tuple[str, ...], samples: int) -> Kept:
        def made() -> Kept:
            how = {"precision": plan.precision, "device": self.device}
            try:
                return kept_by_compiled(self.model, self.objective, self._taken(samples), blocks, **how)
            except Exception:  # of whatever code the model has: then it counts as eager, which keeps more
                return {}

        return self._once(made, "compiled", plan.precision, blocks, samples, kept=dict)

    # What the axes act on, and cost

    def _findings(self, plan: Plan, trace: Trace) -> dict[str, Any]:
        found = {word: self._tried(plan, word) for word in TRIED if getattr(plan, word) > 1}
        if plan.pipeline > 1:
            strategy = pipeline_of(plan)
            make = lambda: (trace, strategy.cut_of(trace))  # with the trace, so that no other gets its id
            _, cut = self._once(make, "cut", id(trace), strategy.stages, plan.cut)
            found["pipeline"] = FoundStages(None, 0.0, trace=trace, cut=cut)  # type: ignore[arg-type]
        return found

    def _tried(self, plan: Plan, word: str) -> Any:
        make = lambda: self._on_stand_in(plan, word) if self._on_meta else self._study(plan, word)
        degree = getattr(plan, word)
        if word == "context":
            return self._once(make, "context-plans", word, degree, plan.attention, kept=ContextPlan)
        return self._once(make, word, degree, word == "tensor" and splits_sequence(plan, self.device))

    def _study(self, plan: Plan, word: str, small: NarrowModel | None = None) -> Any:
        alone = replace(Plan(precision=plan.precision), **{word: getattr(plan, word)}, **_how(plan, word))
        model, batch = (self.model, self.batch) if small is None else (small.model, small.batch)
        return Study(alone, model, self.objective, batch, self.device, (), ORDER).found(word)

    def _on_stand_in(self, plan: Plan, word: str) -> Any:
        found = None
        if (small := self._small) is not None and word in ("tensor", "context"):
            found = self._study(plan, word, small)
            if found is not None:
                found = small.tensor(found, self.model) if word == "tensor" else small.context(found)
        if found is None:
            raise PlanError(
                f"{plan}: what {word}= splits is found by trials, for which the model must have weights",
                "it is on meta; data=, shard=, pipeline= and recompute= are predicted from its trace alone",
            )
        return found

    @cached_property
    def _state(self) -> StateBytes:
        return state_bytes(self.optimizer)

    @cached_property
    def _small(self) -> NarrowModel | None:
        return narrowed(self.model, self.batch, self.tokens)

    def _costed(self, plan: Plan, batch: int) -> list[Costing]:
        """By rank of the pipeline; those that run the same are costed once."""
        samples = ceil(batch / (plan.shares * plan.microbatches))
        return self._once(lambda: self._ranks(plan, samples), "costs", plan, samples)

    def _ranks(self, plan: Plan, samples: int) -> list[Costing]:
        check(plan, self.model)
        trace = self._compiled(plan, self._trace(plan, samples), samples)
        found = self._findings(plan, trace)
        how = {"found": found, "ahead": self.device == "cuda", "estimates": True, "state": self._state}
        alike: dict[Any, Costing] = {}
        keys = [self._likeness(plan, trace, found, rank) for rank in range(plan.pipeline)]
        for rank, key in enumerate(keys):
            if key not in alike:
                alike[key] = costed(plan, trace, self.optimizer, place={"pipeline": rank}, **how)
        return [alike[key] for key in keys]

    @staticmethod
    def _likeness(plan: Plan, trace: Trace, found: Mapping[str, Any], rank: int) -> Any:
        """Ranks of a pipeline that run the same operations: the first of them keeps the most microbatches."""
        if plan.pipeline == 1:
            return 0
        cut, strategy = found["pipeline"].cut, pipeline_of(plan)
        own = [trace.events[i] for stage in strategy.stages_of(rank) for i in cut.ranges[stage]]
        shapes = tuple(trace.parameters[name].shape for event in own for name in event.parameters)
        ends = (rank == 0, rank == plan.pipeline - 1)
        return ends, shapes, tuple((id(event.cost.forward), event.cost.kept) for event in own)

    def _work(self, plan: Plan, batch: int) -> StepWork:
        if plan.server or plan.exchange != "allreduce":
            raise PlanError(f"{plan}: seconds of model servers and local steps are not predicted", "their memory is")
        whole = self._trace(plan, SIZES[0]).cost
        flops = (whole.flops + whole.flops_backward) / SIZES[0] * batch
        ranks = self._costed(plan, batch)
        return plan_work(plan, ranks, samples=batch, tokens=self.tokens * batch, model_flops=flops)


def _how(plan: Plan, word: str) -> dict[str, str]:
    """How an axis works, as far as the plan says."""
    said = {"tensor": {"sequence": plan.sequence}, "context": {"attention": plan.attention}}.get(word, {})
    if word == "tensor" and plan.sequence == "auto" and plan.partitions_modules:
        return {"sequence": "whole"}  # as it is chosen under a pipeline
    return said
