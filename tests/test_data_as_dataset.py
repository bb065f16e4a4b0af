"""Sources are torch Datasets: indexed, sliced, split, read by a DataLoader; parts of them are sources again."""

import sys
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, random_split

import meshfit
from meshfit.data.datasets import open_source
from meshfit.data.transform import crop, flip
from meshfit.errors import DataError
from tests.test_data_exact import IMAGES, LABELS, N, played

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def rows(folder: Path, most: int = 2**30, **how: Any) -> meshfit.data.Source:
    path = folder / "a.parquet"
    if not path.exists():
        table = {"x": np.arange(N, dtype=np.float32), "y": np.arange(N), "word": [f"w{i}" for i in range(N)]}
        pq.write_table(pa.table(table), path, row_group_size=10)
    return meshfit.data.parquet(path, cache=meshfit.data.Cache(folder / f"cache{most}", most), **how)


@pytest.mark.parametrize("most", [2**30, 10])
def test_a_source_is_indexed_sliced_and_iterated(tmp_path: Path, most: int):
    source = rows(tmp_path, most)
    assert isinstance(source, Dataset)
    assert {name: str(value) for name, value in source[3].items()} == {
        "x": "tensor(3.)",
        "y": "tensor(3)",
        "word": "w3",
    }
    assert source[-1]["word"] == source[np.int64(N - 1)]["word"] == f"w{N - 1}"
    with pytest.raises(IndexError, match=f"sample {N} of {N}"):
        source[N]
    part = source[10:40:3]
    assert (len(part), part[0]["word"], part[-1]["word"]) == (10, "w10", "w37")
    assert [sample["word"] for sample in source[[5, 2]]] == ["w5", "w2"]
    mask = np.arange(N) % 50 == 1
    assert [int(sample["y"]) for sample in source[mask]] == [1, 51, 101]
    assert part.name_of(1) == source.name_of(13)


def test_torch_reads_a_source(tmp_path: Path):
    source = rows(tmp_path, columns=("x", "y"))
    for workers in (0, 2):
        got = [y for _, ys in DataLoader(source, 16, num_workers=workers) for y in ys.tolist()]
        assert got == list(range(N))
    train, rest = random_split(source, [80, N - 80], torch.Generator().manual_seed(0))
    assert sorted(int(train[i][1]) for i in range(80)) == sorted(train.indices)
    assert len(list(DataLoader(rest, 10, shuffle=True))) == 3


def test_part_of_a_source_trains_as_a_source(tmp_path: Path):
    """Its random numbers follow the epoch: read as a plain Dataset they would be the same in each."""
    data = meshfit.data.memory((IMAGES, LABELS)).map(crop(8, padding=2), flip())
    ids = torch.randperm(N, generator=torch.Generator().manual_seed(1)).tolist()[:60]
    make = lambda: open_source(Subset(Subset(data, list(range(N))), ids))
    whole = played(make, [(1, 0, 999)])
    assert whole == played(lambda: data.take(ids), [(2, 0, 4), (3, 2, 999)])
    assert sorted(y for e, labels, _ in whole if e == 2 for y in labels) == sorted(ids)
    pictures = [b"".join(sorted(bytes_ for e, _, bytes_ in whole if e == epoch)) for epoch in (0, 1)]
    assert pictures[0] != pictures[1]
    with pytest.raises(meshfit.DataError, match=r"mixture\(\[a, b\]\)"):
        open_source(data + data)


def test_a_part_in_order_keeps_to_few_row_groups(tmp_path: Path):
    source = rows(tmp_path, most=10, columns=("x", "y"))
    part = source.split(0.5)[0]
    assert part.blocks is not None
    assert part.blocks[-1] == len(part)
    whole = played(lambda: rows(tmp_path, most=10, columns=("x", "y")).split(0.5)[0], [(1, 0, 999)], epochs=2)
    assert sorted(y for e, labels, _ in whole if e == 1 for y in labels) == sorted(part.ids.tolist())


def test_a_frame_is_refused_with_what_to_write() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"x": [1.0, 2.0], "y": [0, 1]})
    for data in (frame, {"x": frame.x}, (frame.to_numpy(), frame.y)):
        with pytest.raises(DataError, match=r"frame\[column\]\.to_numpy"):
            open_source(data)
    columns = {column: frame[column].to_numpy() for column in frame.columns}
    assert open_source(columns)[1]["y"] == 1
