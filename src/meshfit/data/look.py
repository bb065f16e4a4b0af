"""What samples look like and how fast they can be read: ``meshfit data URL``.

Batches are read in shuffled order, as a training would, for a second by one thread and for as long by several. The
seconds of one thread are told apart by stage: the stage with the most is what a faster device would wait for.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshfit.data import tree
from meshfit.data.draw import Key
from meshfit.data.order import Ids
from meshfit.data.reading import pool_of
from meshfit.data.source import Source, StageTimer, spread, stage
from meshfit.launch.system import cores as cores_here

SECONDS = 1.0
"""For which each number of threads reads."""

SHOWN = 8
"""Images."""


@dataclass(frozen=True, slots=True)
class Column:
    """One tensor, or list of things, of a batch."""

    name: str
    kind: str
    """ "uint8", "int64", "str", ..."""
    shape: tuple[int, ...] | None
    """Of a sample; None where samples differ."""
    values: str
    """What they are like: a range, some examples."""


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast ``threads`` read."""

    threads: int
    samples: float
    """A second."""
    bytes: float
    """A second, as they reach the model."""


@dataclass(frozen=True)
class Look:
    samples: int
    columns: tuple[Column, ...]
    sample_bytes: float
    first: str
    """Where the first sample is."""
    batch: int
    speeds: tuple[Speed, ...]
    stages: dict[str, float]
    """Of one thread's time, the share of each stage."""
    images: tuple[Tensor, ...]
    """A few, as bytes by channel, row and column."""

    @property
    def slowest(self) -> str:
        return max(self.stages, key=lambda name: self.stages[name])


def look(source: Source, *, batch: int = 256, seconds: float = SECONDS) -> Look:
    """Read some of ``source`` and say what was seen."""
    batch = min(batch, len(source))
    ids = spread(len(source), min(64, len(source)))
    named = list(_named(source.fetch(ids)))
    cores = cores_here()
    clock = StageTimer()
    counts = [1, *(n for n in (2, 4, 8, 16) if n <= cores)]
    speeds = [_speed(source, batch, threads, seconds, clock if threads == 1 else None) for threads in counts]
    spent = sum(clock.seconds.values()) or 1.0
    return Look(
        samples=len(source),
        columns=tuple(_column(name, leaf) for name, leaf in named),
        sample_bytes=sum(_bytes(leaf) for _, leaf in named) / len(ids),
        first=source.name_of(0),
        batch=batch,
        speeds=tuple(speeds),
        stages={name: s / spent for name, s in clock.seconds.items() if s > 0},
        images=tuple(_images(leaf for _, leaf in named)),
    )


def _speed(source: Source, batch: int, threads: int, seconds: float, clock: StageTimer | None) -> Speed:
    ids, count = Ids(len(source), batch, seed=0, shuffle=True, blocks=source.blocks), len(source) // batch
    began, done, size = time.perf_counter(), 0, 0

    def read(i: int) -> int:
        with clock.reading() if clock is not None else nullcontext(), stage("read"):
            return sum(map(_bytes, tree.leaves(source.read(ids(0, i % count), Key()))))

    with pool_of(threads) as pool:
        while time.perf_counter() - began < seconds or not done:
            size += sum(pool.map(read, range(done, done + 2 * threads)))
            done += 2 * threads
    took = time.perf_counter() - began
    return Speed(threads, done * batch / took, size / took)


def _named(content: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of a batch and what they are called."""
    if isinstance(content, Mapping):
        for key, value in content.items():
            yield from _named(value, f"{path}.{key}" if path else str(key))
    elif isinstance(content, tuple | list) and not isinstance(content, tree.Ragged):
        for i, value in enumerate(content):
            yield from _named(value, f"{path}[{i}]")
    else:
        yield path or "sample", content


def _column(name: str, leaf: Any) -> Column:
    if isinstance(leaf, Tensor):
        return Column(name, str(leaf.dtype)[6:], tuple(leaf.shape[1:]), _range(leaf))
    first = leaf[0] if len(leaf) else ""
    if isinstance(first, Tensor):
        shapes = sorted({tuple(each.shape) for each in leaf})
        return Column(name, str(first.dtype)[6:], None, f"from {_by(shapes[0])} to {_by(shapes[-1])}")
    examples = ", ".join(repr(each)[:30] for each in leaf[:2])
    return Column(name, type(first).__name__, None, examples)


def _range(x: Tensor) -> str:
    if not x.numel():
        return "empty"
    if x.dtype == torch.bool:
        return f"{x.float().mean():.0%} true"
    if x.is_floating_point():
        finite = x[x.isfinite()]
        rest = "" if finite.numel() == x.numel() else f", {x.numel() - finite.numel()} not finite"
        return f"{finite.min():.4g} to {finite.max():.4g}, mean {finite.double().mean():.4g}{rest}"
    many = len(x.unique())
    return f"{x.min()} to {x.max()}, {many} of them seen"


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "one"


def _bytes(leaf: Any) -> int:
    if isinstance(leaf, Tensor):
        return leaf.nbytes
    return sum(
        each.nbytes if isinstance(each, Tensor) else len(each) if isinstance(each, str | bytes) else 8 for each in leaf
    )


def _images(leaves: Iterator[Any]) -> list[Tensor]:
    """Those of the first leaf that holds any."""
    for leaf in leaves:
        each = [leaf[i] for i in range(0, len(leaf), max(1, len(leaf) // SHOWN))][:SHOWN]
        found = [_image(x) for x in each]
        if found and all(x is not None for x in found):
            return [x for x in found if x is not None]
    return []


def _image(x: Any) -> Tensor | None:
    if not isinstance(x, Tensor) or x.dtype != torch.uint8 or x.dim() not in (2, 3) or min(x.shape[-2:]) < 1:
        return None
    x = x.unsqueeze(0) if x.dim() == 2 else x
    x = x if x.shape[0] in (1, 3) else x.permute(2, 0, 1)
    return x if x.shape[0] in (1, 3) and min(x.shape[1:]) >= 8 else None


def picture(images: tuple[Tensor, ...], height: int = 32) -> Tensor:
    """Images beside each other, all of one height."""
    made = []
    for image in images:
        width = max(1, round(image.shape[2] * height / image.shape[1]))
        scaled = torch.nn.functional.interpolate(image[None].float(), (height, width), mode="area")[0]
        made.append(scaled.expand(3, -1, -1).round().clamp(0, 255).to(torch.uint8))
    return torch.cat(made, 2)
