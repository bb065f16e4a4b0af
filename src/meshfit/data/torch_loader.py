"""A torch ``DataLoader`` that is handed in: what it says of batches is taken over, and meshfit loads them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from meshfit.data.batching import BySampler
from meshfit.errors import DataError


@dataclass(frozen=True)
class TakenLoader:
    """What a ``DataLoader`` said."""

    data: Any
    batch_size: int
    shuffle: bool
    workers: int | None
    collate: Callable[[list[Any]], Any] | None
    batching: BySampler | None
    drop_last: bool
    note: str


def taken(loader: DataLoader, name: str = "data") -> TakenLoader:
    """What cannot be taken is refused by name."""
    kind = type(loader)
    for method in ("__iter__", "_get_iterator"):
        if getattr(kind, method) is not getattr(DataLoader, method):
            raise _refused(name, f"{kind.__name__} makes its batches in a way of its own ({method})")
    batches: Any = loader.batch_sampler
    if batches is None:
        raise _refused(name, "batch_size=None: its data set gives whole batches")
    if loader.worker_init_fn is not None and not _only_seeds(loader.worker_init_fn):
        raise _refused(
            name,
            "it has a worker_init_fn that does more than to seed",
            "generators are seeded for each sample, by seed=: do the rest of its work in the data set",
        )
    plain = type(batches) is BatchSampler
    drop_last = bool(batches.drop_last) if plain else False
    size = batches.batch_size if plain else getattr(batches, "batch_size", None) or len(next(iter(batches)))
    shuffle, batching, how = False, None, "in the order of the stream"
    if not isinstance(loader.dataset, IterableDataset):
        sampler = batches.sampler if plain else batches
        shuffle, asked, how = _order(sampler, len(loader.dataset) if plain else 0)  # type: ignore[arg-type]
        batching = BySampler(sampler, whole=not plain) if asked else None
    elif drop_last:
        raise _refused(name, "drop_last=True of a stream", "leave out its last samples in the stream itself")
    collate = None if loader.collate_fn is default_collate else loader.collate_fn
    said = [
        f"batches of {size}" if plain else f"batches as {type(batches).__name__} gives them",
        how,
        "without a short last batch" if drop_last else "",
        f"collate {_name(collate)}" if collate is not None else "",
        f"{loader.num_workers} workers" if loader.num_workers else "",
    ]
    taken_over = f"{name}: taken from the DataLoader: {', '.join(filter(None, said))}"
    note = f"{taken_over}; a batch is that of all devices, and seed= decides what is random"
    return TakenLoader(loader.dataset, size, shuffle, loader.num_workers or None, collate, batching, drop_last, note)


SEEDS = {"torch", "numpy", "np", "random", "initial_seed", "seed", "manual_seed", "get_worker_info", "utils", "data"}


def _only_seeds(function: Any) -> bool:
    """Whether it names nothing but generators and their seeds: meshfit seeds them for each sample."""
    code = getattr(function, "__code__", None)
    return code is not None and not code.co_freevars and set(code.co_names) <= SEEDS


def _order(sampler: Any, count: int) -> tuple[bool, bool, str]:
    """(shuffled, whether the sampler is asked, in words)."""
    if type(sampler) is SequentialSampler:
        return False, False, "in order"
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == count:
        return True, False, "shuffled"
    if type(sampler) is DistributedSampler:  # who takes which share is the plan's affair
        return sampler.shuffle, False, "shuffled" if sampler.shuffle else "in order"
    return False, True, f"as {type(sampler).__name__} orders them"


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def _refused(name: str, why: str, *more: str) -> DataError:
    return DataError(
        f"{name}= is a DataLoader that cannot be taken over: {why}",
        *(more or (f"give the data set: {name}=loader.dataset, batch_size= of all devices, collate=, shuffle=",)),
    )
