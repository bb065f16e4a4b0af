"""What goes on beside the training, in the caller's process: callbacks, hooks between epochs, what was logged last."""

from collections.abc import Callable
from typing import Any

import torch

from meshfit.errors import JobError
from meshfit.lightning.attached import AttachedTrainer, bases_of, defines
from meshfit.result import Result
from meshfit.step import Step

SHOWS = ("ProgressBar", "TQDMProgressBar", "RichProgressBar", "ModelSummary", "RichModelSummary", "LearningRateMonitor")
"""Callbacks of Lightning that only show what meshfit shows too: the rate is in every step."""

INSTEAD = {
    "ModelCheckpoint": 'best="-val_loss" keeps the best weights; checkpoint=500, out=folder saves',
    "StochasticWeightAveraging": "ema=0.999 averages the weights",
    "WeightAveraging": "ema=0.999 averages the weights",
    "EMAWeightAveraging": "ema=0.999 averages the weights",
    "GradientAccumulationScheduler": "accumulate_grad_batches=",
    "Timer": "a function of a meshfit.Step that returns 'stop': step.seconds is there",
    "DeviceStatsMonitor": "out=folder: the report there has memory and times",
}

BETWEEN = ("on_train_epoch_start", "on_train_epoch_end")
"""Hooks between epochs: run on one device, where the module is the one that trains."""


class Watching:
    def __init__(self, module: Any, trainer: AttachedTrainer, callbacks: Any, *, alone: bool):
        self.module, self.trainer = module, trainer
        self.callbacks: list[Callable[[Step], Any]] = [self._keep]
        self.each_step: list[Callable[[Step], Any]] = []
        self._sums: dict[str, tuple[float, int]] = {}
        self._seen = 0
        for given in callbacks if isinstance(callbacks, list | tuple) else [callbacks]:
            self._add(given)
        self._hooks = [hook for hook in BETWEEN if defines(module, hook)]
        if alone and self._hooks:
            self.each_step.append(self._between)

    def _add(self, given: Any) -> None:
        names = [kind.__name__ for kind in bases_of(given)]
        if "EarlyStopping" in names:
            self.each_step.append(lambda step: self._stops(given, step))
        elif not names and callable(given):
            self.callbacks.append(given)
        elif not any(name in SHOWS for name in names):
            name = type(given).__name__
            instead = next((INSTEAD[each] for each in names if each in INSTEAD), "a function of a meshfit.Step")
            raise JobError(f"callbacks= holds a {name}, which is not run", instead)

    def begin(self) -> None:
        if "on_train_epoch_start" in self._hooks:
            self._run("on_train_epoch_start", 0, 0)

    def end(self, result: Result) -> None:
        last = result.history[-1] if len(result.history) else None
        at = (0, 0) if last is None else (last.step, last.epoch + last.last)
        self.trainer.outside(*at, self.module)
        for hook in ("on_train_end", "on_fit_end"):
            self._run(hook, *at)

    def _run(self, hook: str, step: int, epoch: int) -> None:
        self.trainer.outside(step, epoch, self.module)
        trained = [(p, p.requires_grad) for p in self.module.parameters()]
        with self.trainer.calling(self.module, hook) as call:
            getattr(self.module, hook)()
        after = [(p, p.requires_grad) for p in self.module.parameters()]
        if len(after) != len(trained) or any(
            a is not c or b != d for (a, b), (c, d) in zip(after, trained, strict=True)
        ):
            raise JobError(
                f"{hook} changes which parameters are trained",
                "a training has the same ones from its beginning: train twice, the second time with the others, too",
            )
        self.trainer.held.update({name: _number(value) for name, value in call.values.items()})

    def _between(self, step: Step) -> None:
        if not step.last:
            return
        self._keep_valid(step)
        if "on_train_epoch_end" in self._hooks:
            self._run("on_train_epoch_end", step.step, step.epoch)
        if "on_train_epoch_start" in self._hooks and step.step != self.trainer.facts.estimated_stepping_batches:
            self._run("on_train_epoch_start", step.step, step.epoch + 1)

    def _keep(self, step: Step) -> None:
        """What Lightning calls callback_metrics."""
        before = self._seen or step.samples * (step.step - 1) // step.step  # about, of the first after a resume
        samples, self._seen = step.samples - before, step.samples
        for name, value in step.values.items():
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = total + value * samples, count + samples
            self.trainer.held[name] = value
        if step.last:
            for name, (total, count) in self._sums.items():
                self.trainer.held[f"{name}_epoch"] = total / max(count, 1)
            self._sums.clear()
        self._keep_valid(step)

    def _keep_valid(self, step: Step) -> None:
        self.trainer.held.update({name: value for name, value in (step.valid or {}).items() if name != "loss"})

    def _stops(self, callback: Any, step: Step) -> str | None:
        """As Lightning's EarlyStopping decides."""
        if not step.valid:
            return None
        if callback.monitor not in step.valid:
            raise JobError(f"EarlyStopping watches {callback.monitor!r}", f"evaluations give {', '.join(step.valid)}")
        current, better = torch.tensor(step.valid[callback.monitor]), callback.monitor_op
        reached, diverged = callback.stopping_threshold, callback.divergence_threshold
        stop = callback.check_finite and not bool(torch.isfinite(current))
        stop |= reached is not None and bool(better(current, torch.tensor(reached)))
        stop |= diverged is not None and bool(better(-current, -torch.tensor(diverged)))
        if not stop and better(current - callback.min_delta, callback.best_score):
            callback.best_score, callback.wait_count = current, 0
        elif not stop:
            callback.wait_count += 1
            stop = callback.wait_count >= callback.patience
        return "stop" if stop else None


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, torch.Tensor) and value.numel() == 1 else value
