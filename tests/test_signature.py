"""The arguments of the public functions: the same everywhere, explained, and seen by help() and by type checkers."""

import inspect
import pydoc
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshfit

X, Y = torch.randn(16, 4), torch.randn(16, 2)
OWN = {"fit": {"callbacks", "each_step", "progress"}, "verify": {"check_steps"}, "steps": set()}


def parameters(verb: Callable) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(verb).parameters)


@pytest.mark.parametrize("verb", [meshfit.fit, meshfit.steps, meshfit.verify])
def test_takes_what_a_job_is_made_of(verb: Callable) -> None:
    found = parameters(verb)
    assert set(found) - {field.name for field in fields(meshfit.Job)} == OWN[verb.__name__]
    for field in fields(meshfit.Job):
        given = inspect.Parameter.empty if field.default is MISSING else field.default
        assert found[field.name].default == given, field.name
        assert (found[field.name].kind is inspect.Parameter.KEYWORD_ONLY) == (field.name not in ("model", "data"))


@pytest.mark.parametrize("verb", [meshfit.steps, meshfit.verify, meshfit.evaluate, meshfit.predict])
def test_an_argument_is_the_same_in_every_verb(verb: Callable) -> None:
    for name, parameter in parameters(verb).items():
        if name not in OWN.get(verb.__name__, ()):
            assert parameter == parameters(meshfit.fit)[name]


def test_help_explains_each_argument_of_fit() -> None:
    explained = re.findall(r"^ {8}(\w+) +\S", meshfit.fit.__doc__ or "", re.MULTILINE)
    assert sorted(explained) == sorted(parameters(meshfit.fit))
    said = pydoc.render_doc(meshfit.fit, renderer=pydoc.plaintext)  # type: ignore[attr-defined]
    assert "batch_size: int | str | None = None" in said
    assert "samples of an optimizer step, over all devices" in said


@pytest.mark.parametrize(
    ("asked", "kind"),
    [({"batch_size": -1}, meshfit.JobError), ({"plan": "data=2 shard=0"}, meshfit.PlanError), ({}, meshfit.JobError)],
)
def test_steps_checks_its_arguments_at_the_call(asked: dict[str, Any], kind: type[Exception]) -> None:
    given = {"optimizer": torch.optim.SGD, "loss": F.mse_loss, "steps": 2, "devices": "cpu"} if asked else {}
    with pytest.raises(kind):
        meshfit.steps(nn.Linear(4, 2), (X, Y), **given, **asked)


SCRIPT = """
import torch
import meshfit

model, data = torch.nn.Linear(4, 2), (torch.zeros(8, 4), torch.zeros(8, 2))
result = meshfit.fit(model, data, loss=torch.nn.functional.mse_loss, optimizer=torch.optim.AdamW, epochs=1)
reveal_type(result)
reveal_type(result.history[-1].loss)
reveal_type(meshfit.evaluate(model, data))
for step in meshfit.steps(model, data, optimizer=lambda params: torch.optim.SGD(params, lr=0.1), steps=3):
    reveal_type(step)
meshfit.fit(model, data, batchsize=8)
meshfit.fit(model, data, precision="bf16")
meshfit.steps(model, data, epochs="3")
meshfit.verify(model, data, check_steps=3, on_nan="ignore")
"""


def test_a_type_checker_sees_them(tmp_path: Path) -> None:
    pytest.importorskip("pyright")
    (tmp_path / "train.py").write_text(SCRIPT)
    source = Path(meshfit.__file__).parent
    assert (source / "py.typed").exists()
    (tmp_path / "pyrightconfig.json").write_text(f'{{"extraPaths": ["{source.parent}"], "include": ["train.py"]}}')
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "-p", str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True).stdout
    revealed = re.findall(r'Type of ".*" is "(.*)"', said)
    assert revealed == ["Result", "float", "dict[str, float]", "Step"], said
    wrong = re.findall(r"train.py:(\d+):\d+ - error: (.*)", said)
    assert [int(line) for line, _ in wrong] == [12, 13, 14, 15], said
    assert 'No parameter named "batchsize"' in wrong[0][1]
    assert 'No parameter named "precision"' in wrong[1][1]
