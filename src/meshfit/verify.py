"""``meshfit.verify``: proof that a plan trains like one device.

A few steps are trained on one device and under the plan, from the same weights on the same samples, and losses,
gradients, their norm, weights, buffers and optimizer state are compared.

Rounding is measured (proof/compare.py), so that it is not taken for a bug: one device is trained again with its weights
perturbed by a rounding error, and with its samples in another order. Where that is not enough, both sides are trained
again in fp64, whose rounding is a billion times smaller. Where that cannot be run, or does not decide it either, the
answer is "undecided". Of a plan that differs the first module is named whose output or gradient does.

Where devices do not take every step together (``staleness=``, ``exchange=local``) equality is not expected: both are
trained on as many samples, and their loss over all data, and how late gradients were, are reported. With plain SGD,
though, weights averaged after each step are those of one device.
"""

import copy
import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from meshfit.arguments import verb_of, whole
from meshfit.axes.data.batchnorm import batch_norms
from meshfit.drive import begin
from meshfit.errors import JobError, PlanError, in_short
from meshfit.job import NO_EVALUATION, Job, plan_of
from meshfit.launch.devices import Devices
from meshfit.plan import Plan
from meshfit.proof.compare import BEYOND, LIMITS, Comparison, Quantity, compare
from meshfit.proof.double import doubled
from meshfit.proof.modules import first_that_differs, keeps_modules
from meshfit.proof.training import Trained, Variant, can_go_backwards, rounding_of, train

NOT_COMPARED = {**NO_EVALUATION, "ema": None, "out": None}
NOT_COMPARED |= {"checkpoint": None, "resume": False, "listen": None}
EXIT_CODES = {"equal": 0, "different": 1, "undecided": 3}


@dataclass(frozen=True)
class Verdict:
    """Whether a plan trained like one device, quantity by quantity."""

    plan: Plan
    steps: int
    rows: list[Quantity]
    noise: list[str] = field(default_factory=list)
    """Tensors whose gradient is rounding: their weights are not compared."""
    notes: list[str] = field(default_factory=list)
    against: str = "one device"
    answer: str = "equal"
    """ "equal", "different", or "undecided"."""
    decided_in: str = "fp32"
    """The precision of ``rows``: the plan's own, or "fp64" where that could not decide."""
    first: str = ""
    """The first module whose output or gradient differs, or the first parameter, in words."""
    comparable: bool = True
    """Whether the plan promises the steps of one device."""

    @property
    def equal(self) -> bool:
        return self.answer == "equal"

    @property
    def exit_code(self) -> int:
        """Of the command: 0 equal, 1 different, 3 undecided, or equality is not expected."""
        return EXIT_CODES[self.answer]


@dataclass(frozen=True, kw_only=True)
class VerifyArguments(Job):
    """What ``verify`` is asked: a job, and how many of its steps are compared."""

    check_steps: int = 5


@verb_of(VerifyArguments)
def verify(asked: dict[str, Any]) -> Verdict:
    """Train ``check_steps`` steps on one device and under the plan, and compare. The model is not changed.

    The other arguments are those of ``fit``; those about its length, evaluations and files have no effect.
    """
    steps = asked.pop("check_steps")
    if not whole(steps) or steps < 1:
        raise JobError(f"check_steps={steps!r} is not a whole number above 0")
    return verify_job(Job(**{**asked, "steps": steps}).training(), steps)


def verify_job(job: Job, steps: int) -> Verdict:
    """The same for a job."""
    if job.weights is not None and isinstance(job.model, nn.Module):
        loaded = replace(job, model=copy.deepcopy(job.model)).loaded()
        job = replace(loaded, weights=None, partial=False)
    settled = replace(job, steps=steps, epochs=None, **NOT_COMPARED).settled()
    plan, devices = plan_of(settled), settled.devices
    assert isinstance(devices, Devices)
    first = "cpu" if devices.kind == "cpu" else f"{devices.kind}:{(devices.indices or (0,))[0]}"
    together = plan.microbatches if batch_norms(job.build()) else 1  # BatchNorm's statistics are those of a microbatch
    one = Plan(precision=plan.precision, batchnorm=plan.batchnorm, microbatches=together, compile="none")
    if plan in (one, replace(one, compile="auto")):
        raise PlanError(f"{plan} is one device: there is nothing to compare", "give a plan of several: data=2, say")
    alone = replace(settled, plan=one, devices=first)
    if not plan.in_step and not _averages_gradients(plan, job):
        return _beside(settled, plan, steps)
    return _Proof(alone, settled, plan, steps).verdict()


class _Proof:
    """One device and a plan, trained and compared until the answer is known."""

    def __init__(self, alone: Job, spread: Job, plan: Plan, steps: int):
        self.alone, self.spread, self.plan, self.steps = alone, spread, plan, steps
        self.notes: list[str] = []
        self.how = Variant()
        self.random = False
        """Whether random numbers are drawn that cannot be turned off."""

    def verdict(self) -> Verdict:
        want = train(self.alone, self.how)
        if want.random:
            self.how = Variant(quiet=True)
            want = train(self.alone, self.how)
            self.random = want.random
            self.notes.append("dropout was off for the comparison: each rank draws its own random numbers")
        rounding = rounding_of(self.alone, self.plan.precision)
        word = self.plan.precision if rounding < 1e-6 or self.plan.precision != "fp32" else "bf16"
        found = self._compared(self.alone, self.spread, want, rounding, LIMITS[word])
        if not self.plan.in_step:
            self.notes.append("losses and gradients are each rank's own: weights are compared")
        if found.equal:
            self._tell_of_raised(found)
            return self._answer("equal", found, word)
        if self.random:
            self.notes.append(
                "each rank draws its own random numbers even in eval mode: they are the difference, or hide it"
            )
            return self._answer("undecided", found, word)
        if math.isinf(found.worst.difference):  # something is there on one side only
            return self._different(self.alone, self.spread, found, word, rounding)
        return self._in_double(found, word, rounding)

    def _in_double(self, found: Comparison, word: str, rounding: float) -> Verdict:
        """The answer of fp64, where ``found`` does not decide it."""
        worst = found.worst
        why = f"{worst.name} differs by {worst.difference:.1e}, and one device from itself by {worst.rounding:.1e}"
        hidden = "" if found.different else "rounding could hide a bug: "
        self.notes.append(f"in {word} {hidden}{(hidden and found.blind) or why}")
        try:
            exact = lambda job: replace(doubled(job), plan=replace(plan_of(job), precision="fp32"))
            alone, spread = exact(self.alone), exact(self.spread)
            want = train(alone, replace(self.how, watched=True))
            eps = torch.finfo(torch.float64).eps
            wide = self._compared(alone, spread, want, eps, LIMITS["fp64"])
        except Exception as error:
            self.notes.append(f"it cannot be repeated in fp64: {in_short(error)}")
            if found.different:
                return self._different(self.alone, self.spread, found, word, rounding)
            return self._answer("undecided", found, word)
        self.notes.append("so both were trained again in fp64, weights and data cast to double")
        lower = want.modules is not None and want.modules.lower
        if wide.equal and word != "fp32":
            self.notes.append(f"in fp64 the plan is equal, but in {word} it differs by more than rounding was measured")
            return self._answer("undecided", found, word)
        if wide.equal:
            if found.different:
                self.notes.append(f"there {worst.name} is equal: in fp32 rounding grew over the steps")
            return self._answer("equal", wide, "fp64")
        if wide.too_rough or wide.blind:
            self.notes.append("even in fp64 one device is not equal to itself: does the model draw random numbers?")
            return self._answer("undecided", wide, "fp64")
        if lower and not found.different:
            self.notes.append("but the model itself casts activations below fp64, so this proves no more than fp32")
            return self._answer("undecided", wide, "fp64")
        return self._different(alone, spread, wide, "fp64", eps)

    def _compared(
        self, alone: Job, spread: Job, want: Trained, rounding: float, limits: dict[str, float]
    ) -> Comparison:
        got = train(spread, self.how)
        again = [train(alone, replace(self.how, perturbed=rounding))]
        found = self._of_rows(compare(want, got, again, limits))
        if found.equal or not can_go_backwards(alone):
            return found
        turned = train(alone, replace(self.how, backwards=True))
        alike, own = (compare(want, other, [], limits).rows for other in (turned, again[0]))
        for one, other in zip(alike, own, strict=True):
            if one.name == "gradients" and one.difference > BEYOND * max(other.difference, rounding):
                self.notes.append("the order of the samples in a batch matters to this training")
                return found
        return self._of_rows(compare(want, got, [*again, turned], limits))

    def _of_rows(self, found: Comparison) -> Comparison:
        return found if self.plan.in_step else replace(found, rows=[r for r in found.rows if r.name == "weights"])

    def _tell_of_raised(self, found: Comparison) -> None:
        for row in found.rows:
            if row.difference > row.fixed:
                self.notes.append(
                    f"{row.name}: the limit is {row.limit:.1e} instead of {row.fixed:.0e}, since one device is"
                    f" {row.rounding:.1e} from itself after a rounding"
                )

    def _different(self, alone: Job, spread: Job, found: Comparison, word: str, rounding: float) -> Verdict:
        names = {row.name: row.first for row in found.rows if not row.equal and row.first}
        first, parameter = "", names.get("each gradient") or names.get("gradients")
        if keeps_modules(self.plan):
            short = [replace(side, steps=1) for side in (alone, spread)]
            short[1] = replace(short[1], plan=replace(plan_of(spread), compile="none"))
            how = replace(self.how, watched=True)
            want, got = (train(side, how).modules for side in short)
            again = train(short[0], replace(how, perturbed=rounding)).modules
            if want is not None and got is not None and again is not None:
                first = first_that_differs(want, got, again, 1e-7 if word == "fp64" else 1e-4)
        if not first and (parameter or "weights" in names):
            first = f"the gradient of {parameter}" if parameter else f"the weight {names['weights']}"
        return self._answer("different", found, word, first)

    def _answer(self, answer: str, found: Comparison, word: str, first: str = "") -> Verdict:
        return Verdict(
            self.plan, self.steps, found.rows, found.noise, self.notes, answer=answer, decided_in=word, first=first
        )


def _averages_gradients(plan: Plan, job: Job) -> bool:
    """Whether weights averaged after every step are those of one step with the mean gradient."""
    (optimizer, *more) = job.make_optimizer(job.build()).each
    momentum = any(group.get("momentum") for group in optimizer.param_groups)
    plain = not more and type(optimizer) is torch.optim.SGD and not momentum
    return plan.exchange == "local" and plan.every == 1 and not plan.overlap and plain and job.clip is None


def _beside(job: Job, plan: Plan, steps: int) -> Verdict:
    """Asynchronous or local steps, beside the same samples with all devices in step."""
    together = replace(plan, staleness=0, late="none", exchange="allreduce", every=1, overlap=0)
    share = plan.data if plan.staleness else 1  # of a batch, in a step
    ends = []
    for each, count in ((together, steps), (plan, steps * share)):
        model = copy.deepcopy(job.build())
        copied = replace(job, plan=each, steps=count, model=model, valid=job.data, valid_every=count)
        made = sorted(begin(copied, lockstep=False), key=lambda step: step.step)
        ends.append((next(step.valid["loss"] for step in reversed(made) if step.valid), made))
    (want, _), (got, made) = ends
    rows = [Quantity("loss over all data, at the end", abs(got - want) / (abs(want) or 1.0), math.inf)]
    notes = [f"loss over all data: {got:.4g}, in step {want:.4g}"]
    if plan.staleness:
        late = [step.staleness or 0 for step in made]
        notes.append(f"gradients were {sum(late) / len(late):.2g} updates late in the mean, {max(late)} at most")
    return Verdict(plan, steps, rows, notes=notes, against=str(together), answer="undecided", comparable=False)
