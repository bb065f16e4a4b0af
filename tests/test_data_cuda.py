"""On a GPU: batches arrive whole, in time, and as they would on a CPU."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import meshfit
from meshfit.data import Source, tree
from meshfit.data.datasets import SampleStream
from meshfit.data.loader import Loader
from meshfit.data.transform import colour, crop, cutout, flip, normalise

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

N = 500
IMAGES = torch.from_numpy(np.random.default_rng(0).integers(0, 255, (N, 3, 16, 16), dtype=np.uint8))
LABELS = torch.arange(N)


def seen(source: Source | SampleStream, device: str, **asked: Any) -> list[Any]:
    made = Loader(source=source, batch_size=48, rank=0, ranks=1, device=torch.device(device), microbatches=2, **asked)
    found = []
    for epoch in range(2):
        for batch in made.epoch(epoch):
            for part in batch.microbatches:
                found += [t.clone() for t in tree.tensors(part.content)]
                torch.cuda._sleep(1_000_000)  # the device is behind: what arrives early must not be overwritten
    made.close()
    return [t.cpu() for t in found]


@pytest.mark.parametrize("workers", [0, 1, 4])
@pytest.mark.parametrize("where", ["host", "device"])
def test_a_gpu_gets_what_a_cpu_gets(workers: int, where: str):
    steps = (crop(16, padding=2), flip(), cutout(4), colour(0.3, 0.3, 0.3), normalise())
    memory = meshfit.data.memory((IMAGES, LABELS))
    source = memory.map(*steps) if where == "host" else memory.on_device(*steps)
    for mine, want in zip(seen(source, "cuda", workers=workers), seen(source, "cpu"), strict=True):
        # Colour rounds to uint8: where a float differs in its last bit, one step of 1/255 over the deviation.
        torch.testing.assert_close(mine, want, atol=1e-6 if where == "host" else 0.02, rtol=0)


def test_tokens_and_streams_arrive(tmp_path: Path):
    np.arange(60_000, dtype=np.uint16).tofile(tmp_path / "a.bin")
    tokens = meshfit.data.tokens(tmp_path / "a.bin", length=100)
    assert all(torch.equal(a, b) for a, b in zip(seen(tokens, "cuda"), seen(tokens, "cpu"), strict=True))
    stream = SampleStream(lambda: zip(IMAGES, LABELS, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(seen(stream, "cuda"), seen(stream, "cpu"), strict=True))


def test_processes_feed_a_gpu():
    source = meshfit.data.memory((IMAGES, LABELS)).map(crop(16, padding=2))
    got = seen(source, "cuda", workers=3, kind="processes")
    assert all(torch.equal(a, b) for a, b in zip(got, seen(source, "cpu"), strict=True))
