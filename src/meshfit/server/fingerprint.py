"""The fingerprint of a job: what a worker that joins must have in common with the run.

Trained weights and BatchNorm's statistics come from the servers. The rest must be the same already: the model's names,
shapes and dtypes, the values of all that is not trained (to rounding: hosts differ), the number of samples, and, of
data in memory, some samples. Other data is compared by its length alone.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from meshfit.axes.data.batchnorm import running_statistics
from meshfit.data import tree
from meshfit.data.datasets import SampleStream
from meshfit.data.source import Memory, Source
from meshfit.exchange.parcel import trained
from meshfit.job import Job

MOST = 1 << 18  # bytes of names that are sent; the digest is of all
NEAR = 1e-4  # of two sums that should be equal
WHAT = {"samples": "samples in data=", "data": "data=", "loss": "loss="}

Facts = dict[str, Any]


def facts_of(job: Job, model: nn.Module, source: Source | SampleStream) -> Facts:
    """Of a job, as plain values."""
    tensors = [f"{name} {_kind(t)}" for name, t in (*model.named_parameters(), *model.named_buffers())]
    ours = trained(model).keys() | running_statistics(model).keys()
    held = {n: t for n, t in (*model.named_parameters(), *model.named_buffers()) if n not in ours}
    found: Facts = {
        "batch_size": job.batch_size,
        "seed": job.seed,
        "shuffle": job.shuffle,
        "samples": None if isinstance(source, SampleStream) else len(source),
        "loss": _name(job.phases[0].objective.step or job.loss),
        "model": hashlib.sha256("\n".join(tensors).encode()).hexdigest(),
        "tensors": _few(tensors),
        "held": [_sums(t) for t in held.values()],
        "names": _few(list(held)),
    }
    if isinstance(source, Memory):
        found |= {"data": source.fingerprint, "few": [_sums(t) for t in tree.tensors(source.few())]}
    return found


def differences(run: Facts, mine: Facts) -> Iterator[str]:
    """What differs, one line each; none: it is the same job."""
    for key in ("batch_size", "seed", "shuffle", "samples", "loss", "data"):
        if run.get(key) != mine.get(key):
            yield f"{WHAT.get(key, key)}: {run.get(key)} there, {mine.get(key)} here"
    if run["model"] != mine.get("model"):
        yield f"model: {_first(run['tensors'], mine.get('tensors', []))}"
    elif (at := _unequal(run["held"], mine.get("held", []))) is not None:
        name = run["names"][at] if at < len(run["names"]) else "a tensor"
        yield f"model: {name} is not trained, and holds other values: build it from a seed, or load the same weights"
    if run.get("data") == mine.get("data") and _unequal(run.get("few", []), mine.get("few", [])) is not None:
        yield "data=: other samples of the same shape"


def _first(run: list[str], mine: list[str]) -> str:
    """The first tensor that differs."""
    for theirs, ours in zip(run, mine, strict=False):
        if theirs != ours:
            return f"{theirs} there, {ours} here"
    if len(run) != len(mine):
        return f"{len(run)} tensors there, {len(mine)} here"
    return "names, shapes or dtypes are others"


def _unequal(run: list[list[float]], mine: list[list[float]]) -> int | None:
    if len(run) != len(mine):
        return min(len(run), len(mine))
    for i, (theirs, ours) in enumerate(zip(run, mine, strict=True)):
        if any(not abs(a - b) <= NEAR * (1e-6 + theirs[1]) and a == a for a, b in zip(theirs, ours, strict=True)):
            return i
    return None


def _sums(tensor: Tensor) -> list[float]:
    """Two numbers that say much about a tensor: a sum weighted by place, and its norm."""
    flat = tensor.detach().reshape(-1).cpu().to(torch.complex128 if tensor.is_complex() else torch.float64)
    flat = flat.real + flat.imag if flat.is_complex() else flat
    places = torch.arange(flat.numel(), dtype=torch.float64)
    norm = float(flat.norm())
    return [float((flat * torch.cos(places)).sum()), norm]


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {'x'.join(map(str, tensor.shape)) or 'scalar'}"


def _few(words: list[str]) -> list[str]:
    """As many of the first as fit into a message."""
    size, kept = 0, []
    for word in words:
        size += len(json.dumps(word)) + 1
        if size > MOST:
            break
        kept.append(word)
    return kept


def _name(function: Callable[..., Any] | None) -> str:
    if function is None:
        return "the model's own"
    return getattr(function, "__qualname__", type(function).__qualname__)
