"""Hugging Face data sets: folders that ``Dataset.save_to_disk`` wrote, which need no library but Arrow; and
``datasets.Dataset`` objects, read as Arrow."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshfit.data.arrow_arrays import Fill
from meshfit.data.blob import Blob, Url, find
from meshfit.data.cache import Cache
from meshfit.data.rows import ArrowRows, Asked
from meshfit.data.source import Source
from meshfit.data.table import of_files
from meshfit.data.tablefiles import TableFile
from meshfit.errors import DataError, did_you_mean

STATE, SPLITS = "state.json", "dataset_dict.json"


class HuggingFaceRows(ArrowRows):
    """The rows of a ``datasets.Dataset``."""

    def __init__(self, data: Any, columns: Asked, images: bool, fill: Fill):
        self.data = data.with_format("arrow")
        super().__init__(
            f"the Dataset {data.info.dataset_name or data._fingerprint}", self.data[:0].schema, columns, images, fill
        )

    def __len__(self) -> int:
        return len(self.data)

    def rows(self, ids: list[int]) -> Any:
        return self.data[ids]

    @property
    def fingerprint(self) -> str:
        return f"Hugging Face {self.data._fingerprint} {len(self)}"


def is_hugging_face(data: Any) -> bool:
    """Whether it is an object of the library ``datasets``, which need not be there."""
    return any(kind.__module__ in ("datasets.arrow_dataset", "datasets.dataset_dict") for kind in type(data).__mro__)


def one_split(data: Any, split: str | None, name: str = "data") -> Any:
    """A Dataset; of a DatasetDict that of ``split``."""
    if not isinstance(data, Mapping):
        return data
    return data[_known_split(split, list(data), f"{name}=", f"take one: {name}[{next(iter(data))!r}]")]


def _known_split(split: str | None, known: list[str], where: str, remedy: str) -> str:
    if split is None:
        raise DataError(f"{where} holds several splits: {', '.join(known)}", remedy)
    if split not in known:
        raise DataError(f"there is no split {split!r} in {where}", did_you_mean(split, known))
    return split


def hf_dataset(
    what: Url | Any,
    *,
    split: str | None = None,
    columns: Asked = None,
    storage: Mapping[str, Any] | None = None,
    cache: Cache | Url | None = None,
    decode: bool = True,
    on_bad: str = "stop",
    fill: Any = None,
) -> Source:
    """The rows of a folder that ``save_to_disk`` wrote, here or in the cloud, or of a ``datasets.Dataset``. ``split``
    of a DatasetDict. ``columns``, ``fill`` and ``on_bad`` are those of other tables."""
    if not isinstance(what, str | Path):
        data = one_split(what, split)
        if not is_hugging_face(data) or not hasattr(data, "with_format") or not hasattr(data, "__len__"):
            raise DataError(f"hf_dataset was given a {type(data).__name__}", "give a folder or a datasets.Dataset")
        return HuggingFaceRows(data, columns, decode, Fill(fill)).on_bad(on_bad)
    held = Cache.of(cache)
    found = find(what, storage=storage, cache=held, folder=True)
    blobs = {blob.name.split("?")[0].rpartition("/")[::2]: blob for blob in found}
    states = {folder: blob for (folder, file), blob in blobs.items() if file == STATE}
    listed = next((_json(blob)["splits"] for (_, file), blob in blobs.items() if file == SPLITS), None)
    if not states:
        raise DataError(f"{what} holds no {STATE}", "Dataset.save_to_disk writes one: is this the folder?")
    if listed is not None:
        split = _known_split(split, listed, str(what), f'take one: split="{listed[0]}"')
        states = {folder: blob for folder, blob in states.items() if folder.rpartition("/")[2] == split}
    (folder, state), *_ = sorted(states.items())
    wanted = [each["filename"] for each in _json(state)["_data_files"]]
    for each in wanted:
        if (folder, each) not in blobs:
            raise DataError(f"{folder}/{each} is missing", f"{folder}/{STATE} lists it: copy the folder again")
    files = [TableFile(blobs[folder, each], "arrow") for each in wanted]
    return of_files(files, columns, cache=held, decode=decode, on_bad=on_bad, fill=fill)


def _json(blob: Blob) -> Any:
    try:
        return json.loads(bytes(blob.read()))
    except ValueError as error:
        raise DataError(f"{blob.name} is not JSON", str(error)) from error
