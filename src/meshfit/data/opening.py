"""``meshfit.data.open``: a path or URL as the source that it looks like."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshfit.data.arrays import arrays
from meshfit.data.blob import Url, find, is_remote
from meshfit.data.classics import cifar, mnist
from meshfit.data.hf_datasets import hf_dataset
from meshfit.data.images import ENDINGS, folder
from meshfit.data.lakes import delta, lance
from meshfit.data.mds import mds
from meshfit.data.remote import without_secrets
from meshfit.data.source import Source
from meshfit.data.sql import sql
from meshfit.data.table import arrow, csv, jsonl, parquet
from meshfit.data.tars import tars
from meshfit.data.tokens import text, tokens
from meshfit.errors import DataError

BY_ENDING: dict[str, Callable[..., Source]] = {
    ".parquet": parquet,
    ".pq": parquet,
    ".arrow": arrow,
    ".feather": arrow,
    ".ipc": arrow,
    ".csv": csv,
    ".tsv": csv,
    ".csv.gz": csv,
    ".jsonl": jsonl,
    ".ndjson": jsonl,
    ".jsonl.gz": jsonl,
    ".npy": arrays,
    ".npz": arrays,
    ".tar": tars,
    ".bin": tokens,
    ".tokens": tokens,
    ".txt": text,
}
DATABASES = ("postgresql", "postgres", "sqlite", "duckdb")


def open(url: Url, **options: Any) -> Source:
    """The samples at ``url``: what they are is told by the names of the files. ``options`` are those of the function
    that reads them: ``meshfit.data.parquet``, ``csv``, ``jsonl``, ``arrays``, ``tars``, ``tokens``, ``text``,
    ``folder``, ``cifar``, ``mnist``, ``sql``, ``hf_dataset``, ``delta``, ``lance``, ``mds``."""
    scheme = str(url).partition(":")[0].partition("+")[0]
    if scheme in DATABASES:
        if "query" not in options or "key" not in options:
            raise DataError(
                f"{without_secrets(str(url))} is a database", 'say what to read: query="select ...", key="id"'
            )
        return sql(str(url), options.pop("query"), **options)
    made = _function(url, options)
    try:
        return made(url, **options)
    except TypeError as error:
        if "argument" not in str(error):
            raise
        what = str(error).replace(f"{made.__name__}()", f"meshfit.data.{made.__name__}")
        raise DataError(f"{without_secrets(str(url))}: {what}", f"see help(meshfit.data.{made.__name__})") from error


def _function(url: Url, options: dict[str, Any]) -> Callable[..., Source]:
    name = str(url).lower().split("?")[0] if is_remote(url) else str(url).lower()
    direct = lance if name.rstrip("/").endswith(".lance") else _by_ending(name)
    if direct is not None:
        return direct
    inside = find(url, storage=options.get("storage"), cache=options.get("cache"))
    names = [blob.name.rpartition("/")[2].lower() for blob in inside]
    if any(n.startswith(("data_batch_1", "test_batch")) for n in names):
        return cifar
    if any("idx3-ubyte" in n for n in names):
        return mnist
    if any("/_delta_log/" in blob.name for blob in inside):
        return delta
    if "state.json" in names and any(n.endswith(".arrow") for n in names):
        return hf_dataset
    if "index.json" in names and any(".mds" in n for n in names):
        return mds
    shown, kinds = without_secrets(str(url)), {function for function in map(_by_ending, names) if function is not None}
    images = sum(n.endswith(ENDINGS) for n in names)
    if images and images >= len(names) / 2:
        return folder
    if len(kinds) == 1:
        return kinds.pop()
    if kinds:
        said = " and ".join(sorted(f.__name__ for f in kinds))
        raise DataError(f"{shown} holds files of {said}", "name them: meshfit.data.parquet(path), say")
    has = ", ".join(Path(blob.name).name for blob in inside[:4])
    raise DataError(
        f"{shown} is nothing that is known by its name",
        f"it holds {has}; known are {' '.join(BY_ENDING)} and images",
    )


def _by_ending(name: str) -> Callable[..., Source] | None:
    return next((made for ending, made in BY_ENDING.items() if name.endswith(ending)), None)
