"""Start the template of all ranks while pytest collects."""

import os

import pytest

from meshfit.drive import RANK_MODULES
from meshfit.launch.folders import CACHE
from meshfit.launch.warm import warm


def pytest_configure(config: pytest.Config) -> None:
    os.environ[CACHE] = "0"  # what is tested is found each time
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        return  # its workers run the tests
    # What pytest's rewritten asserts call; and what cloudpickle believes a test needs that names both
    # ``dist`` and ``torch.tensor``.
    warm("_pytest.assertion.rewrite", "torch.distributed.tensor", *RANK_MODULES)
