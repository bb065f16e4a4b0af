"""What a run leaves on disk, in its folder:

run.json             plan, batch size, seed, versions; at the end: steps, seconds, metrics
metrics.jsonl        one line a step
events/rank0.jsonl   spans, samples and facts of every rank (see events.py)
logs/rank0.log       what every rank printed (see launch/output.py)
tensorboard/         the same metrics for TensorBoard, where that is installed
weights.safetensors  the trained weights under their own names, tied ones once
report.html          one page about the run (see report.py)
"""

import importlib.util
import json
import math
import platform
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

import meshfit
from meshfit.arguments import check_local
from meshfit.errors import JobError
from meshfit.observe.foretold import foretell
from meshfit.observe.tensorboard import Scalars
from meshfit.step import Step

if TYPE_CHECKING:
    from meshfit.drive import Training

FLUSH_SECONDS = 1.0


class Folder:
    """Writes a training's folder, if it has one that this process writes."""

    def __init__(self, training: "Training"):
        job, self._training = training.job, training
        self.path = training.folder if training.writes else None
        self._held: list[Step] = []
        self._about: dict[str, Any] = {
            "plan": str(job.plan),
            "batch_size": job.batch_size,
            "seed": job.seed,
            "meshfit": meshfit.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        self._metrics: dict[str, float] = {}
        self._begun = False
        self._last = (0.0, 0)
        self._scalars = None
        if self.path is not None and importlib.util.find_spec("tensorboard") is not None:
            self._scalars = Scalars(self.path / "tensorboard")
        self._write()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Write what is still held, and, if the training came to its end, what it came to."""
        if self.path is None:
            return
        self._flush()
        outcome = self._training.outcome
        if outcome is not None:
            self._about |= {"seconds": outcome.seconds, "notes": [*self._training.said, *outcome.notes]}
            self._about |= foretell(self._training)
            self._about["metrics"] = {name: _number(value) for name, value in self._metrics.items()}
            self._write()
            _save(self._training.model, self.path / "weights.safetensors")
        self._report(self.path)

    def _report(self, path: Path) -> None:
        """The page; where it cannot be made, a word, since a training is worth more than its report."""
        from meshfit.observe.report import write

        try:
            write(path)
        except Exception as error:
            print(f"meshfit: no report: {type(error).__name__}: {error}", file=sys.stderr)

    def add(self, step: Step) -> None:
        if self.path is None:
            return
        if not self._begun:
            self._begun = True
            _forget(self.path / "metrics.jsonl", step.step)
        self._held.append(step)
        if self._held[0].reading.ready and step.seconds - self._held[0].seconds > FLUSH_SECONDS:
            self._flush()

    def _flush(self) -> None:
        if self.path is not None and self._held:
            lines = [self._line(step) for step in self._held]
            with (self.path / "metrics.jsonl").open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)
            if self._scalars is not None:
                began = time.time() - self._held[-1].seconds
                self._scalars.add([(line["step"], began + line["seconds"], _scalars(line)) for line in lines])
            self._about["steps"] = self._held[-1].step
            self._metrics = next((step.valid for step in reversed(self._held) if step.valid), self._metrics)
            self._held = []

    def _line(self, step: Step) -> dict[str, Any]:
        (seconds, samples), self._last = self._last, (step.seconds, step.samples)
        line: dict[str, Any] = {
            "step": step.step,
            "epoch": step.epoch,
            "loss": _number(step.loss),
            "grad_norm": _number(step.grad_norm),
            "lr": step.lr,
            "samples": step.samples,
            "seconds": round(step.seconds, 6),
        }
        if step.seconds > seconds:
            line["rate"] = round((step.samples - samples) / (step.seconds - seconds), 3)
        if step.staleness is not None:
            line["staleness"] = step.staleness
        if step.valid is not None:
            line["valid"] = {name: _number(value) for name, value in step.valid.items()}
        return line

    def _write(self) -> None:
        if self.path is not None:
            (self.path / "run.json").write_text(json.dumps(self._about, indent=2) + "\n")


def _forget(path: Path, step: int) -> None:
    """Leave out what a run that goes on from a checkpoint had done after it: it does that again."""
    if path.exists():
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if line.endswith("\n") and json.loads(line)["step"] < step))


def _scalars(line: dict[str, Any]) -> dict[str, float]:
    """By tag."""
    names = ("loss", "grad_norm", "lr", "rate", "staleness")
    measured = {f"valid/{name}": value for name, value in line.get("valid", {}).items()}
    return {name: float(value) for name, value in {**{n: line[n] for n in names if n in line}, **measured}.items()}


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


def new_folder(path: Path | str) -> Path:
    """``path``, or ``path-2``, ``path-3`` ... if it holds something already: nothing is overwritten."""
    check_local("out", path)
    path = Path(path)
    candidate, n = path, 2
    try:
        while candidate.exists() and any(candidate.iterdir()):
            candidate, n = path.with_name(f"{path.name}-{n}"), n + 1
        candidate.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise JobError(f"out={str(path)!r} cannot be a folder", f"{type(error).__name__}: {error}") from None
    return candidate
