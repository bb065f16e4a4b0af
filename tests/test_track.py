"""Experiment trackers: real ones where they can run here, and objects of the user's own."""

import json
import sys
import time
import types
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshfit
from meshfit.errors import JobError
from meshfit.observe.track import Track

X, Y = torch.randn(64, 8), torch.randint(4, (64,))


def fit(**asked: Any) -> Any:
    defaults = {"loss": F.cross_entropy, "optimizer": torch.optim.SGD, "batch_size": 16, "steps": 8, "devices": "cpu"}
    return meshfit.fit(lambda: nn.Linear(8, 4), (X, Y), **{**defaults, **asked})


class Heard:
    """Values by step."""

    def __init__(self):
        self.about: dict[str, Any] = {}
        self.steps: dict[int, dict[str, float]] = defaultdict(dict)
        self.pages: list[str] = []


class LikeLightning(Heard):
    def log_hyperparams(self, about: dict[str, Any]) -> None:
        self.about = about

    def log_metrics(self, values: dict[str, float], step: int) -> None:
        self.steps[step] |= values


class LikeWandb(Heard):
    def __init__(self):
        super().__init__()
        self.config = self.about

    def log(self, values: dict[str, float], step: int) -> None:
        self.steps[step] |= values

    def log_artifact(self, page: str) -> None:
        self.pages.append(page)


class LikeWriter(Heard):
    def add_text(self, _name: str, text: str) -> None:
        self.about = json.loads(text)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.steps[step][name] = value


class LikeNeptune(Heard):
    def __getitem__(self, name: str) -> Any:
        def append(value: float, step: int) -> None:
            self.steps[step][name] = value

        return types.SimpleNamespace(append=append, upload=self.pages.append)

    def __setitem__(self, name: str, value: Any) -> None:
        self.about[name.removeprefix("meshfit/")] = value


class LikeFunction(Heard):
    def __call__(self, values: dict[str, float], step: int) -> None:
        self.steps[step] |= values


@pytest.mark.parametrize("kind", [LikeLightning, LikeWandb, LikeWriter, LikeNeptune, LikeFunction])
def test_objects_hear_of_every_step(kind: type[Any], tmp_path: Path) -> None:
    heard = kind()
    result = fit(callbacks=Track(heard), valid=(X, Y), seed=3, out=tmp_path / "run")
    assert [heard.steps[i + 1]["loss"] for i in range(8)] == [step.loss for step in result.history]
    assert heard.steps[8]["valid/loss"] == result.history[-1].valid["loss"]
    if kind is not LikeFunction:
        assert (heard.about["seed"], heard.about["plan"]) == (3, "data=1")
        assert len(heard.about["commit"].rstrip("+")) == 40  # of the repository in which the tests run
    if kind in (LikeWandb, LikeNeptune):
        assert heard.pages == [str(result.folder / "report.html")]


def test_over_ranks_and_thinned() -> None:
    heard = LikeFunction()
    fit(callbacks=Track(heard, every=4), plan="data=2")
    assert list(heard.steps) == [4, 8]


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    result = fit(callbacks=Track("wandb", project="digits", name="one", dir=str(tmp_path)), out=tmp_path / "run")
    assert wandb.run is None  # closed
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    (page,) = run.glob("files/report.html")
    assert page.stat().st_size == (result.folder / "report.html").stat().st_size
    (written,) = run.glob("run-*.wandb")
    words, until = (b"grad_norm", b"data=1", b"digits"), time.monotonic() + 30  # a process of wandb's writes it
    while not all(word in written.read_bytes() for word in words) and time.monotonic() < until:
        time.sleep(0.1)
    assert all(word in written.read_bytes() for word in words)


@pytest.mark.filterwarnings("ignore")
def test_mlflow_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(tmp_path.as_uri())
    result = fit(callbacks=Track("mlflow", project="digits", name="one"), out=tmp_path / "run")
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert (run.info.run_name, run.info.status, run.data.params["plan"]) == ("one", "FINISHED", "data=1")
    told = client.get_metric_history(run.info.run_id, "loss")
    assert [each.value for each in told] == [step.loss for step in result.history]
    assert [each.path for each in client.list_artifacts(run.info.run_id)] == ["report.html"]


@pytest.mark.filterwarnings("ignore")
def test_a_writer_of_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        result = fit(callbacks=Track(writer))
        found = EventAccumulator(str(tmp_path)).Reload()  # what was written is flushed at the end
    assert [event.value for event in found.Scalars("loss")] == pytest.approx([step.loss for step in result.history])


@pytest.mark.parametrize("fails", ["start", "log", "finish"])
def test_a_tracker_that_fails_is_told_once_and_training_goes_on(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def act(name: str, what: str) -> None:
        calls.append(name)
        if what == fails:
            raise ConnectionError("no route to the tracker")

    module: Any = types.ModuleType("mlflow")
    module.set_experiment = lambda name: act(f"experiment {name}", "")
    module.start_run = lambda run_name=None: act(f"run {run_name}", "start")  # as MLflow's: no project
    module.log_params = lambda about: None
    module.log_metrics = lambda values, step: act("log", "log")
    module.end_run = lambda: act("end", "finish")
    monkeypatch.setitem(sys.modules, "mlflow", module)
    with pytest.warns(UserWarning, match="mlflow failed, and training goes on without it: .*no route") as told:
        result = fit(callbacks=Track("mlflow", project="digits", name="one"))
    assert len(result.history) == 8
    assert len([one for one in told if "mlflow" in str(one.message)]) == 1
    want = {"start": [], "log": ["log"], "finish": ["log"] * 8 + ["end"]}[fails]
    assert calls == ["experiment digits", "run one", *want]


def test_what_is_no_tracker_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(JobError, match="needs wandb"):
        Track("wandb")
    with pytest.raises(JobError, match="no tracker 'wandbb'\n  did you mean wandb"):
        Track("wandbb")
    with pytest.raises(JobError, match="the run's folder holds scalars for TensorBoard"):
        Track("tensorboard")
    with pytest.raises(JobError, match="is not a tracker"):
        Track(5)
    with pytest.raises(JobError, match="project= is for trackers that it opens itself"):
        Track(print, project="digits")


def test_of_ranks_that_torchrun_started_the_first_alone_tells_a_tracker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else there would be as many runs of W&B as ranks. A function is called on every rank, as the script is."""
    from meshfit.drive.here import Here

    monkeypatch.setattr(Here, "first", property(lambda here: False, lambda here, value: None), raising=False)
    heard, steps = LikeWandb(), []
    fit(callbacks=[Track(heard), steps.append])
    assert not heard.steps
    assert len(steps) == 8
