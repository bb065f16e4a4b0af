"""What each argument of ``fit`` and its kin may be: checked before anything starts, with one clear error."""

import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from torch import nn

from meshfit.errors import JobError, MeshfitError, did_you_mean
from meshfit.plan import DEGREES, WORDS, Plan
from meshfit.units import in_seconds

P = ParamSpec("P")
R = TypeVar("R")

ELSEWHERE = {
    **dict.fromkeys(("criterion", "loss_fn", "loss_function", "compute_loss_func"), "loss="),
    **dict.fromkeys(("num_epochs", "max_epochs", "num_train_epochs", "n_epochs"), "epochs="),
    **dict.fromkeys(("max_steps", "num_steps", "total_steps"), "steps="),
    **dict.fromkeys(("dataset", "train_dataset", "train_data", "train_loader", "dataloader", "dataloaders"), "data="),
    **dict.fromkeys(("eval_dataset", "val_data", "valid_data", "validation_data", "val_loader"), "valid="),
    **dict.fromkeys(("collate_fn", "data_collator"), "collate="),
    **dict.fromkeys(("max_grad_norm", "gradient_clip_val", "grad_clip", "clip_grad_norm"), "clip="),
    **dict.fromkeys(("device", "gpus", "accelerator"), "devices="),
    **dict.fromkeys(("output_dir", "default_root_dir", "save_dir", "run_dir"), "out="),
    **dict.fromkeys(("resume_from_checkpoint", "ckpt_path"), "resume="),
    **dict.fromkeys(("num_workers", "dataloader_num_workers"), "workers="),
    **dict.fromkeys(("lr_scheduler", "lr_schedule"), "scheduler="),
    **dict.fromkeys(("lr", "learning_rate"), "optimizer=lambda params: torch.optim.AdamW(params, lr=...)"),
    **dict.fromkeys(("gradient_accumulation_steps", "accumulate_grad_batches"), 'plan="microbatches=..."'),
    **dict.fromkeys(("mixed_precision", "amp", "bf16", "fp16"), 'plan="precision=bf16"'),
    **dict.fromkeys(
        ("track", "tracker", "logger", "loggers", "report_to"), 'callbacks=meshfit.observe.track.Track("wandb", ...)'
    ),
    **dict.fromkeys(("strategy", "distributed", "parallel"), 'plan="data=2"'),
}
"""What other libraries call an argument of ``fit``."""


def verb(function: Callable[P, R]) -> Callable[P, R]:
    """A public function. An argument that it does not have is refused with what to write instead, and a
    ``MeshfitError`` ends in the caller's own line, not in ours: it says what to mend there."""
    parameters = inspect.signature(function).parameters
    known = list(parameters)
    any_name = any(each.kind is each.VAR_KEYWORD for each in parameters.values())  # then it refuses some by itself

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            for name in kwargs:
                if name not in known and not any_name:
                    raise JobError(f"{function.__name__} has no argument {name!r}", _instead(name, kwargs, known))
            return function(*args, **kwargs)
        except MeshfitError as error:
            raise error.with_traceback(None) from None

    return call


def verb_of(made: Callable[P, Any]) -> Callable[[Callable[[dict[str, Any]], R]], Callable[P, R]]:
    """A public function of the arguments that ``made`` is made of, which it gets as a dict."""
    signature = inspect.signature(made)

    def decorate(function: Callable[[dict[str, Any]], R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            return function(given.arguments)

        returned = inspect.signature(function).return_annotation
        vars(call)["__signature__"] = signature.replace(return_annotation=returned)
        return verb(call)

    return decorate


def _instead(name: str, given: dict[str, Any], known: list[str]) -> str:
    """What to write for an argument that there is not. Many are words of the plan, or of other libraries."""
    if name in ELSEWHERE and ELSEWHERE[name].partition("=")[0] in known:
        return f"that is {ELSEWHERE[name]}"
    if name in ("callbacks", "each_step", "progress"):
        return "that is fit's: the body of the loop is called after each step, and shows what you like"
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
    """Whether it is one, and finite."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _or_none(right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or right(value)


def _above_0(right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or (right(value) and value > 0)


_path = _or_none(lambda value: isinstance(value, str | Path) and bool(str(value)) and "\0" not in str(value))
_switch = lambda value: isinstance(value, bool)
_text = _or_none(lambda value: isinstance(value, str) and bool(value))


def _functions(value: Any) -> bool:
    """A function, or a list or dict of them."""
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else None
    return callable(value) if inner is None else all(each is None or _functions(each) for each in inner)


ARGUMENTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "model": (lambda value: isinstance(value, nn.Module) or callable(value), "an nn.Module or a function"),
    "loss": (_or_none(lambda value: callable(value) and not _is_class(value)), "a function"),
    "step": (_or_none(lambda value: callable(value) or isinstance(value, Mapping)), "a function"),
    "weights": (
        lambda value: _path(value) or (isinstance(value, list | tuple) and bool(value) and all(map(_path, value))),
        "a path, or a list of them",
    ),
    "partial": (_switch, "True or False"),
    "scheduler": (_or_none(lambda value: bool(value) and _functions(value)), "a function, or functions"),
    "batch_size": (
        lambda value: value is None or isinstance(value, str) or (whole(value) and value > 0),
        "a number of samples above 0",
    ),
    "batch_tokens": (_above_0(whole), "a whole number of tokens above 0"),
    "collate": (_or_none(callable), "a function of a list of samples"),
    "length": (
        lambda value: value is None or callable(value) or (hasattr(value, "__len__") and not isinstance(value, dict)),
        "a field's name, a function of a sample, or all lengths",
    ),
    "pack": (_above_0(whole), "a whole number of tokens above 0"),
    "epochs": (_above_0(number), "a number above 0"),
    "steps": (_above_0(whole), "a whole number above 0"),
    "valid_every": (_above_0(whole), "a whole number of steps above 0"),
    "valid_step": (_or_none(callable), "a function of model and batch"),
    "metrics": (
        lambda value: value is None or (isinstance(value, Mapping) and all(isinstance(name, str) for name in value)),
        'a dict by names: {"accuracy": function}',
    ),
    "best": (_text, 'the name of a metric: "accuracy", "-loss"'),
    "keep": (lambda value: whole(value) and value > 0, "a number of checkpoints above 0"),
    "keep_best": (_text, 'the name of a metric: "accuracy", "-loss"'),
    "patience": (_above_0(whole), "a whole number of evaluations above 0"),
    "ema": (_or_none(lambda value: number(value) and 0 < value < 1), "a decay between 0 and 1"),
    "clip": (_above_0(number), "a number above 0"),
    "on_nan": (lambda value: value in ("stop", "skip"), '"stop" or "skip"'),
    "shuffle": (_or_none(_switch), "True or False"),
    "seed": (lambda value: whole(value) and -(2**63) <= value < 2**64, "a whole number of 64 bits"),
    "out": (_path, "a path"),
    "resume": (lambda value: isinstance(value, bool) or (value is not None and _path(value)), "True, False or a path"),
    "restarts": (lambda value: value == "auto" or (whole(value) and value >= 0), 'a number of tries, or "auto"'),
    "preemption": (_path, "a path, or an address"),
    "grace": (lambda value: in_seconds(value) is not None, '"30 s", or a number of seconds'),
    "listen": (_text, 'an address: "10.0.0.5:7000"'),
    "join": (_text, 'an address: "10.0.0.5:7000"'),
    "timeout": (lambda value: number(value) and 0 < value < 2e6, "a number of seconds above 0 and below 2,000,000"),
    "hang_timeout": (lambda value: value is None or in_seconds(value) is not None, '"30 s", or a number of seconds'),
    "check_replicas": (
        lambda value: value is None or value is False or (whole(value) and value > 0),
        "a number of steps above 0, False or None",
    ),
    "independent": (_switch, "True or False"),
}
"""Those that are not here are checked where they are read: data, plan, devices, workers, checkpoint, optimizer."""


def _is_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


def _meant(name: str, value: Any) -> list[str]:
    """What to write in place of what people try first."""
    if name == "loss" and _is_class(value):
        return [f"an object of it is: loss={value.__name__}()"]
    if name == "loss" and isinstance(value, str) and hasattr(nn.functional, value):
        return [f"loss=torch.nn.functional.{value}"]
    if name == "scheduler" and hasattr(value, "step"):
        kind = type(value).__name__
        return [
            f"a function makes it: scheduler=lambda optimizer: {kind}(optimizer, ...)",
            "it is stepped after every optimizer step, not every epoch: scheduler=lambda optimizer, steps: ... is told"
            " how many there are",
        ]
    return []


def check_arguments(job: Any) -> None:
    for name, (right, wanted) in ARGUMENTS.items():
        value = getattr(job, name)
        if not right(value):
            raise JobError(f"{name}={_shown(value)} is not {wanted}", *_meant(name, value))
        if whole(value):
            object.__setattr__(job, name, int(value))  # NumPy's whole numbers overflow where Python's do not
    for name in ("out", "resume"):
        check_text(name, getattr(job, name))


def is_url(path: Any) -> bool:
    """Whether ``path`` is in a bucket: "s3://bucket/run"."""
    return isinstance(path, str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", path) is not None


def check_text(name: str, path: Any) -> None:
    """Refuse a URL that went through pathlib, which takes one of its slashes away."""
    if isinstance(path, Path) and (found := re.match(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)", str(path))):
        raise JobError(
            f"{name}= is a Path of a URL, and a Path has one slash after {found[1]}:",
            f'write it as text: {name}="{found[1]}://{found[2]}"',
        )


def check_local(name: str, path: Path | str | None) -> None:
    """Refuse a URL where files are written to a folder of this machine: it would become a folder named "s3:"."""
    if is_url(path):
        raise JobError(f"{name}={path!r} is a URL, but {name}= is a folder of this machine", "write a path")
    check_text(name, path)


def _shown(value: Any) -> str:
    text = repr(value).split("\n")[0]
    return text if len(text) < 80 else f"{text[:77]}..."
