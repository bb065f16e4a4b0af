"""Whether compiling pays in a run: guessed before its first step, measured after some."""

import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from meshfit.axes.compile.axis import expected_step_seconds, pays
from meshfit.axes.compile.pieces import InPieces
from meshfit.data import tree
from meshfit.data.datasets import SampleStream
from meshfit.exchange.allreduce import BUCKET_BYTES, FIRST_BUCKET_BYTES, AllReduce
from meshfit.passes.pipeline import Pipelined
from meshfit.passes.whole import Passes

if TYPE_CHECKING:
    from meshfit.run.run import Run

MEASURED_STEPS = (10, 25)  # between them, whether compiling would pay is measured


def expected_step(run: "Run") -> float:
    """A guess of how long a step takes, on a GPU."""
    source, device = run.loader.source, run.world.device
    if device.type != "cuda" or isinstance(source, SampleStream):
        return 0.0
    first = next((t for t in tree.tensors(source.fetch(np.arange(1)))), None)
    tokens = first.numel() if first is not None and not first.is_floating_point() else 1
    return expected_step_seconds(run.model, tokens * run.loader.batch_size // run.plan.shares, device)


class Compiling:
    """Decides for ``run``, and compiles what its plan lets it compile."""

    def __init__(self, run: "Run"):
        self.run, self._done, self._clock = run, False, 0.0

    def reconsider(self, made: int) -> None:
        """Decide by the clock, after ``MEASURED_STEPS``. On one device alone: ranks might measure differently."""
        run, device = self.run, self.run.world.device
        if device.type != "cuda" or run.world.size > 1 or self._done or run.last_step is None:
            return
        torch.cuda.synchronize(device)
        first, last = MEASURED_STEPS
        if made == first:
            self._clock = time.perf_counter()
        else:
            self.decide((time.perf_counter() - self._clock) / (last - first), run.last_step - made)

    def decide(self, seconds: float, steps: int | None) -> None:
        """``seconds``: of a step as it is; ``steps``: that are to come."""
        run, device = self.run, self.run.world.device
        blocks, gathers = run.placed.compiled, any(phase.over.gathers for phase in run.phases)
        in_fp8 = run.plan.precision == "fp8"  # by a mode that acts on calls, which a compiled block has none of
        blocks = None if in_fp8 else blocks
        whole = run.placed.plain and run.plan.compile != "block" and not gathers and not in_fp8
        means = "whole" if whole else "block" if blocks is not None else "none"
        self._done, why = pays(run.plan.compile, device=device, step_seconds=seconds, steps=steps, means=means)
        if device.type == "cuda" or self._done:
            run.notes[:] = [note for note in run.notes if not note.startswith("compile")] + [why]
        if self._done and whole and isinstance(run.schedule, Passes):
            sums = isinstance(run.exchange, AllReduce) and run.exchange.degree > 1
            backend = InPieces(BUCKET_BYTES, FIRST_BUCKET_BYTES) if sums else "inductor"
            for phase in run.phases:
                phase.schedule.objective = torch.compile(phase.schedule.objective.__call__, backend=backend)
        elif self._done and blocks is not None:
            blocks.compile()
            if isinstance(run.schedule, Pipelined):
                run.schedule.split_backward = False  # a compiled block has one backward
