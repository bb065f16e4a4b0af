"""Parametrisations that would repeat a property many times over: a few cases that differ in kind stand for the rest.

    @pytest.mark.parametrize("name", few(ZOO, "gpt2", "batchnorm-cnn"))
    @pytest.mark.parametrize(("model", "plan"), every_other(MODELS, PLANS))

The others are marked ``more``: ``make more`` runs them, ``make test`` does not.
"""

from collections.abc import Iterable
from typing import Any

import pytest


def few(every: Iterable[Any], *kept: str) -> list[Any]:
    """``every``, names or values that have one, as parameters; those not ``kept`` are marked."""
    named = {each if isinstance(each, str) else each.name: each for each in every}
    assert named.keys() >= set(kept), f"no such: {set(kept) - named.keys()}"
    return [pytest.param(each, id=name, marks=() if name in kept else pytest.mark.more) for name, each in named.items()]


def every_other(first: Iterable[Any], second: Iterable[Any]) -> list[Any]:
    """All pairs as parameters, of which half are marked, as on a checkerboard: each of either side stays in some."""
    seconds = list(second)
    return [
        pytest.param(a, b, marks=() if (i + j) % 2 == 0 else pytest.mark.more)
        for i, a in enumerate(first)
        for j, b in enumerate(seconds)
    ]


def diagonal(first: Iterable[Any], second: Iterable[Any]) -> list[Any]:
    """All pairs as parameters; those that are not marked have each of ``first`` once, and ``second`` in turns."""
    seconds = list(second)
    return [
        pytest.param(a, b, marks=() if i % len(seconds) == j else pytest.mark.more)
        for i, a in enumerate(first)
        for j, b in enumerate(seconds)
    ]


def more(*values: Any, id: str | None = None) -> Any:
    return pytest.param(*values, id=id, marks=pytest.mark.more)
