"""Rows of what a library of its own reads by number, as Arrow tables: a Hugging Face Dataset, a Lance data set."""

from abc import abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshfit.data.arrow_arrays import Fill, chosen, fields_of, flat, held, missing_rows, no_tensor
from meshfit.data.columns import gathered
from meshfit.data.rows import Asked, ColumnSource, names_in
from meshfit.data.source import BadSample


class ArrowRows(ColumnSource):
    """Rows by number, ``name`` in messages."""

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
        import pyarrow as pa

        kind = array.type
        try:
            array = self.fill(held(array), name, self.name)
            missing = missing_rows(array)
            if missing is not None and missing.any():
                raise BadSample(f"{self.name_of(int(ids[np.argmax(missing)]))} has no value in column {name!r}")
            about, values, offsets = flat(array)
        except (pa.ArrowException, NotImplementedError, TypeError, ValueError) as error:
            raise no_tensor(name, kind, self.name, error) from error
        shaped = values if about["ragged"] else values.reshape(-1, *about["shape"])
        start = 0 if offsets is None else int(offsets[0])
        return gathered(about, shaped, None if offsets is None else offsets - start, np.arange(len(ids)))

    def name_of(self, i: int) -> str:
        return f"row {i} of {self.name}"
