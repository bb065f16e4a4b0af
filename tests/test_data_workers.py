"""Who reads: threads and processes give the same bytes as nobody; who dies is named."""

import os
import random
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch

import meshfit
from meshfit.data import Source
from meshfit.data.loader import Loader
from meshfit.data.reading import Readers
from meshfit.data.source import BadSample
from meshfit.data.transform import crop, flip
from meshfit.data.tree import Ragged
from meshfit.errors import JobError
from meshfit.observe.reading import read

cloudpickle.register_pickle_by_value(sys.modules[__name__])

N = 60
IMAGES = torch.from_numpy(np.random.default_rng(0).integers(0, 255, (N, 3, 16, 16), dtype=np.uint8))


def slow(sample: Any) -> Any:
    """Holds the lock, and draws from everybody's generators."""
    image, label = sample
    end = time.perf_counter() + 0.0005
    while time.perf_counter() < end:
        pass
    return image.float() + torch.rand(()) + random.random(), label


def made() -> Source:
    return meshfit.data.memory((IMAGES, torch.arange(N))).map(crop(16, padding=2), flip()).map(slow, each=True)


def loader(source: Source, rank: int = 0, ranks: int = 1, **asked: Any) -> Loader:
    return Loader(
        source=source, batch_size=16, rank=rank, ranks=ranks, device=torch.device("cpu"), microbatches=2, **asked
    )


def contents(one: Loader, epoch: int, start: int = 0) -> list[torch.Tensor]:
    return [part.content[0] for batch in one.epoch(epoch, start) for part in batch.microbatches]


def test_processes_read_what_would_have_been_read_here():
    alone, ring = loader(made(), workers=0), loader(made(), workers=2)
    assert ring.reading.kind == "processes"
    assert "random generators" in str(ring.reading)
    for epoch in range(2):
        assert all(torch.equal(a, b) for a, b in zip(contents(alone, epoch), contents(ring, epoch), strict=True))
    batches = ring.epoch(0)
    next(batches)
    batches.close()  # in the middle: the answers on their way are not mistaken for the next epoch's
    assert all(torch.equal(a, b) for a, b in zip(contents(alone, 1, 1), contents(ring, 1, 1), strict=True))
    ring.close()


def test_a_worker_that_dies_is_named_with_its_samples():
    one = replace(loader(made(), workers=1, kind="processes"), batch_size=4)
    batches = one.epoch(0)  # of 15, of which 4 are on their way
    next(batches)
    process = one._ring.workers[0][0]
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(meshfit.DataError, match=rf"(?s)worker 0 \(process {process.pid}\) ended with code -9.*samples"):
        list(batches)
    one.close()


def broken(sample: Any) -> Any:
    if int(sample[1]) == 7:
        raise ValueError("seven")
    return Ragged([str(int(sample[1]))])[0], sample[1]


def test_what_a_worker_met_is_known_here():
    source = meshfit.data.memory((IMAGES, torch.arange(N))).map(broken, each=True)
    one = loader(source, workers=1, kind="processes")
    with pytest.raises(BadSample, match=r"(?s)broken failed on sample 7.*seven"):
        list(one.epoch(0))
    one.close()
    skipping = source.on_bad("skip")
    one = loader(skipping, workers=1, kind="processes", shuffle=False)
    words = [word for batch in one.epoch(0) for part in batch.microbatches for word in part.content[0]]
    assert words == [str(i if i != 7 else 8) for i in range(N)]
    assert list(skipping.bad) == [7]
    one.close()


def test_readers_are_chosen_by_what_the_work_is_like():
    quick = meshfit.data.memory((IMAGES, torch.arange(N)))
    assert loader(quick).reading.kind == "inline"
    assert loader(quick, workers=3).reading.kind == "threads"
    gentle = quick.map(lambda batch: time.sleep(0.02) or batch)  # lets go of the lock
    assert loader(gentle, workers=2).reading.kind == "threads"
    assert loader(quick.map(lambda sample: sample, each=True)).reading.kind == "inline"
    with pytest.raises(meshfit.DataError, match="threads cannot read this data"):
        list(loader(made(), workers=2, kind="threads").epoch(0))
    with pytest.raises(meshfit.DataError, match="'fibres'"):
        list(loader(quick, kind="fibres").epoch(0))


@pytest.mark.parametrize(
    ("asked", "workers", "kind"),
    [(None, None, None), (0, 0, None), (4, 4, None), ("processes", None, "processes"), ("3 threads", 3, "threads")],
)
def test_who_is_asked_to_read(asked: Any, workers: int | None, kind: str | None) -> None:
    assert Readers.of(asked) == Readers(workers, kind)


@pytest.mark.parametrize("asked", [-1, True, "four", "0 processes", "2 elephants"])
def test_readers_that_there_are_not(asked: Any) -> None:
    with pytest.raises(JobError, match="workers="):
        Readers.of(asked)


def test_fit_is_told_who_reads_and_tells_what_it_took(tmp_path: Path) -> None:
    data = meshfit.data.memory((torch.randn(64, 8), torch.randint(4, (64,)))).map(lambda batch: batch)
    results = [
        meshfit.fit(
            lambda: torch.nn.Linear(8, 4),
            data,
            loss=torch.nn.functional.cross_entropy,
            optimizer=torch.optim.SGD,
            batch_size=16,
            steps=6,
            workers=workers,
            out=tmp_path / "run",
        )
        for workers in (0, "2 threads")
    ]
    assert [step.loss for step in results[0].history] == [step.loss for step in results[1].history]
    assert not [note for note in results[0].notes if "read by" in note]
    assert [note for note in results[1].notes if "read by 2 threads (as asked)" in note]
    run = read(tmp_path / "run-2")
    assert run.fact("data_workers") == 2
    told = run.fact("data")
    assert told["batches"] == 6
    assert {"read", "transform", "waited"} <= told.keys()
