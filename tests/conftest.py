"""Start the template of all ranks while pytest collects."""

import gc
import os
from contextlib import suppress

import pytest
import torch

from meshfit.drive import RANK_MODULES
from meshfit.launch.folders import CACHE
from meshfit.launch.warm import warm

LIBRARIES = tuple(f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "llama", "mixtral", "t5"))


def pytest_configure(config: pytest.Config) -> None:
    os.environ[CACHE] = "0"  # what is tested is found each time
    # Else who is woken takes the processor of who wakes it, which still holds gloo's lock: and gloo's threads spin for
    # it. All that tests start inherits this.
    with suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        return  # its workers run the tests
    gc.disable()  # while tests are imported
    torch.set_num_threads(1)  # models this small gain nothing from more, and on busy cores threads wait for each other
    # What pytest's rewritten asserts call; what cloudpickle believes a test needs that names both ``dist`` and
    # ``torch.tensor``; what each rank that builds a model of the zoo would import, in 1.3 s; and what ranks of many
    # tests import when they need it.
    often = "pytest", "meshfit.axes.tensor.find", "torch.profiler._cupti_monitor"
    rest = *often, *LIBRARIES, *RANK_MODULES
    warm("_pytest.assertion.rewrite", "torch.distributed.tensor", "benchmarks.parity", *rest)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # what tests import stays: garbage is looked for in what they make
    gc.enable()


@pytest.fixture(autouse=True)
def without_prediction(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that has a folder predicts, at its end, what it should have needed: only tests of what stands in a folder
    look at that, and for a mixture of experts it takes as long as all the rest of a test."""
    if not request.module.__name__.endswith(("predicted", "observe", "observe_compare", "report", "watch", "cli")):
        monkeypatch.setattr("meshfit.observe.folder.predict", lambda training: {})
