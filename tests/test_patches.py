"""Functions that are replaced for a while, by threads that come and go in any order."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

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
