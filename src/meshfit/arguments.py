"""What each argument of ``fit`` and its kin may be: checked before anything starts, with one clear error."""

import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from numbers import Integral
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from torch import nn

from meshfit.errors import JobError, MeshfitError, did_you_mean
from meshfit.plan import DEGREES, WORDS, Plan

P = ParamSpec("P")
R = TypeVar("R")

NO_METRICS: Mapping[str, Any] = {}


def verb(function: Callable[P, R]) -> Callable[P, R]:
    """A public function. An argument that it does not have is refused with what to write instead, and a
    ``MeshfitError`` ends in the caller's own line, not in ours: it says what to mend there."""
    known = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            for name in kwargs:
                if name not in known:
                    raise JobError(f"{function.__name__} has no argument {name!r}", _instead(name, kwargs, known))
            return function(*args, **kwargs)
        except MeshfitError as error:
            raise error.with_traceback(None) from None

    return call


def _instead(name: str, given: dict[str, Any], known: list[str]) -> str:
    """What to write for an argument that there is not. Many are words of the plan."""
    if name not in [field.name for field in fields(Plan)]:
        return did_you_mean(name, known)
    plan, value = str(given.get("plan", "auto")), given[name]
    left_out = (name, "auto") if name in DEGREES else (name,)
    words = [word for word in plan.split() if word.partition("=")[0] not in left_out]
    if name in WORDS and value not in WORDS[name]:
        value = "|".join(WORDS[name])
    return f'it is a word of the plan: plan="{" ".join([*words, f"{name}={value}"])}"'


def whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _or_none(right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or right(value)


def _above_0(right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or (right(value) and value > 0)


_path = _or_none(lambda value: isinstance(value, str | Path) and bool(str(value)))
_switch = lambda value: isinstance(value, bool)
_text = _or_none(lambda value: isinstance(value, str) and bool(value))

ARGUMENTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "model": (lambda value: isinstance(value, nn.Module) or callable(value), "an nn.Module or a function"),
    "loss": (_or_none(callable), "a function"),
    "step": (_or_none(callable), "a function"),
    "scheduler": (_or_none(callable), "a function"),
    "batch_size": (lambda value: isinstance(value, str) or (whole(value) and value > 0), "a number of samples above 0"),
    "epochs": (_above_0(number), "a number above 0"),
    "steps": (_above_0(whole), "a whole number above 0"),
    "valid_every": (_above_0(whole), "a whole number of steps above 0"),
    "metrics": (lambda value: isinstance(value, Mapping), 'a dict: {"accuracy": function}'),
    "best": (_text, 'the name of a metric: "accuracy", "-loss"'),
    "patience": (_above_0(whole), "a whole number of evaluations above 0"),
    "ema": (_or_none(lambda value: number(value) and 0 < value < 1), "a decay between 0 and 1"),
    "clip": (_above_0(number), "a number above 0"),
    "on_nan": (lambda value: value in ("stop", "skip"), '"stop" or "skip"'),
    "shuffle": (_switch, "True or False"),
    "seed": (whole, "a whole number"),
    "out": (_path, "a path"),
    "resume": (lambda value: isinstance(value, bool) or (value is not None and _path(value)), "True, False or a path"),
    "listen": (_text, 'an address: "10.0.0.5:7000"'),
    "join": (_text, 'an address: "10.0.0.5:7000"'),
    "timeout": (lambda value: number(value) and value > 0, "a number of seconds above 0"),
    "independent": (_switch, "True or False"),
}
"""Those that are not here are checked where they are read: data, plan, devices, workers, checkpoint, optimizer."""


def check_arguments(job: Any) -> None:
    for name, (right, wanted) in ARGUMENTS.items():
        value = getattr(job, name)
        if not right(value):
            raise JobError(f"{name}={_shown(value)} is not {wanted}")
        if whole(value):
            object.__setattr__(job, name, int(value))  # NumPy's whole numbers overflow where Python's do not
    check_local("out", job.out)


def check_local(name: str, path: Path | str | None) -> None:
    """Refuse a URL where files are written to a folder of this machine: it would become a folder named "s3:"."""
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):/", str(path))
    if scheme:
        raise JobError(
            f"{name}={str(path)!r} is a URL, but {name}= is a folder of this machine",
            f'write a path, {name}="runs/one" say, and copy it to {scheme[1]}:// afterwards, or mount that',
            "checkpoints can be read from a bucket: resume=, meshfit checkpoint",
        )


def _shown(value: Any) -> str:
    text = repr(value).split("\n")[0]
    return text if len(text) < 80 else f"{text[:77]}..."
