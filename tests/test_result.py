"""What a training leaves the caller: its steps in bounded memory, and a few lines that say what came of it."""

import random
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshfit
from meshfit import history
from meshfit.history import History
from meshfit.step import Reading, Step

X, Y = torch.randn(64, 4), torch.randint(3, (64,))
RIGHT = {"accuracy": lambda outputs, targets: (outputs.argmax(1) == targets).float()}


def step(number: int, *, evaluated: bool = False, taken: bool = True) -> Step:
    reading = Reading(1.0 / number, 1.0, taken, 0.0)
    valid = {"loss": float(number)} if evaluated else None
    return Step(step=number, epoch=0, lr=0.1, samples=8 * number, seconds=0.1 * number, reading=reading, valid=valid)


def test_a_short_training_is_kept_whole() -> None:
    kept = History()
    for number in range(1, history.MOST + 1):
        kept.add(step(number))
    assert [each.step for each in kept] == list(range(1, history.MOST + 1))
    assert kept[-1].step == kept.total == history.MOST
    assert [each.step for each in kept[2:4]] == [3, 4]


def test_a_long_training_is_thinned_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MOST", 100)
    kept = History()
    for number in range(1, 12_346):
        kept.add(step(number, evaluated=number % 1111 == 0, taken=number % 100 != 7))
        assert len(kept) <= 100 + number // 1111
        assert kept[0].step == 1
        assert kept[-1].step == number
    numbers = [each.step for each in kept]
    assert kept.total == 12_345
    assert set(range(1111, 12_346, 1111)) <= set(numbers)
    assert [n for n in numbers[1:-1] if n % 1111] == [n for n in range(128, 12_345, 128) if n % 1111]
    assert kept.skipped == 124
    assert "12,345 steps, " in repr(kept)


def test_steps_out_of_order_and_told_again_are_in_order_once() -> None:
    numbers = list(range(1, 200))
    random.Random(0).shuffle(numbers)
    kept = History()
    for number in (*numbers, 150, 151):
        kept.add(step(number, evaluated=number == 150))
    assert [each.step for each in kept] == list(range(1, 200))
    assert kept.total == 199


def test_a_result_prints_what_one_wants_to_know(tmp_path: Path) -> None:
    how = {"loss": F.cross_entropy, "optimizer": torch.optim.AdamW, "batch_size": 8, "devices": "cpu"}
    result = meshfit.fit(
        nn.Linear(4, 3),
        (X, Y),
        epochs=3,
        valid=(X, Y),
        metrics=RIGHT,
        best="-loss",
        plan="data=2",
        out=tmp_path / "run",
        **how,
    )
    lines = {line[:12].strip(): line[12:] for line in str(result).splitlines()}
    assert lines["plan"] == "data=2, batch of 8 over all devices"
    assert lines["trained"].startswith("24 steps in ")
    assert lines["trained"].endswith(" samples/s")
    assert lines["loss"] == f"{result.history[0].loss:.4g} to {result.history[-1].loss:.4g}"
    assert lines["valid"] == f"loss {result.metrics['loss']:.4g}, accuracy {result.metrics['accuracy']:.4g}"
    assert lines["best, kept"].startswith("loss ")
    assert "forward and backward " in lines["time"]
    assert 0 < sum(int(share) for share in re.findall(r"(\d+)%", lines["time"])) <= 101
    assert lines["folder"] == str(tmp_path / "run")
    assert repr(result) == str(result)
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 24


def test_the_rate_of_a_resumed_run_is_its_own(tmp_path: Path) -> None:
    how = {"loss": F.cross_entropy, "optimizer": torch.optim.AdamW, "batch_size": 8, "devices": "cpu", "plan": "data=1"}
    meshfit.fit(nn.Linear(4, 3), (X, Y), steps=40, out=tmp_path / "run", checkpoint=40, **how)
    rest = meshfit.fit(nn.Linear(4, 3), (X, Y), steps=44, out=tmp_path / "run", checkpoint=40, resume=True, **how)
    assert rest.steps == 4
    assert rest.rate == pytest.approx(32 / rest.history[-1].seconds)
