"""The user's own data: ``open_source`` turns what ``data=`` was given into a source or a stream.

    Memory         tensors and arrays, nested as they like; a batch is one gather
    Map            a map-style data set; ``__getitems__`` where there is one
    Collated       any source, its samples made into batches by a function of the user's
    SampleStream   an iterable without a length: read in order, by every rank, each keeping its share

A path or URL is opened (opening.py); what ``meshfit.data``'s functions return are sources already.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, TensorDataset

from meshfit.data import collate, tree
from meshfit.data.batching import ByLength, Length, lengths_of
from meshfit.data.collate import TRIED, Collator
from meshfit.data.draw import Key, SampleRandom
from meshfit.data.hf_datasets import is_hugging_face, one_split
from meshfit.data.packing import Packed
from meshfit.data.rows import ColumnSource
from meshfit.data.seeding import CodeGenerators, beside_training, exclusive, global_generators, put_back, reading
from meshfit.data.source import DerivedSource, Memory, Source, hashed, spread, stage
from meshfit.data.torch_loader import TakenLoader, taken
from meshfit.errors import DataError

NO_KEY = Key()
TRIAL = 0.5  # seconds in which to see whether a data set draws random numbers


class Map(Source):
    """A map-style data set: ``len(data)`` and ``data[i]``. Where it draws random numbers, all generators are seeded for
    each sample (seeding.py), and samples are read one by one."""

    def __init__(self, data: Any):
        self.data = data
        self.own_code = not isinstance(data, list | tuple)
        self.generators = CodeGenerators(data)
        self.draws = False
        """Whether it was seen to draw."""
        self._tried = False
        self._searched: int | None = None
        """The epoch in which its generators were looked for."""
        self.collator = collate.default(rows=is_hugging_face(data))

    def __len__(self) -> int:
        return len(self.data)

    @property
    def global_random(self) -> bool:
        if self.own_code and not self._tried:
            self._tried = True
            start = time.perf_counter()
            for some in np.array_split(spread(len(self), 256), 16):
                if len(some) and not self.draws and time.perf_counter() - start < TRIAL:
                    self.read(some, Key())
        return self.draws

    @property
    def fingerprint(self) -> str:
        """Of a list the values of some samples; of a data set its length is all that can be known, but of Hugging
        Face's, which keep one."""
        if is_hugging_face(self.data) and hasattr(self.data, "_fingerprint"):
            return f"Hugging Face {self.data._fingerprint} {len(self)}"
        if self.own_code:
            return super().fingerprint
        some = [self.data[i] for i in spread(len(self), 1024).tolist()]
        return f"{super().fingerprint}, values {hashed(torch.as_tensor(x) for x in map(_number, tree.leaves(some)))}"

    def fetch(self, ids: NDArray[np.int64]) -> Any:
        return self.read(ids, Key())

    def read(self, ids: NDArray[np.int64], key: Key) -> Any:
        assert self.collator is not None
        return self.collator(self.samples(ids, key), ids, key)

    def samples(self, ids: NDArray[np.int64], key: Key) -> list[Any]:
        if not self.own_code or (beside_training() and not self.draws):
            return self._samples(ids.tolist())
        first = self._searched is None
        with exclusive() if first or self.draws else reading:
            if self._searched != key.epoch:
                self.generators.search_again()
                self._searched = key.epoch
            if self.draws:
                return self._seeded(ids, key)
            before = self.generators.mark()
            made = self._samples(ids.tolist())
            made_one = first and self.generators.search_again()  # a generator, when it was first read
            if self.generators.mark() == before and not made_one:
                return made
            put_back(before)
        self.draws = True
        return self.samples(ids, key)

    def _seeded(self, ids: NDArray[np.int64], key: Key) -> list[Any]:
        found = []
        for i, seed in zip(ids.tolist(), SampleRandom(ids, key).seeds(), strict=True):
            self.generators.seed(seed)
            found += self._samples([i])
        return found

    def _samples(self, ids: list[int]) -> list[Any]:
        if hasattr(self.data, "__getitems__"):
            return self.data.__getitems__(ids)
        found = []
        for i in ids:
            try:
                found.append(self.data[i])
            except Exception as error:  # the user's own: it keeps its type and its trace
                error.add_note(f"while reading sample {i} of {type(self.data).__name__}")
                raise
        return found


class Collated(DerivedSource):
    """``source`` with its samples made into batches by ``collator``."""

    def __init__(self, source: Source, collator: Collator):
        super().__init__(source)
        self.collator = self._collate = collator
        self.own_code, self.device_stage = True, False

    @property
    def global_random(self) -> bool:
        return self._collate.draws or self.source.global_random

    def read(self, ids: NDArray[np.int64], key: Key) -> Any:
        samples = self.samples(ids, key)
        with stage("transform"):
            return self._collate(samples, ids, key)

    def samples(self, ids: NDArray[np.int64], key: Key) -> list[Any]:
        return self.source.samples(ids, key)

    def finish(self, content: Any, ids: NDArray[np.int64], key: Key) -> Any:
        return content


class SampleStream:
    """Samples that come one after another, with no length. Every epoch starts the iterable anew.

    What can be promised: the same stream gives the same batches under every plan, because every rank reads
    all of it and keeps its share. The random numbers it draws follow the seed and the epoch: its generators are seeded
    when an epoch begins, and what is drawn elsewhere changes nothing. Shuffling, and going on from the middle, are the
    stream's own affair.
    """

    note = ""
    left_out: Sequence[str] = ()
    skipped: Sequence[str] = ()

    def __init__(self, start: Callable[[], Iterable[Any]], collator: Collator | None = None):
        self.start, self.collator = start, collator or collate.default()
        self.generators = CodeGenerators(start)

    def batches(self, size: int, key: Key = NO_KEY) -> Iterator[list[Any]]:
        """Lists of ``size`` samples; the last may be short."""
        if beside_training():  # only where it was not seen to draw
            samples = iter(self.start())
            while held := list(islice(samples, size)):
                yield held
            return
        samples, state = None, None
        while True:
            with exclusive():
                if samples is None or state is None:
                    self.generators.search_again()
                    self.generators.seed(SampleRandom(np.zeros(1, np.int64), key).seeds()[0])
                    samples = iter(self.start())
                else:
                    state.restore()
                held = list(islice(samples, size))
                state = global_generators()
            if not held:
                return
            yield held

    @cached_property
    def draws(self) -> bool:
        """Whether its first samples draw random numbers."""
        with exclusive():
            samples = iter(self.start())
            return self.generators.watch(lambda: list(islice(samples, 4)))[1]

    def finish(self, content: Any, ids: NDArray[np.int64], key: Key) -> Any:
        return content

    def name_of(self, i: int) -> str:
        return f"sample {i}"

    def few(self, most: int = 16) -> Any:
        """A batch of the first samples, to try things on."""
        held = next(self.batches(most), None)
        if held is None:
            raise DataError("data= holds no sample")
        self.prepare()
        return self.collator(held, np.arange(len(held)), NO_KEY)

    def prepare(self, *, shared: bool = False) -> None:
        """See ``Collator.prepare``."""
        if self.collator.own or shared:
            held = next(self.batches(TRIED), [])
            read = lambda ids: self.collator([held[i] for i in ids], ids, NO_KEY)
            self.collator.prepare(read, np.arange(len(held)), shared=shared)


@dataclass(frozen=True)
class Recipe:
    """``data``, and how its samples become batches. Opened in the process that reads."""

    data: Any
    collate: Callable[[list[Any]], Any] | None = None
    length: Length | None = None
    tokens: int | None = None
    """Of a batch."""
    pack: int | None = None
    """Tokens of a row, of data that is packed."""
    loader: TakenLoader | None = None
    """What was said by the DataLoader that was given as the data."""
    padding: int | None = 0
    """The model's padding token; None: not known."""

    @classmethod
    def of(cls, data: Any, name: str = "data", **how: Any) -> "Recipe":
        if isinstance(data, Recipe):
            return data
        if not isinstance(data, DataLoader):
            return cls(data, **how)
        loader = taken(data, name)
        for word, said in (("collate", loader.collate), ("length", loader.batching), ("tokens", loader.batching)):
            if said is not None and how.get(word) is not None:
                word = {"tokens": "batch_tokens"}.get(word, word)
                raise DataError(f"{name}= is a DataLoader with a {_what(said)}, and {word}= is given too", "keep one")
        return cls(loader.data, **{**how, "collate": how.get("collate") or loader.collate}, loader=loader)

    @property
    def code(self) -> tuple[Any, ...]:
        """The user's own: of the data, and of what makes batches of it."""
        batching = None if self.loader is None or self.loader.batching is None else self.loader.batching.sampler
        return self.data, self.collate, batching

    def measured(self) -> "Recipe":
        """With the lengths of its samples, where they are needed; a function that gives the data is not called."""
        if self.pack is not None and self.length is None:
            return replace(self, length="input_ids").measured()
        if self.length is None or _is_function(self.data):
            return self
        source = open_source(self.data)
        if isinstance(source, SampleStream):
            return self
        lengths = lengths_of(source, self.length)
        if self.pack is not None and not lengths.any():
            raise DataError("pack= has no token to pack", f"{len(source)} documents, all of them empty")
        return replace(self, length=lengths)

    @property
    def needs_padding_token(self) -> bool:
        """Whether samples are of tokens that only the model's own padding token can bring to one length."""
        if self.padding is not None or self.collate is not None or _is_function(self.data):
            return False
        source = open_source(self.data)
        if not isinstance(source, Map) or len(source) == 0:
            return False
        sample = source.samples(np.zeros(1, np.int64), Key())[0]
        return isinstance(sample, Mapping) and "input_ids" in sample

    def mean_size(self) -> int | None:
        """Samples of a batch by tokens, about; None: not known."""
        if self.tokens is None or not isinstance(self.length, np.ndarray):
            return None
        return ByLength(self.length, self.tokens).mean_size()

    def source(self, name: str = "data") -> Source | SampleStream:
        source = open_source(self.data, name)
        if self.pack is not None:
            if isinstance(source, SampleStream):
                raise DataError(f"{name}= is a stream, whose lengths are not known: pack= needs a data set")
            lengths = lengths_of(source, "input_ids" if self.length is None else self.length)
            return Packed(source, self.pack, lengths, self.padding or 0)
        rows = isinstance(source, Map) and is_hugging_face(source.data)
        collator = collate.default(self.padding, rows=rows) if self.collate is None else Collator(self.collate)
        collator.whole = self.length is not None
        if source is self.data and (self.loader is not None or self.length is not None):
            source = copy(source)  # the caller's stays as it is
        if isinstance(source, SampleStream):
            if self.length is not None:
                raise DataError(
                    f"{name}= is a stream, whose lengths are not known: length= and batch_tokens= need a data set"
                )
            source.collator = source.collator if source.collator.own else collator
        elif self.collate is not None:
            source = Collated(source, collator)
        elif isinstance(source, Map):
            source.collator = collator
        elif _holds_token_lists(source):
            source = Collated(source, collator)
        if self.loader is not None:
            source.note = self.loader.note
            if isinstance(source, Source):
                source.batching = self.loader.batching
                source.drop_last = self.loader.drop_last and self.tokens is None
        if self.length is not None and isinstance(source, Source):
            source.batching = ByLength(lengths_of(source, self.length), self.tokens)
        return source


def _is_function(data: Any) -> bool:
    return callable(data) and (isinstance(data, type) or not hasattr(data, "__len__"))


def _holds_token_lists(source: Source) -> bool:
    """Whether its samples are rows of a table with token lists of several lengths, which are padded."""
    leaf = source
    while isinstance(leaf, DerivedSource):
        leaf = leaf.source
    if not isinstance(leaf, ColumnSource) or isinstance(leaf.asked, str | tuple | list) or not len(source):
        return False
    some = source.fetch(spread(len(source), TRIED))
    found = [some[name] for name in collate.PADS if name in some] if isinstance(some, Mapping) else []
    return any(isinstance(values, tree.Ragged) and isinstance(values[0], torch.Tensor) for values in found)


def _ours(data: Any) -> bool:
    """Whether it is a source, or torch's ``Subset`` of one."""
    return _ours(data.dataset) if isinstance(data, Subset) else isinstance(data, Source)


def _what(said: Any) -> str:
    return "collate_fn" if callable(said) else "sampler of its own"


def open_source(data: Any, name: str = "data") -> Source | SampleStream:
    """The source that ``data`` stands for. A function is called, here, in the process that reads."""
    if isinstance(data, DataLoader | Recipe):
        return Recipe.of(data, name).source(name)
    if isinstance(data, Source | SampleStream):
        return data
    if isinstance(data, Subset) and _ours(data):  # random_split's parts are of this kind
        return open_source(data.dataset, name).take(data.indices)  # type: ignore[union-attr]
    if isinstance(data, ConcatDataset) and any(map(_ours, data.datasets)):
        raise DataError(
            f"{name}= joins sources of meshfit with +, which would draw the same random numbers every epoch",
            "meshfit.data.mixture([a, b]) gives all samples of both",
        )
    if isinstance(data, TensorDataset):
        return Memory(data.tensors, name)
    if isinstance(data, Mapping) and is_hugging_face(data):
        return open_source(one_split(data, None, name), name)
    tree.refuse_frames(data, name)
    if isinstance(data, torch.Tensor | np.ndarray | tuple | Mapping):
        return Memory(dict(data) if isinstance(data, Mapping) else data, name)
    if isinstance(data, list) and data and all(isinstance(x, torch.Tensor | np.ndarray) for x in data):
        return Memory(tuple(data), name) if len({len(x) for x in data}) == 1 and len(data) < 9 else Map(data)
    if isinstance(data, str | Path):
        from meshfit.data.opening import open

        return open(data)
    if isinstance(data, IterableDataset):
        return SampleStream(lambda: data)
    if _is_function(data):
        assert callable(data)
        made: Any = data()
        if not isinstance(made, Iterator):
            return open_source(made, name)
        function, first = data, [made]  # of the first epoch; the function is called again for each one after it
        return SampleStream(lambda: first.pop() if first else function())  # type: ignore[arg-type]
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return Map(data)
    if isinstance(data, Iterator):
        raise DataError(
            f"{name}= is an iterator, which can be read only once and by one rank",
            f"pass an iterable (an IterableDataset, say) or a function that returns one: {name}=lambda: ...",
        )
    if isinstance(data, Iterable) and not isinstance(data, Set):  # whose order differs from process to process
        return SampleStream(lambda: data)
    raise DataError(
        f"{name}= is a {type(data).__name__}, which holds no samples",
        "give tensors, arrays, a Dataset, an IterableDataset, or a function that returns one of them",
    )


def sample_count(data: Any, name: str = "data") -> int | None:
    """Samples in ``data`` as far as can be told without calling a function of the user's."""
    if isinstance(data, DataLoader | Recipe):
        return sample_count(Recipe.of(data, name).data, name)
    if _is_function(data):
        return None
    source = open_source(data, name)
    return None if isinstance(source, SampleStream) else len(source)


def _number(leaf: Any) -> Any:
    """A leaf as something that is a tensor."""
    return leaf if isinstance(leaf, torch.Tensor | np.ndarray | int | float) else list(repr(leaf).encode())
