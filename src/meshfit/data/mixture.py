"""Several sources in fixed shares.

An epoch of a mixture has ``length`` samples, of which each source gives exactly its weight's part (largest remainders
get the odd ones). A source that gives more than it has starts over, in another order; one that gives less leaves some
out, others each epoch. Which sample stands where is a pure function, so shuffling, sharing and resuming stay exact.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshfit.data import tree
from meshfit.data.datasets import SampleStream, open_source
from meshfit.data.draw import Key
from meshfit.data.order import by_part, order
from meshfit.data.source import Source
from meshfit.errors import DataError


class MixedSource(Source):
    """``sources`` in the shares of ``weights``. Position i of an epoch belongs to one source for good; which sample of
    it that is depends on the epoch."""

    def __init__(self, sources: list[Source], weights: list[float], length: int | None, seed: int):
        self.sources, self.seed = sources, seed
        sizes = np.array([len(source) for source in sources])
        shares = np.array(weights, np.float64) / sum(weights)
        total = int(sizes.sum()) if length is None else length
        self.counts = _exact(shares, total)
        self.edges = np.concatenate([[0], np.cumsum(self.counts)])
        self.waits = any(source.waits for source in sources)
        self.own_code = any(source.own_code for source in sources)
        self.collator = next((source.collator for source in sources if source.collator is not None), None)

    @property
    def global_random(self) -> bool:
        return any(source.global_random for source in self.sources)

    def __len__(self) -> int:
        return int(self.edges[-1])

    def fetch(self, ids: NDArray[np.int64]) -> Any:
        return self.read(ids, Key())

    def read(self, ids: NDArray[np.int64], key: Key) -> Any:
        if self.collator is not None:
            return self.collator(self.samples(ids, key), ids, key)
        parts, places = [], []
        for k, at, mine in self.where(ids, key.epoch):
            source = self.sources[k]
            parts.append(source.finish(source.read(mine, key), mine, key))
            places.append(at)
        try:
            joined = parts[0] if len(parts) == 1 else tree.concatenate(parts)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise DataError("the sources of the mixture give different samples", str(error).split("\n")[0]) from error
        return tree.take(joined, np.argsort(np.concatenate(places)))

    def samples(self, ids: NDArray[np.int64], key: Key) -> list[Any]:
        if self.collator is None:
            return super().samples(ids, key)
        found: dict[int, Any] = {}
        for k, at, mine in self.where(ids, key.epoch):
            found.update(zip(at.tolist(), self.sources[k].samples(mine, key), strict=True))
        return [found[i] for i in range(len(ids))]

    def where(self, ids: NDArray[np.int64], epoch: int) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
        """For each source: which of the positions ``ids`` are its, and which of its samples stand there."""
        for k, at, inner in by_part(self.edges, ids):
            n = len(self.sources[k])
            # A position's place in the endless row of passes over the source; epochs follow each other in it.
            rounds, place = np.divmod(epoch * self.counts[k] + inner, n)
            found = np.empty(len(place), np.int64)
            for turn in np.unique(rounds).tolist():
                now = rounds == turn
                found[now] = order(n, seed=self.seed + k, epoch=turn)[place[now]]
            yield k, at, found

    def name_of(self, i: int) -> str:
        ((k, _, mine),) = self.where(np.array([i]), 0)
        return f"{self.sources[k].name_of(int(mine[0]))} (in epoch 0)"

    @property
    def fingerprint(self) -> str:
        parts = (f"{n} of ({s.fingerprint})" for n, s in zip(self.counts.tolist(), self.sources, strict=True))
        return " + ".join(parts) + (f", seed {self.seed}" if self.seed else "")

    @property
    def left_out(self) -> list[str]:
        return [why for source in self.sources for why in source.left_out]

    @property
    def skipped(self) -> list[str]:
        return [why for source in self.sources for why in source.skipped]

    def state(self) -> dict[str, Any]:
        return {"sources": [source.state() for source in self.sources]}

    def load_state(self, state: dict[str, Any]) -> None:
        for source, held in zip(self.sources, state.get("sources", []), strict=False):
            source.load_state(held)


def _exact(shares: NDArray[np.float64], total: int) -> NDArray[np.int64]:
    """Whole numbers in these shares that add up to ``total``."""
    ideal = shares * total
    counts = np.floor(ideal).astype(np.int64)
    missing = total - int(counts.sum())
    counts[np.argsort(-(ideal - counts), kind="stable")[:missing]] += 1
    return counts


def mixture(
    sources: Sequence[Any] | Mapping[Any, float],
    weights: Sequence[float] | None = None,
    *,
    length: int | None = None,
    seed: int = 0,
) -> Source:
    """``mixture([a, b], weights=[3, 1])``: three samples of ``a`` for one of ``b``. ``length`` samples make an epoch;
    by default as many as all sources have together, in proportion to their sizes where no weights are given."""
    if not isinstance(sources, list | tuple | Mapping):
        raise DataError(f"mixture is given a {type(sources).__name__}", "mixture([a, b], weights=[3, 1]), say")
    given = [open_source(source, "mixture") for source in sources]
    opened = [source for source in given if isinstance(source, Source)]
    if any(isinstance(source, SampleStream) for source in given):
        raise DataError(
            "a stream cannot be part of a mixture", "its samples have no index: mix them in the stream itself"
        )
    if length is not None and (not isinstance(length, int) or length < 1):
        raise DataError(f"length={length!r} of a mixture is not a number of samples above 0")
    asked = sources.values() if isinstance(sources, Mapping) and weights is None else weights
    try:
        shares = [float(share) for share in (map(len, opened) if asked is None else asked)]
    except (TypeError, ValueError):
        raise DataError(f"the weights {asked!r} are no shares", "numbers of 0 or more, not all 0") from None
    if len(shares) != len(opened) or not opened:
        raise DataError(f"the mixture has {len(opened)} sources and {len(shares)} weights", "give one weight a source")
    if any(not np.isfinite(w) or w < 0 for w in shares) or not sum(shares):
        raise DataError(f"the weights {shares} are no shares", "numbers of 0 or more, not all 0")
    if empty := [i for i, source in enumerate(opened) if not len(source) and shares[i]]:
        raise DataError(f"source {empty[0]} of the mixture holds no sample")
    if any(source.device_stage for source in opened):
        raise DataError("a source of the mixture has an on_device stage", "mix first, then .on_device")
    return MixedSource(opened, shares, length, seed)
