"""Trains a few steps, on one device or under a plan, and keeps their losses, gradients, weights and state."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshfit.axes.data.batchnorm import batch_norms
from meshfit.data import tree
from meshfit.data.datasets import open_source
from meshfit.data.loader import Batch, Microbatch
from meshfit.drive import begin
from meshfit.job import Job
from meshfit.proof.modules import ModuleHooks, ModuleOutputs
from meshfit.run import Run
from meshfit.step import Step


@dataclass(frozen=True)
class Trained:
    """Losses, gradients, weights and state of a few steps."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    """Of the first step's mean loss over the batch."""
    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]
    first_buffers: dict[str, Tensor]
    """After the first step."""
    optimizer: dict[tuple[str, str], Tensor]
    """By parameter and key."""
    random: bool
    """Whether random numbers were drawn."""
    order: list[str] = field(default_factory=list)
    """Parameters in the order in which a forward reaches them."""
    modules: ModuleOutputs | None = None


@dataclass(frozen=True)
class Variant:
    """How the trainings that are compared differ from the job's."""

    quiet: bool = False
    """Without dropout: modules in eval mode, all but BatchNorm."""
    perturbed: float = 0.0
    """Relative perturbation of the weights, up or down at random."""
    backwards: bool = False
    """The samples of each batch in the opposite order: the same sums with another rounding."""
    watched: bool = False
    """Also keep the outputs of modules in the first step."""


def train(job: Job, how: Variant) -> Trained:
    """Train a copy of ``job``'s model; an optimizer of the user's own is copied with it."""
    model, optimizer = copy.deepcopy((job.build(), job.optimizer))
    if how.quiet:
        model.train = Quiet(model)  # type: ignore[method-assign]
        model.train()
    if how.perturbed:
        _perturb(model, how.perturbed)
    training = begin(replace(job, model=model, optimizer=optimizer), lockstep=False, tap=partial(capture, how))
    steps: list[Step] = list(training)
    assert training.outcome is not None
    return Trained([s.loss for s in steps], [s.grad_norm for s in steps], **training.outcome.captured)


@torch.no_grad()
def _perturb(model: nn.Module, by: float) -> None:
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        if p.is_floating_point() or p.is_complex():
            sign = torch.randint(2, p.shape, generator=generator) * 2 - 1
            p.mul_((1 + by * sign.double()).to(p.device))


class Quiet:
    """Replaces a model's ``train``: a training mode without dropout, wherever the model is recorded, copied or sent.
    Only the BatchNorms that would train do."""

    def __init__(self, model: nn.Module):
        self.model = model
        norms = set(batch_norms(model))
        self.trains = {name for name, module in model.named_modules() if module in norms and module.training}

    def __call__(self, mode: bool = True) -> nn.Module:
        type(self.model).train(self.model, mode)
        for name, module in self.model.named_modules():
            module.training = mode and name in self.trains
        return self.model


def capture(how: Variant, run: Run) -> None:
    """Keep a run's first gradients, and its weights and state after the last step."""
    before = _random_state(run.world.device)
    named, shape = dict(run.model.named_parameters()), run.placed.shape
    if how.backwards:
        batches = run.batches
        run.batches = lambda: map(_backwards, batches())  # type: ignore[method-assign]
    hooks = ModuleHooks(run, keep=how.watched)

    first: dict[str, Tensor] = {}

    def gradients(correction: Tensor | float) -> None:
        if run.step == 0:
            run.captured["first_buffers"] = buffers(run.placed.tensors())
            own = {name: p.grad for name, p in named.items() if p.requires_grad and p.grad is not None}
            made = {name: {"": grad * correction} for name, grad in own.items()}
            if (peers := run.coordination.peers) is not None:  # each worker has its own; the servers sum them
                for each in made.values():
                    dist.all_reduce(each[""], group=peers)
            found = {name: each[""] for name, each in run.placed.wholes(made).items()}
            first.update(found)  # phase by phase
            run.captured["gradients"] = first
            run.captured["order"] = hooks.order
            if how.watched:
                run.captured["modules"] = hooks.outputs(correction)
            hooks.remove()

    def buffers(whole: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: whole[name] for name, b in shape.named_buffers() if b.is_floating_point()}

    def captured() -> dict[str, Any]:
        whole = run.placed.tensors()
        weights = {name: whole[name] for name, _ in shape.named_parameters()}
        optimizer = {(name, key): t for name, many in run.optimizer_state().items() for key, t in many.items()}
        random = not torch.equal(before, _random_state(run.world.device))
        return {"weights": weights, "buffers": buffers(whole), "optimizer": optimizer, "random": random}

    run.tap = gradients
    run.at_end = lambda: run.captured.update(captured())


def _random_state(device: torch.device) -> Tensor:
    here = torch.get_rng_state()
    return torch.cat([here, torch.cuda.get_rng_state(device)]) if device.type == "cuda" else here


def can_go_backwards(job: Job) -> bool:
    """Whether the samples of a batch can be reordered: where they are rows of tensors."""
    few = open_source(job.data).few(2)
    leaves = list(tree.leaves(few))
    return tree.by_sample(few) is None and all(isinstance(leaf, Tensor) and leaf.dim() > 0 for leaf in leaves)


def _backwards(batch: Batch) -> Batch:
    def turned(part: Microbatch) -> Microbatch:
        return replace(part, content=tree.map_tensors(lambda t: t.flip(0), part.content)) if part.samples else part

    return replace(batch, microbatches=[turned(part) for part in batch.microbatches])


def rounding_of(job: Job, precision: str) -> float:
    """Relative size of a rounding error in the lowest precision of the training."""
    kinds = {p.dtype for p in job.build().parameters() if p.is_floating_point()}
    if precision != "fp32" or kinds & {torch.float16, torch.bfloat16}:
        return 2.0**-12  # then rounded to 8 or 11 bits: some weights change, some do not
    return torch.finfo(torch.float64 if kinds == {torch.float64} else torch.float32).eps


def named_in_order(names: list[str], order: list[str]) -> Iterator[str]:
    """``names`` as a forward reaches them; those that it does not, at the end."""
    place = {name: i for i, name in enumerate(order)}
    yield from sorted(names, key=lambda name: place.get(name, len(place)))
