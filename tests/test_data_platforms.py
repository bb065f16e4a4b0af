"""Data sets of other libraries: Hugging Face's, Delta, Lance, MDS. Written by these libraries, read by index, in exact
order on any number of ranks; refused in words where the library or the files are not there."""

import ast
import json
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshfit
from meshfit.data import Source, delta, hf_dataset, lance, mds
from meshfit.data.datasets import Recipe, open_source
from tests.test_data_exact import N, played
from tests.test_data_sources import IDS, PICTURES, encoded

cloudpickle.register_pickle_by_value(sys.modules[__name__])
remote_module = sys.modules["meshfit.data.remote"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(meshfit.data.Cache, "usual", classmethod(lambda cls: cls(tmp_path / "cache")))


def exact(make: Any, count: int = N) -> None:
    """Each sample once an epoch; the same under other ranks, from a copy, and resumed."""
    whole = played(make, [(1, 0, 999)], epochs=2)
    assert sorted(y for e, labels, _ in whole if e == 1 for y in labels) == list(range(count))
    assert played(lambda: pickle.loads(cloudpickle.dumps(make())), [(3, 2, 4), (2, 0, 999)], epochs=2) == whole


# Hugging Face


def rows(count: int = N) -> dict[str, Any]:
    return {
        "image": [{"bytes": encoded(PICTURES[i % 37]), "path": None} for i in range(count)],
        "label": list(range(count)),
        "input_ids": [list(range(i % 4 + 1)) for i in range(count)],
        "mat": np.arange(count * 6, dtype=np.float32).reshape(count, 2, 3),
    }


@pytest.fixture(scope="module")
def data() -> Any:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "label": datasets.Value("int32"),
            "input_ids": datasets.Sequence(datasets.Value("int32")),
            "mat": datasets.Array2D((2, 3), "float32"),
        }
    )
    return datasets.Dataset.from_dict(rows(), features=features)


def check(source: Source) -> None:
    got = source.fetch(IDS)
    np.testing.assert_array_equal(got["image"].numpy(), PICTURES[IDS].transpose(0, 3, 1, 2))
    assert got["label"].tolist() == IDS.tolist()
    assert [x.tolist() for x in got["input_ids"]] == [list(range(i % 4 + 1)) for i in IDS]
    np.testing.assert_array_equal(got["mat"].numpy(), rows()["mat"][IDS])


def test_a_saved_hugging_face_data_set_is_read_without_the_library(
    data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    data.save_to_disk(str(tmp_path / "one"), num_shards=3)
    monkeypatch.setitem(sys.modules, "datasets", None)
    source = meshfit.data.open(tmp_path / "one")
    assert len(source) == N
    check(source)
    exact(lambda: hf_dataset(tmp_path / "one", columns=("image", "label")))
    (tmp_path / "one" / "data-00001-of-00003.arrow").unlink()
    with pytest.raises(meshfit.DataError, match=r"data-00001-of-00003\.arrow is missing"):
        hf_dataset(tmp_path / "one")


def test_splits_are_named(data: Any, tmp_path: Path):
    import datasets

    both = datasets.DatasetDict({"train": data, "test": data.select(range(5))})
    both.save_to_disk(str(tmp_path / "two"))
    for what in (tmp_path / "two", both):
        with pytest.raises(meshfit.DataError, match="holds several splits: train, test"):
            hf_dataset(what)
        with pytest.raises(meshfit.DataError, match=r"(?s)no split 'tran'.*train"):
            hf_dataset(what, split="tran")
        assert len(hf_dataset(what, split="test", columns="label")) == 5
    with pytest.raises(meshfit.DataError, match=r"data= holds several splits.*\n.*data\['train'\]"):
        open_source(both)


def test_a_hugging_face_data_set_itself(data: Any):
    check(hf_dataset(data))
    exact(lambda: hf_dataset(data, columns=("image", "label")))
    shuffled = data.shuffle(seed=3)
    assert hf_dataset(shuffled, columns="label").fetch(IDS).tolist() == [shuffled[int(i)]["label"] for i in IDS]
    gap = data.select(range(3)).add_column("maybe", [1, None, 3])
    with pytest.raises(meshfit.data.BadSample, match=r"row 1 of the Dataset .* has no value in column 'maybe'"):
        hf_dataset(gap, columns="maybe").fetch(np.arange(3))
    assert hf_dataset(gap, columns="maybe", fill=-1).fetch(np.arange(3)).tolist() == [1, -1, 3]
    datasets = pytest.importorskip("datasets")
    large = datasets.Dataset.from_dict({"id": np.array([1, 2**63], np.uint64)})
    with pytest.raises(meshfit.DataError, match=r"'id' of .* holds 9223372036854775808, above what int64 holds"):
        hf_dataset(large, columns="id").fetch(np.arange(2))
    plain = Recipe.of(data.select_columns(["label", "mat"])).source()  # as fit(data=...) takes it, by its own samples
    assert isinstance(plain, Source)
    assert plain.fetch(IDS)["label"].tolist() == IDS.tolist()
    torch.testing.assert_close(plain.fetch(IDS)["mat"], torch.from_numpy(rows()["mat"][IDS]), atol=0, rtol=0)
    assert plain.fingerprint != open_source(data.select_columns(["label", "mat"]).shuffle(seed=1)).fingerprint


def test_the_hub_out_of_reach_is_an_error_in_words(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(remote_module, "TRIES", 1)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.raises(meshfit.DataError, match=r"hf://datasets/u/n/\*\.parquet cannot be read"):
        meshfit.data.parquet("hf://datasets/u/n/*.parquet", storage={"endpoint": "http://127.0.0.1:9"})


# Delta


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    deltalake = pytest.importorskip("deltalake")
    ids = np.arange(N)
    table = pa.table({"x": ids * 0.5, "y": ids, "year": 2020 + ids % 3, "land": [f"l {i % 2}" for i in ids]})
    deltalake.write_deltalake(str(tmp_path / "lake"), table, partition_by=["year", "land"])
    return tmp_path / "lake"


def test_a_delta_table_is_read_as_of_a_version(lake: Path):
    import deltalake

    source = meshfit.data.open(lake)
    got = source.fetch(np.arange(N))
    assert sorted(got["y"].tolist()) == list(range(N))
    assert torch.equal(got["year"], 2020 + got["y"] % 3)
    assert got["land"] == [f"l {i % 2}" for i in got["y"].tolist()]
    assert torch.equal(got["x"], got["y"] * 0.5)
    exact(lambda: delta(lake, columns=("x", "y")))
    more = pa.table({"x": [1.0], "y": [N], "year": [2023], "land": ["l 0"], "z": [7]})
    deltalake.write_deltalake(str(lake), more, mode="append", schema_mode="merge")
    deltalake.DeltaTable(str(lake)).delete("y = 5")
    assert sorted(source.fetch(np.arange(N))["y"].tolist()) == list(range(N))  # what it was when it was opened
    assert sorted(delta(lake, version=0, columns="y").fetch(np.arange(N)).tolist()) == list(range(N))
    now = delta(lake, columns=("y", "z"), fill={"z": -1}, cache=meshfit.data.Cache(lake.parent / "small", 10))
    assert type(now).__name__ == "RowGroups"
    y, z = now.fetch(np.arange(len(now)))
    assert sorted(y.tolist()) == [i for i in range(N + 1) if i != 5]
    assert z[y == N].tolist() == [7]
    assert z[y != N].unique().tolist() == [-1]
    assert now.fingerprint != source.fingerprint
    with pytest.raises(meshfit.DataError, match="cannot be read as a Delta table"):
        delta(lake, version=99)


# Lance


def test_a_lance_data_set_is_read_as_of_a_version(tmp_path: Path):
    library = pytest.importorskip("lance")
    ids = np.arange(N)
    table = pa.table(
        {"x": ids * 0.5, "y": ids, "s": pa.array([{"a": int(i)} for i in ids]), "w": [f"w{i}" for i in ids]}
    )
    library.write_dataset(table, str(tmp_path / "t.lance"), max_rows_per_file=20)
    source = meshfit.data.open(tmp_path / "t.lance", columns=("x", "s.a", "w"))
    x, a, words = source.fetch(IDS)
    assert (x.tolist(), a.tolist(), words) == ((IDS * 0.5).tolist(), IDS.tolist(), [f"w{i}" for i in IDS])
    exact(lambda: lance(tmp_path / "t.lance", columns=("x", "y")))
    held = library.dataset(str(tmp_path / "t.lance"))
    held.delete("y = 3")
    assert pickle.loads(cloudpickle.dumps(source)).fetch(IDS)[1].tolist() == IDS.tolist()  # in another process too
    now = lance(tmp_path / "t.lance", columns="y")
    assert len(now) == N - 1
    assert now.fetch(np.array([3])).tolist() == [4]
    assert lance(tmp_path / "t.lance", version=1, columns="y").fetch(np.array([3])).tolist() == [3]
    with pytest.raises(meshfit.DataError, match="cannot be read as a Lance data set"):
        lance(tmp_path / "none.lance")


# MDS: tests/mds was written by mosaicml-streaming 0.13, which NumPy keeps out of this environment

MDS = Path(__file__).parent / "mds"


@pytest.mark.parametrize("kind", ["plain", "zstd"])
def test_mds_shards_are_read_by_index(kind: str):
    source = meshfit.data.open(MDS / kind)
    assert len(source) == 12
    ids = np.array([11, 0, 3, 3, 4])
    got = source.fetch(ids)
    for name in ("n", "small", "si"):
        assert got[name].tolist() == ids.tolist()
        assert got[name].dtype == torch.int64
    assert got["f"].tolist() == (ids / 2).tolist()
    assert got["word"] == [f"w{i}" * (i % 3 + 1) for i in ids]
    assert [bytes(b) for b in got["b"]] == [bytes([i]) * (i % 2 + 1) for i in ids]
    assert got["j"]["k"].tolist() == ids.tolist()
    assert got["fixed"].tolist() == [[[i, i], [i, i]] for i in ids]
    assert [x.tolist() for x in got["typed"]] == [[i] * (i % 3 + 1) for i in ids]
    assert [tuple(x.shape) for x in got["free"]] == [(1, 2), (300, 1), (1, 2), (1, 2), (1, 2)]
    for name, more in (("image", 0), ("raw", 1)):
        assert got[name].shape == (5, 3, 2, 3)
        assert got[name][:, 0, 0, 0].tolist() == (ids + more).tolist()
    exact(lambda: mds(MDS / kind, columns=("fixed", "n")), 12)
    assert source.name_of(7) == f"sample 2 of {MDS / kind}/shard.00002.mds"


def test_mds_that_cannot_be_read_is_refused_in_words(tmp_path: Path):
    with pytest.raises(meshfit.DataError, match=r"'p' of .* is pickled.* reading it would run code"):
        mds(MDS / "pkl")
    assert mds(MDS / "pkl", columns="n").fetch(np.array([0])).tolist() == [1]
    shutil.copytree(MDS / "plain", tmp_path / "a")
    shard = tmp_path / "a" / "shard.00001.mds"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-9])
    with pytest.raises(meshfit.DataError, match=r"shard\.00001\.mds has \d+ bytes, not \d+ as its index says"):
        mds(tmp_path / "a")
    shard.unlink()
    with pytest.raises(meshfit.DataError, match=r"shard\.00001\.mds is missing"):
        mds(tmp_path / "a")
    with pytest.raises(meshfit.DataError, match=r"(?s)several data sets.*plain.*zstd"):
        mds(MDS)
    index = json.loads((MDS / "plain" / "index.json").read_text())
    index["shards"][2]["column_names"][0] = "other"
    shard.write_bytes(whole)
    (tmp_path / "a" / "index.json").write_text(json.dumps(index))
    with pytest.raises(meshfit.DataError, match=r"a shard of .* is mds 2 of other"):
        mds(tmp_path / "a")


@pytest.mark.parametrize(("function", "module"), [(delta, "deltalake"), (lance, "lance")])
def test_a_library_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, function: Any, module: str, tmp_path: Path
):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(meshfit.DataError, match=rf'(?s)needs {module}.*pip install "meshfit\[(delta|lance)\]"'):
        function(tmp_path)


def test_none_of_them_is_imported_with_meshfit():
    optional = {"datasets", "deltalake", "lance", "pandas", "pyarrow", "huggingface_hub", "fsspec", "obstore"}
    for file in Path(meshfit.data.__file__).parent.glob("*.py"):
        found = [each for each in ast.parse(file.read_text()).body if isinstance(each, ast.Import | ast.ImportFrom)]
        names = {n.name for each in found if isinstance(each, ast.Import) for n in each.names}
        names |= {each.module or "" for each in found if isinstance(each, ast.ImportFrom)}
        assert not optional & {name.partition(".")[0] for name in names}, file


@pytest.mark.parametrize("kind", ["hf", "lance"])
def test_ranks_train_from_them_as_from_memory(data: Any, tmp_path: Path, kind: str):
    """The libraries' threads are of the process that opened the data; each rank opens it anew."""
    if kind == "hf":
        source = hf_dataset(data, columns=("mat", "mat"))
    else:
        library = pytest.importorskip("lance")
        flat = pa.FixedSizeListArray.from_arrays(pa.array(rows()["mat"].reshape(-1)), 6)
        library.write_dataset(pa.table({"mat": flat}), str(tmp_path / "t.lance"))
        source = lance(tmp_path / "t.lance", columns=("mat", "mat"))
    losses = []
    for each in (source, (torch.from_numpy(rows()["mat"]), torch.from_numpy(rows()["mat"]))):
        result = meshfit.fit(
            lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 6)),
            each,
            loss=lambda out, y: F.mse_loss(out, y.flatten(1) / 1000),
            optimizer=lambda p: torch.optim.SGD(p, lr=1e-6),
            batch_size=16,
            epochs=1,
            plan="data=2",
            devices="cpu",
        )
        losses.append([step.loss for step in result.history])
    assert losses[0] == losses[1]
