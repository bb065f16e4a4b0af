"""The interface of an axis, by the one that docs/adding-an-axis.md adds: it counts the calls of every module."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

import meshfit
from meshfit import plan_cost
from meshfit.anatomy.trace import Trace
from meshfit.axes import find, place
from meshfit.axes.axis import Applied, Axis
from meshfit.axes.find import Study
from meshfit.axes.forward import unwrap, wrap
from meshfit.axes.order import ORDER
from meshfit.axes.place import Placed
from meshfit.axes.shard.units import traced
from meshfit.cost import CollectiveCall, Cost
from meshfit.loss.objective import Objective
from meshfit.plan import Plan
from meshfit.plan_cost import Costing

CALLS: Counter[str] = Counter()


class CountAxis(Axis):
    word = "count"

    def on(self, plan: Plan, model: nn.Module, device: str) -> bool:
        return True

    def find(self, study: Study) -> tuple[str, ...]:
        study.notes.append("count: calls of every layer are counted")
        return tuple(path for path, module in study.model.named_modules() if path and not list(module.children()))

    def closed(self, finding: tuple[str, ...]) -> Iterable[str]:
        return finding

    def apply(self, placed: Placed, finding: tuple[str, ...]) -> "Counted":
        return Counted(placed.model, finding)

    def cost(self, costing: Costing, finding: tuple[str, ...]) -> None:
        costing.total += Cost(collectives=(CollectiveCall("count", 0, count=len(finding)),))


class Counted(Applied):
    def __init__(self, model: nn.Module, paths: tuple[str, ...]):
        self.model = model
        for path in paths:
            wrap(model.get_submodule(path), lambda forward, path=path: self._counting(forward, path))

    @staticmethod
    def _counting(forward: Any, path: str) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            CALLS[path] += 1
            return forward(*args, **kwargs)

        return run

    def undo(self) -> None:
        unwrap(self.model)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> None:
    CALLS.clear()
    for module in (find, place, plan_cost):
        monkeypatch.setattr(module, "ORDER", (*ORDER, CountAxis()))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


DATA = torch.randn(8, 4), torch.randint(2, (8,))


def fit(plan: str) -> meshfit.Result:
    loss = nn.functional.cross_entropy
    return meshfit.fit(net(), DATA, loss=loss, optimizer=torch.optim.SGD, batch_size=4, steps=3, plan=plan)


def test_a_new_axis_is_applied_and_undone(counting: None) -> None:
    result = fit("microbatches=2 recompute=none")
    assert "count: calls of every layer are counted" in result.notes
    assert set(CALLS) == {"0", "1", "2"}
    assert CALLS["0"] >= 6  # three steps of two microbatches
    before = CALLS["0"]
    result.model(DATA[0])
    assert CALLS["0"] == before, "the model has its own forwards back"


def test_it_changes_nothing_and_is_in_the_cost(counting: None) -> None:
    losses = [step.loss for step in fit("data=1").history]
    trace = traced(net(), Objective(nn.functional.cross_entropy), DATA, device="cpu")
    assert isinstance(trace, Trace)
    optimizer = torch.optim.SGD(net().parameters())
    assert plan_cost.cost(Plan(), trace, optimizer, found={"count": ("0", "2")}).calls == {"count": 2}
    assert losses == pytest.approx([step.loss for step in fit("data=1").history])


def test_every_axis_has_a_word_and_a_place() -> None:
    words = [axis.word for axis in ORDER]
    assert len(set(words)) == len(words)
    assert all(hasattr(Plan(), word) for word in words)
    for axis in ORDER:
        folder = type(axis).__module__.split(".")[2]
        assert folder == axis.word, f"{axis.word}= is in axes/{folder}"
