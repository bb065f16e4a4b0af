"""The folder of a run:

run.json             plan, batch size, seed, versions; at the end: steps, seconds, metrics
metrics.jsonl        one line a step
events/rank0.jsonl   spans, samples and facts of every rank (see events.py)
logs/rank0.log       the output of every rank (see launch/output.py)
tensorboard/         the same metrics for TensorBoard, where that is installed
weights.safetensors  the trained weights under their own names, tied ones once
report.html          one page about the run (see report.py)
"""

import importlib.util
import json
import math
import os
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from meshfit.arguments import check_local, is_url
from meshfit.checkpoint.parts import WholeModel
from meshfit.checkpoint.pretrained import write_weights
from meshfit.checkpoint.resume import folder_to_resume
from meshfit.data.remote import without_secrets
from meshfit.errors import JobError
from meshfit.job import Job
from meshfit.observe.about import about
from meshfit.observe.mirror import Mirror, local_folder, new_prefix, prefix_to_resume, removed_with
from meshfit.observe.predicted import predict
from meshfit.observe.tensorboard import Scalars
from meshfit.step import Rate, Step

if TYPE_CHECKING:
    from meshfit.drive import Training

WEIGHTS = "weights.safetensors"
FLUSH_SECONDS = 1.0
MOST_WAITING = 100_000  # lines that are kept while they cannot be written


class RunFolder:
    """Writes a training's folder, if it has one and this process is the one to write it."""

    def __init__(self, training: "Training"):
        job, self._training = training.job, training
        self.path = training.folder if training.writes else None
        self._held: list[Step] = []
        self._about: dict[str, Any] = about(job) if self.path is not None else {}
        self._metrics: dict[str, float] = {}
        self._begun = 0
        """How often its first step has come: see ``Training.taken_back``."""
        self._rate = Rate()
        self._scalars = None
        self._waiting: list[str] = []
        """Lines that could not be written yet."""
        self._lost = 0
        """Lines that were dropped, since too many waited."""
        self._noted: set[str] = set()
        self._mirror: Mirror | None = None
        if self.path is not None and is_url(job.out):
            self._scratch = removed_with(training, self.path)
            self._mirror = Mirror(self.path, str(job.out), self._note)
        try:
            if self.path is not None and importlib.util.find_spec("tensorboard") is not None:
                self._scalars = Scalars(self.path / "tensorboard")
            self._write()
        except OSError as error:
            raise JobError(f"out={str(self.path)!r} cannot be written", f"{type(error).__name__}: {error}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Write what is still held, and, if the training ended well, its result. A file that cannot be written is a
        note: it hides no error of the training, and the result is returned all the same."""
        if self.path is None:
            return
        self._flush()
        outcome = self._training.outcome
        if missing := self._lost + len(self._waiting):
            self._note("lost", f"the metrics of {missing} steps could not be written to {self.path / 'metrics.jsonl'}")
        if outcome is not None:
            if self._training.parts is None:  # else all ranks have written it together
                with self._noting(WEIGHTS, "; the caller's model holds the trained weights"):
                    write_weights(WholeModel(self._training.model), self._training.file(WEIGHTS))
            self._about |= {"seconds": outcome.seconds, "notes": [*self._training.said, *outcome.notes]}
            self._about |= predict(self._training)
            self._about["metrics"] = {name: _number(value) for name, value in self._metrics.items()}
            with self._noting("run.json"):
                self._write()
        from meshfit.observe.report import write

        try:
            write(self.path)
        except Exception as failed:
            self._note("report.html", f"no report: {type(failed).__name__}: {failed}")
        if self._mirror is not None and not self._mirror.finish():
            self._scratch.detach()

    @contextmanager
    def _noting(self, name: str, more: str = "") -> Iterator[None]:
        """Around writing a file: a full disk, or a folder that is gone, is a note, once for each file."""
        try:
            yield
        except OSError as error:
            where = self.path / name if self.path is not None and name != WEIGHTS else self._training.file(name)
            shown = without_secrets(where) if isinstance(where, str) else where
            self._note(name, f"{shown} could not be written: {error.strerror or error}{more}")

    def _note(self, name: str, text: str) -> None:
        if name not in self._noted:
            self._noted.add(name)
            print(f"meshfit: {text}", file=sys.stderr, flush=True)
            notes = self._training.said if self._training.outcome is None else self._training.outcome.notes
            notes.append(text)

    def add(self, step: Step) -> None:
        if self.path is None:
            return
        if self._begun <= self._training.taken_back:
            self._begun = self._training.taken_back + 1
            self._flush()
            with self._noting("metrics.jsonl"):
                _drop_later(self.path / "metrics.jsonl", step.step)
        self._held.append(step)
        if step.seconds - self._held[0].seconds > FLUSH_SECONDS:
            self._flush(sum(1 for _ in takewhile(lambda each: each.reading.ready, self._held)))

    def _flush(self, count: int | None = None) -> None:
        """Write the first ``count`` of the steps that are held; None: all, also those whose loss is still to come."""
        if self.path is None or not (steps := self._held[:count]):
            return
        lines = [self._line(step) for step in steps]
        self._waiting += [json.dumps(line) + "\n" for line in lines]
        self._lost += max(0, len(self._waiting) - MOST_WAITING)
        del self._waiting[:-MOST_WAITING]
        with self._noting("metrics.jsonl", "; the training goes on, and it is tried again"):
            _append(self.path / "metrics.jsonl", "".join(self._waiting))
            self._waiting = []
        if self._scalars is not None:
            began = time.time() - steps[-1].seconds
            with self._noting("tensorboard"):
                self._scalars.add([(line["step"], began + line["seconds"], _scalars(line)) for line in lines])
        self._about["steps"] = steps[-1].step
        self._metrics = next((step.valid for step in reversed(steps) if step.valid), self._metrics)
        self._held = self._held[len(steps) :]

    def _line(self, step: Step) -> dict[str, Any]:
        line: dict[str, Any] = {
            "step": step.step,
            "epoch": step.epoch,
            "loss": _number(step.loss),
            "grad_norm": _number(step.grad_norm),
            "lr": step.lr,
            "samples": step.samples,
            "seconds": round(step.seconds, 6),
        }
        if (rate := self._rate(step)) is not None:
            line["rate"] = round(rate, 3)
        if step.staleness is not None:
            line["staleness"] = step.staleness
        if step.values:
            line["values"] = {name: _number(value) for name, value in step.values.items()}
        if step.valid is not None:
            line["valid"] = {name: _number(value) for name, value in step.valid.items()}
        return line

    def _write(self) -> None:
        if self.path is not None:
            (self.path / "run.json").write_text(json.dumps(self._about, indent=2) + "\n")


def _append(path: Path, text: str) -> None:
    """All of ``text``, or, where the disk is full, nothing of it."""
    with path.open("ab", buffering=0) as file:
        before, left = file.seek(0, os.SEEK_END), memoryview(text.encode())
        try:
            while left:
                left = left[file.write(left) or 0 :]
        except OSError:
            with suppress(OSError):
                file.truncate(before)
            raise


def _drop_later(path: Path, step: int) -> None:
    """Drop the lines from ``step`` on: a run that resumes from a checkpoint repeats those steps."""
    if path.exists():
        lines = path.read_text().splitlines(keepends=True)
        new = path.with_suffix(".new")
        new.write_text("".join(line for line in lines if line.endswith("\n") and json.loads(line)["step"] < step))
        new.replace(path)


def _scalars(line: dict[str, Any]) -> dict[str, float]:
    """By tag."""
    names = ("loss", "grad_norm", "lr", "rate", "staleness")
    measured = line.get("values", {}) | {f"valid/{name}": value for name, value in line.get("valid", {}).items()}
    return {name: float(value) for name, value in {**measured, **{n: line[n] for n in names if n in line}}.items()}


def _number(value: float) -> float | str:
    """JSON has no NaN."""
    return value if math.isfinite(value) else str(value)


def folder_of(job: Job) -> tuple[Path | str | None, Path | None]:
    """Where a run's files are to be, and the folder of this machine in which they are written: the same, but for a
    bucket."""
    if job.out is None:
        return None, None
    if not is_url(job.out):
        folder = folder_to_resume(job.out).root if job.resume is True else new_folder(job.out)
        return folder, folder
    folder = local_folder(secrets.token_hex(6))
    try:
        out = str(job.out)
        return (prefix_to_resume(out, folder) if job.resume is True else new_prefix(out)), folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def new_folder(path: Path | str) -> Path:
    """``path``, or ``path-2``, ``path-3`` ... if it is not empty: nothing is overwritten."""
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
