"""What a sample of rows is: ``columns=`` of every source of rows.

    None                         every column, as a dict
    "text"                       that column alone
    ("image", "label")           a tuple: the model's input, then the target
    (["a", "b", "c"], "label")   a, b and c side by side as one float32 row, then the target
    {"x": "image", "y": "label"} a dict under other names
    ("image.bytes", "label")     the field "bytes" of a struct; a column whose name has a dot goes before it

Bytes that are images are decoded to uint8 (channels, height, width); words stay words, for ``map`` to tokenise.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from meshfit.data.arrow_arrays import Fill, chosen, fields_of, flat, held, missing_rows, named, root_of
from meshfit.data.columns import gathered
from meshfit.data.images import decode, looks_like_image
from meshfit.data.source import BadFile, BadSample, Source
from meshfit.data.tablefiles import TableFile
from meshfit.data.tree import Ragged
from meshfit.errors import DataError, did_you_mean

Asked = Any
"""What ``columns=`` takes: see above."""


def names_in(asked: Asked, known: Sequence[str], fields: Sequence[str] = ()) -> list[str]:
    """The columns, and ``fields`` of them, that ``asked`` needs; an unknown one is refused."""
    if asked is None:
        return list(known)
    if isinstance(asked, str):
        if asked not in known and asked not in fields:
            raise DataError(f"there is no column {asked!r}", did_you_mean(asked, [*known, *fields]))
        return [asked]
    if isinstance(asked, Mapping | tuple | list):
        inner = asked.values() if isinstance(asked, Mapping) else asked
        return list(dict.fromkeys(name for part in inner for name in names_in(part, known, fields)))
    raise DataError(f"columns={asked!r} is not understood", 'write ("image", "label"), say')


def fields_in(asked: Asked, known: Sequence[str]) -> list[str]:
    """The names "a.b" in ``asked`` of which ``known`` holds "a"."""
    if isinstance(asked, str):
        return [asked] if asked not in known and root_of(asked, known) else []
    inner = asked.values() if isinstance(asked, Mapping) else asked if isinstance(asked, tuple | list) else ()
    return [name for part in inner for name in fields_in(part, known)]


def shaped(asked: Asked, columns: Mapping[str, Any]) -> Any:
    """A batch of the form ``asked`` out of a batch of columns."""
    if asked is None:
        return dict(columns)
    if isinstance(asked, str):
        return columns[asked]
    if isinstance(asked, Mapping):
        return {key: shaped(value, columns) for key, value in asked.items()}
    if isinstance(asked, tuple):
        return tuple(shaped(part, columns) for part in asked)
    side = []
    for name in asked:
        value = columns[name]
        if isinstance(value, Ragged) or (value.dim() == 4 and value.dtype == torch.uint8):
            raise DataError(
                f"column {name!r} is no number, so it cannot stand in a row beside others",
                f"a list puts numbers side by side; a tuple gives one thing after another: ({name!r}, ...)",
            )
        side.append(value.float().reshape(len(value), -1))
    return torch.cat(side, 1)


class ColumnSource(Source):
    """A source of rows: ``raw`` gives columns, ``fetch`` their images decoded, in the form that was ``asked``."""

    def __init__(self, asked: Asked, images: bool):
        self.asked, self.images = asked, images
        self._pictures: dict[str, bool] = {}

    @abstractmethod
    def raw(self, ids: NDArray[np.int64]) -> dict[str, Any]:
        """The columns of some rows: tensors, or ``Ragged`` of words, bytes or tensors."""

    def fetch(self, ids: NDArray[np.int64]) -> Any:
        return shaped(self.asked, {name: self._decoded(name, value, ids) for name, value in self.raw(ids).items()})

    def _decoded(self, name: str, value: Any, ids: NDArray[np.int64]) -> Any:
        if not self.images or not isinstance(value, Ragged) or not isinstance(value[0], bytes | memoryview | bytearray):
            return value
        if name not in self._pictures:
            self._pictures[name] = any(map(looks_like_image, self._first(name)))
        if self._pictures[name] or any(map(looks_like_image, value[:8])):
            return decode(value, lambda i: self.name_of(int(ids[i])))
        return value

    def _first(self, name: str) -> list[Any]:
        """The first values of a column."""
        found = []
        for i in range(min(8, len(self))):
            with suppress(BadSample):
                found.append(self.raw(np.array([i]))[name][0])
        return found


class ArrowRows(ColumnSource):
    """Rows that a library of its own reads by number, as Arrow tables: a Hugging Face Dataset, a Lance data set.
    ``name``: in messages."""

    def __init__(self, name: str, schema: Any, columns: Asked, images: bool, fill: Fill):
        super().__init__(columns, images)
        self.name, self.fill = name, fill
        self.names = names_in(columns, schema.names, fields_of(schema))

    @abstractmethod
    def rows(self, ids: list[int]) -> Any:
        """An Arrow table of these rows, in that order."""

    def raw(self, ids: NDArray[np.int64]) -> dict[str, Any]:
        batch = self.rows(ids.tolist()).combine_chunks()
        return {name: self._tensor(name, chosen(batch, name), ids) for name in self.names}

    def _tensor(self, name: str, array: Any, ids: NDArray[np.int64]) -> Any:
        with named(name, array.type, self.name):
            array = self.fill(held(array), name, self.name)
            missing = missing_rows(array)
            if missing is not None and missing.any():
                raise BadSample(f"{self.name_of(int(ids[np.argmax(missing)]))} has no value in column {name!r}")
            about, values, offsets = flat(array)
        shaped = values if about["ragged"] else values.reshape(-1, *about["shape"])
        start = 0 if offsets is None else int(offsets[0])
        return gathered(about, shaped, None if offsets is None else offsets - start, np.arange(len(ids)))

    def name_of(self, i: int) -> str:
        return f"row {i} of {self.name}"


def known_names(files: Sequence[TableFile], asked: Asked) -> tuple[list[str], list[str]]:
    """The columns of ``files``, and the fields of those that are structs: of the first, where it has all that is
    ``asked``, else of all that can be read."""
    found, bad = [], None
    for file in files:
        try:
            found.append(file.names())
        except BadFile as error:
            bad = error
            continue
        with suppress(DataError):
            names_in(asked, *found[0])
            return found[0]
    if bad is not None and not found:
        raise bad
    columns, inside = (dict.fromkeys(name for each in found for name in each[i]) for i in (0, 1))
    return list(columns), list(inside)
