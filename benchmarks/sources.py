"""Rows a second from databases and MB a second from S3, shuffled, meshfit beside a plain loop, in one run.

    python benchmarks/sources.py                 # PostgreSQL and an S3 server are started for it
    python benchmarks/sources.py --only sqlite
    python benchmarks/sources.py --only formats,groups

A table of 50,000 rows: a key, 3,072 bytes, a label. Batches of 256, visited in a random order, by one reader and by
four threads. Beside it what one writes by hand, a batch's keys in one query, and a query a row; and the same rows from
Parquet. From S3: a file of 256 MB in pieces of 4 MiB, in a random order, beside s3fs where that is installed (``pip
install s3fs``): with an empty cache, into which it is written, and a full one.

``formats``: the same rows from a folder of Hugging Face's ``datasets``, from its Dataset object through meshfit and by
itself, from Delta, from Lance. ``groups``: a Parquet file that is too large for the cache, read by four ranks of one
host, which share the row groups that the first of them decompresses; and as if each were on a host of its own.
"""

import argparse
import contextlib
import importlib.util
import multiprocessing
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import meshfit
from meshfit.data.blob import find
from meshfit.data.cache import Cache
from meshfit.data.draw import Key
from meshfit.data.loader import Loader
from meshfit.data.order import order
from meshfit.data.reading import pool_of
from meshfit.data.source import Source
from tests.servers import ACCESS, S3, SECRET, Postgres, postgres_folder, storage

ROWS, WIDTH, BATCH, PIECE = 50_000, 3072, 256, 4 * 2**20
Case = Callable[[], float]
"""Reads for a while; what it read a second."""


def main() -> None:
    asked = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    asked.add_argument("--only", default="postgresql,sqlite,s3,formats,groups")
    asked.add_argument("--rounds", type=int, default=3)
    asked.add_argument("--seconds", type=float, default=2.0)
    asked.add_argument("--rows", type=int, default=ROWS)
    asked.add_argument("--megabytes", type=int, default=256)
    args = asked.parse_args()
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        folder = Path(place)
        if "sql" in args.only or "formats" in args.only:
            rows = [random.bytes(WIDTH) for _ in range(args.rows)], random.integers(0, 10, args.rows).tolist()
            pq.write_table(pa.table({"x": rows[0], "y": rows[1]}), folder / "rows.parquet")
        if "postgresql" in args.only:
            if postgres_folder() is None:
                print("no PostgreSQL on this machine")
            else:
                compare("PostgreSQL, rows a second", dict(from_postgres(folder, rows, stack, args)), args)
        if "sqlite" in args.only:
            compare("SQLite, rows a second", dict(from_sqlite(folder, rows, args)), args)
        if "formats" in args.only:
            compare("Formats, rows a second", dict(from_formats(folder, rows, args)), args)
        if "groups" in args.only:
            by_groups(folder, random, args)
        if "s3" in args.only:
            compare("S3, MB a second", dict(from_s3(folder, random, stack, args)), args)


def compare(title: str, cases: dict[str, Case], args: Any) -> None:
    """The best of some rounds, which take turns."""
    best = dict.fromkeys(cases, 0.0)
    for _ in range(args.rounds):
        for name, case in cases.items():
            best[name] = max(best[name], case())
    first = next(iter(best.values()))
    print(f"\n{title}")
    for name, speed in best.items():
        print(f"  {name:46} {speed:12,.0f}  {speed / first:6.2f} of the first line", flush=True)


def batches(count: int) -> Iterator[np.ndarray]:
    shuffled, epoch = order(count, seed=0, epoch=0), 0
    while True:
        for start in range(0, count - BATCH + 1, BATCH):
            yield shuffled[np.arange(start, start + BATCH)]
        epoch += 1
        shuffled = order(count, seed=0, epoch=epoch)


def timed(read: Callable[[np.ndarray], Any], count: int, seconds: float, threads: int = 1) -> float:
    ids, done, began = batches(count), 0, time.perf_counter()
    if threads == 1:
        while time.perf_counter() - began < seconds:
            read(next(ids))
            done += BATCH
    else:
        with pool_of(threads) as pool:
            while time.perf_counter() - began < seconds:
                list(pool.map(read, [next(ids) for _ in range(4 * threads)]))
                done += 4 * threads * BATCH
    return done / (time.perf_counter() - began)


def ours(source: Source, args: Any) -> Iterator[tuple[str, Case]]:
    read = lambda ids: source.read(ids, Key())
    read(np.arange(BATCH))
    yield "meshfit", lambda: timed(read, args.rows, args.seconds)
    yield "meshfit, 4 threads", lambda: timed(read, args.rows, args.seconds, 4)


def parquet(folder: Path, args: Any) -> Iterator[tuple[str, Case]]:
    source = meshfit.data.parquet(folder / "rows.parquet", columns=("x", "y"), cache=folder / "cache", decode=False)
    read = lambda ids: source.read(ids, Key())
    read(np.arange(BATCH))
    yield "meshfit, the same from Parquet", lambda: timed(read, args.rows, args.seconds)


def from_postgres(folder: Path, rows: Any, stack: Any, args: Any) -> Iterator[tuple[str, Case]]:
    import psycopg

    server = Postgres()
    stack.callback(server.close)
    link = stack.enter_context(psycopg.connect(server.url, autocommit=True))
    link.execute("create table train (id bigint primary key, x bytea, y int)")
    with link.cursor() as cursor, cursor.copy("copy train from stdin") as copy:
        for i, row in enumerate(zip(*rows, strict=True)):
            copy.write_row((i, *row))
    link.execute("analyze train")
    query = "select id, x, y from train"
    yield from ours(meshfit.data.sql(server.url, query, key="id", columns=("x", "y"), decode=False), args)

    def by_batch(ids: np.ndarray) -> Any:
        return link.execute(f"{query} where id = any(%s)", (ids.tolist(),)).fetchall()

    def by_row(ids: np.ndarray) -> Any:
        return [link.execute(f"{query} where id = %s", (i,)).fetchone() for i in ids.tolist()]

    yield "psycopg, a query a batch", lambda: timed(by_batch, args.rows, args.seconds)
    yield "psycopg, a query a row", lambda: timed(by_row, args.rows, args.seconds)
    yield from parquet(folder, args)


def from_sqlite(folder: Path, rows: Any, args: Any) -> Iterator[tuple[str, Case]]:
    file = folder / "rows.sqlite"
    link = sqlite3.connect(file)
    link.execute("create table train (id integer primary key, x blob, y integer)")
    link.executemany("insert into train values (?, ?, ?)", ((i, *row) for i, row in enumerate(zip(*rows, strict=True))))
    link.commit()
    query = "select id, x, y from train"
    yield from ours(meshfit.data.sql(f"sqlite:///{file}", query, key="id", columns=("x", "y"), decode=False), args)

    def by_batch(ids: np.ndarray) -> Any:
        return link.execute(f"{query} where id in ({','.join('?' * len(ids))})", ids.tolist()).fetchall()

    def by_row(ids: np.ndarray) -> Any:
        return [link.execute(f"{query} where id = ?", (i,)).fetchone() for i in ids.tolist()]

    yield "sqlite3, a query a batch", lambda: timed(by_batch, args.rows, args.seconds)
    yield "sqlite3, a query a row", lambda: timed(by_row, args.rows, args.seconds)
    yield from parquet(folder, args)


def from_s3(folder: Path, random: Any, stack: Any, args: Any) -> Iterator[tuple[str, Case]]:
    import obstore

    server = S3(folder / "s3")
    stack.callback(server.stop)
    server.create_bucket("bucket")
    how = {**storage(server.port), "region": "us-east-1"}
    store = obstore.store.S3Store("bucket", config=how, client_options={"allow_http": True})  # type: ignore[arg-type]
    size = args.megabytes * 10**6
    obstore.put(store, "big.dat", random.bytes(size))
    pieces = [(start, min(start + PIECE, size)) for start in range(0, size, PIECE)]
    shuffled = [pieces[i] for i in random.permutation(len(pieces)).tolist()]

    def speed(read: Callable[[int, int], bytes], pieces: list[tuple[int, int]], threads: int) -> float:
        began = time.perf_counter()
        with pool_of(threads) as pool:
            total = sum(pool.map(lambda piece: len(read(*piece)), pieces))
        assert total == size
        return size / 1e6 / (time.perf_counter() - began)

    def first(threads: int) -> float:
        """With an empty cache, into which it is written."""
        with tempfile.TemporaryDirectory() as empty:
            (blob,) = find("s3://bucket/big.dat", storage=storage(server.port), cache=Cache(Path(empty)))
            return speed(lambda start, stop: bytes(blob.read(start, stop)), shuffled, threads)

    def again() -> float:
        (blob,) = find("s3://bucket/big.dat", storage=storage(server.port), cache=Cache(folder / "kept"))
        read = lambda start, stop: bytes(blob.read(start, stop))
        speed(read, shuffled, 4)
        return speed(read, shuffled, 4)

    yield "meshfit, random pieces, 4 threads", lambda: first(4)
    yield "meshfit, random pieces, 1 thread", lambda: first(1)
    yield "meshfit, the second time, from its cache", again
    if importlib.util.find_spec("s3fs"):
        import s3fs

        files = s3fs.S3FileSystem(key=ACCESS, secret=SECRET, endpoint_url=f"http://127.0.0.1:{server.port}")
        theirs = lambda start, stop: files.cat_file("bucket/big.dat", start=start, end=stop)
        yield "s3fs, random pieces, 4 threads", lambda: speed(theirs, shuffled, 4)
        yield "s3fs, random pieces, 1 thread", lambda: speed(theirs, shuffled, 1)


def from_formats(folder: Path, rows: Any, args: Any) -> Iterator[tuple[str, Case]]:
    yield from parquet(folder, args)
    table = pa.table({"x": rows[0], "y": rows[1]})

    def reads(source: Source) -> Case:
        read = lambda ids: source.read(ids, Key())
        read(np.arange(BATCH))
        return lambda: timed(read, args.rows, args.seconds)

    how: dict[str, Any] = {"columns": ("x", "y"), "decode": False}
    if importlib.util.find_spec("datasets"):
        import datasets

        datasets.disable_progress_bars()
        made = datasets.Dataset(pa.Table.from_arrays(table.columns, names=table.column_names))
        made.save_to_disk(str(folder / "hf"))
        held = datasets.load_from_disk(str(folder / "hf"))
        yield "meshfit, saved by datasets", reads(meshfit.data.hf_dataset(folder / "hf", cache=folder / "cache", **how))
        yield "meshfit, a datasets.Dataset", reads(meshfit.data.hf_dataset(held, **how))
        yield "a datasets.Dataset by itself", lambda: timed(lambda ids: held[ids.tolist()], args.rows, args.seconds)
    if importlib.util.find_spec("deltalake"):
        import deltalake

        deltalake.write_deltalake(str(folder / "delta"), table)
        yield "meshfit, Delta", reads(meshfit.data.delta(folder / "delta", cache=folder / "cache", **how))
    if importlib.util.find_spec("lance"):
        import lance

        held_lance = lance.write_dataset(table, str(folder / "rows.lance"))
        yield "meshfit, Lance", reads(meshfit.data.lance(folder / "rows.lance", **how))
        yield "Lance by itself", lambda: timed(lambda ids: held_lance.take(ids.tolist()), args.rows, args.seconds)


def by_groups(folder: Path, random: Any, args: Any, ranks: int = 4) -> None:
    """What ``ranks`` decompress in an epoch, of a file of so many MB, and what that costs."""
    path, rows = folder / "groups.parquet", args.megabytes * 10**6 // 4 // WIDTH
    values = random.integers(0, 64, (rows, WIDTH), dtype=np.uint8)  # compresses to three quarters
    table = pa.table({"x": pa.array(list(map(bytes, values)), pa.binary()), "y": np.arange(rows)})
    pq.write_table(table, path, compression="zstd", row_group_size=max(1, rows // 64))
    print(f"\nA Parquet file of {path.stat().st_size / 1e6:.0f} MB by row groups, {ranks} ranks of one host, one epoch")
    for name, shared in (("one cache", True), ("a cache for each", False)):
        context = multiprocessing.get_context("spawn")
        answers, together = context.Queue(), context.Barrier(ranks)
        place = folder / name
        given = [(rank, ranks, path, place / ("" if shared else str(rank)), together, answers) for rank in range(ranks)]
        held = [context.Process(target=one_rank, args=each) for each in given]
        for each in held:
            each.start()
        found = [answers.get(timeout=600) for _ in held]
        for each in held:
            each.join()
        read, processor, seconds = (sum(each[i] for each in found) for i in range(3))
        share, cpu, wall = read / path.stat().st_size, processor / ranks, seconds / ranks
        print(f"  {name:18} decompressed {share:5.2f} of the file, {cpu:5.1f} s of processor a rank, {wall:5.1f} s")


def one_rank(rank: int, ranks: int, path: Path, place: Path, together: Any, answers: Any) -> None:
    cache = Cache(place, most=path.stat().st_size // 2)  # less than twice the decompressed size: by row groups
    source: Any = meshfit.data.parquet(path, columns=("x", "y"), decode=False, cache=cache)
    loader = Loader(source=source, batch_size=BATCH, rank=rank, ranks=ranks, device=torch.device("cpu"), workers=0)
    together.wait()
    began, before = time.perf_counter(), time.process_time()
    for _ in loader.epoch(0):
        together.wait()  # as a training's ranks do
    answers.put((source.decompressed, time.process_time() - before, time.perf_counter() - began))


if __name__ == "__main__":
    main()
