"""Every format on disk: the samples that were written, by index, in any order; clear words where they are not."""

import gzip
import io
import json
import pickle
import struct
import sys
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

import meshfit
from meshfit.data import Source
from meshfit.data.draw import Key
from meshfit.data.tree import Ragged, stack

cloudpickle.register_pickle_by_value(sys.modules[__name__])

N = 37
RNG = np.random.default_rng(0)
X = RNG.standard_normal((N, 5)).astype(np.float32)
Y = RNG.integers(0, 3, N)
PICTURES = RNG.integers(0, 255, (N, 12, 16, 3), dtype=np.uint8)
IDS = np.array([30, 2, 2, 36, 0])


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(meshfit.data.Cache, "usual", classmethod(lambda cls: cls(tmp_path / "cache")))


def encoded(picture: np.ndarray, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.fromarray(picture).save(out, kind)
    return out.getvalue()


def table(**more: Any) -> pa.Table:
    return pa.table({**{f"x{k}": X[:, k] for k in range(5)}, "y": Y, **more})


def same(source: Source, x: Any = X, y: Any = Y) -> None:
    """Length, batches by index, and a pickled copy's batches are as written; memory is the batch's own."""
    assert len(source) == len(x)
    for one in (source, pickle.loads(cloudpickle.dumps(source))):
        got_x, got_y = one.fetch(IDS)
        np.testing.assert_array_equal(got_x.numpy(), x[IDS])
        np.testing.assert_array_equal(got_y.numpy(), y[IDS])
        got_x.zero_()
        np.testing.assert_array_equal(one.fetch(IDS)[0].numpy(), x[IDS])


COLUMNS = (["x0", "x1", "x2", "x3", "x4"], "y")


def test_parquet_arrow_csv_and_json_lines_give_the_same_rows(tmp_path: Path):
    pq.write_table(table(), tmp_path / "a.parquet", row_group_size=10)
    pyarrow.feather.write_feather(table(), str(tmp_path / "a.feather"))
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as out, pa.ipc.new_stream(out, table().schema) as writer:
        writer.write_table(table(), max_chunksize=7)
    pyarrow.csv.write_csv(table(), tmp_path / "a.csv")
    rows = "\n".join(json.dumps(row) for row in table().to_pylist())
    (tmp_path / "a.jsonl").write_text(rows)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    for name in ("a.parquet", "a.feather", "a.arrow", "a.csv", "a.jsonl", "b.jsonl.gz"):
        same(meshfit.data.open(tmp_path / name, columns=COLUMNS))
    held = meshfit.data.parquet(tmp_path / "a.parquet").fetch(IDS)
    assert set(held) == {"x0", "x1", "x2", "x3", "x4", "y"}
    renamed = meshfit.data.parquet(tmp_path / "a.parquet", columns={"labels": "y"}).fetch(IDS)
    np.testing.assert_array_equal(renamed["labels"].numpy(), Y[IDS])


def test_many_files_are_one_source_in_order_of_their_names(tmp_path: Path):
    for i, start in enumerate(range(0, N, 10)):
        pq.write_table(table().slice(start, 10), tmp_path / f"part-{i}.parquet")
    for url in (tmp_path, f"{tmp_path}/*.parquet", [tmp_path / f"part-{i}.parquet" for i in range(4)]):
        source = meshfit.data.parquet(url, columns=COLUMNS)
        same(source)
    assert source.name_of(13) == f"row 3 of {tmp_path}/part-1.parquet"


def test_lists_words_and_images_in_tables(tmp_path: Path):
    lists = [list(range(k % 4)) for k in range(N)]
    held = table(
        fixed=pa.FixedSizeListArray.from_arrays(pa.array(X.reshape(-1)), 5),
        lists=pa.array(lists),
        words=[f"word {k}" for k in range(N)],
        image=[encoded(p) for p in PICTURES],
        hub=pa.array([{"bytes": encoded(p), "path": None} for p in PICTURES]),
        flag=Y > 0,
    )
    pq.write_table(held, tmp_path / "a.parquet", row_group_size=8)
    got = meshfit.data.parquet(tmp_path / "a.parquet").fetch(IDS)
    np.testing.assert_array_equal(got["fixed"].numpy(), X[IDS])
    assert [t.tolist() for t in got["lists"]] == [lists[i] for i in IDS]
    assert got["words"] == [f"word {i}" for i in IDS]
    np.testing.assert_array_equal(got["image"].numpy(), PICTURES[IDS].transpose(0, 3, 1, 2))
    assert torch.equal(got["hub"], got["image"])
    assert got["flag"].dtype == torch.bool
    raw = meshfit.data.parquet(tmp_path / "a.parquet", columns="image", decode=False).fetch(IDS)
    assert isinstance(raw, Ragged)
    assert bytes(raw[0]) == encoded(PICTURES[30])


def test_parquet_larger_than_the_cache_is_read_by_row_groups(tmp_path: Path):
    held = table(image=[encoded(p) for p in PICTURES])
    pq.write_table(held, tmp_path / "a.parquet", row_group_size=4)
    small = meshfit.data.Cache(tmp_path / "small", most=1000)
    source = meshfit.data.parquet(tmp_path / "a.parquet", columns=COLUMNS, cache=small)
    assert type(source).__name__ == "RowGroups"
    assert source.blocks is not None
    same(source)
    images = meshfit.data.parquet(tmp_path / "a.parquet", columns=("image", "y"), cache=small)
    same(images, PICTURES.transpose(0, 3, 1, 2))
    assert images.name_of(9).startswith("row 9 of")


def test_a_changed_file_is_read_anew(tmp_path: Path):
    pyarrow.csv.write_csv(table(), tmp_path / "a.csv")
    first = meshfit.data.csv(tmp_path / "a.csv", columns=COLUMNS)
    same(first)
    pyarrow.csv.write_csv(table().slice(0, 20), tmp_path / "a.csv")
    again = meshfit.data.csv(tmp_path / "a.csv", columns=COLUMNS)
    assert len(again) == 20
    assert again.fingerprint != first.fingerprint


def test_numpy_files_are_mapped(tmp_path: Path):
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "y.npy", Y)
    np.savez(tmp_path / "both.npz", x=X, y=Y)
    X.tofile(tmp_path / "x.raw")
    same(meshfit.data.arrays(tmp_path / "x.npy", tmp_path / "y.npy"))
    got = meshfit.data.arrays({"x": tmp_path / "x.npy", "y": tmp_path / "y.npy"}).fetch(IDS)
    np.testing.assert_array_equal(got["x"].numpy(), X[IDS])
    np.testing.assert_array_equal(meshfit.data.open(tmp_path / "both.npz").fetch(IDS)["y"].numpy(), Y[IDS])
    raw = meshfit.data.arrays(tmp_path / "x.raw", dtype="float32", shape=(5,)).fetch(IDS)
    np.testing.assert_array_equal(raw.numpy(), X[IDS])
    assert len(pickle.dumps(meshfit.data.arrays(tmp_path / "x.npy"))) < 1000


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_tokens_are_rows_of_inputs_and_targets(tmp_path: Path, dtype: str):
    words = RNG.integers(0, 2**16, 1000).astype(dtype)
    words.tofile(tmp_path / "train.bin")
    words[:250].tofile(tmp_path / "train2.bin")
    source = meshfit.data.tokens(tmp_path / "train.bin", length=16, dtype=dtype)
    assert len(source) == 999 // 16
    x, y = source.fetch(np.array([5, 0]))
    np.testing.assert_array_equal(x[0].numpy(), words[80:96])
    np.testing.assert_array_equal(y[0].numpy(), words[81:97])
    assert x.dtype == torch.int64
    narrow = source.read(np.array([5, 0]), Key())
    assert narrow.element_size() == np.dtype(dtype).itemsize  # what travels to the device
    both = meshfit.data.tokens(tmp_path, length=16, dtype=dtype)
    assert len(both) == 62 + 15
    np.testing.assert_array_equal(both.fetch(np.array([63, 1]))[0][0].numpy(), words[16:32])
    assert "tokens 16 to 32" in both.name_of(63)
    whole = meshfit.data.tokens(tmp_path / "train.bin", length=16, dtype=dtype, whole=True)
    assert whole.fetch(np.array([0])).shape == (1, 17)


def test_text_is_tokenised_once_and_packed(tmp_path: Path):
    words = "Before we proceed any further, hear me speak. " * 30
    (tmp_path / "a.txt").write_text(words)
    x, y = meshfit.data.open(tmp_path / "a.txt", length=20).fetch(np.array([2]))
    assert bytes(x[0].tolist()).decode() == words[40:60]
    assert bytes(y[0].tolist()).decode() == words[41:61]
    signs = meshfit.data.vocabulary(tmp_path / "a.txt")
    x, _ = meshfit.data.text(tmp_path / "a.txt", length=20, tokenizer="characters").fetch(np.array([2]))
    assert "".join(signs[i] for i in x[0]) == words[40:60]
    calls: list[str] = []

    def split(text: str) -> list[int]:
        calls.append(text)
        return [len(word) for word in text.split()]

    for _ in range(2):
        x, _ = meshfit.data.text(tmp_path / "a.txt", length=4, tokenizer=split, end=99).fetch(np.array([0]))
    assert x.tolist() == [[6, 2, 7, 3]]
    assert sum(text == words for text in calls) == 1  # the rest: what it is like, to know it again


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_folders_of_images_by_class(tmp_path: Path, kind: str):
    for i, picture in enumerate(PICTURES):
        place = tmp_path / "train" / ["cat", "dog", "emu"][Y[i]]
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{i:02}.{kind.lower()}").write_bytes(encoded(picture, kind))
    source = meshfit.data.open(tmp_path / "train")
    order = np.argsort(Y, kind="stable")
    want = [np.asarray(Image.open(io.BytesIO(encoded(p, kind)))).transpose(2, 0, 1) for p in PICTURES[order]]
    same(source, np.stack(want), Y[order])
    assert source.classes == ["cat", "dog", "emu"]
    assert source.name_of(0).endswith(f"cat/{order[0]:02}.{kind.lower()}")


def cifar_files(folder: Path, python: bool) -> tuple[np.ndarray, np.ndarray]:
    images = RNG.integers(0, 255, (6, 4, 3, 32, 32), dtype=np.uint8)
    labels = RNG.integers(0, 10, (6, 4))
    folder.mkdir()
    for i, name in enumerate([*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]):
        if python:
            held = {b"data": images[i].reshape(4, -1), b"labels": labels[i].tolist()}
            (folder / name).write_bytes(pickle.dumps(held, protocol=2))
        else:
            rows = np.concatenate([labels[i][:, None].astype(np.uint8), images[i].reshape(4, -1)], 1)
            (folder / f"{name}.bin").write_bytes(rows.tobytes())
    return images, labels


@pytest.mark.parametrize("python", [True, False])
def test_cifar_in_its_own_formats(tmp_path: Path, python: bool):
    images, labels = cifar_files(tmp_path / "cifar", python)
    x, y = meshfit.data.open(tmp_path / "cifar").fetch(np.array([5, 19]))
    np.testing.assert_array_equal(x.numpy(), images[:5].reshape(-1, 3, 32, 32)[[5, 19]])
    np.testing.assert_array_equal(y.numpy(), labels[:5].reshape(-1)[[5, 19]])
    assert len(meshfit.data.cifar(tmp_path / "cifar", train=False)) == 4


def test_a_cifar_file_that_would_run_code_is_refused(tmp_path: Path):
    cifar_files(tmp_path / "cifar", python=True)

    class Bomb:
        def __reduce__(self):
            return print, ("run",)

    (tmp_path / "cifar" / "data_batch_3").write_bytes(pickle.dumps({b"data": Bomb()}))
    with pytest.raises(meshfit.DataError, match="data_batch_3"):
        meshfit.data.cifar(tmp_path / "cifar")


@pytest.mark.parametrize("zipped", [True, False])
def test_mnist_in_its_own_format(tmp_path: Path, zipped: bool):
    images = RNG.integers(0, 255, (9, 28, 28), dtype=np.uint8)
    labels = np.arange(9, dtype=np.uint8)
    for name, array in {"train-images-idx3-ubyte": images, "train-labels-idx1-ubyte": labels}.items():
        head = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
        data = head + array.tobytes()
        (tmp_path / (name + (".gz" if zipped else ""))).write_bytes(gzip.compress(data) if zipped else data)
    x, y = meshfit.data.open(tmp_path).fetch(np.array([3, 1]))
    np.testing.assert_array_equal(x.numpy(), images[[3, 1], None])
    assert y.tolist() == [3, 1]


def write_tars(folder: Path, kind: str = "PNG") -> None:
    for shard, start in enumerate(range(0, N, 15)):
        with tarfile.open(folder / f"shard-{shard}.tar", "w") as tar:
            for i in range(start, min(start + 15, N)):
                parts = {"img.png": encoded(PICTURES[i], kind), "cls": str(Y[i]).encode(), "json": b'{"k": %d}' % i}
                for ending, data in parts.items():
                    info = tarfile.TarInfo(f"{i:04}.{ending}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))


def test_webdataset_tars_are_read_by_index(tmp_path: Path):
    write_tars(tmp_path)
    source = meshfit.data.open(tmp_path, columns=("img.png", "cls"))
    same(source, PICTURES.transpose(0, 3, 1, 2))
    assert source.name_of(16) == f"0016 in {tmp_path}/shard-1.tar"
    assert meshfit.data.tars(tmp_path, columns="json").fetch(IDS)["k"].tolist() == IDS.tolist()


def test_a_path_is_data(tmp_path: Path):
    np.save(tmp_path / "x.npy", X)
    losses = []
    for data in (X, str(tmp_path / "x.npy"), tmp_path / "x.npy"):
        result = meshfit.fit(
            lambda: nn.Linear(5, 5),
            data,
            loss=F.mse_loss,
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
            batch_size=8,
            epochs=2,
            plan="data=2",
            devices="cpu",
        )
        losses.append([step.loss for step in result.history])
    assert losses[0] == losses[1] == losses[2]


def _broken(folder: Path) -> dict[str, tuple[Any, str]]:
    (folder / "bad.parquet").write_bytes(b"PAR1 nothing")
    (folder / "bad.jsonl").write_text('{"x": 1}\n{"x": \n')
    (folder / "list.jsonl").write_text("[1, 2]\n")
    (folder / "odd.bin").write_bytes(b"123")
    (folder / "short.npy").write_bytes((folder / "x.npy").read_bytes()[:200])
    (folder / "nulls.jsonl").write_text('{"x": 1}\n{"x": null}\n')
    (folder / "mixed").mkdir()
    (folder / "mixed" / "a.csv").write_text("a\n1\n")
    (folder / "mixed" / "b.npy").write_bytes(b"")
    (folder / "flat").mkdir()
    (folder / "flat" / "a.png").write_bytes(encoded(PICTURES[0]))
    (folder / "bad.tar").write_bytes(b"x" * 2000)
    data = meshfit.data
    return {
        "missing": (
            lambda: data.open(folder / "train.csv"),
            r"train\.csv' is a path, but there is nothing there.*holds",
        ),
        "parquet": (lambda: data.open(folder / "bad.parquet").few(), r"bad\.parquet"),
        "json": (lambda: data.open(folder / "bad.jsonl").few(), r"line 2 of .*bad\.jsonl is not JSON"),
        "object": (lambda: data.open(folder / "list.jsonl").few(), r"line 1 of .* is no object"),
        "nulls": (lambda: data.open(folder / "nulls.jsonl").few(), r"'x' has no value in row 1 of .*nulls\.jsonl"),
        "column": (lambda: data.open(folder / "mixed" / "a.csv", columns="b").few(), "no column 'b'.*known: a"),
        "tokens": (lambda: data.open(folder / "odd.bin", length=4), "3 bytes do not divide by 2"),
        "long rows": (lambda: data.tokens(folder / "x.npy", length=4000), "no file holds a row"),
        "no length": (lambda: data.open(folder / "odd.bin"), "length"),
        "cut": (lambda: data.open(folder / "short.npy"), "cut short"),
        "mixed": (lambda: data.open(folder / "mixed"), "arrays and csv"),
        "no class": (lambda: data.folder(folder / "flat"), "is in no class"),
        "tar": (lambda: data.open(folder / "bad.tar"), r"bad\.tar is no tar"),
        "cifar": (lambda: data.cifar(folder / "flat"), "does not hold data_batch_1.*it holds a.png"),
        "option": (lambda: data.open(folder / "x.npy", colour="red"), "colour"),
        "database": (lambda: data.open("postgresql://u:pw@h/d"), "is a database"),
        "unknown": (lambda: data.open(folder / "x.npy.xyz"), "there is nothing there"),
    }


def test_what_cannot_be_read_is_refused_in_words(tmp_path: Path):
    np.save(tmp_path / "x.npy", X)
    for case, (act, words) in _broken(tmp_path).items():
        with pytest.raises(meshfit.DataError, match=f"(?s){words}") as caught:
            act()
        assert "pw" not in str(caught.value), case


def test_parts_of_a_source():
    source = meshfit.data.memory((X, Y))
    train, rest = source.split(0.8)
    assert (len(train), len(rest)) == (30, 7)
    assert not set(train.ids.tolist()) & set(rest.ids.tolist())
    np.testing.assert_array_equal(source.take(slice(10, 20)).fetch(np.array([3]))[0].numpy(), X[[13]])
    assert source.take(slice(10, 20)).name_of(3) == "sample 13"


def jsonl(path: Path, *rows: Any) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "row groups"])
def test_files_of_different_columns_are_refused(tmp_path: Path, kind: str):
    """They were joined wrongly: rows of the first file got the labels of the second."""
    first, second = {"x": [0.0, 1.0]}, {"x": [2.0, 3.0], "label": [7, 8]}
    ending = "jsonl" if kind == "jsonl" else "parquet"
    for one, other in ((first, second), (second, first)):
        for name, columns in (("0", one), ("1", other)):
            path = tmp_path / f"{name}.{ending}"
            rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
            jsonl(path, *rows) if kind == "jsonl" else pq.write_table(pa.table(columns), path)
        how: dict[str, Any] = {"cache": meshfit.data.Cache(tmp_path / "small", 1)} if kind == "row groups" else {}
        with pytest.raises(meshfit.DataError, match=r"1\.\w+ differs in its columns from .*0\.\w+\n.*'label'"):
            len(getattr(meshfit.data, ending)(tmp_path / f"*.{ending}", **how))
        source = getattr(meshfit.data, ending)(tmp_path / f"*.{ending}", columns="x", **how)  # what both have
        assert sorted(source.fetch(np.arange(4)).tolist()) == [0, 1, 2, 3]


def test_lines_of_different_keys_are_refused(tmp_path: Path):
    jsonl(tmp_path / "a.jsonl", {"x": 1}, {"x": 2, "label": 3})
    with pytest.raises(meshfit.DataError, match=r"line 2 of .*a\.jsonl has 'label', which line 1 lacks"):
        len(meshfit.data.jsonl(tmp_path / "a.jsonl"))
    assert meshfit.data.jsonl(tmp_path / "a.jsonl", columns="x").fetch(np.arange(2)).tolist() == [1, 2]
    jsonl(tmp_path / "b.jsonl", {"x": 1.0, "y": 2}, {"x": 2.0})
    with pytest.raises(meshfit.DataError, match=r"line 2 of .*b\.jsonl lacks 'y', which line 1 has"):
        len(meshfit.data.jsonl(tmp_path / "b.jsonl"))


def test_columns_are_matched_by_name_and_types_by_value(tmp_path: Path):
    pq.write_table(pa.table({"x": pa.array([1, 2], pa.int32()), "y": [0.5, 1.5]}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"y": pa.array([2.5], pa.float32()), "x": [2**40]}), tmp_path / "1.parquet")
    got = meshfit.data.parquet(tmp_path / "?.parquet").fetch(np.arange(3))
    assert got["x"].tolist() == [1, 2, 2**40]
    assert got["y"].tolist() == [0.5, 1.5, 2.5]
    pq.write_table(pa.table({"x": [0.5], "y": [3.5]}), tmp_path / "2.parquet")  # 2**40 and 0.5 are both doubles
    assert meshfit.data.parquet(tmp_path / "?.parquet").fetch(np.arange(4))["x"].tolist() == [1, 2, 2**40, 0.5]
    pq.write_table(pa.table({"x": [2**60 + 1], "y": [4.5]}), tmp_path / "3.parquet")  # this is none
    with pytest.raises(meshfit.DataError, match=r"'x' of .*3\.parquet is int64 numbers\n.*0\.parquet it is float64"):
        len(meshfit.data.parquet(tmp_path / "?.parquet"))


def test_whole_numbers_above_int64_are_refused(tmp_path: Path):
    pq.write_table(pa.table({"id": pa.array([1, 2**63 + 5], pa.uint64())}), tmp_path / "a.parquet")
    with pytest.raises(meshfit.DataError, match=r"'id' of .*a\.parquet holds 9223372036854775813"):
        len(meshfit.data.parquet(tmp_path / "a.parquet"))
    np.save(tmp_path / "a.npy", np.array([1, 2**63 + 5], np.uint64))
    kept = meshfit.data.arrays(tmp_path / "a.npy").fetch(np.array([1]))
    assert kept.dtype == torch.uint64
    assert kept.tolist() == [2**63 + 5]
    assert meshfit.data.memory(np.array([1, 2**63 + 5], np.uint64)).fetch(np.array([1, 0])).tolist() == [2**63 + 5, 1]


def test_rows_that_cannot_be_converted_are_skipped_and_listed(tmp_path: Path):
    """on_bad="skip" did nothing where a table was converted."""
    rows = [{"x": float(i), "y": i if i != 3 else None} for i in range(200)]
    jsonl(tmp_path / "a.jsonl", *rows[:100], {"x": 100.0}, *rows[101:])
    (tmp_path / "b.csv").write_text("x,y\n" + "".join(f"{i},{i}\n" if i != 5 else "5,5,5\n" for i in range(200)))
    for source, count in ((meshfit.data.jsonl(tmp_path / "a.jsonl", on_bad="skip"), 198),
                          (meshfit.data.csv(tmp_path / "b.csv").on_bad("skip"), 199)):  # fmt: skip
        assert len(source) == count
        got = source.fetch(np.arange(count))
        assert got["x"].tolist() == got["y"].tolist()
        assert len(source.left_out) == 200 - count
    assert "line 101 of" in meshfit.data.jsonl(tmp_path / "a.jsonl", on_bad="skip").left_out[0]
    with pytest.raises(meshfit.DataError, match="2 of 200 samples are bad; on_bad='skip' allows 1"):
        len(meshfit.data.jsonl(tmp_path / "a.jsonl").on_bad("skip", most=0.001))
    with pytest.raises(meshfit.DataError, match="line 101"):
        len(meshfit.data.jsonl(tmp_path / "a.jsonl"))


def test_rows_of_groups_without_a_value_are_skipped_too(tmp_path: Path):
    rows = {"x": np.arange(400.0), "y": [None if i == 30 else i for i in range(400)]}
    pq.write_table(pa.table(rows), tmp_path / "a.parquet", row_group_size=40)
    how: dict[str, Any] = {"columns": ("x", "y"), "cache": meshfit.data.Cache(tmp_path / "small", 1)}
    with pytest.raises(meshfit.DataError, match=r"row 30 of .*a\.parquet has no value in column 'y'"):
        meshfit.data.parquet(tmp_path / "a.parquet", **how).fetch(np.arange(29, 33))
    x, y = meshfit.data.parquet(tmp_path / "a.parquet", on_bad="skip", **how).fetch(np.array([31, 30, 29, 39, 40]))
    assert x.tolist() == y.tolist() == [31, 31, 29, 39, 40]  # the next stands in


def test_times_are_microseconds_and_nested_columns_are_named(tmp_path: Path):
    columns = {
        "time": pa.array([1_000, 2_000_000], pa.time64("ns")),
        "clock": pa.array([1, 2], pa.time32("s")),
        "when": pa.array([5_000, 6_000], pa.timestamp("ns")),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    got = meshfit.data.parquet(tmp_path / "a.parquet").fetch(np.arange(2))
    assert {name: value.tolist() for name, value in got.items()} == {
        "time": [1, 2000],
        "clock": [1_000_000, 2_000_000],
        "when": [5, 6],
    }
    refused = {
        "timestamp[ns]": pa.array([5_001], pa.timestamp("ns")),
        "time64[ns]": pa.array([7], pa.time64("ns")),
        "struct<a: int64>": pa.array([{"a": 1}]),
        "map<string, int64": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())),
        "list<element: list<element: int64>>": pa.array([[[1], [1, 2]]]),
    }
    for kind, array in refused.items():
        pq.write_table(pa.table({"ok": [1], "c": array}), tmp_path / "b.parquet")
        with pytest.raises(meshfit.DataError) as error:
            len(meshfit.data.parquet(tmp_path / "b.parquet", columns="c"))
        assert f"column 'c' of {tmp_path}/b.parquet is {kind}" in str(error.value)
    pq.write_table(pa.table({"c": pa.array([[[1, 2], [3, 4], [5, 6]]] * 2)}), tmp_path / "c.parquet")
    whole = meshfit.data.parquet(tmp_path / "c.parquet", columns="c").fetch(np.arange(2))  # of one shape
    assert whole.tolist() == [[[1, 2], [3, 4], [5, 6]]] * 2


def test_corrupt_parquet_pages_name_the_file(tmp_path: Path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": RNG.standard_normal(5000), "s": [str(i) for i in range(5000)]}), path)
    whole = path.read_bytes()
    for at in range(8, len(whole) - 1000, 9000):
        path.write_bytes(whole[:at] + b"\xff" * 200 + whole[at + 200 :])
        try:
            len(meshfit.data.parquet(path))
        except meshfit.DataError as error:
            assert "a.parquet" in str(error)  # noqa: PT017


@pytest.mark.parametrize("sign", [";", "\t", "|"])
def test_csv_of_another_delimiter_is_no_single_column(tmp_path: Path, sign: str):
    (tmp_path / "a.csv").write_text(f"x{sign}y\n1{sign}2\n3{sign}4\n")
    with pytest.raises(meshfit.DataError, match=r"delimiter="):
        len(meshfit.data.csv(tmp_path / "a.csv"))
    got = meshfit.data.open(tmp_path / "a.csv", delimiter=sign).fetch(np.arange(2))
    assert {name: value.tolist() for name, value in got.items()} == {"x": [1, 3], "y": [2, 4]}
    (tmp_path / "one.csv").write_text("x\n1\n")
    assert meshfit.data.csv(tmp_path / "one.csv", columns="x").fetch(np.array([0])).tolist() == [1]


def test_a_tar_that_is_cut_short_is_told_wherever_it_is_cut(tmp_path: Path):
    """It opened with fewer samples, without a word, where the cut was between two of them."""
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        for i in range(20):
            for ending, content in (("cls", b"%d" % i), ("bin", bytes([i]) * (100 + 37 * i))):
                info = tarfile.TarInfo(f"{i:04}.{ending}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
        end = tar.offset
    whole = path.read_bytes()
    assert len(meshfit.data.tars(path)) == 20
    for cut in [*range(512, end + 512, 512), *np.linspace(1, end, 40).astype(int).tolist()]:
        path.write_bytes(whole[:cut])
        with pytest.raises(meshfit.DataError, match=r"a\.tar is .*cut short"):
            meshfit.data.tars(path)
    path.write_bytes(whole[:10240] + b"x" * 512 + whole[10752:])  # a damaged header in the middle
    with pytest.raises(meshfit.DataError, match=r"a\.tar is no tar after its first 10240 bytes"):
        meshfit.data.tars(path)
    path.write_bytes(whole + whole)
    with pytest.raises(meshfit.DataError, match=r"a\.tar goes on after its end"):
        meshfit.data.tars(path)


@dataclass
class Sample:
    x: torch.Tensor
    seen: int = field(init=False, default=0)


def test_what_does_not_stack_stays_as_it_is() -> None:
    words = stack([np.str_("a"), np.str_("bc")])
    assert isinstance(words, Ragged)
    assert words == ["a", "bc"]
    assert isinstance(stack([Sample(torch.ones(2)), Sample(torch.ones(2))]), Ragged)


def test_token_files_of_two_dtypes_keep_every_token(tmp_path: Path):
    np.save(tmp_path / "a.npy", np.arange(9, dtype=np.uint16))
    np.save(tmp_path / "b.npy", np.arange(70_000, 70_009, dtype=np.uint32))
    inputs, _ = meshfit.data.tokens(tmp_path, length=8).fetch(np.array([1, 0]))
    assert inputs.tolist() == [list(range(70_000, 70_008)), list(range(8))]
