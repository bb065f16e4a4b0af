"""The leader of a model server's workers, the first connected: it evaluates, keeps the best weights, saves.

What must outlive it is in the folder where the workers meet: the last evaluation, and the best weights so far. The next
worker takes over from there; an evaluation that was not finished is made again, with the same weights, as no step was
taken meanwhile.
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
        """Whether this worker is the leader."""
        self.missed: dict[int, dict[str, float]] = {}
        """By step: an evaluation that the leader before may not have reported."""
        self._found: dict[str, Any] = {}

    def take(self) -> None:
        """Be the leader from now on."""
        self.taken, found, best = True, newest(self.folder), self.run.best
        if found is None:
            return
        tensors, self._found = found
        if best is not None:
            best.restore_facts(self._found["best"])
            best.weights = {name: tensor.to(self.run.world.device) for name, tensor in tensors.items()}

    def evaluate(self, make: Callable[[], dict[str, float]]) -> dict[str, float]:
        """What ``make`` measures, kept; or what the leader before has measured already."""
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
        facts = {"step": self.run.step, "measured": measured, "best": None if best is None else best.facts()}
        write(self.folder, self.run.step, kept, facts)
