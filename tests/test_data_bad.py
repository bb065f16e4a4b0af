"""Each kind of bad row under one policy: refused with its file and row; or skipped, counted and named in the report."""

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshfit
from meshfit.data.loader import Loader
from tests.test_data_sources import encoded

cloudpickle.register_pickle_by_value(sys.modules[__name__])
N = 300
NAMES = {7: "null", 30: "wrong shape", 101: "truncated", 250: "undecodable"}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(meshfit.data.Cache, "usual", classmethod(lambda cls: cls(tmp_path / "cache")))


def picture(i: int) -> bytes | None:
    whole = encoded(np.full((6, 7 if i == 30 else 6, 3), i % 256, np.uint8), "JPEG")
    return {250: b"\xff\xd8\xff nothing", 101: whole[: len(whole) // 3], 7: None}.get(i, whole)


def written(folder: Path, bad: set[int]) -> Path:
    """Rows of images, of which those in ``bad`` are bad, each in its way."""
    path = folder / "train.parquet"
    columns = {
        "image": [picture(i) if i in bad or i not in NAMES else picture(0) for i in range(N)],
        "y": list(range(N)),
    }
    pq.write_table(pa.table(columns), path, row_group_size=40)
    return path


def trained(source: Any, plan: str = "data=1", **how: Any) -> Any:
    return meshfit.fit(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(108, 1)),
        source,
        loss=lambda out, y: F.mse_loss(out[:, 0], y / 100),
        optimizer=lambda p: torch.optim.SGD(p, lr=1e-3),
        batch_size=20,
        epochs=1,
        plan=plan,
        devices="cpu",
        **how,
    )


def opened(path: Path, groups: bool, **how: Any) -> Any:
    cache = meshfit.data.Cache(path.parent / f"cache {groups}", 10 if groups else 2**30)
    return meshfit.data.parquet(path, columns=("image", "y"), cache=cache, **how).map(meshfit.data.transform.unit())


def read(source: Any) -> None:
    for _ in Loader(source=source, batch_size=20, rank=0, ranks=1, device=torch.device("cpu")).epoch(0):
        pass


@pytest.mark.parametrize("groups", [False, True])
def test_each_kind_is_refused_with_file_and_row(tmp_path: Path, groups: bool):
    for bad in NAMES:
        path = written(tmp_path, {bad})
        with pytest.raises(meshfit.DataError, match=rf"(?s)row {bad} of {path}"):
            read(opened(path, groups))
        with pytest.raises(meshfit.DataError, match=rf"(?s)row {bad} of {path}"):
            read(meshfit.data.parquet(path, columns=("image", "y")))  # and where nothing comes after it


@pytest.mark.parametrize("groups", [False, True])
def test_all_kinds_are_skipped_and_the_report_counts_them(tmp_path: Path, groups: bool):
    path = written(tmp_path, set(NAMES))
    with pytest.raises(meshfit.DataError, match=r"samples are bad; on_bad='skip' allows \d"):
        read(opened(path, groups).on_bad("skip", most=0.001))
    cache = meshfit.data.Cache(tmp_path / f"cache {groups}", 10 if groups else 2**30)
    rows = lambda: meshfit.data.parquet(path, columns=("image", "y"), cache=cache).on_bad("skip", most=0.02)
    alone, shared = (trained(rows().map(meshfit.data.transform.unit()), plan) for plan in ("data=1", "data=2"))
    assert [step.loss for step in alone.history] == pytest.approx([step.loss for step in shared.history], rel=1e-6)
    for result in (alone, shared):
        (note,) = [note for note in result.notes if "bad sample" in note]
        if not groups:  # a null is left out when the table is converted
            (left,) = [note for note in result.notes if "left out: " in note]
            note += left
            assert "1 row" in left
        assert f"{4 if groups else 3} bad samples were skipped" in note
        assert all(f"row {bad} of {path}" in note for bad in NAMES)


def test_a_transform_that_fails_after_the_policy_is_covered_too(tmp_path: Path):
    def fails(x: Any) -> Any:
        if int(x[1]) == 33:
            raise ValueError("odd")
        return x

    data = meshfit.data.memory((torch.zeros(200, 2), torch.arange(200))).on_bad("skip").map(fails, each=True)
    assert data.fetch(np.array([32, 33, 34]))[1].tolist() == [32, 34, 34]
    assert "odd" in data.skipped[0]


@pytest.mark.parametrize("kind", ["parquet", "row groups", "arrow", "jsonl.gz", "csv.gz"])
def test_a_file_that_is_cut_short_is_left_out_and_named(tmp_path: Path, kind: str):
    ending, groups = kind.replace("row groups", "parquet"), kind == "row groups"
    for at in range(4):
        rows = np.arange(50) + 50 * at
        table, path = (
            pa.table({"x": rows * (0.5 if at == 2 else 1), "w": [f"w{i}" for i in rows]}),
            tmp_path / f"{at}.{ending}",
        )
        if ending == "parquet":
            pq.write_table(table, path)
        elif ending == "arrow":
            with pa.OSFile(str(path), "wb") as out, pa.ipc.new_stream(out, table.schema) as writer:
                writer.write_table(table, max_chunksize=10)
        elif ending == "csv.gz":
            body = "x,w\n" + "".join(
                f"{x},{w}\n" for x, w in zip(table["x"].to_pylist(), table["w"].to_pylist(), strict=True)
            )
            path.write_bytes(gzip.compress(body.encode()))
        else:
            path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in table.to_pylist()).encode()))
    broken = tmp_path / f"2.{ending}"
    broken.write_bytes(broken.read_bytes()[: broken.stat().st_size // 2])
    cache = meshfit.data.Cache(tmp_path / "small", 10 if groups else 2**30)
    how: dict[str, Any] = {"cache": cache}
    make = getattr(meshfit.data, ending.partition(".")[0])
    with pytest.raises(meshfit.DataError, match=rf"{broken} cannot be read"):
        len(make(tmp_path / f"*.{ending}", **how))
    source = make(tmp_path / f"*.{ending}", on_bad="skip", **how)
    want = [i for i in range(200) if not 100 <= i < 150]
    got = source.fetch(np.arange(len(source)))
    assert got["x"].tolist() == want
    assert got["w"] == [f"w{i}" for i in want]
    (left,) = source.left_out
    assert left.startswith(f"{broken} cannot be read")
    (tmp_path / f"0.{ending}").write_bytes(broken.read_bytes())
    with pytest.raises(meshfit.DataError, match=rf"{broken} cannot be read"):  # two of four
        len(make(tmp_path / f"*.{ending}", on_bad="skip", **how))
