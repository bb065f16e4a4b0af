"""The caller's settings of logging and warnings, for its ranks to have alike: scripts make them once, and are not run
again in ranks."""

import logging
import sys
import warnings
from dataclasses import dataclass, field
from typing import Any


def _form() -> tuple[str, str | None, bool] | None:
    """Of the root logger's lines on the terminal: format, dates, and whether they go to standard output."""
    for handler in logging.getLogger().handlers:
        if type(handler) is logging.StreamHandler:
            form = handler.formatter or logging.Formatter()
            return form._fmt or "%(message)s", form.datefmt, handler.stream is sys.stdout
    return None


def _levels() -> dict[str, int]:
    known = {"": logging.getLogger(), **logging.Logger.manager.loggerDict}
    return {name: log.level for name, log in known.items() if isinstance(log, logging.Logger) and log.level}


def _filters() -> list[Any]:
    """Those that make errors stay with the caller, they are about its own code; those of a package's own warnings too,
    lest every rank imports it."""
    return [each for each in warnings.filters if each[0] != "error" and each[2].__module__ == "builtins"]


@dataclass(frozen=True, slots=True)
class LoggingSettings:
    """Those of the process that makes it; ``apply`` them in another."""

    form: tuple[str, str | None, bool] | None = field(default_factory=_form)
    levels: dict[str, int] = field(default_factory=_levels)
    """By logger, of those that have one of their own."""
    warnings: list[Any] = field(default_factory=_filters)

    def apply(self) -> None:
        warnings.filters[:] = self.warnings  # type: ignore[index]
        if self.form is None:
            return
        form, dates, out = self.form
        logging.basicConfig(format=form, datefmt=dates, stream=sys.stdout if out else sys.stderr)
        for name, level in self.levels.items():
            logging.getLogger(name).setLevel(level)
