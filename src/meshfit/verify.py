"""``meshfit.verify``: proof that a plan trains like one device.

A few steps are trained on one device and under the plan, from the same weights on the same samples, and
everything that training makes is compared: losses, gradients, their norm, weights, buffers, optimizer state.

Tensors are compared over the whole model, ||a - b|| / ||b||. Tensor by tensor would fail correct code: some
parameters have a true gradient of zero (attention's key biases), an adaptive optimizer divides their rounding by
itself, and so moves them by its full learning rate in a direction that means nothing. Such tensors are listed. A bias
before a BatchNorm is one, and its running mean follows the bias: where there are such tensors, buffers are compared
after the first step, not the last.

Where devices do not make every step together (``staleness=``, ``exchange=local``) there is nothing to be equal: both
are trained on as many samples, and their loss over all data, and how late gradients were, are put beside each other.
Averaged after each step of plain SGD, though, weights are those of one device.
"""

import copy
import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshfit.drive import begin
from meshfit.errors import PlanError, clearly
from meshfit.job import Job
from meshfit.launch.devices import Devices
from meshfit.layout.batchnorm import batch_norms
from meshfit.plan import Plan
from meshfit.run import Run
from meshfit.served import ServedRun
from meshfit.step import Step

# Largest relative difference that counts as equal, by precision: what rounding in another order comes to.
LIMITS = {
    "fp32": {
        "loss": 1e-5,
        "gradient norm": 1e-4,
        "gradients": 1e-4,
        "weights": 1e-4,
        "buffers": 1e-4,
        "optimizer": 1e-3,
    },
    "bf16": {
        "loss": 1e-2,
        "gradient norm": 5e-2,
        "gradients": 1e-1,
        "weights": 1e-2,
        "buffers": 2e-2,
        "optimizer": 5e-1,
    },
}
LIMITS["fp16"] = LIMITS["bf16"]
NOT_COMPARED = {"valid": None, "metrics": {}, "best": None, "patience": None, "ema": None, "out": None}
NOT_COMPARED |= {"checkpoint": None, "resume": False, "listen": None}
NOISE = 1e-5  # a gradient this small beside the model's typical one is rounding


@dataclass(frozen=True)
class Row:
    """One quantity, compared."""

    name: str
    difference: float
    limit: float
    first: str = ""
    """Where it first goes beyond the limit: a step, or a tensor."""

    @property
    def equal(self) -> bool:
        return self.difference <= self.limit  # False for NaN


@dataclass(frozen=True)
class Verdict:
    """Whether a plan trained like one device, quantity by quantity."""

    plan: Plan
    steps: int
    rows: list[Row]
    noise: list[str] = field(default_factory=list)
    """Tensors whose true gradient is zero: not compared."""
    notes: list[str] = field(default_factory=list)
    against: str = "one device"
    comparable: bool = True
    """Whether the plan promises the steps of one device."""

    @property
    def equal(self) -> bool:
        return all(row.equal for row in self.rows)


@dataclass(frozen=True)
class _Trained:
    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]
    first_buffers: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    random: bool


@clearly
def verify(model: Any, data: Any, *, check_steps: int = 5, **asked: Any) -> Verdict:
    """Train ``check_steps`` steps on one device and under the plan, and compare. The keywords are those of ``fit``.

    The model is left as it is.
    """
    return verify_job(Job.of({"model": model, "data": data, "steps": check_steps, **asked}).training(), check_steps)


def verify_job(job: Job, steps: int = 5) -> Verdict:
    """The same for a job."""
    settled = replace(job, steps=steps, epochs=None, **NOT_COMPARED).settled()
    plan, devices = settled.plan, settled.devices
    assert isinstance(plan, Plan)
    assert isinstance(devices, Devices)
    spread = replace(settled, precision=None, microbatches=None, batchnorm=None, compile=None)  # all in the plan now
    first = "cpu" if devices.kind == "cpu" else f"{devices.kind}:{(devices.indices or (0,))[0]}"
    together = plan.microbatches if batch_norms(job.build()) else 1  # BatchNorm is over each microbatch by itself
    one = Plan(precision=plan.precision, batchnorm=plan.batchnorm, microbatches=together, compile="none")
    if plan in (one, replace(one, compile="auto")):
        raise PlanError(f"{plan} is one device: there is nothing to compare", "name a plan that spreads: data=2, say")
    alone = replace(spread, plan=one, devices=first)
    if not plan.in_step and not _averages_gradients(plan, job):
        return _beside(spread, plan, steps)
    notes = []
    reference = _train(alone, quiet=False)
    if quiet := reference.random:
        notes.append("dropout was off for the comparison: each rank draws its own random numbers")
        reference = _train(alone, quiet=True)
    rows, noise = _compare(reference, _train(spread, quiet=quiet), LIMITS[plan.precision])
    if not plan.in_step:
        notes.append("losses and gradients are each rank's own: weights are compared")
        rows = [row for row in rows if row.name == "weights"]
    return Verdict(plan, steps, rows, noise, notes)


def _averages_gradients(plan: Plan, job: Job) -> bool:
    """Whether weights averaged after every step are those of one step with the mean gradient."""
    optimizer = job.make_optimizer(job.build())
    plain = type(optimizer) is torch.optim.SGD and not any(group["momentum"] for group in optimizer.param_groups)
    return plan.exchange == "local" and plan.every == 1 and not plan.overlap and plain and job.clip is None


def _beside(job: Job, plan: Plan, steps: int) -> Verdict:
    """What steps that are not made together come to, beside the same samples in step."""
    together = replace(plan, staleness=0, late="none", exchange="allreduce", every=1, overlap=0)
    share = plan.data if plan.staleness else 1  # of a batch, in a step
    ends = []
    for each, count in ((together, steps), (plan, steps * share)):
        apart = replace(
            job, plan=each, steps=count, model=copy.deepcopy(job.build()), valid=job.data, valid_every=count
        )
        told = sorted(begin(apart, lockstep=False), key=lambda step: step.step)
        ends.append((next(step.valid["loss"] for step in reversed(told) if step.valid), told))
    (want, _), (got, told) = ends
    rows = [Row("loss over all data, at the end", abs(got - want) / (abs(want) or 1.0), math.inf)]
    notes = [f"loss over all data: {got:.4g}, in step {want:.4g}"]
    if plan.staleness:
        late = [step.staleness or 0 for step in told]
        notes.append(f"gradients were {sum(late) / len(late):.2g} updates late in the mean, {max(late)} at most")
    return Verdict(plan, steps, rows, notes=notes, against=str(together), comparable=False)


def _train(job: Job, quiet: bool) -> _Trained:
    # The user's model stays as it is. An optimizer of their own goes with its copy of the parameters.
    model, optimizer = copy.deepcopy((job.build(), job.optimizer))
    apart = replace(job, model=model, optimizer=optimizer)
    training = begin(apart, lockstep=False, tap=_Capture(quiet))
    steps: list[Step] = list(training)
    assert training.outcome is not None
    return _Trained([s.loss for s in steps], [s.grad_norm for s in steps], **training.outcome.captured)


@dataclass(frozen=True)
class _Capture:
    """Puts aside what a run makes: the first step's gradients, and everything after the last step."""

    quiet: bool
    """Without dropout: modules in eval mode, all but BatchNorm."""

    def __call__(self, run: Run) -> None:
        if self.quiet:
            norms = set(batch_norms(run.model))
            for module in run.model.modules():
                module.training = module in norms
        before = torch.get_rng_state()
        named, shape = dict(run.model.named_parameters()), run.placed.shape

        def gradients(correction: Tensor | float) -> None:
            if run.step == 0:
                run.captured["first_buffers"] = buffers(run.placed.tensors())
                made = {name: {"": p.grad * correction} for name, p in named.items() if p.grad is not None}
                if (
                    isinstance(run, ServedRun) and run.peers is not None
                ):  # each worker has its own; the servers sum them
                    for each in made.values():
                        dist.all_reduce(each[""], group=run.peers)
                run.captured["gradients"] = {name: each[""] for name, each in run.placed.wholes(made).items()}

        def buffers(whole: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: whole[name] for name, b in shape.named_buffers() if b.is_floating_point()}

        def captured() -> dict[str, Any]:
            whole = run.placed.tensors()
            weights = {name: whole[name] for name, _ in shape.named_parameters()}
            optimizer = {f"{name}.{key}": t for name, many in run.optimizer_state().items() for key, t in many.items()}
            random = not torch.equal(before, torch.get_rng_state())
            return {"weights": weights, "buffers": buffers(whole), "optimizer": optimizer, "random": random}

        run.tap = gradients
        run.at_end = lambda: run.captured.update(captured())


def _compare(want: _Trained, got: _Trained, limits: dict[str, float]) -> tuple[list[Row], list[str]]:
    typical = _rms(want.gradients.values())
    noise = sorted(name for name, g in want.gradients.items() if _rms([g]) < NOISE * typical)
    rows = [
        _series("loss", want.losses, got.losses, limits["loss"]),
        _series("gradient norm", want.norms, got.norms, limits["gradient norm"]),
    ]
    for name in ("gradients", "weights", "buffers", "optimizer"):
        kept = "first_buffers" if name == "buffers" and noise else name
        ours, theirs = getattr(got, kept), getattr(want, kept)
        if ours or theirs:
            rows.append(_tensors(name, theirs, ours, limits[name], noise))
    return rows, noise


def _series(name: str, want: list[float], got: list[float], limit: float) -> Row:
    differences = [abs(a - b) / (abs(b) or 1.0) for a, b in zip(got, want, strict=True)]
    beyond = next((i for i, d in enumerate(differences, 1) if not d <= limit), None)
    worst = max(differences, key=lambda d: (d != d, d))
    return Row(name, worst, limit, f"step {beyond}" if beyond else "")


def _tensors(name: str, want: dict[str, Tensor], got: dict[str, Tensor], limit: float, noise: list[str]) -> Row:
    if want.keys() != got.keys():
        return Row(name, float("inf"), limit, f"{min(want.keys() ^ got.keys())} is in one of them only")
    quiet = tuple(noise)  # a tensor's optimizer state begins with its name
    compared = {key: tensor.double() for key, tensor in want.items() if not (key.startswith(quiet))}
    apart = {key: (got[key].double() - tensor).norm().item() for key, tensor in compared.items()}
    size = sum(tensor.norm().item() ** 2 for tensor in compared.values()) ** 0.5
    total = sum(d * d for d in apart.values()) ** 0.5 / (size or 1.0)
    first = ""
    if not total <= limit:
        own = {key: d / (compared[key].norm().item() or 1.0) for key, d in apart.items()}
        first = next((key for key, d in own.items() if not d <= limit), max(own, key=lambda key: own[key]))
    return Row(name, total, limit, first)


def _rms(tensors: Any) -> float:
    tensors = list(tensors)
    count = sum(t.numel() for t in tensors) or 1
    return (sum(t.double().square().sum().item() for t in tensors) / count) ** 0.5
