"""What a caller changes while copies train in ranks: refused where code there reads it, seen on one device."""

import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

import meshfit
from meshfit.drive.read_by_code import ReadByCode
from meshfit.errors import JobError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
Y = torch.randint(3, (8,), generator=torch.Generator().manual_seed(1))
weight = 0.0
loss = 1.0


def fit(data: Any, plan: str, each_step: Any = (), model: nn.Module | None = None, **asked: Any) -> meshfit.Result:
    given: dict[str, Any] = {"loss": F.cross_entropy, "optimizer": lambda params: torch.optim.SGD(params, lr=0.1)}
    given |= {"batch_size": 4, "steps": 3, "shuffle": False, "devices": "cpu", "progress": False, **asked}
    given["loss"] = None if "step" in given else given["loss"]
    torch.manual_seed(0)
    return meshfit.fit(model or nn.Linear(4, 3), data, plan=plan, each_step=each_step, **given)


class Experiment:
    """A step and a callback of one object."""

    def __init__(self) -> None:
        self.beta, self.losses = 0.0, list[float]()

    def step(self, model: nn.Module, batch: Any) -> Tensor:
        return self.penalised(model(batch[0]), batch[1])

    def penalised(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets) + self.beta * outputs.square().mean()

    def anneal(self, step: Any) -> None:
        self.beta = 0.1

    def keep(self, step: Any) -> None:
        self.losses.append(step.loss)


class Levels(Dataset):
    def __init__(self) -> None:
        self.level = 1

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> Any:
        return X[i] * self.level, Y[i]


class Replay(IterableDataset):
    def __init__(self) -> None:
        self.items = [*zip(X, Y, strict=True)]

    def __iter__(self) -> Any:
        yield from self.items


class Scaled(nn.Linear):
    scale = 1.0

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * self.scale


def test_a_weight_that_is_annealed_by_a_callback() -> None:
    alone = Experiment()
    constant = fit((X, Y), "data=1", step=Experiment().step).model.state_dict()
    seen = fit((X, Y), "data=1", [alone.anneal, alone.keep], step=alone.step).model.state_dict()
    assert not torch.equal(seen["weight"], constant["weight"])
    spread = Experiment()
    with pytest.raises(JobError, match=r"Experiment\.beta was changed in this process"):
        fit((X, Y), "data=2", spread.anneal, step=spread.step)
    kept = fit((X, Y), "data=2", spread.keep, step=spread.step)  # losses is not read by step
    assert len(spread.losses) == len(kept.history) == 3


def test_a_replay_buffer_that_a_loop_fills() -> None:
    replay = Replay()
    asked = {"loss": F.cross_entropy, "batch_size": 4, "steps": 4, "plan": "data=2", "devices": "cpu"}
    loop = meshfit.steps(nn.Linear(4, 3), replay, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), **asked)
    next(loop)
    replay.items.append((X[0] + 1, Y[0]))
    with pytest.raises(JobError, match=r"Replay\.items was changed"):
        next(loop)


def test_a_parameter_that_is_unfrozen_later() -> None:
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 3))
    with pytest.raises(JobError, match=r"0\.weight was unfrozen while the model trains"):
        fit((X, Y), "data=2", lambda step: model.requires_grad_(True), model)


def test_one_device_takes_a_caller_that_freezes_and_unfreezes() -> None:
    def stages(model: nn.Sequential, step: int) -> None:
        model[0].requires_grad_(2 <= step < 4)

    def made() -> nn.Sequential:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
        stages(model, 0)
        return model

    adamw = lambda params: torch.optim.AdamW(params, lr=0.05)
    plain, model = made(), made()
    optimizer = adamw(plain.parameters())
    for step in range(6):
        stages(plain, step)
        optimizer.zero_grad()
        F.cross_entropy(plain(X[:4]), Y[:4]).backward()
        optimizer.step()
    asked = {"loss": F.cross_entropy, "batch_size": 4, "steps": 6, "plan": "data=1", "devices": "cpu"}
    change = lambda step: stages(model, step.step)
    meshfit.fit(model, (X[:4], Y[:4]), optimizer=adamw, each_step=change, progress=False, shuffle=False, **asked)
    for name, weight in plain.named_parameters():
        assert torch.allclose(weight, dict(model.named_parameters())[name], atol=1e-6), name


def by_global(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).loss + weight  # .loss is none of the global of that name


def change(name: str, value: Any) -> Callable[[], None]:
    return lambda: globals().__setitem__(name, value)


def closure() -> tuple[Any, Callable[[], None]]:
    kept = {"beta": [1.0]}
    return (lambda model, batch: model(batch) * kept["beta"][0]), lambda: kept["beta"].__setitem__(0, 2.0)


def test_what_code_names() -> None:
    levels, scaled, tensors = Levels(), Scaled(), (X.clone(), Y.clone())
    subset = torch.utils.data.Subset(levels, [0, 1])
    step, more = closure()
    cases: list[tuple[Any, Callable[[], Any], str | None]] = [
        (step, more, "kept"),
        (by_global, change("weight", 1.0), "weight"),
        (by_global, change("loss", 2.0), None),
        (levels, lambda: setattr(levels, "level", 2), "Levels.level"),
        (subset, lambda: setattr(levels, "level", 3), "Subset.dataset.level"),
        (scaled, lambda: setattr(scaled, "scale", 2.0), "Scaled.scale"),
        (scaled, lambda: scaled.eval(), None),
        (tensors, lambda: tensors[0].zero_(), "tuple[0]"),
        (torch.nn.functional.cross_entropy, lambda: None, None),
    ]
    for code, act, name in cases:
        read = ReadByCode(code)
        assert read.changed() is None
        act()
        assert read.changed() == name
