"""What ``fit`` returns."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from meshfit.checkpoint.export import SHARD
from meshfit.data.remote import without_secrets
from meshfit.errors import JobError
from meshfit.history import History
from meshfit.observe.kinds import KINDS, PHASES
from meshfit.plan import Plan

if TYPE_CHECKING:
    from meshfit.drive import Training


@dataclass(frozen=True, kw_only=True, repr=False)
class Result:
    """A finished training. Prints as a short summary."""

    held: nn.Module | None
    gather: Callable[[], nn.Module]
    write: Callable[..., list[Path | str]]

    history: History
    """Steps in order: all of the first 10,000; of a longer training some thousands, evenly, and every evaluation."""

    metrics: dict[str, float]
    """Of the last evaluation; the last step's loss where there was none."""

    best: dict[str, float] | None
    """Of the evaluation whose weights were kept, with ``best=``."""

    plan: Plan
    batch_size: int
    steps: int
    seconds: float
    phases: list[dict[str, float]]
    """By rank: seconds in data, forward_backward, exchange, update, evaluate."""

    notes: list[str]
    folder: Path | str | None = None
    """Of the run's files; the URL of one in a bucket."""

    local: Path | None = None
    """Where they are on this machine."""

    @classmethod
    def of(cls, training: "Training", history: History) -> "Result":
        outcome, job = training.outcome, training.job
        assert outcome is not None
        evaluations = [step.valid for step in history if step.valid]
        metrics = evaluations[-1] if evaluations else {"loss": history[-1].loss} if history else {}
        return cls(
            held=training.model if training.parts is None else None,
            gather=training.gather,
            write=training.save,
            history=history,
            metrics=metrics,
            best=outcome.best,
            plan=job.plan,  # type: ignore[arg-type]
            batch_size=job.batch_size,  # type: ignore[arg-type]
            steps=history.total,
            seconds=outcome.seconds,
            phases=outcome.phases,
            notes=[*training.said, *outcome.notes],
            folder=job.out,
            local=training.folder,
        )

    @property
    def model(self) -> nn.Module:
        """The caller's model (or the one its function built) with the trained weights, on its device."""
        if self.held is None:
            raise JobError(
                "every rank holds a part of the model, and none all of it",
                "the model was given as a function, so that no process needs memory for all of it",
                "result.gather_model() puts it together, on every rank: all of them must call it",
            )
        return self.held

    def gather_model(self) -> nn.Module:
        """The whole model, with the trained weights. Where ranks hold parts of it every rank must call it, and then has
        all of it in host memory; ``model`` is that model from then on."""
        if self.held is None:
            object.__setattr__(self, "held", self.gather())
        return self.model

    def save(self, target: Path | str, *, dtype: torch.dtype | None = None, shard: int = SHARD) -> list[Path | str]:
        """Write the trained model. A folder gets what ``from_pretrained`` opens: the weights, in several files of
        ``shard`` bytes if they are large, the config, and the tokenizer of the folder that ``weights=`` named; of a
        model with adapters (peft), these alone. A file, "weights.safetensors", gets the weights under their own names.
        ``dtype``: cast floating point to it. Where ranks hold parts of the model every rank must call it, and none
        needs memory for all of it. Nothing is overwritten."""
        return self.write(target, dtype=dtype, shard=shard)

    @property
    def rate(self) -> float:
        """Samples a second, over all devices."""
        if not self.history:
            return 0.0
        first, last = self.history[0], self.history[-1]
        return (last.samples - max(0, first.samples - self.batch_size)) / max(last.seconds, 1e-9)

    def rows(self) -> list[tuple[str, str]]:
        """A summary in lines: a word, and its text."""
        rows = [
            ("plan", f"{self.plan}, batch of {self.batch_size:,} over all devices"),
            ("trained", f"{self.steps:,} steps in {self.seconds:.1f} s, {self.rate:,.0f} samples/s"),
        ]
        if self.history:
            rows.append(("loss", f"{self.history[0].loss:.4g} to {self.history[-1].loss:.4g}"))
        if any(step.valid for step in self.history):
            rows.append(("valid", _measured(self.metrics)))
        if self.best is not None:
            rows.append(("best, kept", _measured(self.best)))
        if skipped := self.history.skipped:
            rows.append(("skipped", f"{skipped:,} steps, not finite"))
        return rows

    def _repr_html_(self) -> str:
        """As notebooks show it: with pictures of how busy the devices were."""
        from meshfit.observe.notebook import page

        return page(self)

    def __repr__(self) -> str:
        rows = self.rows()
        if self.phases:
            whole = max(self.seconds, 1e-9) * len(self.phases)
            shares = {phase: sum(rank.get(phase, 0.0) for rank in self.phases) / whole for phase in PHASES}
            shown = [f"{KINDS[phase].label} {share:.0%}" for phase, share in shares.items() if share >= 0.005]
            rows.append(("time", ", ".join(shown)))
        if self.folder is not None:
            rows.append(("folder", without_secrets(str(self.folder))))
        rows += [("note", note) for note in self.notes]
        return "\n".join(f"{word:<12}{said}" for word, said in rows)


def _measured(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())
