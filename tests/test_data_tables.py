"""Files of one table that differ: columns, types, folders, structs, missing values. And row groups, once a host."""

import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch

import meshfit
from meshfit.data import Source
from meshfit.data.datasets import Recipe
from meshfit.data.loader import Loader
from meshfit.data.table import RowGroups
from tests.test_data_exact import BATCH, N, played
from tests.test_data_sources import PICTURES, encoded

cloudpickle.register_pickle_by_value(sys.modules[__name__])
ENDING = {"parquet": "parquet", "row groups": "parquet", "arrow": "arrow", "csv": "csv", "jsonl": "jsonl"}
KINDS = list(ENDING)


def write(path: Path, kind: str, columns: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(columns)
    if kind == "arrow":
        with pa.OSFile(str(path), "wb") as out, pa.ipc.new_file(out, table.schema) as writer:
            writer.write_table(table)
    elif kind == "csv":
        pyarrow.csv.write_csv(table, path)
    elif kind == "jsonl":
        rows = [{k: v for k, v in row.items() if v is not None} for row in table.to_pylist()]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(table, path, row_group_size=40)


def opened(folder: Path, kind: str, url: Any = "", **how: Any) -> Source:
    """With a cache that is too small, where row groups are to be read."""
    cache = meshfit.data.Cache(folder / f"cache {kind}", 10 if kind == "row groups" else 2**30)
    return getattr(meshfit.data, ENDING[kind])(url or folder / "t", cache=cache, **how)


def all_of(source: Source) -> dict[str, Any]:
    found = source.fetch(np.arange(len(source)))
    return {name: list(v) if isinstance(v, list) else v.tolist() for name, v in found.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_columns_of_all_files_with_what_stands_for_the_missing(tmp_path: Path, kind: str):
    for at, columns in enumerate(({"x": [1, 2], "a": [0.5, 1.5]}, {"x": [3.5], "b": [7]}, {"a": [2.5], "x": [4]})):
        write(tmp_path / "t" / f"{at}.{ENDING[kind]}", kind, columns)
    with pytest.raises(meshfit.DataError, match=r"(?s)1\.\w+ .*(lacks 'a'|differs).*fill="):
        all_of(opened(tmp_path, kind))
    with pytest.raises(meshfit.DataError, match=r"fill="):
        all_of(opened(tmp_path, kind, fill={"a": 0.0}))
    want = {"x": [1, 2, 3.5, 4], "a": [0.5, 1.5, -1, 2.5], "b": [0, 0, 7, 0]}
    source = opened(tmp_path, kind, fill={"a": -1.0, "b": 0})
    assert all_of(source) == want
    assert source.fetch(np.array([0]))["x"].dtype == torch.float64  # also where a file has whole numbers alone
    assert source.fetch(np.array([2]))["b"].dtype == torch.int64
    asked = opened(tmp_path, kind, columns={"x": "x", "b": "b"}, fill=0)  # of which the first file lacks one
    assert all_of(asked) == {"x": want["x"], "b": want["b"]}


@pytest.mark.parametrize("kind", ["parquet", "row groups"])
def test_types_are_widened_where_that_is_exact(tmp_path: Path, kind: str):
    first = {"n": pa.array([1], pa.int16()), "f": pa.array([0.1], pa.float32()), "w": ["a"]}
    write(tmp_path / "t" / "0.parquet", kind, first)
    second = {"n": [2**40], "f": pa.array([0.1], pa.float64()), "w": pa.array(["b"]).dictionary_encode()}
    write(tmp_path / "t" / "1.parquet", kind, second)
    got = opened(tmp_path, kind).fetch(np.array([1, 0]))
    assert got["n"].tolist() == [2**40, 1]
    assert got["f"].tolist() == [0.1, float(np.float32(0.1))]
    assert got["w"] == ["b", "a"]
    write(tmp_path / "t" / "2.parquet", kind, {"n": [0.5], "f": [1.0], "w": ["c"]})
    assert opened(tmp_path, kind).fetch(np.arange(3))["n"].tolist() == [1, 2**40, 0.5]
    write(tmp_path / "t" / "3.parquet", kind, {"n": [2**60 + 1], "f": [1.0], "w": ["c"]})
    with pytest.raises(meshfit.DataError, match=r"'n' of .*3\.parquet"):  # no double is that number
        opened(tmp_path, kind).fetch(np.arange(4))
    write(tmp_path / "t" / "3.parquet", kind, {"n": [3], "f": [1.0], "w": [4]})
    with pytest.raises(meshfit.DataError, match=r"'w' of .*3\.parquet is int64"):
        opened(tmp_path, kind).fetch(np.arange(4))


@pytest.mark.parametrize("kind", KINDS)
def test_folders_are_columns(tmp_path: Path, kind: str):
    for year, land, x in ((2023, "de", 1), (2023, "fr", 2), (2024, "de%20at", 3)):
        write(tmp_path / "t" / f"year={year}" / f"land={land}" / f"0.{ENDING[kind]}", kind, {"x": [x, 10 * x]})
    want = {
        "x": [1, 10, 2, 20, 3, 30],
        "year": [2023] * 4 + [2024] * 2,
        "land": ["de"] * 2 + ["fr"] * 2 + ["de at"] * 2,
    }
    assert all_of(opened(tmp_path, kind)) == want
    pattern = f"{tmp_path}/t/year=*/land=*/*.{ENDING[kind]}"
    assert opened(tmp_path, kind, pattern, columns=("x", "year")).fetch(np.array([4, 1]))[1].tolist() == [2024, 2023]
    one = all_of(opened(tmp_path, kind, tmp_path / "t" / "year=2023"))  # what lies above is no column
    assert one == {"x": want["x"][:4], "land": want["land"][:4]}
    listed = sorted((tmp_path / "t").rglob("0.*"))
    assert all_of(opened(tmp_path, kind, listed)) == want
    write(tmp_path / "t" / f"year=__HIVE_DEFAULT_PARTITION__/land=x/0.{ENDING[kind]}", kind, {"x": [4]})
    with pytest.raises(meshfit.DataError, match=r"(?s)(no value in row 0|row 0 of .*no value).*year"):
        all_of(opened(tmp_path, kind))
    assert all_of(opened(tmp_path, kind, fill={"year": 0}))["year"] == [*want["year"], 0]


@pytest.mark.parametrize("kind", ["parquet", "row groups", "arrow", "jsonl"])
def test_fields_of_structs(tmp_path: Path, kind: str):
    image = [{"bytes": encoded(p), "size": {"w": i, "h": 2 * i}} for i, p in enumerate(PICTURES[:5])]
    if kind == "jsonl":
        image = [{"bytes": f"b{i}", "size": each["size"]} for i, each in enumerate(image)]
    rows = {"image": pa.array(image), "label": [4, 3, 2, 1, 0], "a.b": [1, 2, 3, 4, 5]}
    write(tmp_path / "t" / f"0.{ENDING[kind]}", kind, rows)
    source = opened(tmp_path, kind, columns=("image.bytes", "label", "image.size.h", "a.b"))
    pictures, labels, heights, dotted = source.fetch(np.array([3, 1]))
    assert (labels.tolist(), heights.tolist(), dotted.tolist()) == ([1, 3], [6, 2], [4, 2])
    if kind == "jsonl":
        assert pictures == ["b3", "b1"]
    else:
        np.testing.assert_array_equal(pictures.numpy(), PICTURES[[3, 1]].transpose(0, 3, 1, 2))
        with pytest.raises(meshfit.DataError, match=r"a tuple gives one thing after another: \('image.bytes'"):
            opened(tmp_path, kind, columns=["image.bytes", "label"]).fetch(np.array([0]))
    with pytest.raises(meshfit.DataError, match=r"no column 'image.byts'.*\n?.*image.bytes"):
        all_of(opened(tmp_path, kind, columns={"x": "image.byts"}))
    with pytest.raises(meshfit.DataError, match=r'(?s)is struct<.*its fields are bytes, size: columns="a.b"'):
        opened(tmp_path, kind, columns="image").fetch(np.arange(5))
    nothing = pa.array([None], rows["image"].type) if kind != "jsonl" else pa.array([None], pa.struct([]))
    write(tmp_path / "t" / f"1.{ENDING[kind]}", kind, {"image": nothing, "label": [9], "a.b": [9]})
    with pytest.raises(meshfit.DataError, match=r"(?s)'?image"):  # a struct that is missing misses its fields
        opened(tmp_path, kind, columns=("image.size.h", "label")).fetch(np.arange(6))
    filled = opened(tmp_path, kind, columns=("image.size.h", "label"), fill={"image.size.h": -1})
    assert filled.fetch(np.arange(6))[0].tolist() == [0, 2, 4, 6, 8, -1]


@pytest.mark.parametrize("kind", KINDS)
def test_missing_values_by_policy(tmp_path: Path, kind: str):
    rows: dict[str, list[Any]] = {"x": [float(i) for i in range(300)], "y": list(range(300))}
    rows["x"][7] = rows["y"][30] = None
    write(tmp_path / "t" / f"0.{ENDING[kind]}", kind, rows)
    with pytest.raises(meshfit.DataError, match=r"(?s)(row 7|row 30|line 8|line 31) of .*0\.\w+"):
        all_of(opened(tmp_path, kind))
    got = all_of(opened(tmp_path, kind, on_bad="skip"))
    left = opened(tmp_path, kind, on_bad="skip").left_out
    if kind == "row groups":  # the next good row stands in
        assert (got["x"][7], got["y"][7], got["x"][30]) == (8, 8, 31)
    else:
        assert got["y"] == got["x"] == [i for i in range(300) if i not in (7, 30)]
        assert len(left) == 2
    filled = all_of(opened(tmp_path, kind, fill={"x": float("nan"), "y": -1}))
    assert np.isnan(filled["x"][7])
    assert filled["y"] == [-1 if i == 30 else i for i in range(300)]
    assert all_of(opened(tmp_path, kind, fill=-5))["x"][6:9] == [6, -5, 8]
    with pytest.raises(
        meshfit.DataError, match=r"fill='none' does not fit column 'x' of .*0\.\w+, which is (double|int64)"
    ):
        all_of(opened(tmp_path, kind, fill="none"))


def test_a_list_in_which_a_value_is_missing_is_a_missing_value(tmp_path: Path):
    write(tmp_path / "t" / "0.parquet", "parquet", {"x": [[i, None if i == 130 else i] for i in range(200)]})
    with pytest.raises(meshfit.DataError, match=r"no value in row 130 of .*0\.parquet"):
        all_of(opened(tmp_path, "parquet"))
    assert len(opened(tmp_path, "parquet", on_bad="skip")) == 199


@pytest.mark.parametrize("kind", KINDS)
def test_such_tables_are_shared_and_resumed_exactly(tmp_path: Path, kind: str):
    for at, rows in enumerate(np.array_split(np.arange(N), 4)):
        columns: dict[str, Any] = {"s": pa.array([{"y": int(i)} for i in rows])} if kind != "csv" else {"s.y": rows}
        if at != 2:
            columns["x"] = rows * 1.0 if at else rows
        write(tmp_path / "t" / f"part={at}" / f"0.{ENDING[kind]}", kind, columns)
    make = lambda: opened(tmp_path, kind, columns=("x", "s.y", "part"), fill={"x": -1.0})
    whole = played(make, [(1, 0, 999)], epochs=2)
    assert sorted(y for e, labels, _ in whole if e == 1 for y in labels) == list(range(N))
    assert played(make, [(3, 2, 4), (2, 0, 999)], epochs=2) == whole


@pytest.mark.parametrize("how", [{}, {"length": "input_ids"}])
def test_token_lists_of_a_table_are_padded_as_those_of_a_data_set(tmp_path: Path, how: dict[str, Any]):
    lists = [list(range(1, i % 5 + 2)) for i in range(N)]
    masks = [[1] * len(x) for x in lists]
    samples = [{"input_ids": x, "attention_mask": m, "labels": x} for x, m in zip(lists, masks, strict=True)]
    columns = {name: [sample[name] for sample in samples] for name in samples[0]}
    write(tmp_path / "t" / "0.parquet", "parquet", columns)
    source = opened(tmp_path, "parquet")

    def batches(data: Any) -> list[Any]:
        given: dict[str, Any] = {"batch_size": BATCH, "rank": 1, "ranks": 2, "device": torch.device("cpu"), "seed": 7}
        return [b.microbatches[0].content for b in Loader(source=Recipe.of(data, **how).source(), **given).epoch(0)]

    from_table, from_list = batches(source), batches([{k: torch.tensor(v) for k, v in s.items()} for s in samples])
    assert [{k: v.tolist() for k, v in b.items()} for b in from_table] == [
        {k: v.tolist() for k, v in b.items()} for b in from_list
    ]
    assert min(b["labels"].min() for b in from_table) == -100


# Row groups, once a host


def rank_of(rank: int, ranks: int, folder: Path, most: int, together: Any, answers: Any) -> None:
    cache = meshfit.data.Cache(folder / "c", most)
    source = meshfit.data.parquet(folder / "a.parquet", columns=("x", "y"), cache=cache)
    assert isinstance(source, RowGroups)
    loader = Loader(source=source, batch_size=BATCH, rank=rank, ranks=ranks, device=torch.device("cpu"), seed=7)
    labels: list[int] = []
    for batch in loader.epoch(0):
        labels += [y for part in batch.microbatches[:1] if part.samples for y in part.content[1].tolist()]
        together.wait(60)  # as a training's ranks do
    answers.put((rank, source.decompressed, labels))


def test_row_groups_are_read_and_decompressed_once_a_host(tmp_path: Path):
    """Every rank needs rows of every group."""
    path, n, ranks = tmp_path / "a.parquet", 4000, 4
    random = np.random.default_rng(0)
    pq.write_table(pa.table({"x": random.standard_normal(n), "y": np.arange(n)}), path, row_group_size=100)
    metadata = pq.ParquetFile(path).metadata
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    size = sum(group.column(k).total_compressed_size for group in groups for k in range(2))
    context = multiprocessing.get_context("fork")
    answers, together = context.Queue(), context.Barrier(ranks)
    held = [
        context.Process(target=rank_of, args=(rank, ranks, tmp_path, n, together, answers)) for rank in range(ranks)
    ]
    for each in held:
        each.start()
    found = sorted(answers.get(timeout=120) for _ in held)
    for each in held:
        each.join()
    assert sorted(y for _, _, labels in found for y in labels) == list(range(n))
    assert sum(read for _, read, _ in found) == size
    left = [place for place in (tmp_path / "c" / "groups").iterdir() if place.is_dir()]
    assert len(left) <= 17 + ranks  # the cache is small: the groups of a window or two stay
