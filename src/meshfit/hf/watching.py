"""What goes on beside the training, in the caller's process: the log of the original, and its callbacks."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from meshfit.errors import JobError
from meshfit.step import Step

RUN = """
    on_init_end on_train_begin on_epoch_begin on_step_end on_log on_evaluate on_epoch_end on_train_end
""".split()  # noqa: SIM905
ASKS = ("should_epoch_stop", "should_save", "should_evaluate", "should_log")


class TrainerLog:
    """The log history of the original: mean losses every so many steps, and evaluations."""

    def __init__(self, history: list[dict[str, float]], every: int, epoch: int):
        """``epoch``: steps of one."""
        self.history, self._every, self.epoch = history, every, epoch
        self.losses, self.count, self.step, self.samples = 0.0, 0, 0, 0
        self._since: list[float] = []

    def __call__(self, step: Step) -> None:
        self.losses, self.count, self.step = self.losses + step.loss, self.count + 1, step.step
        self.samples = step.samples
        self._since.append(step.loss)
        place = {"epoch": step.step / self.epoch, "step": step.step}
        if step.step % self._every == 0:
            mean = sum(self._since) / len(self._since)
            told = {"loss": mean, "grad_norm": step.grad_norm, "learning_rate": step.lr}
            self.history.append({**told, **place})
            self._since.clear()
        if step.valid:
            self.history.append({**prefixed(step.valid, "eval"), **place})

    def metrics(self, seconds: float) -> dict[str, float]:
        """Of the training, when it has ended."""
        return {
            "train_runtime": seconds,
            "train_samples_per_second": self.samples / seconds,
            "train_steps_per_second": self.count / seconds,
            "train_loss": self.losses / max(self.count, 1),
            "epoch": self.step / self.epoch,
        }


def check_callbacks(callbacks: list[Any]) -> None:
    """Refuse hooks that would not be run."""
    for one in callbacks:
        for name in _defined(one):
            if name not in RUN:
                raise JobError(f"{type(one).__name__} defines {name}, which is not run", "on_step_end is")


class TrainerCallbacks:
    """transformers' ``TrainerCallback`` objects during one training. All devices wait for them after each step, so that
    what they ask for is done in the step in which they ask."""

    def __init__(self, callbacks: list[Any], args: Any, log: TrainerLog, state: Callable[[], Any], **given: Any):
        from transformers import TrainerControl

        self._callbacks, self._args, self._log, self._state, self._given = callbacks, args, log, state, given
        self._control, self._epoch_ended = TrainerControl(), True

    def begin(self, model: Any) -> None:
        """``model``: the one that trains, where it is in this process."""
        if model is not None:
            self._given["model"] = model
        for one in self._callbacks:
            for name in _defined(one):
                self._refuse_unknown(type(one).__name__, name, inspect.signature(getattr(one, name)))
        for hook in ("on_init_end", "on_train_begin"):
            self._say(hook)

    def __call__(self, step: Step) -> str | None:
        if self._epoch_ended:
            self._say("on_epoch_begin")
        before = len(self._log.history)
        self._log(step)
        self._say("on_step_end")
        self._epoch_ended = step.last
        if step.last:
            self._say("on_epoch_end")
        for told in self._log.history[before:]:
            self._say("on_log", logs=dict(told))
            if any(name.startswith("eval_") for name in told):
                self._say("on_evaluate", metrics=dict(told))
        return "stop" if self._control.should_training_stop else None

    def end(self) -> None:
        self._say("on_train_end")

    def _say(self, hook: str, **more: Any) -> None:
        for one in self._callbacks:
            if hook not in _defined(one):
                continue
            said = getattr(one, hook)(self._args, self._state(), self._control, **self._given, **more)
            self._control = said or self._control
            if asked := [name for name in ASKS if getattr(self._control, name)]:
                raise JobError(
                    f"{type(one).__name__} asks for control.{asked[0]}, which is not done",
                    "control.should_training_stop is; TrainingArguments(eval_steps=, save_steps=, logging_steps=) say"
                    " how often",
                )

    def _refuse_unknown(self, kind: str, name: str, signature: inspect.Signature) -> None:
        """Refuse what a hook names as an argument, and is not given."""
        for asked in list(signature.parameters.values())[3:]:
            named = asked.kind in (asked.POSITIONAL_OR_KEYWORD, asked.KEYWORD_ONLY) and asked.default is asked.empty
            if named and asked.name not in (*self._given, "logs", "metrics"):
                raise JobError(
                    f"{kind}.{name} asks for {asked.name}, which it is not given",
                    "where several devices train, the model here is not the one that trains"
                    if asked.name == "model"
                    else "a function of a meshfit.Step in callbacks= sees losses, rates and evaluations",
                )


def prefixed(found: Mapping[str, float], prefix: str) -> dict[str, float]:
    return {f"{prefix}_{name.removeprefix('eval/')}": value for name, value in found.items()}


def _defined(callback: Any) -> list[str]:
    """Hooks of its own."""
    from transformers import TrainerCallback

    names = [name for name in dir(TrainerCallback) if name.startswith("on_")]
    return [name for name in names if getattr(type(callback), name) is not getattr(TrainerCallback, name)]
