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
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from safetensors import SafetensorError
from torch import nn

from meshfit.arguments import check_local
from meshfit.errors import JobError
from meshfit.observe.foretold import foretell
from meshfit.observe.tensorboard import Scalars
from meshfit.step import Step
from meshfit.version import VERSION

if TYPE_CHECKING:
    from meshfit.drive import Training

FLUSH_SECONDS = 1.0
MOST_WAITING = 100_000  # lines that wait for a disk that is full


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
            "meshfit": VERSION,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        self._metrics: dict[str, float] = {}
        self._begun = False
        self._last = (0.0, 0)
        self._scalars = None
        self._waiting: list[dict[str, Any]] = []
        """Lines that could not be written yet."""
        self._lost = 0
        """Lines that never will be."""
        self._said: set[str] = set()
        try:
            if self.path is not None and importlib.util.find_spec("tensorboard") is not None:
                self._scalars = Scalars(self.path / "tensorboard")
            self._write()
        except OSError as error:
            raise JobError(f"out={str(self.path)!r} cannot be written", f"{type(error).__name__}: {error}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Write what is still held, and, if the training came to its end, what it came to. What cannot be written is
        said, and in the notes: it hides no error of the training, and takes nothing from its result."""
        if self.path is None:
            return
        self._flush()
        outcome = self._training.outcome
        if missing := self._lost + len(self._waiting):
            self._say("lost", f"the metrics of {missing} steps could not be written to {self.path / 'metrics.jsonl'}")
        if outcome is not None:
            with self._telling("weights.safetensors", "; the caller's model holds the trained weights"):
                _save(self._training.model, self.path / "weights.safetensors")
            self._about |= {"seconds": outcome.seconds, "notes": [*self._training.said, *outcome.notes]}
            self._about |= foretell(self._training)
            self._about["metrics"] = {name: _number(value) for name, value in self._metrics.items()}
            with self._telling("run.json"):
                self._write()
        self._report(self.path)

    @contextmanager
    def _telling(self, name: str, more: str = "") -> Iterator[None]:
        """Around what may find the disk full, or the folder gone: that is said, once for each file."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            assert self.path is not None
            why = getattr(error, "strerror", None) or str(error)
            self._say(name, f"{self.path / name} could not be written: {why}{more}")

    def _say(self, what: str, text: str) -> None:
        if what not in self._said:
            self._said.add(what)
            print(f"meshfit: {text}", file=sys.stderr, flush=True)
            notes = self._training.notes if self._training.outcome is None else self._training.outcome.notes
            notes.append(text)

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
            with self._telling("metrics.jsonl"):
                _forget(self.path / "metrics.jsonl", step.step)
        self._held.append(step)
        if self._held[0].reading.ready and step.seconds - self._held[0].seconds > FLUSH_SECONDS:
            self._flush()

    def _flush(self) -> None:
        if self.path is None or not self._held:
            return
        lines = [self._line(step) for step in self._held]
        self._waiting += lines
        self._lost += max(0, len(self._waiting) - MOST_WAITING)
        del self._waiting[:-MOST_WAITING]
        with self._telling("metrics.jsonl", "; the training goes on, and it is tried again"):
            _append(self.path / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in self._waiting))
            self._waiting = []
        if self._scalars is not None:
            began = time.time() - self._held[-1].seconds
            with self._telling("tensorboard"):
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


def _append(path: Path, text: str) -> None:
    """All of it, or, where the disk is full, nothing: no half lines."""
    with path.open("ab", buffering=0) as file:
        before, left = file.seek(0, os.SEEK_END), memoryview(text.encode())
        try:
            while left:
                left = left[file.write(left) or 0 :]
        except OSError:
            with suppress(OSError):
                file.truncate(before)
            raise


def _forget(path: Path, step: int) -> None:
    """Leave out what a run that goes on from a checkpoint had done after it: it does that again."""
    if path.exists():
        lines = path.read_text().splitlines(keepends=True)
        beside = path.with_suffix(".new")
        beside.write_text("".join(line for line in lines if line.endswith("\n") and json.loads(line)["step"] < step))
        beside.replace(path)


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
    beside = path.with_suffix(".part")
    try:
        save_file(weights, beside)
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


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
