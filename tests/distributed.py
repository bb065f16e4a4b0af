"""Tests that run in every rank of a small world.

    @pytest.mark.parametrize("op", [dist.ReduceOp.SUM, dist.ReduceOp.MAX])
    @distributed(world=4)
    def test_all_ranks_agree(op): ...

The body runs in fresh ranks, forked from a warm template: nothing leaks from test to test, and a test
costs some 0.1 s. A rank that fails is named, with its traceback; a hang is cut after ``timeout`` seconds
and each rank prints where it stood.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest

from meshfit.errors import MeshfitError
from meshfit.launch.devices import Devices
from meshfit.launch.local import LocalRanks


def distributed(world: int = 4, timeout: float = 60) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the test in ``world`` CPU ranks. Its arguments (parameters, fixtures) are pickled to them."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**arguments: Any) -> None:
            __tracebackhide__ = True
            cloudpickle.register_pickle_by_value(sys.modules[test.__module__])  # ranks need not import it
            work = lambda world, channel: test(**arguments)
            failure = None
            with LocalRanks(work, size=world, devices=Devices("cpu", None), timeout=timeout) as ranks:
                try:
                    for _ in ranks.messages(timeout):
                        pass
                except TimeoutError:
                    ranks.stacks()
                    failure = f"cut after {timeout} s: see on stderr where each rank stood"
                except MeshfitError as error:
                    failure = str(error)
            if failure:
                pytest.fail(failure, pytrace=False)

        return run

    return decorate
