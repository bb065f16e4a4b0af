"""Packages that only some data needs."""

import importlib
from types import ModuleType

from meshfit.errors import DataError


def needed(module: str, extra: str, why: str = "") -> ModuleType:
    """``module``, or an error that says which extra brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(
            f"{why or 'reading this'} needs {module.partition('.')[0]}, which is not installed",
            f'pip install "meshfit[{extra}]"',
        ) from error
