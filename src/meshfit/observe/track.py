"""Steps for an experiment tracker: ``fit(..., callbacks=Track("wandb", project="digits"))``.

A tracker runs in the caller's process, and ranks do not wait for it. If it fails (no network, no login, a wrong
option), there is one warning, and the training goes on without it.
"""

import importlib
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from meshfit.errors import JobError, did_you_mean
from meshfit.step import Rate, Step

Values = Mapping[str, float]


class Tracker(Protocol):
    """Where a run is told to. ``about``: plan, seed, versions and so on; ``report``: the page about the run."""

    def start(self, about: Mapping[str, Any]) -> None: ...
    def log(self, values: Values, step: int) -> None: ...
    def report(self, page: Path) -> None: ...
    def finish(self) -> None: ...


class Wandb:
    def __init__(self, project: str | None, name: str | None, options: Mapping[str, Any]):
        self._wandb = _installed("wandb")
        self._run: Any = None
        self._options = {"project": project, "name": name, **options}

    def start(self, about: Mapping[str, Any]) -> None:
        self._run = self._wandb.init(**self._options)
        self._run.config.update(dict(about))

    def log(self, values: Values, step: int) -> None:
        self._run.log(dict(values), step=step)

    def report(self, page: Path) -> None:
        self._run.save(str(page), base_path=str(page.parent), policy="now")

    def finish(self) -> None:
        self._run.finish()


class MLflow:
    def __init__(self, project: str | None, name: str | None, options: Mapping[str, Any]):
        self._mlflow = _installed("mlflow")
        self._project, self._options = project, {"run_name": name, **options}

    def start(self, about: Mapping[str, Any]) -> None:
        if self._project is not None:
            self._mlflow.set_experiment(self._project)
        self._mlflow.start_run(**self._options)
        self._mlflow.log_params(dict(about))

    def log(self, values: Values, step: int) -> None:
        self._mlflow.log_metrics(dict(values), step=step)

    def report(self, page: Path) -> None:
        self._mlflow.log_artifact(str(page))

    def finish(self) -> None:
        self._mlflow.end_run()


class Given:
    """An object of the user's, told by whichever way it has: a run of wandb or Comet (``log``, ``log_metrics``), a
    logger of Lightning's, a SummaryWriter (``add_scalar``), a run of Neptune's (``run["loss"].append``), or a function
    of values and step."""

    def __init__(self, target: Any):
        self._target = target
        known = ("log_metrics", "add_scalar", "log")
        self._way = next((name for name in known if callable(getattr(target, name, None))), "")
        if not self._way:
            self._way = "item" if hasattr(target, "__getitem__") and hasattr(target, "__setitem__") else "call"
        if self._way == "call" and not callable(target):
            raise JobError(
                f"Track({target!r}) is not a tracker",
                "it has none of log, log_metrics, add_scalar and run[name].append, and is no function of values, step",
            )

    def start(self, about: Mapping[str, Any]) -> None:
        target = self._target
        hear = next((n for n in ("log_hyperparams", "log_params", "log_parameters") if hasattr(target, n)), None)
        if hear is not None:
            getattr(target, hear)(dict(about))
        elif hasattr(getattr(target, "config", None), "update"):
            target.config.update(dict(about))
        elif hasattr(target, "add_text"):
            target.add_text("meshfit", json.dumps(dict(about), indent=2))
        elif self._way == "item":
            for name, value in about.items():
                target[f"meshfit/{name}"] = value

    def log(self, values: Values, step: int) -> None:
        if self._way in ("log", "log_metrics"):
            getattr(self._target, self._way)(dict(values), step=step)
        elif self._way == "call":
            self._target(dict(values), step)
        else:
            for name, value in values.items():
                if self._way == "add_scalar":
                    self._target.add_scalar(name, value, step)
                else:
                    self._target[name].append(value, step=step)

    def report(self, page: Path) -> None:
        if self._way == "item":
            self._target["meshfit/report"].upload(str(page))
        elif callable(keep := getattr(self._target, "log_artifact", None) or getattr(self._target, "log_asset", None)):
            keep(str(page))

    def finish(self) -> None:
        """The user opened it, and closes it."""
        getattr(self._target, "flush", lambda: None)()


TRACKERS: Mapping[str, Callable[..., Tracker]] = {"wandb": Wandb, "mlflow": MLflow}


class Track:
    """A callback that sends loss, learning rate, gradient norm, rate and evaluations to ``tracker``.

    ``tracker`` is "wandb", "mlflow", or an object or function of your own (see ``Given``). ``project`` is wandb's
    project or MLflow's experiment, ``name`` the run's name; other ``options`` go to wandb.init or mlflow.start_run as
    they are. ``every`` thins the steps; evaluations all go. Plan, seed, versions, git's commit and, with ``out=``, the
    report are told, too.
    """

    def __init__(
        self, tracker: Any, *, every: int = 1, project: str | None = None, name: str | None = None, **options: Any
    ):
        if not isinstance(every, int) or every < 1:
            raise JobError(f"Track's every={every!r} is not a whole number of steps above 0")
        if not isinstance(tracker, str):
            if stated := [key for key, value in {"project": project, "name": name, **options}.items() if value]:
                raise JobError(f"Track's {stated[0]}= is for trackers that it opens itself", "wandb or mlflow, by name")
            self._tracker: Tracker = Given(tracker)
        elif tracker in TRACKERS:
            self._tracker = TRACKERS[tracker](project, name, options)
        else:
            near = did_you_mean(tracker, tuple(TRACKERS))
            if tracker.lower() == "tensorboard":
                near = "with out=, the run's folder holds scalars for TensorBoard already: no tracker is needed"
            raise JobError(f"there is no tracker {tracker!r}", near, "an object with log(values, step=) is one, too")
        self.tracker = tracker if isinstance(tracker, str) else type(tracker).__name__
        self.every = every
        self._page: Path | None = None
        self._begun = self._failed = False
        self._rate = Rate()

    def begin(self, about: Mapping[str, Any], folder: Path | None) -> None:
        """``fit`` calls it before the first step."""
        self._page = folder / "report.html" if folder is not None else None
        self._begun = True
        self._try(lambda: self._tracker.start(about))

    def __call__(self, step: Step) -> None:
        rate = self._rate(step)
        if step.step % self.every and not step.valid:
            return
        values = {"loss": step.loss, "grad_norm": step.grad_norm, "lr": step.lr, "epoch": step.epoch}
        values = step.values | values
        if rate is not None:
            values["samples_per_second"] = rate
        values |= {f"valid/{name}": value for name, value in (step.valid or {}).items()}
        self._try(lambda: self._tracker.log(values, step.step))

    def finish(self) -> None:
        """Send the report, and close the tracker's run. ``fit`` calls it at the end."""
        if not self._begun:
            return
        if (page := self._page) is not None and page.exists():
            self._try(lambda: self._tracker.report(page))
        self._try(self._tracker.finish)
        self._begun = False

    def _try(self, act: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            act()
        except Exception as error:
            self._failed = True
            what = str(error).strip().split("\n")[0][:300]
            warnings.warn(
                f"meshfit: {self.tracker} failed, and training goes on without it: {type(error).__name__}: {what}",
                stacklevel=4,
            )


def _installed(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise JobError(f"Track({name!r}) needs {name}, which is not installed", f"pip install {name}") from None
