"""Rows of databases by key: a real PostgreSQL, SQLite, DuckDB; connections that break, tables that change."""

import contextlib
import datetime
import json
import pickle
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshfit
from meshfit.data import Source, sql
from meshfit.data.databases import database
from meshfit.data.loader import Loader
from tests.servers import PASSWORD, Postgres, postgres_folder
from tests.test_data_exact import played
from tests.test_data_sources import IDS, PICTURES, X, Y, encoded

cloudpickle.register_pickle_by_value(sys.modules[__name__])
remote_module = sys.modules["meshfit.data.remote"]
N = len(X)
KEYS = [10 * i + 3 for i in range(N)]
QUERY = "select id, x, y, image, word, price from train"


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    if postgres_folder() is None:
        pytest.skip("no PostgreSQL on this machine")
    pytest.importorskip("psycopg")
    server = Postgres()
    yield server
    server.close()


@pytest.fixture
def filled(postgres: Postgres) -> Postgres:
    import psycopg

    with psycopg.connect(postgres.url, autocommit=True) as link:
        link.execute("drop table if exists train")
        link.execute(
            "create table train (id bigint primary key, x real[], y smallint, image bytea, word text, "
            "price numeric, a double precision, b double precision)"
        )
        for i in np.random.default_rng(0).permutation(N).tolist():
            link.execute(
                "insert into train values (%s, %s, %s, %s, %s, %s, %s, %s)",
                (
                    KEYS[i],
                    X[i].tolist(),
                    int(Y[i]),
                    encoded(PICTURES[i]),
                    f"w{i}",
                    i / 4,
                    float(X[i, 0]),
                    float(X[i, 1]),
                ),
            )
    return postgres


@pytest.fixture
def lite(tmp_path: Path) -> str:
    with sqlite3.connect(tmp_path / "train.db") as link:
        link.execute(
            "create table train (id integer primary key, x blob, y integer, image blob, word text, "
            "price real, a real, b real)"
        )
        for i in range(N):
            row = (
                KEYS[i],
                X[i].tobytes(),
                int(Y[i]),
                encoded(PICTURES[i]),
                f"w{i}",
                i / 4,
                float(X[i, 0]),
                float(X[i, 1]),
            )
            link.execute("insert into train values (?, ?, ?, ?, ?, ?, ?, ?)", row)
    link.close()
    return f"sqlite:///{tmp_path}/train.db"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remote_module, "PAUSE", 0.02)


def check(source: Source) -> None:
    assert len(source) == N
    for one in (source, pickle.loads(cloudpickle.dumps(source))):
        images, labels = one.fetch(IDS)
        np.testing.assert_array_equal(images.numpy(), PICTURES[IDS].transpose(0, 3, 1, 2))
        assert labels.tolist() == Y[IDS].tolist()


@pytest.mark.parametrize("copy", [False, True])
def test_rows_of_postgresql_come_by_key(filled: Postgres, tmp_path: Path, copy: bool):
    how: dict[str, Any] = {"key": "id", "copy": copy, "cache": tmp_path / "cache"}
    check(sql(filled.url, QUERY, columns=("image", "y"), **how))
    held = sql(filled.url, QUERY + ";", **how)
    batch = held.fetch(IDS)
    assert set(batch) == {"x", "y", "image", "word", "price"}
    np.testing.assert_allclose(batch["x"].numpy(), X[IDS])
    assert batch["word"] == [f"w{i}" for i in IDS]
    np.testing.assert_allclose(batch["price"].numpy().astype(float), IDS / 4)
    assert f"id={KEYS[5]}" in held.name_of(5)
    assert PASSWORD not in held.name_of(5) + held.fingerprint + repr(held)
    features = sql(filled.url, "select * from train where word like 'w%'", columns=(["a", "b"], "y"), **how)
    np.testing.assert_allclose(features.fetch(IDS)[0].numpy(), X[IDS][:, :2])
    by_word = sql(filled.url, QUERY, columns="y", **{**how, "key": "word"})
    order = sorted(range(N), key=lambda i: f"w{i}")
    assert by_word.fetch(IDS).tolist() == Y[order][IDS].tolist()


@pytest.mark.parametrize("copy", [False, True])
def test_rows_of_sqlite_come_by_key(lite: str, tmp_path: Path, copy: bool):
    how: dict[str, Any] = {"key": "id", "copy": copy, "cache": tmp_path / "cache"}
    check(sql(lite, QUERY, columns=("image", "y"), **how))
    raw = sql(lite, QUERY, columns=("x", "y"), **how).map(meshfit.data.transform.from_bytes("float32", (5,)))
    np.testing.assert_array_equal(raw.fetch(IDS)[0].numpy(), X[IDS])
    opened = meshfit.data.open(lite, query=QUERY, key="word", columns="y")
    assert len(opened) == N


def test_rows_of_duckdb_and_of_any_connection(tmp_path: Path):
    duckdb = pytest.importorskip("duckdb")
    path = str(tmp_path / "train.duckdb")
    with duckdb.connect(path) as link:
        link.execute("create table train (id integer, y integer, image blob)")
        for i in range(N):
            link.execute("insert into train values (?, ?, ?)", [KEYS[i], int(Y[i]), encoded(PICTURES[i])])
    check(sql(f"duckdb:///{path}", "select * from train", key="id", columns=("image", "y")))
    connect = lambda: __import__("duckdb").connect(path, read_only=True)
    check(sql(connect, "select * from train", key="id", columns=("image", "y")))
    check(sql(connect, "select * from train", key="id", columns=("image", "y"), copy=True, cache=tmp_path / "cache"))


def test_images_that_begin_late_in_a_column_are_decoded(tmp_path: Path):
    with contextlib.closing(sqlite3.connect(tmp_path / "late.db")) as link, link:
        link.execute("create table train (id integer primary key, image blob)")
        for i in range(20):
            link.execute("insert into train values (?, ?)", (i, encoded(PICTURES[i]) if i > 9 else b"none"))
    source = sql(f"sqlite:///{tmp_path}/late.db", "select * from train", key="id", columns="image")
    late = np.array([10, 12])
    np.testing.assert_array_equal(source.fetch(late).numpy(), PICTURES[late].transpose(0, 3, 1, 2))


def test_training_from_a_database_is_training_from_memory(filled: Postgres, lite: str):
    losses = []
    for data in (
        (torch.from_numpy(X[:, :2].copy()), torch.from_numpy(Y)),
        sql(filled.url, "select id, a, b, y from train", key="id", columns=(["a", "b"], "y")),
        sql(lite, "select id, a, b, y from train", key="id", columns=(["a", "b"], "y")),
    ):
        result = meshfit.fit(
            lambda: nn.Linear(2, 3),
            data,
            loss=F.cross_entropy,
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
            batch_size=8,
            epochs=2,
            plan="data=2",
            devices="cpu",
        )
        losses.append([step.loss for step in result.history])
    assert losses[0] == losses[1] == losses[2]


def ids_of(source: Source, during: Any = None) -> list[int]:
    loader = Loader(source=source, batch_size=5, rank=0, ranks=1, device=torch.device("cpu"), workers=2)
    found = []
    for batch in loader.epoch(0):
        assert batch.microbatches[0].content[1].tolist() == Y[batch.ids].tolist()
        found += batch.ids.tolist()
        if during is not None:
            during(batch.index)
    return sorted(found)


def test_a_dropped_connection_is_made_again_and_rows_come_once(filled: Postgres):
    import psycopg

    source = sql(filled.url, QUERY, key="id", columns=("image", "y"))

    def drop(index: int) -> None:
        with psycopg.connect(filled.url, autocommit=True) as link:
            link.execute("select pg_terminate_backend(pid) from pg_stat_activity where pid <> pg_backend_pid()")

    assert ids_of(source, drop) == list(range(N))


def test_a_server_that_restarts_is_waited_for(filled: Postgres, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remote_module, "PAUSE", 0.3)
    source = sql(filled.url, QUERY, key="id", columns=("image", "y"))

    def restart(index: int) -> None:
        if index == 2:
            filled.stop()
            later = threading.Timer(0.7, filled.start)
            later.start()
            restarts.append(later)

    restarts: list[threading.Timer] = []
    assert ids_of(source, restart) == list(range(N))
    restarts[0].join()


def test_a_server_that_stays_away_is_an_error_without_the_password(filled: Postgres):
    source = sql(filled.url, QUERY, key="id")
    filled.stop()
    try:
        start = time.monotonic()
        with pytest.raises(
            meshfit.DataError, match=r"postgresql://tests:\*\*\*@.* cannot be reached, after 6"
        ) as caught:
            source.fetch(IDS)
        assert PASSWORD not in str(caught.value)
        assert time.monotonic() - start < 20
    finally:
        filled.start()


def test_a_changed_table_is_noticed(filled: Postgres, lite: str):
    import psycopg

    first = sql(filled.url, QUERY, key="id", columns="y", check=True)
    with psycopg.connect(filled.url, autocommit=True) as link:
        link.execute("update train set y = y + 5 where id = 13")
        changed = sql(filled.url, QUERY, key="id", columns="y", check=True)
        assert changed.fingerprint != first.fingerprint
        link.execute("delete from train where id = 23")
        with pytest.raises(meshfit.DataError, match="the row with id=23 is gone"):
            first.fetch(np.arange(5))
        link.execute("insert into train (id, x, y) values (99999, '{}', 1)")
    fewer = sql(filled.url, QUERY, key="id", columns="y")
    assert fewer.fingerprint != first.fingerprint
    loader = Loader(source=first, batch_size=5, rank=0, ranks=1, device=torch.device("cpu"))
    with pytest.raises(meshfit.DataError, match="not that of the run"):
        Loader(source=fewer, batch_size=5, rank=0, ranks=1, device=torch.device("cpu")).resume(loader.state(0, 2))
    with pytest.raises(meshfit.data.BadSample, match=r"id=99999.* has no value in column 'image'"):
        sql(filled.url, QUERY, key="id").fetch(np.array([N - 1]))


def test_what_a_database_cannot_give_is_refused_in_words(filled: Postgres, lite: str, tmp_path: Path):
    wrong = filled.url.replace(PASSWORD, "wr0ng-passw0rd")
    for url, query, key, words in (
        (filled.url, "select * from absent", "id", "(?s)refuses the query.*absent"),
        (filled.url, QUERY, "key", "gives no column 'key'"),
        (filled.url, QUERY, "y", "y names more than one row"),
        (filled.url, QUERY + " where id < 0", "id", "gives no row"),
        (wrong, QUERY, "id", "refuses|cannot be reached"),
        (lite, "select * from absent", "id", "no such table: absent"),
        (f"sqlite:///{tmp_path}/none.db", QUERY, "id", "cannot be opened"),
        ("mysql://u:geheim@h/d", QUERY, "id", "mysql:// is no database"),
        (filled.url, "select id, '1.2.3.4'::inet as t from train", "id", "cast it in the query"),
    ):
        with pytest.raises(meshfit.DataError, match=words) as caught:
            sql(url, query, key=key).few()
        for secret in (PASSWORD, "wr0ng-passw0rd", "geheim"):
            assert secret not in str(caught.value)


@pytest.mark.parametrize("copy", [False, True])
def test_paths_of_sqlite_may_hold_any_sign(tmp_path: Path, copy: bool):
    """Of "a#b.db" the file "a" was opened, and could be written."""
    for name, value in (("a#b.db", 1), ("a?mode=rw.db", 2), ("a%23b.db", 3), ("a", 4), ("a b.db", 5)):
        with contextlib.closing(sqlite3.connect(tmp_path / name)) as base:
            base.execute("create table t (id integer primary key, x real)")
            base.execute("insert into t values (1, ?)", (float(value),))
            base.commit()
        source = meshfit.data.sql(
            f"sqlite:///{tmp_path}/{name}",
            "select * from t",
            key="id",
            columns="x",
            copy=copy,
            cache=tmp_path / "cache",
        )
        assert source.fetch(np.array([0])).tolist() == [value], name
        made = database(f"sqlite:///{tmp_path}/{name}").connect()
        with contextlib.closing(made), pytest.raises(sqlite3.OperationalError, match="readonly"):
            made.execute("delete from t")


# Keys of several columns, JSON, times, null

MOMENT = datetime.datetime(2024, 2, 29, 12, 30, 15, 250_000)
SINCE_1970 = 1_709_209_815_250_000


def shop(i: int) -> dict[str, Any]:
    """A row: its key is (user, day)."""
    return {
        "user": f"u{i % 4}",
        "day": datetime.date(2024, 1, 1 + i // 4),
        "n": i,
        "info": {"score": i / 2, "tags": [i, i + 1], "deep": {"er": i}} | ({} if i == 9 else {"some": i}),
        "moment": MOMENT + datetime.timedelta(microseconds=i),
        "maybe": None if i == 5 else i,
    }


@pytest.fixture
def shops(postgres: Postgres, tmp_path: Path) -> dict[str, Any]:
    """The same rows in three databases."""
    import duckdb
    import psycopg

    rows = [shop(i) for i in np.random.default_rng(1).permutation(20).tolist()]
    with psycopg.connect(postgres.url, autocommit=True) as link:
        link.execute("drop table if exists shop")
        link.execute(
            'create table shop ("user" text, day date, n int, info jsonb, moment timestamp, maybe int, '
            'primary key ("user", day))'
        )
        for row in rows:
            link.execute(
                "insert into shop values (%(user)s, %(day)s, %(n)s, %(info)s, %(moment)s, %(maybe)s)",
                {**row, "info": json.dumps(row["info"])},
            )
    plain = [(r["user"], str(r["day"]), r["n"], json.dumps(r["info"]), str(r["moment"]), r["maybe"]) for r in rows]
    with contextlib.closing(sqlite3.connect(tmp_path / "shop.db")) as lite, lite:
        lite.execute(
            "create table shop (user text, day text, n int, info text, moment text, maybe int, primary key (user, day))"
        )
        lite.executemany("insert into shop values (?, ?, ?, ?, ?, ?)", plain)
    with duckdb.connect(str(tmp_path / "shop.duckdb")) as duck:
        duck.execute('create table shop ("user" text, day date, n int, info json, moment timestamp, maybe int)')
        duck.executemany("insert into shop values (?, ?, ?, ?, ?, ?)", plain)
    return {
        "postgresql": postgres.url,
        "sqlite": f"sqlite:///{tmp_path}/shop.db",
        "duckdb": f"duckdb:///{tmp_path}/shop.duckdb",
    }


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("kind", ["postgresql", "sqlite", "duckdb"])
def test_keys_of_several_columns_and_fields_of_json(shops: dict[str, Any], kind: str, copy: bool, tmp_path: Path):
    how: dict[str, Any] = {"key": ("user", "day"), "copy": copy, "cache": tmp_path / "cache"}
    order = sorted(range(20), key=lambda i: (shop(i)["user"], shop(i)["day"]))
    ids = np.array([19, 3, 3, 0, 11])
    want = [order[i] for i in ids]
    columns = ("n", "info.score", "info.deep.er", "info.tags")
    source = sql(shops[kind], "select * from shop", columns=columns, **how)
    for one in (source, pickle.loads(cloudpickle.dumps(source))):
        n, score, deeper, tags = one.fetch(ids)
        assert (n.tolist(), score.tolist(), deeper.tolist()) == (want, [i / 2 for i in want], want)
        assert tags.tolist() == [[i, i + 1] for i in want]
    assert "user='u0', day=2024-01-01" in source.name_of(0).replace("'2024-01-01'", "2024-01-01")
    gap = order.index(9)
    with pytest.raises(
        meshfit.data.BadSample, match=r"user='u1', day='?2024-01-03'? of .* has no value in column 'info.some'"
    ):
        sql(shops[kind], "select * from shop", columns="info.some", **how).fetch(np.arange(20))
    filled = sql(
        shops[kind], "select * from shop", columns=("info.some", "maybe"), fill={"info.some": -1, "maybe": 0}, **how
    )
    assert filled.fetch(np.array([gap, order.index(5)]))[0].tolist() == [-1, 5]
    assert filled.fetch(np.array([gap, order.index(5)]))[1].tolist() == [9, 0]
    skipped = sql(shops[kind], "select * from shop", columns=("n", "maybe"), on_bad="skip", **how)
    assert skipped.fetch(np.arange(20))[0].tolist().count(5) == 0
    make = lambda: sql(shops[kind], "select * from shop", columns=("info.score", "n"), **how)
    whole = played(make, [(1, 0, 999)], epochs=2)
    assert sorted(y for e, labels, _ in whole if e == 1 for y in labels) == list(range(20))
    assert played(make, [(2, 2, 1), (3, 0, 999)], epochs=2) == whole


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("kind", ["postgresql", "duckdb"])
def test_times_of_databases_are_microseconds(shops: dict[str, Any], kind: str, copy: bool, tmp_path: Path):
    zoned = "cast('2024-02-29 14:30:15.25+02' as timestamptz)" if kind == "postgresql" else "moment"  # duckdb: pytz
    query = f"""select n, moment, day, cast(moment as time) as clock,
        moment - (timestamp '2024-02-29 12:30:00') as since, {zoned} as zoned from shop"""
    got = sql(shops[kind], query, key="n", copy=copy, cache=tmp_path / "cache").fetch(np.array([7, 0]))
    seconds = (12 * 60 + 30) * 60 * 10**6
    assert {name: value.tolist() for name, value in got.items()} == {
        "moment": [SINCE_1970 + 7, SINCE_1970],
        "day": [19_724 * 86_400 * 10**6, 19_723 * 86_400 * 10**6],
        "clock": [seconds + 15_250_007, seconds + 15_250_000],
        "since": [15_250_007, 15_250_000],
        "zoned": [SINCE_1970 + 7 * (kind == "duckdb"), SINCE_1970],
    }


def test_whole_objects_of_json_are_dicts(shops: dict[str, Any]):
    query = "select n, info from shop where n < 9"
    got = sql(shops["postgresql"], query, key="n", columns="info").fetch(np.array([4, 2]))
    assert got["score"].tolist() == [2, 1]
    assert got["deep"]["er"].tolist() == [4, 2]
    with pytest.raises(meshfit.data.BadSample, match=r"column 'user' of the row with n=0 of .* is not JSON"):
        sql(shops["sqlite"], "select * from shop", key="n", columns="user.name").fetch(np.array([0]))
    with pytest.raises(meshfit.DataError, match=r'(?s)day names more than one row.*key=\("user", "day"\)'):
        sql(shops["sqlite"], "select * from shop", key="day")
