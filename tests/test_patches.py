"""Functions that are replaced for a while, by threads that come and go in any order."""

import builtins
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshfit
from meshfit.patches import replaced


def _plus(word: str) -> Any:
    return lambda before: lambda *args: before(*args) + word


def test_in_this_thread_alone() -> None:
    real = lambda: "real"
    home = SimpleNamespace(say=real)
    with ThreadPoolExecutor(1) as pool, replaced(home, "say", _plus(" a")), replaced(home, "say", _plus(" b")):
        assert home.say() == "real a b"
        assert pool.submit(lambda: home.say()).result() == "real"
    assert home.say is real


def test_threads_leave_in_any_order() -> None:
    real = lambda: "real"
    home = {"say": real}
    first, second = replaced(home, "say", _plus(" a")), replaced(home, "say", _plus(" b"))
    with ThreadPoolExecutor(1) as pool:
        first.__enter__()
        pool.submit(second.__enter__).result()
        assert (home["say"](), pool.submit(lambda: home["say"]()).result()) == ("real a", "real b")
        first.__exit__(None, None, None)
        assert (home["say"](), pool.submit(lambda: home["say"]()).result()) == ("real", "real b")
        pool.submit(second.__exit__, None, None, None).result()
    assert home == {"say": real}


def test_everywhere() -> None:
    home = SimpleNamespace(say=lambda: "real")
    with ThreadPoolExecutor(1) as pool, replaced(home, "say", _plus(" all"), everywhere=True):
        assert pool.submit(lambda: home.say()).result() == "real all"
        with replaced(home, "say", _plus(" mine")):
            assert home.say() == "real all mine"


class _Named:
    def say(self, word: str) -> str:
        return f"{type(self).__name__} {word}"


class _Below(_Named):
    pass


def test_methods_and_what_is_inherited() -> None:
    with replaced(_Named, "say", _plus("!")):
        assert _Below().say("hi") == "_Below hi!"
    with replaced(_Below, "say", _plus("?"), real=_Named.say):
        assert (_Below().say("hi"), _Named().say("hi")) == ("_Below hi?", "_Named hi")
    assert "say" not in vars(_Below)


def test_it_is_put_back_after_an_error() -> None:
    real = lambda: "real"
    home = SimpleNamespace(say=real)
    with pytest.raises(KeyError), replaced(home, "say", _plus(" a")):
        raise KeyError
    assert home.say is real


def _process() -> list[Any]:
    """What trainings change in torch for a while."""
    from torch._dynamo import config

    level = torch.autograd.function._SingleLevelFunction
    changed = [
        nn.Module.__call__,
        nn.Module.__setattr__,
        F.batch_norm,
        torch.compiler.is_compiling,
        builtins.__import__,
    ]
    nesting = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return [
        *changed,
        vars(level).get("apply"),
        frozenset(torch.library._impls),
        (config.recompile_limit, torch.compiler.config.dynamic_sources),
        (nesting, torch.is_autocast_enabled("cpu"), torch.is_grad_enabled(), torch._C._len_torch_function_stack()),
    ]


@pytest.mark.filterwarnings("ignore")
def test_a_training_leaves_the_process_as_it_was() -> None:
    before = _process()
    data = torch.randn(8, 4), torch.randn(8, 4)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    plan = "microbatches=2 precision=bf16 recompute=full"
    meshfit.fit(model, data, loss=F.mse_loss, optimizer=torch.optim.AdamW, batch_size=8, steps=2, plan=plan)
    assert _process() == before
