"""A disk that is full, or a folder that is gone, takes metrics, not the training, and hides no other error."""

import json
import shutil
from pathlib import Path

import pytest
from torch import nn

from meshfit.checkpoint import CheckpointError, Saver
from meshfit.checkpoint.manifest import standing
from meshfit.events import Events
from meshfit.observe import folder as folders
from meshfit.step import Step
from tests.test_checkpoint import begun
from tests.test_resume import fit


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "FLUSH_SECONDS", 0.0)


def blocked(path: Path) -> None:
    """Nobody can write a file of this name."""
    path.unlink(missing_ok=True)
    path.mkdir()


def test_metrics_that_cannot_be_written_are_said_and_the_training_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    metrics = tmp_path / "run" / "metrics.jsonl"
    ended = fit(tmp_path / "run", steps=6, callbacks=[lambda step: blocked(metrics) if step.step == 2 else None])
    assert len(ended.history) == 6
    said = capfd.readouterr().err
    assert said.count("metrics.jsonl could not be written: Is a directory; the training goes on") == 1
    assert "steps could not be written" in said
    assert any("steps could not be written" in note for note in ended.notes)
    assert (tmp_path / "run" / "weights.safetensors").exists()


def test_metrics_that_could_not_be_written_come_later(tmp_path: Path) -> None:
    metrics = tmp_path / "run" / "metrics.jsonl"
    acts = {2: lambda: blocked(metrics), 4: metrics.rmdir}
    fit(tmp_path / "run", steps=8, callbacks=[lambda step: acts.get(step.step, lambda: None)()])
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == list(range(steps[0], 9))
    assert steps[0] <= 3


def test_no_half_line_is_left(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    folders._append(path, "one\n")
    folders._append(path, "two\n")
    assert path.read_text() == "one\ntwo\n"
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        folders._append(tmp_path / "full", "x\n")


def test_a_checkpoint_that_fails_is_the_error(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def gone(step: Step) -> None:
        if step.step == 5:
            blocked(run / "metrics.jsonl")
            while (run / "checkpoints").exists():  # a save under way may still add to it
                shutil.rmtree(run / "checkpoints", ignore_errors=True)

    with pytest.raises(CheckpointError, match="could not be written"):
        fit(run, steps=100, checkpoint=2, callbacks=[gone])


def test_what_is_said_of_the_checkpoint_before_is_true(tmp_path: Path) -> None:
    folder, run = tmp_path / "checkpoints", begun(lambda: nn.Linear(8, 4))
    saver = Saver(folder)
    saver.save(run, wait=True)
    assert standing(saver.files, "0001-step-0") == "0001-step-0, the one before, is complete"
    shutil.rmtree(folder)
    with pytest.raises(CheckpointError) as caught:
        saver.save(run, wait=True)
    assert "0001-step-0, the one before, is gone or damaged" in str(caught.value)
    assert "intact" not in str(caught.value)
    saver.close()


def test_a_weight_file_that_cannot_be_written_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    ended = fit(run, steps=3, callbacks=[lambda step: shutil.rmtree(run) if step.step == 3 else None])
    assert len(ended.history) == 3
    assert any("the caller's model holds the trained weights" in note for note in ended.notes)


def test_events_on_a_full_disk_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    events = Events(tmp_path)
    assert events._file is not None
    events._file.close()
    events._file = open("/dev/full", "w")  # noqa: SIM115
    for _ in range(3):
        events.scalar("x", 1.0)
        events.flush()
    events.close()
    assert capfd.readouterr().err.count("no more events in /dev/full: No space left on device") == 1
