"""Columns that the folders of a table's files give: ``year=2024/month=01/part-0.parquet``, as Hive and Spark write."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from meshfit.data.blob import Url, has_pattern, is_remote
from meshfit.data.remote import without_secrets
from meshfit.data.tablefiles import TableFile

NULL = "__HIVE_DEFAULT_PARTITION__"


def with_partitions(files: list[TableFile], url: Url | Sequence[Url]) -> list[TableFile]:
    """``files`` with the columns that folders below ``url`` give. Whole numbers are int64, all else words."""
    import pyarrow as pa

    urls = [url] if isinstance(url, str | Path) else list(url)
    names = {file.name for file in files}
    base = _common([_base(each, names) for each in urls])
    found: list[dict[str, str | None]] = []
    for file in files:
        folders = file.name.split("?")[0].split("/")[:-1]
        pairs = [each.partition("=") for each in folders[len(_common([base, folders])) :] if "=" in each]
        found.append({key: None if value == NULL else unquote(value) for key, _, value in pairs if key})
    types: dict[str, Any] = {}
    for key in {key for each in found for key in each}:
        values = [each[key] for each in found if each.get(key) is not None]
        types[key] = pa.int64() if all(re.fullmatch(r"-?\d{1,18}", str(value)) for value in values) else pa.string()
    return [
        replace(file, given={key: _typed(value, types[key]) for key, value in each.items()}, given_types=types)
        for file, each in zip(files, found, strict=True)
    ]


def _typed(value: str | None, kind: Any) -> Any:
    return int(value) if value is not None and str(kind) == "int64" else value


def _base(url: Url, files: set[str]) -> list[str]:
    """The folders of a URL up to its first pattern."""
    text = without_secrets(url).split("?***")[0] if isinstance(url, str) and is_remote(url) else ""
    text = text or str(Path(str(url).removeprefix("file://")).expanduser())
    parts = text.rstrip("/").split("/")
    if text in files:
        return parts[:-1]
    return parts[: next((i for i, part in enumerate(parts) if has_pattern(part)), len(parts))]


def _common(rows: list[list[str]]) -> list[str]:
    """What all begin with."""
    shared = []
    for parts in zip(*rows, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return shared
