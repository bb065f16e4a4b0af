"""Configurations that are wrong: one clear error each, before anything starts."""

import os
import random
import string
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshfit
from meshfit.errors import MeshfitError
from meshfit.launch import warm
from tests.command import meshfit as command

X, Y = torch.randn(8, 4), torch.randint(0, 3, (8,))
RIGHT: dict[str, Any] = {
    "model": nn.Linear(4, 3),
    "data": (X, Y),
    "loss": F.cross_entropy,
    "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
    "batch_size": 4,
    "steps": 1,
    "devices": "cpu",
    "progress": False,
}
NAN, THING = float("nan"), object()
VALUES: list[Any] = [
    -1,
    0,
    1.5,
    NAN,
    float("inf"),
    "",
    "no",
    "a" * 500,
    b"x",
    [],
    [1],
    {},
    {"a": 1},
    True,
    THING,
    "\0",
    10**30,
]
"""Which of these an argument takes is said below; all others it must refuse."""
TAKES: dict[str, list[Any]] = {
    "loss": [],
    "step": [],
    "weights": [],
    "partial": [True],
    "optimizer": [],
    "scheduler": [],
    "batch_size": [10**30],
    "batch_tokens": [10**30],
    "collate": [],
    "pack": [10**30],
    "epochs": [1.5, 10**30],
    "steps": [10**30],
    "valid_every": [10**30],
    "valid_step": [],
    "metrics": [{}],
    "best": [],
    "patience": [],
    "ema": [],
    "clip": [1.5, 10**30],
    "on_nan": [],
    "shuffle": [True],
    "workers": [0, 10**30],
    "seed": [-1, 0],
    "plan": [""],  # every device for the data
    "devices": [],
    "out": ["no", "a" * 500],
    "checkpoint": [10**30],
    "keep": [10**30],
    "keep_best": [],
    "resume": [True, "no", "a" * 500],
    "listen": [],
    "join": [],
    "timeout": [1.5],
    "independent": [True],
    "callbacks": [[]],
    "each_step": [[], {}],
    "progress": [True],
}


def wrong_value(draw: random.Random) -> dict[str, Any]:
    name = draw.choice(sorted(TAKES))
    refused = [value for value in VALUES if not any(value is right or value == right for right in TAKES[name])]
    if name == "callbacks":
        refused.remove({})
    return {name: draw.choice(refused)}


def wrong_name(draw: random.Random) -> dict[str, Any]:
    name = list(draw.choice(sorted(TAKES)))
    at = draw.randrange(len(name))
    name[at : at + draw.randrange(2)] = draw.choice(string.ascii_lowercase + "_")
    found = "".join(name)
    return {found if found not in TAKES and found not in RIGHT else f"{found}_": 1}


def wrong_plan(draw: random.Random) -> dict[str, Any]:
    degree = draw.choice(["data", "shard", "tensor", "pipeline", "context", "expert", "server", "microbatches", "zero"])
    value = draw.choice(["-1", "0", "1.5", "two", "", "=2", "1e3", "0x2", "nan", "99999999", "2;3", "²"])
    other = draw.choice(
        ["precision=fp7", "schedule=1f1c", "recompute=maybe", "exchange=post", "compile=perhaps", "datta=2"]
    )
    text = draw.choice([f"{degree}={value}", other, f"data=1 {other}", f"data=1 data=1 {degree}={value}"])
    return {"plan": text if "server=0" not in text else "server=-1"}


def wrong_devices(draw: random.Random) -> dict[str, Any]:
    return {
        "devices": draw.choice(
            ["cpu:0", "cpu:99999999", "cpu:-2", "cpu:x", "gpu", "tpu:4", "cuda:", "cpu:1:2", ",", "-1", "²"]
        )
    }


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(warm, "fork", started)


@pytest.mark.usefixtures("nothing_starts")
def test_500_random_wrong_configurations_are_one_clear_error_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    seed = int(os.environ.get("MESHFIT_FUZZ_SEED", "0"))
    draw, problems, slowest = random.Random(seed), [], 0.0
    for _ in range(500):
        wrong = draw.choice([wrong_value, wrong_value, wrong_name, wrong_plan, wrong_devices])(draw)
        began = time.process_time()
        try:
            meshfit.fit(**(RIGHT | wrong))
            problems.append(f"{wrong} was accepted")
        except MeshfitError as error:
            text = str(error)
            if len(text) > 2000 or "Traceback" in text or not error.headline.strip():
                problems.append(f"{wrong}: {text[:300]}")
        except Exception as error:
            problems.append(f"{wrong}: {type(error).__name__}: {error}")
        slowest = max(slowest, time.process_time() - began)
    assert not problems, f"seed {seed}, {len(problems)} of 500:\n" + "\n".join(sorted(set(problems)))
    assert slowest < 3.0  # seconds of processor, on a busy machine too
    assert not [path for path in tmp_path.iterdir() if path.name != "no"]


OWN = nn.Parameter(torch.ones(1))
OPTIMIZER = torch.optim.SGD([OWN], lr=0.1)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"shufle": True}, "did you mean shuffle?"),
        ({"plan": "dat=2"}, "did you mean data?"),
        ({"data_": 1}, "did you mean data?"),
        ({"shuffle": "no"}, "shuffle='no' is not True or False"),
        ({"out": 5}, "out=5 is not a path"),
        ({"seed": "a"}, "seed='a' is not a whole number"),
        ({"tensor": 2}, "it is a word of the plan"),
        ({"criterion": F.cross_entropy}, "that is loss="),
        ({"num_epochs": 3}, "that is epochs="),
        ({"learning_rate": 1e-3}, "that is optimizer=lambda params:"),
        ({"loss": nn.CrossEntropyLoss}, "loss=CrossEntropyLoss()"),
        ({"loss": "cross_entropy"}, "loss=torch.nn.functional.cross_entropy"),
        ({"scheduler": torch.optim.lr_scheduler.StepLR(OPTIMIZER, 3)}, "scheduler=lambda optimizer: StepLR("),
        ({"optimizer": lambda params: torch.optim.SGD([*params, OWN], lr=0.1)}, "make them a part of the model"),
    ],
)
def test_what_was_meant_is_said(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(MeshfitError) as caught:
        meshfit.fit(**(RIGHT | wrong))
    assert said in str(caught.value)


SCRIPT = """
import torch, meshfit
x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
meshfit.fit(torch.nn.Linear(4, 3), (x, y), loss=torch.nn.functional.cross_entropy,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1), steps=1, devices="cpu", progress=False)
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "train.py", "--plan", "dat=2"),
        ("train", "train.py", "--plann", "data=2"),
        ("train", "train.py", "--keep", "many"),
        ("train", "train.py", "--checkpoint", "now and then"),
        ("train", "train.py", "--devices", "gpu"),
        ("train", "train.py", "--fit", "0"),
        ("train", "train.py", "--key-file", "none"),
        ("train", "nowhere.py"),
        ("train", "."),
        ("trian", "train.py"),
        ("verify", "train.py", "--steps", "-1"),
        ("verify", "train.py", "--plan", "data=two"),
        ("join", "nowhere", "train.py"),
        ("watch", "nowhere"),
        ("report", "nowhere"),
        ("compare", "nowhere", "elsewhere"),
        ("data", "nowhere.parquet"),
        ("inspect", "nowhere.py"),
        ("inspect", "train.py", "--input", "int 4y"),
    ],
    ids=" ".join,
)
def test_the_command_line_ends_with_2_and_no_traceback(arguments: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = command(tmp_path, *arguments)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.strip()
