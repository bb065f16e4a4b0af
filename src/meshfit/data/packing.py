"""Documents packed into rows of one length, so that hardly a position is padding.

A sample is a dict with ``input_ids`` (and ``labels``; else the tokens are their own). Documents go into rows by best
fit, longest first; one that is longer than a row is cut into pieces. A row is then a sample: order, shares and resume
are those of any data. Which documents share a row depends on their lengths alone.

    input_ids       the documents of the row, one after another; what is left is padding
    position_ids    from 0 in every document, and in the padding: Hugging Face's models keep those apart whose positions
                    start anew
    labels          -100 for the first token of a document, which no other predicts, and for padding
"""

from bisect import bisect_left, insort
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from meshfit.data.draw import Key
from meshfit.data.source import DerivedSource, Source
from meshfit.errors import DataError

FIELDS = ("input_ids", "labels", "attention_mask")
IGNORED = -100


class Packed(DerivedSource):
    """``source`` in rows of ``length`` tokens; ``lengths``: of its documents."""

    def __init__(self, source: Source, length: int, lengths: NDArray[np.int64], padding: int = 0):
        super().__init__(source)
        self.length, self.padding = length, padding
        self.pieces, self.firsts = rows_of(lengths, length)
        self.blocks = self.batching = self.collator = None
        self.device_stage = False
        filled = int(lengths.sum()) / (len(self) * length)
        self.note = f"data: {len(source):,} documents packed into {len(self):,} rows of {length}, {filled:.0%} full"

    def __len__(self) -> int:
        return len(self.firsts) - 1

    def read(self, ids: NDArray[np.int64], key: Key) -> Any:
        pieces = [self.pieces[self.firsts[i] : self.firsts[i + 1]] for i in ids.tolist()]
        documents = np.unique(np.concatenate(pieces)[:, 0])
        held = dict(zip(documents.tolist(), self.source.samples(documents, key), strict=True))
        tokens = torch.full((len(ids), self.length), self.padding)
        labels = torch.full((len(ids), self.length), IGNORED)
        positions = torch.zeros((len(ids), self.length), dtype=torch.int64)
        for row, some in enumerate(pieces):
            at = 0
            for document, start, stop in some.tolist():
                given, wanted = self._document(held[document], document)
                end = at + stop - start
                tokens[row, at:end] = given[start:stop]
                labels[row, at:end] = wanted[start:stop]
                labels[row, at] = IGNORED
                positions[row, at:end] = torch.arange(stop - start)
                at = end
            positions[row, at:] = torch.arange(self.length - at)
        return {"input_ids": tokens, "position_ids": positions, "labels": labels}

    def samples(self, ids: NDArray[np.int64], key: Key) -> list[Any]:
        content = self.read(ids, key)
        return [{name: value[i] for name, value in content.items()} for i in range(len(ids))]

    def finish(self, content: Any, ids: NDArray[np.int64], key: Key) -> Any:
        return content

    def _document(self, sample: Any, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not isinstance(sample, Mapping) or "input_ids" not in sample:
            raise DataError(f"pack= packs dicts with 'input_ids', but {self.source.name_of(i)} is {_shown(sample)}")
        if more := [str(name) for name in sample if name not in FIELDS]:
            raise DataError(
                f"pack= does not know how to pack {more[0]!r} of {self.source.name_of(i)}",
                f"leave it out: it packs {', '.join(FIELDS)}",
            )
        tokens = torch.as_tensor(sample["input_ids"])
        if "attention_mask" in sample and not torch.as_tensor(sample["attention_mask"]).bool().all():
            raise DataError(
                f"pack= packs documents without padding, but {self.source.name_of(i)} has some", "leave it out"
            )
        labels = torch.as_tensor(sample.get("labels", tokens))
        if labels.shape != tokens.shape:
            raise DataError(f"pack= needs a label a token, but {self.source.name_of(i)} has {tuple(labels.shape)}")
        return tokens, labels

    def name_of(self, i: int) -> str:
        documents = self.pieces[self.firsts[i] : self.firsts[i + 1], 0].tolist()
        return f"row {i}: {', '.join(self.source.name_of(document) for document in documents[:4])}"

    @property
    def fingerprint(self) -> str:
        return f"{self.source.fingerprint} | packed into {len(self)} rows of {self.length}"


def rows_of(lengths: NDArray[np.int64], length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(document, start, stop) of the pieces of all rows, and where each row's begin. Best fit, longest first."""
    pieces = [
        (document, start, min(start + length, count))
        for document, count in enumerate(lengths.tolist())
        for start in range(0, count, length)
    ]
    sizes = np.array([stop - start for _, start, stop in pieces], np.int64)
    rows: list[list[tuple[int, int, int]]] = []
    room: list[tuple[int, int]] = []
    """(tokens left, row), sorted."""
    for at in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[at])
        fits = bisect_left(room, (size, -1))
        left, row = room.pop(fits) if fits < len(room) else (length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(pieces[at])
        if left > size:
            insort(room, (left - size, row))
    for row in rows:
        row.sort()
    firsts = np.cumsum([0, *map(len, rows)])
    return np.array([piece for row in rows for piece in row], np.int64).reshape(-1, 3), firsts


def _shown(sample: Any) -> str:
    return f"a {type(sample).__name__}" + (
        f" with {', '.join(map(str, sample))}" if isinstance(sample, Mapping) else ""
    )
