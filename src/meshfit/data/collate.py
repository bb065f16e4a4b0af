"""Samples to a batch: ``stacked``, unless the user gives a function of a list of samples.

A batch of one device is made of all its samples; a rank needs only its share. Whether the share can be collated alone
is tried on some samples: where each of them comes out as it does beside all others, it can. A function that pads to the
longest of a batch, or draws random numbers, is called with the whole batch on every rank, which keeps its own rows: so
it is the batch of one device under every plan, and its microbatches have one length. Its generators are then seeded
from seed, epoch and the first sample of the batch.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import default_collate

from meshfit.data import tree
from meshfit.data.draw import Key, SampleRandom
from meshfit.data.seeding import CodeGenerators, exclusive
from meshfit.errors import DataError

TRIED = 16
"""Samples on which a function is tried."""
PLACE = 2**20  # sets its random numbers apart from those of transforms
PADS = {
    "input_ids": 0,
    "attention_mask": 0,
    "token_type_ids": 0,
    "position_ids": 0,
    "special_tokens_mask": 1,
    "labels": -100,
    "decoder_input_ids": 0,
    "decoder_attention_mask": 0,
}
"""What Hugging Face's fields are padded with, on the right; ``input_ids`` with the model's own padding token."""


class Collator:
    """``function`` of a list of samples, and how what it gives is shared. ``own``: it is the user's."""

    def __init__(self, function: Callable[[list[Any]], Any], *, own: bool = True):
        self.function, self.own, self.whole = function, own, False
        """``whole``: each rank makes the whole batch, and keeps its rows."""
        self.generators = CodeGenerators(function)
        self.shared = False
        """Whether batches are cut."""
        self.draws = False
        self.uncut = ""
        """Why a batch cannot be cut; empty if it can."""
        self._form: Any = None
        self._tried = self._trying = False

    def __call__(self, samples: list[Any], ids: NDArray[np.int64], key: Key) -> Any:
        if self._trying:
            made, drew = self.generators.watch(lambda: self.function(copy.deepcopy(samples)))
            self.draws |= drew
            return made
        if not self.draws:
            return self._marked(self.function(samples))
        with exclusive():
            self.generators.seed(SampleRandom(ids[:1], key.at(PLACE)).seeds()[0])
            return self._marked(self.function(samples))

    def prepare(self, read: Callable[[NDArray[np.int64]], Any], ids: NDArray[np.int64], *, shared: bool) -> None:
        """Try it, by reading some samples together and in two parts. ``shared``: batches are cut, over ranks or into
        microbatches."""
        if not self._tried and (self.own or shared) and len(ids):
            self._tried = self._trying = True
            try:
                with exclusive():
                    self._try(read, ids)
            finally:
                self._trying = False
        self.shared = self.shared or shared
        if shared and self.uncut:
            raise DataError(
                f"what collate= makes of a batch cannot be shared: {self.uncut}",
                "let it give tensors with a row a sample, or lists with an item a sample",
                "plans that leave batches whole take it as it is: no data=, shard=, expert= or microbatches=",
            )

    def cut(self, content: Any, rows: slice | list[int]) -> Any:
        """Some samples of a whole batch."""
        return _cut(content, self._form, rows)

    def check(self, content: Any, samples: int) -> None:
        """Refuse a share that is of another shape than those of other ranks may be."""
        pads = isinstance(self._form, Mapping) and "input_ids" in self._form
        if self._form is not None and (self.own or pads):
            _cut(content, self._form, None, samples)

    @property
    def note(self) -> str:
        """What the user should know where batches are cut; empty: nothing."""
        if not self.whole or not self.shared:
            return ""
        why = "collate draws random numbers" if self.draws else "they are padded to their longest sample"
        return f"data: every rank makes whole batches and keeps its rows, since {why}: the batches of one device"

    def _try(self, read: Callable[[NDArray[np.int64]], Any], ids: NDArray[np.int64]) -> None:
        count = len(ids)
        first = max(1, (count - 1) // 2)
        cuts = [slice(0, count)] if count == 1 else [slice(0, first), slice(first, count)]
        together, *parts = (read(ids[cut]) for cut in (slice(0, count), *cuts))
        try:
            forms = [_form(together, part, count, len(ids[cut])) for part, cut in zip(parts, cuts, strict=True)]
        except _Uncut as why:
            self.uncut = str(why)
            return
        self._form = forms[0]
        ones = [slice(i, i + 1) for i in range(count)]  # two halves may have a longest sample of the same length
        tried = [*zip(parts, cuts, strict=True), *((read(ids[one]), one) for one in ones)]
        alike = all(tree.same(_cut(together, self._form, cut), part) for part, cut in tried)
        self.whole = self.whole or self.draws or not alike or count == 1

    def _marked(self, content: Any) -> Any:
        """With lists of samples marked as such."""
        if self._form is None or not self.own:
            return content
        try:
            return _cut(content, self._form, None)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                "what collate= gives for this batch is of another structure than for the first samples",
                f"{type(error).__name__}: {error}",
            ) from error


class _Uncut(Exception):
    """Says why."""


class _Rows:
    """A tensor with a row a sample; ``shape``: of a row."""

    def __init__(self, shape: tuple[int, ...]):
        self.shape = shape


class _Items:
    """A list with an item a sample."""


class _Fields(dict[str, Any]):
    """A dataclass."""


class _Same:
    """What is the same for all samples."""


def _form(whole: Any, part: Any, count: int, some: int, at: str = "") -> Any:
    """How a batch of ``count`` is cut, told from that of ``some`` of its samples. ``at``: where in the batch."""
    if isinstance(whole, Tensor):
        if whole.dim() and len(whole) == count and len(part) == some:
            return _Rows(tuple(whole.shape[1:]))
        if tree.same(whole, part):
            return _Same()
        dropped = "; leave samples that it drops out of the data set" if whole.dim() and 1 < len(whole) < count else ""
        shapes = f"a tensor of {tuple(whole.shape)}, of {some} {tuple(part.shape)}"
        raise _Uncut(f"{at}of {count} samples it gives {shapes}{dropped}")
    fields = lambda name, a, b: _form(a, b, count, some, f"{at}{name!r}: ")
    if isinstance(whole, Mapping):
        if whole.keys() != part.keys():
            raise _Uncut(f"{at}it gives other keys for other samples")
        return {key: fields(key, value, part[key]) for key, value in whole.items()}
    if dataclasses.is_dataclass(whole) and type(whole) is type(part):
        return _Fields({name: fields(name, value, vars(part)[name]) for name, value in vars(whole).items()})
    if isinstance(whole, tuple | list):
        if len(whole) == len(part) and (count != some or len(whole) != count):
            inner = [_form(a, b, count, some, at) for a, b in zip(whole, part, strict=True)]
            return type(whole)(*inner) if hasattr(whole, "_fields") else type(whole)(inner)
        if len(whole) == count and len(part) == some:
            return _Items()
        raise _Uncut(f"{at}of {count} samples it gives {len(whole)} items, of {some} {len(part)}")
    if tree.same(whole, part):
        return _Same()
    if isinstance(whole, bool | int | float | str):
        raise _Uncut(f"{at}it gives {whole!r} for {count} samples and {part!r} for {some}")
    raise _Uncut(f"{at}it gives a {type(whole).__name__}, an object of its own: a dict or a dataclass can be shared")


def _cut(content: Any, form: Any, rows: slice | list[int] | None, checked: int | None = None) -> Any:
    """Some rows of a batch, or all, by its form. ``checked``: its samples; rows must then have the form's shape."""
    if isinstance(form, _Rows):
        if checked is not None and (len(content) != checked or tuple(content.shape[1:]) != form.shape):
            raise DataError(
                f"collate gives rows of {tuple(content.shape[1:])} here and gave {form.shape} for the first samples",
                "each rank collates its own share, since those came out alike: of others it would pad to other lengths",
                'say what a length is: length="input_ids", or a function of a sample; whole batches are then padded',
            )
        return content if rows is None else content[rows]
    if isinstance(form, _Items):
        if checked is not None and len(content) != checked:
            raise DataError(f"collate gives a list of {len(content)} items for {checked} samples")
        if rows is None:
            return tree.PerSample(content)
        return tree.PerSample(content[rows] if isinstance(rows, slice) else [content[i] for i in rows])
    if isinstance(form, _Fields):
        made = copy.copy(content)
        for name, how in form.items():
            object.__setattr__(made, name, _cut(vars(content)[name], how, rows, checked))
        return made
    if isinstance(form, Mapping):
        if content.keys() != form.keys():
            raise KeyError(f"{sorted(map(str, content))}, not {sorted(map(str, form))}")
        return {key: _cut(content[key], form[key], rows, checked) for key in form}
    if isinstance(form, tuple | list):
        inner = [_cut(each, how, rows, checked) for each, how in zip(content, form, strict=True)]
        return type(form)(*inner) if hasattr(form, "_fields") else type(form)(inner)
    return content


def stacked(samples: Sequence[Any], *, padding: int | None = 0, rows: bool = False) -> Any:
    """As torch collates, tensor by tensor. Hugging Face's fields may differ in length and are padded: tokens with
    ``padding``; None: it is not known. ``rows``: they are those of a table, in which a list of numbers is a tensor."""
    first = samples[0]
    if isinstance(first, Mapping) and (rows or "input_ids" in first):
        return {key: _field(key, samples, padding) for key in first}
    try:
        return default_collate(list(samples))
    except (RuntimeError, ValueError, TypeError) as error:
        raise _explained(samples, error) from error


def default(padding: int | None = 0, *, rows: bool = False) -> Collator:
    return Collator(partial(stacked, padding=padding, rows=rows), own=False)


def _field(key: str, samples: Sequence[Mapping[str, Any]], padding: int | None) -> Any:
    values = [sample[key] for sample in samples]
    if isinstance(values[0], list) and values[0] and not isinstance(values[0][0], str):
        values = [torch.as_tensor(np.array(value)) for value in values]
        values = [value.to(torch.get_default_dtype()) if value.is_floating_point() else value for value in values]
    elif isinstance(values[0], np.ndarray):
        values = [torch.as_tensor(value) for value in values]
    if not isinstance(values[0], Tensor) or len({value.shape for value in values}) == 1:
        return default_collate(values)
    ragged = partial(_ragged, repr(key), [tuple(value.shape) for value in values])
    if key not in PADS or any(value.dim() != 1 for value in values):
        raise ragged()
    value = PADS[key]
    if key in ("input_ids", "decoder_input_ids"):
        mask = key.replace("input_ids", "attention_mask")
        if mask not in samples[0]:
            raise ragged(f"or let samples have {mask!r}, and they are padded")
        if padding is None and np.ndim(samples[0].get("labels", 0)) == 0:  # some classifiers look for it
            raise ragged(
                "the model's padding token is not known here: a model, not a function that builds it, tells it"
            )
        value = padding or 0
    return torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=value)


def _explained(samples: Sequence[Any], error: Exception) -> Exception:
    """What differs in shape; the error itself where nothing does."""
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for sample in samples:
        for name, shape in _shapes(sample, ""):
            shapes.setdefault(name, []).append(shape)
    differ = next((name for name, some in shapes.items() if len(set(some)) > 1), None)
    if differ is not None:
        return _ragged(differ or "the sample", shapes[differ])
    if isinstance(error, TypeError):
        return DataError(
            "the samples make no batch", str(error).split("\n")[0], "collate= is a function that makes one"
        )
    return error


def _shapes(sample: Any, path: str) -> Any:
    if isinstance(sample, Tensor | np.ndarray):
        yield path, tuple(sample.shape)
    elif isinstance(sample, Mapping):
        for key, value in sample.items():
            yield from _shapes(value, f"{path}[{key!r}]")
    elif isinstance(sample, list) and sample and all(isinstance(value, int | float) for value in sample):
        yield path, (len(sample),)
    elif isinstance(sample, tuple | list):
        for i, value in enumerate(sample):
            yield from _shapes(value, f"{path}[{i}]")


def _ragged(what: str, shapes: list[tuple[int, ...]], *more: str) -> DataError:
    some = sorted(set(shapes))
    return DataError(
        f"the samples of a batch differ in shape: {what} is {some[0]} and {some[-1]}",
        "say how a list of samples becomes a batch: collate=, a function (Hugging Face's data collators, say)",
        *more,
        "or bring them to one shape in the data set",
    )
