"""``meshfit data URL``: what is there, and how fast it is read."""

import json
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import meshfit
from meshfit.cli.verbs import app
from meshfit.data.look import look, picture
from meshfit.errors import DataError


@pytest.fixture
def images(tmp_path: Path) -> Path:
    for i in range(6):
        folder = tmp_path / "images" / ("cat", "dog")[i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((16, 20, 3), 40 * i, np.uint8)).save(folder / f"{i}.png")
    return tmp_path / "images"


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    app(["data", *arguments], standalone_mode=False)
    return capsys.readouterr().out


def test_says_what_samples_are(images: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    said = shown(capsys, str(images), "--images", str(tmp_path / "some.png"))
    assert "6 samples" in said
    assert "3 x 16 x 20" in said
    assert "waits for" in said
    with Image.open(tmp_path / "some.png") as made:
        assert made.size == (6 * 80, 64)
        assert made.getpixel((10, 10)) == (0, 0, 0)
    told = json.loads(shown(capsys, str(images), "--json", "--batch", "3"))
    assert (told["samples"], told["batch"]) == (6, 3)
    assert [column["type"] for column in told["columns"]] == ["uint8", "int64"]
    assert set(told["stages"]) == {"read", "decode"}
    assert told["speeds"][0]["samples"] > 0


def test_names_the_slowest_stage() -> None:
    source = meshfit.data.memory((torch.arange(64.0), torch.arange(64)))
    assert look(source, batch=16, seconds=0.05).slowest == "read"

    def slow(batch: tuple) -> tuple:
        time.sleep(0.02)
        return batch

    found = look(source.map(slow), batch=16, seconds=0.1)
    assert found.slowest == "transform"
    assert found.stages["transform"] > 0.7
    assert found.speeds[0].samples < 16 / 0.02
    assert [column.values for column in found.columns] == ["0 to 63, mean 31.5", "0 to 63, 64 of them seen"]


def test_pictures_are_beside_each_other() -> None:
    grey, colour = torch.full((1, 8, 8), 7, dtype=torch.uint8), torch.full((3, 8, 16), 9, dtype=torch.uint8)
    made = picture((grey, colour), 4)
    assert made.shape == (3, 4, 12)
    assert made[0, 0].tolist() == [7] * 4 + [9] * 8


def test_what_cannot_be_shown(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "x.what")
    with pytest.raises(DataError, match="nothing that is known"):
        app(["data", str(tmp_path / "x.what")], standalone_mode=False)
    (tmp_path / "x.txt").write_text("words " * 100)
    with pytest.raises(DataError, match="--length 1024"):
        app(["data", str(tmp_path / "x.txt")], standalone_mode=False)
    np.save(tmp_path / "x.npy", np.arange(10.0))
    with pytest.raises(DataError, match="no images to write"):
        app(["data", str(tmp_path / "x.npy"), "--images", str(tmp_path / "x.png")], standalone_mode=False)


def test_an_image_that_nobody_can_read_is_not_a_bad_one(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    for on_bad in ("stop", "skip"):
        with pytest.raises(DataError, match="needs PIL") as raised:
            meshfit.data.folder(images).on_bad(on_bad).fetch(np.arange(2))
        assert not isinstance(raised.value, meshfit.data.BadSample)
