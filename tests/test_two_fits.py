"""Two trainings in two threads of one process train like one after the other, and leave the process as it was."""

import builtins
import functools
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshfit
from meshfit import JobError, events, turns


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        drawn = 0.01 * (random.random() + np.random.rand())
        return x + self.dropout(F.relu(self.norm(self.linear(x)))) * (1 + drawn)


def _model(seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model = nn.Sequential(nn.Linear(4, 8), Block(), Block(), nn.Linear(8, 3))
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
    return model


def _fit(seed: int, plan: str, model: nn.Module | None = None, **how: Any) -> tuple[list[float], dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(48, 4, generator=generator), torch.randint(0, 3, (48,), generator=generator)
    result = meshfit.fit(
        model or _model(seed),
        (x, y),
        loss=F.cross_entropy,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        batch_size=8,
        epochs=2,
        plan=plan,
        devices="cpu",
        seed=seed,
        progress=False,
        **how,
    )
    return [step.loss for step in result.history], result.model.state_dict()


def _at_once(*works: Callable[[Callable[[object], None]], Any]) -> list[Any]:
    """Each in a thread of its own; given what makes all wait for each other at their first steps."""
    barrier = threading.Barrier(len(works))
    met = threading.local()

    def meet(step: object) -> None:
        if getattr(met, "times", 0) < 3:
            met.times = getattr(met, "times", 0) + 1
            barrier.wait(60)

    with ThreadPoolExecutor(len(works)) as pool:
        return [each.result() for each in [pool.submit(work, meet) for work in works]]


def _same(got: tuple[list[float], dict[str, Tensor]], want: tuple[list[float], dict[str, Tensor]]) -> bool:
    return got[0] == want[0] and all(torch.equal(got[1][name], tensor) for name, tensor in want[1].items())


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("data=1", "data=1"),
        ("recompute=full", "recompute=selective"),
        ("data=1 microbatches=2", "recompute=full"),
        ("data=2", "data=2"),
        ("data=2", "recompute=full"),
        ("pipeline=2", "data=1"),
    ],
)
def test_they_train_like_one_after_the_other(first: str, second: str) -> None:
    """Dropout, BatchNorm's statistics, and numbers drawn from Python and NumPy; each waits for the other's steps."""
    plans = first, second
    want = [_fit(seed, plan) for seed, plan in enumerate(plans)]
    models = [_model(seed) for seed in range(2)]  # before: it draws numbers
    got = _at_once(*(lambda meet, i=i: _fit(i, plans[i], models[i], each_step=meet) for i in range(2)))
    assert [_same(one, other) for one, other in zip(got, want, strict=True)] == [True, True]


def test_one_between_the_steps_of_another() -> None:
    want = _fit(0, "data=1"), _fit(1, "recompute=full")
    model, inner = _model(1), []

    def between(step: meshfit.Step) -> None:
        if step.step == 3:
            inner.append(_fit(1, "recompute=full", model))

    outer = _fit(0, "data=1", each_step=between)
    assert _same(outer, want[0])
    assert _same(inner[0], want[1])


def _in_the_process() -> dict[str, Any]:
    """What trainings and their setup replace for a while, and the generators. Not what ``mallopt`` was told: glibc
    does not say."""
    config = torch._dynamo.config
    return {
        "call": nn.Module.__call__,
        "setattr": nn.Module.__setattr__,
        "import": builtins.__import__,
        "apply": dict(torch.autograd.function._SingleLevelFunction.__dict__).get("apply"),
        "functional": dict(vars(F)),
        "compiling": (torch.compiler.is_compiling, torch.compiler.is_exporting),
        "recompile": config.recompile_limit,
        "mha": torch.backends.mha.get_fastpath_enabled(),
        "threads": torch.get_num_threads(),
        "grad": (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")),
        "events": events.current(),
        "torch": torch.get_rng_state().tolist(),
        "numpy": np.random.get_state(legacy=False)["state"]["key"].tolist(),  # type: ignore[index]
        "python": random.getstate(),
    }


@pytest.mark.filterwarnings("ignore")  # dynamo looks at what it warns of itself
@pytest.mark.parametrize("plan", ["data=1", "recompute=full", "compile=block", "data=2"])
def test_nothing_is_left_of_a_training(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    before = _in_the_process()
    _fit(3, plan)
    after = _in_the_process()
    assert [name for name in before if before[name] != after[name]] == []


def test_nothing_is_left_of_two_at_once_nor_of_one_that_fails() -> None:
    before = _in_the_process()

    def fails(step: object) -> None:
        raise KeyError("mine")

    def failing(meet: Any) -> None:
        with pytest.raises(KeyError, match="mine"):
            _fit(1, "recompute=full", models[1], each_step=fails)

    models = [_model(seed) for seed in range(2)]
    _at_once(lambda meet: _fit(0, "recompute=full", models[0]), failing)
    after = _in_the_process()
    assert [name for name in before if before[name] != after[name]] == []
    assert turns._live == []


def test_two_at_once_in_a_rank_are_refused() -> None:
    """Their collectives would meet each other's."""
    first, second = (turns.Turn(torch.device("cpu"), world=True) for _ in range(2))
    with first.under_way():
        with second.under_way():  # in one thread they follow each other
            pass
        with ThreadPoolExecutor(1) as pool, pytest.raises(JobError, match="two trainings at once"):
            pool.submit(lambda: turns.Turn(torch.device("cpu"), world=True).under_way().__enter__()).result()
