"""Files far away, on a real S3 server: the same samples as from disk, through every fault or not at all."""

import os
import pickle
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch

import meshfit
from meshfit.data import Cache, remote
from meshfit.data.blob import find
from meshfit.data.loader import Loader
from tests.servers import S3, SECRET, faulty, storage
from tests.test_data_sources import IDS, PICTURES, X, Y, encoded, same, table, write_tars

obs: Any = pytest.importorskip("obstore")
COLUMNS = (["x0", "x1", "x2", "x3", "x4"], "y")
BIG = np.random.default_rng(1).integers(0, 255, 9 * 2**20 + 123, dtype=np.uint8)  # three blocks


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    server = S3(tmp_path_factory.mktemp("s3") / "server")
    files = tmp_path_factory.mktemp("files")
    pq.write_table(table(), files / "a.parquet", row_group_size=10)
    pyarrow.csv.write_csv(table(), files / "a.csv")
    np.save(files / "x.npy", X)
    np.save(files / "y.npy", Y)
    np.arange(5000, dtype=np.uint16).tofile(files / "train.bin")
    (files / "big.dat").write_bytes(BIG.tobytes())
    (files / "tars").mkdir()
    write_tars(files / "tars")
    for i, picture in enumerate(PICTURES):
        place = files / "pictures" / str(Y[i])
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{i:02}.png").write_bytes(encoded(picture))
    upload(server, files)
    yield server
    server.stop()


def bucket(server: S3) -> Any:
    how = {**storage(server.port), "region": "us-east-1"}
    return obs.store.S3Store("bucket", config=how, client_options={"allow_http": True})


def upload(server: S3, files: Path) -> None:
    server.create_bucket("bucket")
    for file in files.rglob("*"):
        if file.is_file():
            obs.put(bucket(server), f"data/{file.relative_to(files)}", file.read_bytes())


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remote, "PAUSE", 0.01)


def at(server: Any, tmp_path: Path, **more: Any) -> dict[str, Any]:
    return {"storage": storage(server.port, **more), "cache": tmp_path / "cache"}


def test_every_format_reads_the_same_from_s3(s3: S3, tmp_path: Path):
    how = at(s3, tmp_path)
    url = "s3://bucket/data"
    same(meshfit.data.open(f"{url}/a.parquet", columns=COLUMNS, **how))
    same(meshfit.data.open(f"{url}/*.csv", columns=COLUMNS, **how))
    same(meshfit.data.arrays(f"{url}/x.npy", f"{url}/y.npy", **how))
    same(meshfit.data.open(f"{url}/tars/", columns=("img.png", "cls"), **how), PICTURES.transpose(0, 3, 1, 2))
    order = np.argsort(Y, kind="stable")
    same(meshfit.data.folder(f"{url}/pictures", **how), PICTURES[order].transpose(0, 3, 1, 2), Y[order])
    x, _ = meshfit.data.tokens(f"{url}/train.bin", length=64, **how).fetch(np.array([3]))
    assert x[0].tolist() == list(range(192, 256))
    small = Cache(tmp_path / "small", most=1000)
    by_groups = meshfit.data.parquet(f"{url}/a.parquet", columns=COLUMNS, storage=how["storage"], cache=small)
    assert type(by_groups).__name__ == "RowGroups"
    same(by_groups)


def test_what_was_read_comes_from_the_cache(s3: S3, tmp_path: Path):
    with faulty(s3.port, lambda number, path: None) as between:
        for _ in range(2):
            (blob,) = find("s3://bucket/data/big.dat", **{**at(between, tmp_path), "cache": Cache(tmp_path / "cache")})
            assert bytes(blob.read(5, 4 * 2**20 + 7)) == BIG[5 : 4 * 2**20 + 7].tobytes()
        assert between.gets == 2  # two blocks, once


def test_the_cache_is_bounded_and_checked(s3: S3, tmp_path: Path):
    cache = Cache(tmp_path / "cache", most=9 * 2**20)
    (blob,) = find("s3://bucket/data/big.dat", storage=storage(s3.port), cache=cache)
    for _ in range(2):
        assert bytes(blob.read()) == BIG.tobytes()
    blocks = sorted((tmp_path / "cache" / "blocks").iterdir())
    assert sum(block.stat().st_size for block in blocks) <= cache.most
    for block in blocks:  # spoilt on disk: noticed, and fetched again
        with block.open("r+b") as file:
            file.seek(1000)
            file.write(b"spoilt")
    (fresh,) = find("s3://bucket/data/big.dat", storage=storage(s3.port), cache=Cache(tmp_path / "cache"))
    assert bytes(fresh.read()) == BIG.tobytes()


def test_trimming_leaves_what_others_are_writing(tmp_path: Path):
    """A run ended with "the cache cannot be written": another's temporary file had been trimmed."""
    cache = Cache(tmp_path / "cache", most=1000)
    blocks = tmp_path / "cache" / "blocks"
    blocks.mkdir(parents=True)
    theirs, dead = blocks / ".tmp-of-another", blocks / ".tmp-of-the-dead"
    for file in (theirs, dead):
        file.write_bytes(b"x" * 600)
    os.utime(dead, (1, 1))
    for i in range(8):
        cache.get(f"block {i}", 300, lambda i=i: bytes([i]) * 300)
    assert theirs.exists()
    assert not dead.exists()
    held = [file.stat().st_size for file in blocks.iterdir() if file != theirs]
    assert 0 < sum(held) <= 1000
    shutil.rmtree(tmp_path / "cache")  # safe to delete, also while it is used
    cache.get("block 9", 300, lambda: b"9" * 300)
    kept = Cache(tmp_path / "many", most=2**20)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: kept.get(f"{i}", 2**16, lambda: os.urandom(2**16)), range(64)))
    assert sum(file.stat().st_size for file in (tmp_path / "many" / "blocks").iterdir()) <= 2**20


@pytest.mark.parametrize("fault", ["500", "503", "reset", "short", "stall"])
def test_faults_are_retried_and_every_sample_comes_once(s3: S3, tmp_path: Path, fault: str):
    met: set[str] = set()

    def first_time(number: int, path: str) -> str | None:
        known = path in met or (fault == "stall" and number % 12 != 1)
        met.add(path)
        return None if known else fault

    with faulty(s3.port, first_time) as between:
        how = at(between, tmp_path, client_options={"timeout": "1s"})
        source = meshfit.data.folder("s3://bucket/data/pictures", **how)
        loader = Loader(source=source, batch_size=5, rank=0, ranks=1, device=torch.device("cpu"), workers=2)
        seen = list(loader.epoch(0))
    assert sorted(i for batch in seen for i in batch.ids.tolist()) == list(range(len(Y)))
    order = np.argsort(Y, kind="stable")
    for batch in seen:
        np.testing.assert_array_equal(
            batch.microbatches[0].content[0].numpy(), PICTURES[order][batch.ids].transpose(0, 3, 1, 2)
        )


@pytest.mark.parametrize("fault", ["500", "reset", "short"])
def test_a_fault_that_stays_is_an_error_that_names_the_file_and_no_secret(s3: S3, tmp_path: Path, fault: str):
    with faulty(s3.port, lambda number, path: fault if "big.dat" in path else None) as between:
        (blob,) = find("s3://bucket/data/big.dat", storage=storage(between.port), cache=Cache(tmp_path / "cache"))
        with pytest.raises(
            meshfit.DataError, match=r"s3://bucket/data/big\.dat cannot be read, after 6 tries"
        ) as caught:
            blob.read(0, 10)
        assert between.gets == 6
    assert SECRET not in str(caught.value)
    assert SECRET not in repr(blob)


def test_a_file_that_changes_between_reads_is_noticed(s3: S3, tmp_path: Path):
    store = bucket(s3)
    obs.put(store, "data/changing.dat", b"a" * (5 * 2**20))
    (blob,) = find("s3://bucket/data/changing.dat", storage=storage(s3.port), cache=Cache(tmp_path / "cache"))
    blob.read(0, 10)
    obs.put(store, "data/changing.dat", b"b" * (5 * 2**20))
    with pytest.raises(meshfit.DataError, match=r"changing\.dat: has changed since it was opened"):
        blob.read(4 * 2**20, 4 * 2**20 + 10)


def test_what_is_not_there_or_not_allowed_is_said_at_once(s3: S3, tmp_path: Path):
    how = at(s3, tmp_path)
    start = time.monotonic()
    with pytest.raises(meshfit.DataError, match=r"s3://bucket/data/none\.csv: is not there"):
        meshfit.data.open("s3://bucket/data/none.csv", **how)
    with pytest.raises(meshfit.DataError, match=r"(?s)there is nothing at s3://bucket/data/\*\.xyz"):
        meshfit.data.csv("s3://bucket/data/*.xyz", **how)
    how["storage"] = {**how["storage"], "secret_access_key": "wr0ng-secret"}
    with pytest.raises(meshfit.DataError) as caught:
        meshfit.data.open("s3://bucket/data/a.csv", **how)
    assert "wr0ng-secret" not in str(caught.value)
    assert time.monotonic() - start < 20


@contextmanager
def refusing(status: int) -> Iterator[list[str]]:
    """A server that answers everything alike; what it was asked, and its address as the last."""
    asked: list[str] = []

    class Refuse(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *args: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Refuse) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{server.server_port}"
        try:
            yield asked
        finally:
            server.shutdown()


@pytest.mark.parametrize(("status", "words"), [(403, "credentials"), (401, "credentials"), (404, "not there")])
def test_answers_that_stay_are_not_asked_for_again(
    status: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A listing that is not allowed was tried six times. The endpoint is told by the environment, and is plain http."""
    for name, value in (("ACCESS_KEY_ID", "a"), ("SECRET_ACCESS_KEY", "b"), ("REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "")
    for path in ("data/*.csv", "data/a.csv"):
        with refusing(status) as asked, pytest.raises(meshfit.DataError, match=words):
            meshfit.data.csv(f"s3://bucket/{path}", cache=tmp_path / "cache")
        assert len(asked) == 1


def test_http_and_other_schemes(tmp_path: Path):
    pq.write_table(table(), tmp_path / "a.parquet")
    np.save(tmp_path / "x.npy", X)

    class Quiet(SimpleHTTPRequestHandler):  # answers ranges with the whole, as many servers do
        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}"
        same(meshfit.data.open(f"{url}/a.parquet", columns=COLUMNS, cache=tmp_path / "cache"))
    finally:
        server.shutdown()
        server.server_close()
    fsspec = pytest.importorskip("fsspec")
    with fsspec.open("memory://held/a.csv", "wb") as out:
        pyarrow.csv.write_csv(table(), out)
    same_rows = meshfit.data.open("memory://held/a.csv", columns=COLUMNS, cache=tmp_path / "cache2")
    np.testing.assert_array_equal(same_rows.fetch(IDS)[0].numpy(), X[IDS])


def test_a_source_far_away_travels_without_what_it_has_open(s3: S3, tmp_path: Path):
    source = meshfit.data.arrays("s3://bucket/data/x.npy", **at(s3, tmp_path))
    source.few()
    assert len(pickle.dumps(source)) < 2000
