"""``meshfit inspect``: what is inside a model, and along which axes it can be spread. Nothing is trained.

Builds the model that the command line names, and inputs for it. What is found about it is in ``anatomy/describe.py``,
how it is printed in ``screen.py``.
"""

import importlib
import json as json_format
import os
import re
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from meshfit.anatomy.cost import Meter
from meshfit.anatomy.describe import describe
from meshfit.anatomy.pairs import Pairs, find_pairs
from meshfit.anatomy.record import SHARE, TraceError, record
from meshfit.anatomy.trace import Trace
from meshfit.axes.find import as_number
from meshfit.axes.tensor.plan import plan_tensor
from meshfit.cli.screen import show
from meshfit.cli.script import Arguments, Which, instead_of_fit
from meshfit.data import tree
from meshfit.data.datasets import open_source
from meshfit.errors import JobError
from meshfit.job import Job
from meshfit.loss.objective import call, split
from meshfit.torch_private.modules import Dropout

SAMPLES = 4  # of a script's data that are traced: more than one, so that nothing broadcasts by accident
LENGTH = 128  # tokens of a sample, by default
FINE = 0.002  # share of the parameters down to which modules are opened
MOST_TRIED = 1 << 26  # parameters up to which tensor= is tried, which needs real weights: some seconds
LARGEST = 8 << 30  # bytes of weights up to which a model is built for real where its code needs values


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model and what to call it on."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Any
    """A tensor, a tuple of them, or a dict: as ``fit`` would call the model."""

    def trace(self) -> tuple[Trace, nn.Module]:
        """Traced on the meta device; with real weights where the model's code needs values."""
        try:
            with torch.device("meta"):
                model = self.build()
        except JobError:
            raise
        except Exception:  # a constructor that looks at values
            model = self.build()
        try:
            return _traced(model, self.inputs), model
        except TraceError:
            weights = sum(p.numel() * p.element_size() for p in model.parameters())
            if not any(p.is_meta for p in model.parameters()) or weights > LARGEST:
                raise
            model = self.build()
            return _traced(model, self.inputs), model

    def tensor_splits(self, model: nn.Module) -> tuple[Pairs | None, list[str]]:
        """Pairs that can be split column then row, and the checked splits of ``tensor=2`` in words. None and nothing
        where the model is too large to try, or cannot be run by itself."""
        pairs: Pairs | None = None
        if sum(p.numel() for p in model.parameters()) > MOST_TRIED:
            return pairs, []
        with warnings.catch_warnings(), suppress(Exception):  # the trace is shown without them
            warnings.simplefilter("ignore")
            real = self.build() if any(p.is_meta for p in model.parameters()) else model
            pairs = find_pairs(real, self.inputs)
            return pairs, plan_tensor(real, lambda twin: as_number(call(twin, self.inputs)), 2).explain()
        return pairs, []


def _traced(model: nn.Module, inputs: Any) -> Trace:
    """In detail; where that fails, as coarse as a training traces it."""
    with suppress(TraceError):
        return record(model, inputs, share=FINE, meter=Meter).trace
    return record(model, inputs, share=SHARE, meter=Meter).trace


def inspect(
    target: Annotated[str, typer.Argument(help="train.py, module:function, or a config.json.", show_default=False)],
    arguments: Arguments = None,
    input: Annotated[list[str] | None, typer.Option(help='What to call it on: "int64 4x128".')] = None,
    json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
    fit: Which = 1,
) -> None:
    """Show what is inside a model: its blocks, their cost, where it can be cut, and which axes can spread it."""
    specs = input or []
    if target.endswith(".py"):

        def act(asked: dict[str, Any]) -> int:
            _describe(_from_job(Job(**asked), target, specs), json)
            return 0

        instead_of_fit(Path(target), arguments, act, fit, quiet=json)
    elif target.endswith(".json"):
        _describe(from_config(Path(target), specs), json)
    elif ":" in target:
        _describe(_from_function(target, specs), json)
    else:
        raise JobError(
            f"{target} cannot be inspected: it is none of",
            "train.py           a script that calls meshfit.fit",
            "package.net:build  a function or class that makes the model, with --input",
            "config.json        a Hugging Face configuration",
        )


def _describe(subject: Subject, as_json: bool) -> None:
    trace, model = subject.trace()
    samples = max(1, next((len(t) for t in tree.tensors(subject.inputs) if t.dim()), 1))
    pairs, split = subject.tensor_splits(model)
    dropouts = tuple(path for path, part in model.named_modules() if isinstance(part, Dropout) and part.p > 0)
    found = describe(trace, name=subject.name, samples=samples, dropouts=dropouts, pairs=pairs)
    if as_json:
        print(json_format.dumps({**asdict(found), "tensor": split}, indent=1))
    else:
        show(found, split)


def _from_job(job: Job, name: str, specs: list[str]) -> Subject:
    if specs:
        return Subject(name=name, build=job.build, inputs=inputs_of(specs))
    batch = open_source(job.data).few(SAMPLES)
    whole = job.loss is None and job.step is None
    return Subject(name=name, build=job.build, inputs=batch if whole else split(batch)[0])


def _from_function(target: str, specs: list[str]) -> Subject:
    where, _, name = target.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(where)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise JobError(f"there is no {target}", f"{type(error).__name__}: {error}", "write module:function") from error
    if not callable(found):
        raise JobError(f"{target} is a {type(found).__name__}", "give a function or class that makes the model")
    if not specs:
        raise JobError(
            f"what is {target} called on?",
            'say so with --input "int64 4x128" (dtype, then shape), several times for several inputs,',
            'or by name: --input "input_ids=int64 4x128"',
        )

    def build() -> nn.Module:
        try:
            model = found if isinstance(found, nn.Module) else found()
        except TypeError as error:
            raise JobError(f"{target} cannot be called without arguments", str(error)) from error
        if not isinstance(model, nn.Module):
            raise JobError(f"{target} made something of type {type(model).__name__}, not an nn.Module")
        return model

    return Subject(name=target, build=build, inputs=inputs_of(specs))


def from_config(path: Path, specs: list[str]) -> Subject:
    config = config_of(path)
    return Subject(name=str(path), build=lambda: built(config), inputs=inputs_of(specs) if specs else _usual(config))


def config_of(path: Path) -> Any:
    """A configuration that transformers knows."""
    if not path.is_file():
        raise JobError(f"there is no file {path}")
    try:
        import transformers
    except ImportError:
        raise JobError(f"{path} needs transformers, which is not installed", "pip install transformers") from None
    try:
        config = transformers.AutoConfig.from_pretrained(str(path))
    except (ValueError, KeyError, OSError) as error:
        raise JobError(f"{path} is no configuration that transformers knows", str(error).splitlines()[0]) from error
    if hasattr(config, "use_cache"):
        config.use_cache = False  # of use when generating, not in training
    return config


def built(config: Any) -> nn.Module:
    import transformers

    named = getattr(transformers, next(iter(config.architectures or ()), ""), None)
    if named is not None:
        return named(config)
    causal = type(config) in transformers.AutoModelForCausalLM._model_mapping
    return (transformers.AutoModelForCausalLM if causal else transformers.AutoModel).from_config(config)


def _usual(config: Any) -> dict[str, Tensor]:
    """What a Hugging Face model of this kind is called on: tokens, or images."""
    if not hasattr(config, "vocab_size"):
        if not hasattr(config, "image_size"):
            raise JobError(
                f"what is a {config.model_type} called on?", 'say so: --input "input_values=float32 2x16000"'
            )
        side = config.image_size
        height, width = side if isinstance(side, tuple | list) else (side, side)
        return {"pixel_values": torch.randn(2, getattr(config, "num_channels", 3), height, width)}
    length = min(LENGTH, getattr(config, "max_position_embeddings", None) or LENGTH)
    names = ("input_ids", "decoder_input_ids") if getattr(config, "is_encoder_decoder", False) else ("input_ids",)
    return {name: torch.zeros(2, length, dtype=torch.int64) for name in names}


def inputs_of(specs: list[str]) -> Any:
    """What --input stands for: "int64 4x128", "float32 2x3x32x32", "mask=bool 4x128". All named, or none."""
    found: list[tuple[str, Tensor]] = []
    for spec in specs:
        match = re.fullmatch(r"\s*(?:(\w+)\s*=\s*)?(?:([a-z]\w*)[\s,]+)?(\d+(?:x\d+)*)\s*", spec)
        dtype = getattr(torch, match[2] or "float32", None) if match else None
        if match is None or not isinstance(dtype, torch.dtype):
            raise JobError(
                f"--input {spec!r} is not understood",
                'write a dtype and a shape: "int64 4x128", or "input_ids=int64 4x128"',
            )
        shape = [int(dim) for dim in match[3].split("x")]
        tensor = torch.randn(shape).to(dtype) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)
        found.append((match[1] or "", tensor))
    if all(name for name, _ in found):
        return dict(found)
    if any(name for name, _ in found):
        raise JobError("some of --input have names and some do not", "name all of them, or none")
    return found[0][1] if len(found) == 1 else tuple(tensor for _, tensor in found)
