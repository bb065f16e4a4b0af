"""What one worker of a model server does for all of them: it evaluates, keeps the best weights, and saves.

That is the first of those at work. What it must not take along when it dies lies in the folder where the workers meet,
whole or not there: the last evaluation, and the best weights so far. The next in line takes over from there; an
evaluation that was not finished is made again, with the same weights, as no step was taken meanwhile.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshfit.server.snapshot import newest, write

if TYPE_CHECKING:
    from meshfit.run import Run


class Leader:
    def __init__(self, run: "Run", folder: Path):
        self.run, self.folder = run, folder
        self.taken = False
        """Whether it is this worker's."""
        self.missed: dict[int, dict[str, float]] = {}
        """By step: an evaluation that the one before may not have come to tell of."""
        self._found: dict[str, Any] = {}

    def take(self) -> None:
        """Have it from now on."""
        self.taken, found, best = True, newest(self.folder), self.run.best
        if found is None:
            return
        tensors, self._found = found
        if best is not None:
            best.value, best.misses = self._found["value"], self._found["misses"]
            best.weights = {name: tensor.to(self.run.world.device) for name, tensor in tensors.items()}

    def evaluate(self, make: Callable[[], dict[str, float]]) -> dict[str, float]:
        """What ``make`` measures, kept; or what the one before has measured already."""
        if not self.taken:
            self.take()
        if self._found.get("step") == self.run.step:
            return self._found["measured"]
        measured = make()
        if self.run.plan.data > 1:
            self._keep(measured)
        return measured

    def _keep(self, measured: dict[str, float]) -> None:
        best = self.run.best
        kept = {} if best is None else {name: tensor.cpu() for name, tensor in best.weights.items()}
        facts = {"step": self.run.step, "measured": measured}
        facts |= {} if best is None else {"value": best.value, "misses": best.misses}
        write(self.folder, self.run.step, kept, facts)
