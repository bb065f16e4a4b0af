"""Parametrisations over many models, of which a few that differ in kind stand for the rest.

    @pytest.mark.parametrize("name", few(ZOO, "gpt2", "batchnorm-cnn"))

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
