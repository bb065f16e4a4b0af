"""Sources made of sources: transformed, blended, in part, without their bad samples.

``source.map(fn)`` runs ``fn`` on whole batches: fn(batch), or fn(batch, draw) for one that is random, whose numbers
come from ``draw`` (draw.py) and so follow the samples. ``each=True`` runs it on one sample at a time: fn(sample), or
fn(sample, generator). A sample's function may draw from torch's, NumPy's or Python's global generators, or from some of
its own: they are seeded for every sample (seeding.py). torchvision's transforms do, and are run so without being
asked. A batch's function may not: its numbers would depend on how the batch was shared, so that is
refused when it first happens.

``source.on_device(fn)`` runs ``fn`` on batches too, but where the model is.

Samples that cannot be read, decoded or transformed: by default a run stops and names the file or row.
``on_bad="skip"`` goes on: the next good sample by id stands in for a bad one, so that batches keep their size and no
rank need ask another. Which one stands in depends on the data alone, not on ranks, workers or a resume. The bad ones
are listed, and above a share of 1 % the run stops. Transforms that follow are covered too, and samples of another shape
than most have, where they are to be stacked. An answer that does not come (a server that is gone, a file that
shrank) is no bad sample: it is retried, then raised.
"""

import hashlib
import inspect
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshfit.data import tree
from meshfit.data.draw import Key, SampleRandom
from meshfit.data.order import order
from meshfit.data.seeding import CodeGenerators, exclusive
from meshfit.data.source import BadSample, DerivedSource, DifferentShapes, Source, spread, stage
from meshfit.data.transform import Transform
from meshfit.errors import DataError

SKIPPED = 0.01
"""The share of bad samples that on_bad="skip" allows."""


class Mapped(DerivedSource):
    """``source`` with every batch passed through ``function``; ``place`` sets its random numbers apart."""

    def __init__(self, source: Source, function: Callable[..., Any], *, each: bool, device: bool, place: int):
        super().__init__(source)
        self.function, self.each, self.device, self.place = function, each, device, place
        self.draws = _arguments(function) > 1
        self.device_stage = source.device_stage or device
        self.own_code = source.own_code or not isinstance(function, Transform)
        self.generators = CodeGenerators(function)
        self._tried = self.draws or each

    @property
    def global_random(self) -> bool:
        return self.source.global_random or (self.each and not self.draws)

    def read(self, ids: NDArray[np.int64], key: Key) -> Any:
        content = self.source.read(ids, key)
        return content if self.device else self._applied(self.source.finish(content, ids, key), ids, key)

    def finish(self, content: Any, ids: NDArray[np.int64], key: Key) -> Any:
        return self._applied(self.source.finish(content, ids, key), ids, key) if self.device else content

    def _applied(self, content: Any, ids: NDArray[np.int64], key: Key) -> Any:
        draw = SampleRandom(ids, key.at(self.place))
        with stage("transform"):
            if self.each:
                return self._one_by_one(content, draw)
            try:
                if self.draws:
                    return self.function(content, draw)
                return self.function(content) if self._tried else self._first(content)
            except DifferentShapes as error:
                raise error.named(lambda i: self.name_of(int(ids[i]))) from None
            except DataError:
                raise
            except Exception as error:
                raise self._blamed(error, content, ids, key) from error

    def _one_by_one(self, content: Any, draw: SampleRandom) -> Any:
        def run(i: int, *more: Any) -> Any:
            try:
                return self.function(tree.sample(content, i), *more)
            except Exception as error:
                raise self._bad(int(draw.ids[i]), error) from error

        if self.draws:
            return tree.stack([run(i, generator) for i, generator in enumerate(draw.generators())])
        done = []
        with exclusive():
            for i, seed in enumerate(draw.seeds()):
                self.generators.seed(seed)
                done.append(run(i))
        return tree.stack(done)

    def _first(self, content: Any) -> Any:
        """Run a batch's function for the first time, and see whether it draws numbers behind our back."""
        with exclusive():
            before = self.generators.mark(), _gpu_states()
            made = self.function(content)
            if (self.generators.mark(), _gpu_states()) != before:
                raise DataError(
                    f"{_name(self.function)} draws random numbers, which would depend on how a batch is shared",
                    "take them from the second argument: def fn(batch, draw): ... draw.uniform()",
                    "or have it run on each sample: .map(fn, each=True)",
                )
        self._tried = True
        return made

    def _blamed(self, error: Exception, content: Any, ids: NDArray[np.int64], key: Key) -> DataError:
        """Which sample it was, found by trying each alone."""
        for i, at in enumerate(ids.tolist()):
            one = tree.rows(content, slice(i, i + 1), len(ids))
            try:
                self.function(*([one, SampleRandom(ids[i : i + 1], key.at(self.place))] if self.draws else [one]))
            except Exception as alone:
                if type(alone) is type(error):
                    return self._bad(at, alone)
        return DataError(
            f"{_name(self.function)} failed on a batch of {len(ids)} samples, though on none of them alone",
            f"{type(error).__name__}: {error}",
        )

    def _bad(self, i: int, error: Exception) -> BadSample:
        return BadSample(f"{_name(self.function)} failed on {self.name_of(i)}", f"{type(error).__name__}: {error}")

    @property
    def fingerprint(self) -> str:
        return f"{self.source.fingerprint} | {_name(self.function)}"


def mapped(
    source: Source, functions: tuple[Callable[..., Any], ...], each: bool | None, device: bool = False
) -> Source:
    """``source`` through ``functions``, one after another."""
    for function in functions:
        if not callable(function):
            raise DataError(f"map was given {function!r}, which is no function")
        if source.device_stage and not device:
            raise DataError("map follows on_device", "what runs on the device comes last: put .map before .on_device")
        one = _takes_a_sample(function) if each is None else each
        if one and device:
            raise DataError("on_device runs on whole batches", "transforms of one sample go into .map")
        if isinstance(source, Skipping) and not device:  # a sample that a transform fails on is bad, too
            inner = Mapped(source.source, function, each=one, device=False, place=_places(source) + 1)
            source = Skipping(inner, source.most)
            continue
        source = Mapped(source, function, each=one, device=device, place=_places(source) + 1)
    return source


class Mixup(DerivedSource):
    """Each sample blended with another by a weight of Beta(alpha, alpha); labels become shares of classes.

    The other is the sample that a second, fixed permutation of the epoch puts in its place: every sample is blended
    with another under every plan alike. It costs a second read.
    """

    def __init__(self, source: Source, alpha: float, classes: int):
        super().__init__(source)
        if not isinstance(alpha, int | float) or not 0 < alpha <= 2:
            raise DataError(f"mixup's alpha={alpha} is not between 0 and 2", "0.2 is usual")
        self.alpha, self.classes, self.place = alpha, classes, _places(source) + 1
        if source.device_stage:
            raise DataError("mixup follows on_device", "what runs on the device comes last")

    def read(self, ids: NDArray[np.int64], key: Key) -> Any:
        partners = order(len(self), seed=int(key.at(self.place).number), epoch=key.epoch)[ids]
        weight = SampleRandom(ids, key.at(self.place)).beta(self.alpha)
        all_ids = np.concatenate([ids, partners])
        both = self.source.finish(self.source.read(all_ids, key), all_ids, key)

        def blend(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if leaf.dim() == 1 and not leaf.is_floating_point():
                if leaf.numel() and not 0 <= int(leaf.min()) <= int(leaf.max()) < self.classes:
                    raise DataError(f"mixup is told of classes={self.classes}, and a label is {int(leaf.max())}")
                leaf = torch.nn.functional.one_hot(leaf.long(), self.classes).float()
            mine, other = leaf.float().split(len(ids))
            return torch.lerp(other, mine, weight.view(-1, *[1] * (leaf.dim() - 1)))

        return tree.map_leaves(blend, both)

    def finish(self, content: Any, ids: NDArray[np.int64], key: Key) -> Any:
        return content

    @property
    def fingerprint(self) -> str:
        return f"{self.source.fingerprint} | mixup({self.alpha})"


class Subset(DerivedSource):
    """Some samples of ``source``, in an order of their own."""

    def __init__(self, source: Source, ids: NDArray[np.int64]):
        super().__init__(source)
        if len(ids) and not (ids.min() >= 0 and ids.max() < len(source)):
            wrong = ids.max() if ids.max() >= len(source) else ids.min()
            raise DataError(f"take asks for sample {wrong}", f"there are {len(source)}, from 0")
        self.ids, self.blocks, self.batching = ids, None, None
        if source.blocks is not None and (np.diff(ids) > 0).all():
            self.blocks = np.unique(np.searchsorted(ids, source.blocks))

    def __len__(self) -> int:
        return len(self.ids)

    def without_unconverted(self, most: float) -> Source:
        return self  # whose ids are those of all rows

    def read(self, ids: NDArray[np.int64], key: Key) -> Any:
        return self.source.read(self.ids[ids], key)

    def finish(self, content: Any, ids: NDArray[np.int64], key: Key) -> Any:
        return self.source.finish(content, self.ids[ids], key)

    def name_of(self, i: int) -> str:
        return self.source.name_of(int(self.ids[i]))

    @property
    def fingerprint(self) -> str:
        return f"{self.source.fingerprint} [{len(self)}: {hashlib.sha256(self.ids.tobytes()).hexdigest()[:16]}]"


def _places(source: Source) -> int:
    """Transforms a sample of ``source`` has been through."""
    count = 0
    while isinstance(source, DerivedSource):
        count += isinstance(source, Mapped | Mixup)
        source = source.source
    return count


def _arguments(function: Callable[..., Any]) -> int:
    try:
        given = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 1
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in kinds and p.default is p.empty for p in given)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or re.sub(r" at 0x[0-9a-f]+", "", repr(function).split("\n")[0])


def _takes_a_sample(function: Callable[..., Any]) -> bool:
    """Whether it is a transform of a library whose transforms take one sample."""
    return any(kind.__module__.startswith("torchvision.transforms") for kind in inspect.getmro(type(function)))


def _gpu_states() -> list[bytes]:
    return [s.numpy().tobytes() for s in torch.cuda.get_rng_state_all()] if torch.cuda.is_initialized() else []


# Bad samples


class Skipping(DerivedSource):
    """``source`` without its bad samples, of which ``most`` is the largest share allowed."""

    one_shape = False
    """Whether a sample of another shape than the others is bad."""

    def __init__(self, source: Source, most: float = SKIPPED):
        super().__init__(source)
        self.most = most
        self.bad: dict[int, str] = {}
        """What was wrong with each bad sample met so far, by id."""
        self._usual: list[tuple[int, ...] | None] | None = None

    def read(self, ids: NDArray[np.int64], key: Key) -> Any:
        while True:
            used = self._used(ids)
            try:
                content = self.source.read(used, key)
            except Exception as error:
                misshapen = self.one_shape and isinstance(error, DifferentShapes)
                if not (misshapen or _of_a_sample(error)) or not self._find(used, key):
                    raise
                continue
            if not self.one_shape or not self._misshapen(content, used):
                return content

    def _misshapen(self, content: Any, ids: NDArray[np.int64]) -> int:
        """Find samples of another shape than most have; how many are bad."""
        if self._usual is None:
            self._usual = self._find_usual()
        found: dict[int, str] = {}
        for leaf, usual in zip(tree.leaves(content), self._usual, strict=False):
            if usual is not None and isinstance(leaf, Tensor | tree.Ragged):
                shapes = map(_shape, leaf) if isinstance(leaf, tree.Ragged) else [tuple(leaf.shape[1:])] * len(leaf)
                for i, shape in zip(ids.tolist(), shapes, strict=True):
                    if shape not in (None, usual):
                        found[i] = f"{self.name_of(i)} has the shape {shape}, others {usual}"
        for i, why in found.items():
            self._add(i, BadSample(why))
        return len(found)

    def _find_usual(self) -> list[tuple[int, ...] | None]:
        """The shape of each leaf that more than half of some samples from all over have; None: there is none."""
        seen = []
        for i in spread(len(self), 16).tolist():
            with suppress(Exception):  # one of the bad ones
                seen.append([_shape(leaf[0]) for leaf in tree.leaves(self.source.read(np.array([i]), Key()))])
        usual = [max(shapes, key=shapes.count) for shapes in zip(*seen, strict=False)]
        return [s if 2 * sum(row[k] == s for row in seen) > len(seen) else None for k, s in enumerate(usual)]

    def finish(self, content: Any, ids: NDArray[np.int64], key: Key) -> Any:
        return self.source.finish(content, self._used(ids), key)

    def _used(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """``ids`` with the next good one in the place of each bad one."""
        if not self.bad:
            return ids
        return np.array([self._stand_in(i) for i in ids.tolist()], np.int64)

    def _stand_in(self, i: int) -> int:
        while i in self.bad:
            i = (i + 1) % len(self)
        return i

    def _find(self, ids: NDArray[np.int64], key: Key) -> int:
        """Try each sample alone; how many more are bad."""
        found = 0
        for i in ids.tolist():
            if i in self.bad:
                continue
            try:
                content = self.source.read(np.array([i]), key)
            except Exception as error:
                if not _of_a_sample(error):
                    raise
                self._add(i, error)
                found += 1
            else:
                found += self.one_shape and self._misshapen(content, np.array([i]))
        return found

    def _add(self, i: int, error: Exception) -> None:
        self.bad[i] = str(error) if isinstance(error, BadSample) else f"{self.name_of(i)}: {error!r}"
        within(list(self.bad.values()), len(self), self.most, error)

    @property
    def skipped(self) -> list[str]:
        return [*self.source.skipped, *(why.replace("\n", ":", 1) for why in self.bad.values())]

    def state(self) -> dict[str, Any]:
        return {**self.source.state(), "bad": dict(self.bad)}

    def load_state(self, state: dict[str, Any]) -> None:
        self.source.load_state(state)
        self.bad.update({int(i): why for i, why in state.get("bad", {}).items()})


def expect_one_shape(source: Source) -> None:
    """Where samples of ``source`` are stacked as they are, those of another shape than most are bad."""
    stacked = source.collator is None
    while isinstance(source, DerivedSource):
        if isinstance(source, Skipping):
            source.one_shape = stacked
        source = source.source


def _shape(x: Any) -> tuple[int, ...] | None:
    return tuple(x.shape) if isinstance(x, Tensor) else None


def within(bad: list[str], samples: int, most: float, error: Exception | None = None) -> None:
    """Refuse more than a share of ``most`` bad ones of ``samples``."""
    allowed = max(1, int(most * samples))
    if len(bad) > allowed:
        raise DataError(
            f"{len(bad)} of {samples} samples are bad; on_bad='skip' allows {allowed} ({most:.0%})",
            *(text.replace("\n", " ") for text in bad[:5]),
            "mend the data, or allow more: .on_bad('skip', most=0.05)",
        ) from error


def _of_a_sample(error: Exception) -> bool:
    return isinstance(error, BadSample) or not isinstance(
        error, DataError | ConnectionError | TimeoutError | MemoryError
    )
