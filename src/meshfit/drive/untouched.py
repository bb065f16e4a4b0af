"""The caller's model, optimizer and Python objects while copies of them train in ranks: what is changed here reaches
nobody, and what is read here is from before the training.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from meshfit.drive.read_by_code import ReadByCode
from meshfit.errors import JobError
from meshfit.python_state import PythonState
from meshfit.torch_private.tensors import version


class TrainedParameters:
    """Which parameters train: a caller leaves that as it is from the first step to the last."""

    def __init__(self, model: nn.Module):
        self._named = [*model.named_parameters()]
        self.take()

    def take(self) -> None:
        self._trains = [p.requires_grad for _, p in self._named]

    def check(self) -> None:
        for (name, p), trains in zip(self._named, self._trains, strict=True):
            if p.requires_grad is not trains:
                raise JobError(
                    f"{name} was {'frozen' if trains else 'unfrozen'} while the model trains",
                    "a training has the same parameters from its beginning to its end: call fit again for the others",
                    "or let all train, and a scheduler keep a group's learning rate at 0 until then",
                    "one device takes it as it is",
                )


class Untouched:
    """As they are now."""

    def __init__(self, model: nn.Module, optimizer: Any, *code: Any):
        """``code``: functions and data sets of the user's, which ranks have copies of."""
        self.model, self.optimizers, self.code = model, _instances(optimizer), ReadByCode(model, *code)
        self.weights_came()
        self._settings, self.trained = self._settings_now(), TrainedParameters(model)

    def weights_came(self) -> None:
        """From the ranks: that is no change of the caller's."""
        self._versions = self._versions_now()

    def check(self) -> None:
        """After the caller was given a step."""
        now = self._versions_now()
        if changed := [name for name, at in now.items() if at != self._versions.get(name, at)]:
            self._versions = now
            raise JobError(
                f"{changed[0]} was changed in this process, while copies of the model train in others",
                "the change would be lost: weights come back when the training has ended",
                "in the optimizer (a register_step_post_hook, say) it is done where the weights are",
            )
        self.trained.check()
        for name, value in (settings := self._settings_now()).items():
            if value != self._settings[name]:
                self._settings = settings
                raise JobError(
                    f"the optimizer's {name} was changed in this process, while copies of it step in others",
                    "the change would be lost",
                    "scheduler=lambda optimizer: LambdaLR(optimizer, f) changes a learning rate where it is used",
                )
        if (name := self.code.changed()) is not None:
            raise JobError(
                f"{name} was changed in this process, while what reads it runs in others, on copies from before",
                "the change would be lost",
                'what the code itself counts follows the training: state["step"] += 1 in step=, say',
                "on one device the training runs in this process, and sees the change",
            )

    def _versions_now(self) -> dict[str, int]:
        return {name: version(p) for name, p in self.model.named_parameters()}

    def _settings_now(self) -> dict[str, Any]:
        groups = [group for one in self.optimizers for group in one.param_groups]
        found = [(i, key, value) for i, group in enumerate(groups) for key, value in group.items() if key != "params"]
        return {f"{key} of group {i}": value for i, key, value in found if not isinstance(value, Tensor)}


def note_of(model: nn.Module, callbacks: Sequence[Callable[..., Any]]) -> list[str]:
    """That a callback holds the model, whose weights it will find as they were."""
    modules = set(model.modules())
    holds = [function for function in callbacks if modules & PythonState(nn.Module(), function).modules]
    names = [getattr(function, "__name__", type(function).__name__) for function in holds]
    if not names:
        return []
    return [
        f"callbacks: {', '.join(names)} can reach the model, which trains in other processes: here its weights stay as"
        " they are until the training has ended; ema=, best=, checkpoint= and metrics= have those of each step"
    ]


def _instances(optimizer: Any) -> list[Optimizer]:
    if isinstance(optimizer, Optimizer):
        return [optimizer]
    many = optimizer.values() if isinstance(optimizer, Mapping) else optimizer
    return [one for one in many if isinstance(one, Optimizer)] if isinstance(optimizer, Mapping | list | tuple) else []
