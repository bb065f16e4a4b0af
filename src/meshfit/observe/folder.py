"""What a run leaves on disk, in its folder:

run.json             plan, batch size, seed, versions; at the end: steps, seconds, metrics
metrics.jsonl        one line a step
events/rank0.jsonl   spans of every rank (see events.py)
weights.safetensors  the trained weights under their own names, tied ones once
"""

import json
import math
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from meshfit.job import Job
from meshfit.step import Step

if TYPE_CHECKING:
    from meshfit.result import Result

FLUSH_SECONDS = 1.0


class Folder:
    """Writes a run's folder. Without a path it writes nothing."""

    def __init__(self, path: Path | None, job: Job):
        self.path = path
        self._held: list[Step] = []
        self._about: dict[str, Any] = {
            "plan": str(job.plan),
            "batch_size": job.batch_size,
            "seed": job.seed,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        self._write()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._flush()

    def add(self, step: Step) -> None:
        if self.path is None:
            return
        self._held.append(step)
        if self._held[0].reading.ready and step.seconds - self._held[0].seconds > FLUSH_SECONDS:
            self._flush()

    def finish(self, result: "Result") -> None:
        self._flush()
        self._about |= {"steps": result.steps, "seconds": result.seconds, "notes": result.notes}
        self._about["metrics"] = {name: _number(value) for name, value in result.metrics.items()}
        self._write()
        if self.path is not None:
            _save(result.model, self.path / "weights.safetensors")

    def _flush(self) -> None:
        if self.path is not None and self._held:
            with (self.path / "metrics.jsonl").open("a") as lines:
                lines.writelines(json.dumps(_line(step)) + "\n" for step in self._held)
            self._held = []

    def _write(self) -> None:
        if self.path is not None:
            (self.path / "run.json").write_text(json.dumps(self._about, indent=2) + "\n")


def _line(step: Step) -> dict[str, Any]:
    line: dict[str, Any] = {
        "step": step.step,
        "epoch": step.epoch,
        "loss": _number(step.loss),
        "grad_norm": _number(step.grad_norm),
        "lr": step.lr,
        "samples": step.samples,
        "seconds": round(step.seconds, 6),
    }
    if step.valid is not None:
        line["valid"] = {name: _number(value) for name, value in step.valid.items()}
    return line


def _save(model: nn.Module, path: Path) -> None:
    from safetensors.torch import save_file

    weights: dict[str, torch.Tensor] = {}
    known: set[tuple[int, torch.Size]] = set()
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, torch.Tensor) and (key := (tensor.data_ptr(), tensor.shape)) not in known:
            known.add(key)
            weights[name] = tensor.detach().cpu().contiguous().clone()
    save_file(weights, path)


def _number(value: float) -> float | str:
    """JSON has no NaN."""
    return value if math.isfinite(value) else str(value)
