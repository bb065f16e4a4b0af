"""Other loaders for benchmarks/loading.py, where they are installed: webdataset, grain, Mosaic's streaming.

Each takes (JPEG bytes, labels), as its own format wants them, shuffles, decodes with PIL and makes batches.
"""

import importlib.util
import io
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

Epoch = Callable[[int], Iterator[Any]]
SHARDS = 8


def peers(
    jpegs: list[bytes], labels: np.ndarray, decode: Callable[[bytes], Any], batch: int, at: Path
) -> dict[str, Any]:
    """Those that are installed, each with the workers it is best with on two cores: none, and two."""
    found: dict[str, Epoch] = {}
    for name, make in {"webdataset": tars, "grain": grained, "streaming": streamed}.items():
        if importlib.util.find_spec(name):
            for workers in (0, 2):
                found[f"{name} {workers} workers, PIL"] = make(jpegs, labels, decode, batch, at / name, workers)
    return found


def tars(jpegs: list[bytes], labels: np.ndarray, decode: Any, batch: int, at: Path, workers: int) -> Epoch:
    import webdataset

    if not at.exists():
        at.mkdir()
        for shard, ids in enumerate(np.array_split(np.arange(len(jpegs)), SHARDS)):
            with tarfile.open(at / f"{shard}.tar", "w") as tar:
                for i in ids.tolist():
                    for end, data in (("jpg", jpegs[i]), ("cls", str(int(labels[i])).encode())):
                        held = tarfile.TarInfo(f"{i:06d}.{end}")
                        held.size = len(data)
                        tar.addfile(held, io.BytesIO(data))
    urls = [str(at / f"{shard}.tar") for shard in range(SHARDS)]
    made = webdataset.WebDataset(urls, shardshuffle=SHARDS, empty_check=False).shuffle(5000)
    made = made.map(lambda sample: (decode(sample["jpg"]), int(sample["cls"]))).batched(batch)
    loader = webdataset.WebLoader(made, batch_size=None, num_workers=workers)
    return lambda epoch: iter(loader)


def grained(jpegs: list[bytes], labels: np.ndarray, decode: Any, batch: int, at: Path, workers: int) -> Epoch:
    import grain

    held = grain.MapDataset.source(list(zip(jpegs, labels.tolist(), strict=True))).shuffle(seed=0)  # type: ignore[arg-type]
    made = held.map(lambda sample: (decode(sample[0]).numpy(), np.int64(sample[1]))).batch(batch).to_iter_dataset()
    if workers:
        made = made.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
    return lambda epoch: ((torch.from_numpy(x), torch.from_numpy(y)) for x, y in made)


def streamed(jpegs: list[bytes], labels: np.ndarray, decode: Any, batch: int, at: Path, workers: int) -> Epoch:
    import streaming

    if not at.exists():
        with streaming.MDSWriter(out=str(at), columns={"x": "bytes", "y": "int"}) as writer:
            for data, label in zip(jpegs, labels.tolist(), strict=True):
                writer.write({"x": data, "y": label})

    class Decoded(streaming.StreamingDataset):
        def __getitem__(self, at: Any) -> Any:
            sample = super().__getitem__(at)
            return decode(sample["x"]), sample["y"]

    made = Decoded(local=str(at), shuffle=True, batch_size=batch)
    loader = streaming.StreamingDataLoader(made, batch_size=batch, num_workers=workers)
    return lambda epoch: iter(loader)
