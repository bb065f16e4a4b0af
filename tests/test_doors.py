"""Where a run listens, and what becomes of strangers at its door. Real runs, looked at through the kernel."""

import os
import resource
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import meshfit
from meshfit.errors import RankError, in_short
from meshfit.server.wire import HEADER, KINDS, MAGIC, PROTOCOL, _authenticated
from meshfit.step import Step
from tests.faults.watch import Address, listening
from tests.few import few
from tests.small import assert_same, slowly
from tests.small import fit as fit_model

KEY = "a key of more than sixteen characters"


def fit(plan: str, **how: Any) -> meshfit.Result:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
    return fit_model(plan, model=model, **how)


def family() -> list[int]:
    """This process and all below it."""
    return [os.getpid(), *(each.pid for each in psutil.Process().children(recursive=True))]


class Looking:
    """A callback that notes where the run listens."""

    def __init__(self) -> None:
        self.before, self.found, self.steps = set(listening(family())), set[Address](), 0

    def __call__(self, step: Step) -> None:
        if step.step % 3 == 0:
            self.steps += 1
            self.found |= set(listening(family())) - self.before


@pytest.mark.parametrize(
    "plan", few(["data=2", "server=1 data=2", "pipeline=2", "shard=2"], "data=2", "server=1 data=2")
)
def test_nothing_listens_beyond_loopback(plan: str) -> None:
    looking = Looking()
    fit(plan, callbacks=looking)
    assert looking.steps > 1
    assert [str(each) for each in looking.found if not each.address.is_loopback] == []
    if plan.startswith(("data", "shard")):  # gloo does listen: so what listens is seen
        assert looking.found


def test_a_port_beyond_loopback_would_be_seen() -> None:
    with socket.create_server(("0.0.0.0", 0)) as open_to_all, socket.create_server(("::1", 0), family=socket.AF_INET6):
        port = open_to_all.getsockname()[1]
        found = {str(each): each.address.is_loopback for each in listening([os.getpid()])}
    assert found[f"0.0.0.0:{port}"] is False
    assert any(name.startswith("::1:") and loopback for name, loopback in found.items())


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard) if hard > 0 else 4096, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def free_port() -> int:
    with closing(socket.socket()) as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


def closed_within(end: socket.socket, limit: float) -> bool:
    """Whether the other end closes, whatever it says before."""
    end.settimeout(limit)
    until = time.monotonic() + limit
    with suppress(ConnectionError):
        while time.monotonic() < until:
            if not end.recv(4096):
                return True
        return False
    return True


class Strangers:
    """Once, while the training waits, sends all kinds of them to ``port``."""

    def __init__(self, port: int):
        self.port, self.said = port, dict[str, bool]()

    def __call__(self, step: Step) -> None:
        if step.step < 3 or self.said:
            return
        where = ("127.0.0.1", self.port)
        for name, sent in {"noise": os.urandom(4096), "http": b"GET / HTTP/1.1\r\n\r\n", "size": b"\xff" * 64}.items():
            with closing(socket.create_connection(where, timeout=10)) as end:
                end.sendall(sent)
                self.said[name] = closed_within(end, 20)
        with ExitStack() as ends:
            idle = [ends.enter_context(closing(socket.create_connection(where, timeout=10))) for _ in range(1000)]
            self.said["idle"] = all(closed_within(end, 20) for end in idle)
        try:
            _authenticated(f"tcp:127.0.0.1:{self.port}", b"another key of sixteen characters")
            self.said["key"] = False
        except Exception:
            self.said["key"] = True
        words: dict[str, tuple[int, int]] = {"words": (2**32 - 1, 0), "payload": (2, 2**32)}
        for name, (length, size) in words.items():  # of one who knows the key
            with closing(_authenticated(f"tcp:127.0.0.1:{self.port}", KEY.encode())) as end:
                kind = KINDS.index("join")
                end.sendall(HEADER.pack(MAGIC, PROTOCOL, kind, 9, 1, 0, length, size) + b"{}")
                self.said[name] = closed_within(end, 20)
        with closing(_authenticated(f"tcp:127.0.0.1:{self.port}", KEY.encode())) as end:
            text = b'{"job": 5}'
            end.sendall(HEADER.pack(MAGIC, PROTOCOL, KINDS.index("join"), 9, 1, 0, len(text), 0) + text)
            self.said["job"] = closed_within(end, 20)


@pytest.mark.usefixtures("many_files")
def test_strangers_are_closed_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHFIT_KEY", KEY)
    plan, port = "server=1 data=1", free_port()
    strangers, looking = Strangers(port), Looking()
    how: dict[str, Any] = {"steps": 30, "loss": slowly}
    got = fit(plan, listen=f"127.0.0.1:{port}", each_step=strangers, callbacks=looking, **how)
    assert strangers.said == dict.fromkeys(("noise", "http", "size", "idle", "key", "words", "payload", "job"), True)
    assert all(each.address.is_loopback for each in looking.found)
    assert len(got.history) == 30
    assert_same(got, fit(plan, **how))


def test_a_length_of_4_gigabytes_takes_no_memory() -> None:
    """Of what ranks send each other too: a length is believed when so many bytes are there."""
    from meshfit.comm.encoding import Unreadable, loads

    for sent in (struct.pack(">Q", 2**32) + b"{}", struct.pack(">Q", 2**63) + b"[]"):
        with pytest.raises(Unreadable):
            loads(sent)


def test_a_run_folder_holds_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHFIT_KEY", KEY)
    out = tmp_path / "run"
    fit("server=1 data=1", listen=f"127.0.0.1:{free_port()}", out=out, steps=3, checkpoint=2)
    for path in out.rglob("*"):
        if path.is_file():
            assert KEY.encode() not in path.read_bytes(), path


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://ann:s3cret@db/x", "postgresql://ann:***@db/x"),
        ("s3://b/k?X-Amz-Signature=s3cret&part=1", "s3://b/k?X-Amz-Signature=***&part=1"),
        ("https://a.blob/x?sv=2&sig=s3cret", "https://a.blob/x?sv=2&sig=***"),
        ("redis://:s3cret@h:1/0", "redis://:***@h:1/0"),
        ("https://example.com/a?page=2", "https://example.com/a?page=2"),
        ("tcp://10.0.0.5:7000", "tcp://10.0.0.5:7000"),
    ],
)
def test_errors_show_no_secret_of_a_url(url: str, shown: str) -> None:
    error = RankError(f"rank 1 raised ValueError: {url}", f"reads {url!r}", trace=f'  File "x"\n    open("{url}")')
    assert "s3cret" not in str(error)
    assert str(error).count(shown) == 3
    assert "s3cret" not in in_short(ValueError(url))


def test_the_traceback_of_a_rank_shows_no_secret() -> None:
    url = "postgresql://ann:s3cret@db/x"

    def loss(outputs: Any, targets: Any) -> Any:
        raise ConnectionError(f"cannot reach {url}")

    with pytest.raises(RankError) as caught:
        fit("data=2", loss=loss)
    assert "s3cret" not in str(caught.value)
    assert "ann:***@db" in str(caught.value)
