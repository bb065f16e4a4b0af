"""Token files and text: rows of ``length`` + 1 tokens, cut from one long file, of which the last is the target's.

A sample is (inputs, targets): row[:-1] and row[1:], int64. Rows follow each other without overlap, so that a token is
a target once an epoch. The file is mapped: uint16 or uint32, or an .npy of them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from meshfit.data.arrays import Rows, npy
from meshfit.data.blob import Blob, LocalFile, Url, find, tag_of
from meshfit.data.cache import Cache
from meshfit.data.draw import Key
from meshfit.data.order import by_part, part_of
from meshfit.data.source import Source
from meshfit.errors import DataError

TEXTS = (".txt", ".md", ".text")


class Tokens(Source):
    """Rows of tokens over one or more files; a row is within one file."""

    def __init__(self, files: list[Rows], length: int, whole: bool):
        self.files, self.length, self.whole = files, length, whole
        self.dtype = np.result_type(*(rows.dtype for rows in files))
        self.firsts = np.concatenate([[0], np.cumsum([len(rows) for rows in files])])
        self.waits = any(not isinstance(rows.blob, LocalFile) for rows in files)
        far = [rows.blocks for rows in files]
        if any(part is not None for part in far):
            edges = [f + (np.array([0]) if b is None else b[:-1]) for f, b in zip(self.firsts, far, strict=False)]
            self.blocks = np.append(np.concatenate(edges), self.firsts[-1])

    def __len__(self) -> int:
        return int(self.firsts[-1])

    def fetch(self, ids: NDArray[np.int64]) -> Any:
        return self.finish(self.read(ids, Key()), ids, Key())

    def finish(self, content: Any, ids: NDArray[np.int64], key: Key) -> Any:
        """int64, and cut into inputs and targets, on the device: a quarter of the bytes travels."""
        found = content.to(torch.int64)
        if content.dtype == torch.int16:
            found &= 0xFFFF
        return found if self.whole else (found[:, :-1].contiguous(), found[:, 1:].contiguous())

    def read(self, ids: NDArray[np.int64], key: Key) -> Any:
        """As many bytes as the file has, under names that all devices know."""
        rows = np.empty((len(ids), self.length + 1), self.dtype)
        for file, at, inner in by_part(self.firsts, ids):
            rows[at] = self.files[file].gather(inner)
        signed = {2: np.int16, 4: np.int32}.get(rows.dtype.itemsize, np.int64)
        return torch.from_numpy(rows.view(signed) if rows.dtype.kind == "u" else rows.astype(np.int64))

    def name_of(self, i: int) -> str:
        file, row = part_of(self.firsts, i)
        return f"tokens {row * self.length} to {(row + 1) * self.length} of {self.files[file].blob.name}"

    @property
    def fingerprint(self) -> str:
        return f"tokens {tag_of([rows.blob for rows in self.files])} {self.length} {len(self)}"


def tokens(
    url: Url | Sequence[Url],
    *,
    length: int,
    dtype: str = "uint16",
    whole: bool = False,
    storage: Mapping[str, Any] | None = None,
    cache: Cache | Url | None = None,
) -> Source:
    """Rows of ``length`` tokens of binary files, as (inputs, targets), the targets one token on; ``whole`` gives rows
    of ``length`` + 1 tokens instead."""
    blobs = find(url, (".bin", ".npy", ".tokens"), storage=storage, cache=cache)
    return _rows(blobs, length, dtype, whole)


def _rows(blobs: list[Blob], length: int, dtype: str, whole: bool) -> Tokens:
    if length < 1:
        raise DataError(f"length={length} is not a number of tokens above 0")
    files = []
    for blob in blobs:
        offset, kind, count = 0, np.dtype(dtype), blob.size // np.dtype(dtype).itemsize
        if blob.name.endswith(".npy"):
            flat = npy(blob)
            offset, kind, count = flat.offset, flat.dtype, flat.shape[0]
        elif blob.size % kind.itemsize:
            raise DataError(f"{blob.name} is no file of {kind}", f"{blob.size} bytes do not divide by {kind.itemsize}")
        rows = max(0, (count - 1) // length)
        if rows:
            files.append(Rows(blob, kind, (rows, length + 1), offset, stride=length * kind.itemsize))
    if not files:
        most = max(blob.size // np.dtype(dtype).itemsize for blob in blobs)
        raise DataError(
            f"no file holds a row of {length} + 1 tokens", f"the longest has {most}", "choose a smaller length"
        )
    return Tokens(files, length, whole)


Tokenizer = Callable[[str], Iterable[int]]


def text(
    url: Url | Sequence[Url],
    *,
    length: int,
    tokenizer: Tokenizer | Any = "bytes",
    end: int | None = None,
    whole: bool = False,
    storage: Mapping[str, Any] | None = None,
    cache: Cache | Url | None = None,
) -> Source:
    """Text files as rows of tokens, as ``tokens`` gives them: tokenised once, into the cache.

    ``tokenizer`` is "bytes" (256 tokens), "characters" (those of the text, in order: see ``vocabulary``), or a function
    from a string to token ids; Hugging Face's have .encode, which is taken. ``end`` is put after each file.
    """
    held = Cache.of(cache)
    blobs = find(url, TEXTS, storage=storage, cache=held)
    encode, name = _encoder(tokenizer, blobs)

    def make(folder: Path) -> None:
        with (folder / "tokens.bin").open("wb") as out:
            for blob in blobs:
                try:
                    found = np.asarray(encode(bytes(blob.read()).decode()), np.int64)
                except UnicodeDecodeError as error:
                    raise DataError(f"{blob.name} is not UTF-8 text", str(error)) from error
                if end is not None:
                    found = np.append(found, end)
                out.write(found.astype(np.uint32).tobytes())

    folder = held.folder(f"text 1 {tag_of(blobs)} {name} {end}", make)
    return _rows([LocalFile(folder / "tokens.bin")], length, "uint32", whole)


def vocabulary(url: Url | Sequence[Url], **options: Any) -> list[str]:
    """The characters of text files, in order: what ``tokenizer="characters"`` numbers."""
    return _characters(find(url, TEXTS, **options))


def _characters(blobs: list[Blob]) -> list[str]:
    return sorted({sign for blob in blobs for sign in bytes(blob.read()).decode()})


def _encoder(tokenizer: Any, blobs: list[Blob]) -> tuple[Tokenizer, str]:
    """A function from text to tokens, and a name that changes when it does."""
    if tokenizer == "bytes":
        return lambda words: np.frombuffer(words.encode(), np.uint8), "bytes"
    if tokenizer == "characters":
        signs = _characters(blobs)
        number = np.zeros(max(map(ord, signs), default=0) + 1, np.int64)
        number[[ord(sign) for sign in signs]] = np.arange(len(signs))
        return lambda words: number[np.frombuffer(words.encode("utf-32-le"), np.uint32)], "characters"
    encode = getattr(tokenizer, "encode", tokenizer)
    if not callable(encode):
        raise DataError(f"tokenizer={tokenizer!r} is not understood", '"bytes", "characters" or a function of a string')

    def run(words: str) -> Any:
        found = encode(words)
        return getattr(found, "ids", found)

    probe = list(run("The quick brown fox jumps over 13 lazy dogs: naïve café 東京!"))
    return run, f"{type(tokenizer).__name__} {getattr(tokenizer, 'name_or_path', '')} {probe}"
