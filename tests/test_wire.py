"""Messages between worker and server: framed, authenticated, checked; and the memory and the layout beside them."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshfit.exchange.compress import Codec, Feedback
from meshfit.exchange.parcel import Parcel, shares, split
from meshfit.server import wire
from meshfit.server.shared_memory import SharedMemory, view
from meshfit.server.wire import HEADER, KINDS, MAGIC, PROTOCOL, ConnectionLost, Listener, Wire, WireError, connect

SECRET = b"0123456789abcdef"


@pytest.fixture
def pair() -> Iterator[tuple[Wire, Wire]]:
    one, other = socket.socketpair()
    wires = Wire(one, worker=3), Wire(other)
    yield wires
    for each in wires:
        each.close()


@pytest.fixture(params=["unix", "tcp"])
def served(request: Any, tmp_path: Path) -> Iterator[tuple[str, list[Wire]]]:
    """An address, and the connections that were admitted there."""
    met: list[Wire] = []
    listener = Listener(f"unix:{tmp_path}/s" if request.param == "unix" else "tcp::0", SECRET, met.append)
    yield listener.address, met
    listener.close()
    for each in met:
        each.close()


def until(true: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_message_arrives_as_it_was_sent(pair: tuple[Wire, Wire]) -> None:
    here, there = pair
    body = torch.arange(1000, dtype=torch.uint8)
    here.send("push", sequence=7, version=2**40, words={"loss": float("nan"), "a": [1]}, payload=view(body))
    got = torch.zeros_like(body)
    message = there.recv(view(got), timeout=20)
    assert (message.kind, message.worker, message.sequence, message.version) == ("push", 3, 7, 2**40)
    assert message.words["a"] == [1]
    assert message.words["loss"] != message.words["loss"]
    assert torch.equal(got, body)
    assert message.payload == 1000


@pytest.mark.parametrize("size", [1, 999, 1001, 2**60])
def test_a_payload_of_another_size_is_refused(pair: tuple[Wire, Wire], size: int) -> None:
    here, there = pair
    here._end.sendall(HEADER.pack(MAGIC, PROTOCOL, 2, 0, 1, 1, 2, size) + b"{}")
    with pytest.raises(WireError, match="another size"):
        there.recv(memoryview(bytearray(1000)), timeout=20)


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n".ljust(HEADER.size, b"x"),
        HEADER.pack(MAGIC, PROTOCOL, len(KINDS), 0, 0, 0, 2, 0) + b"{}",
        HEADER.pack(MAGIC, PROTOCOL + 1, 0, 0, 0, 0, 2, 0) + b"{}",
        HEADER.pack(MAGIC, PROTOCOL, 0, 0, 0, 0, 2, 0) + b"{]",
        HEADER.pack(MAGIC, PROTOCOL, 0, 0, 0, 0, 2, 0) + b"[]",
        HEADER.pack(MAGIC, PROTOCOL, 0, 0, 0, 0, 2, 0) + b"\xff\xff",
        HEADER.pack(MAGIC, PROTOCOL, 0, 0, 0, 0, 2**31, 0),
    ],
)
def test_what_is_no_message_is_refused(pair: tuple[Wire, Wire], sent: bytes) -> None:
    pair[0]._end.sendall(sent)
    with pytest.raises(WireError):
        pair[1].recv(timeout=20)


def test_a_dead_peer_is_noticed_at_once(pair: tuple[Wire, Wire]) -> None:
    here, there = pair
    heard: list[object] = []

    def listen() -> None:
        with pytest.raises(ConnectionLost):
            there.recv()
        heard.append(time.monotonic())

    thread = threading.Thread(target=listen)
    thread.start()
    time.sleep(0.05)
    assert not there.gone()
    left = time.monotonic()
    here.close()
    thread.join(20)
    assert heard
    assert heard[0] - left < 10  # type: ignore[operator]
    assert there.gone()


def test_a_message_cut_short_is_a_dead_peer(pair: tuple[Wire, Wire]) -> None:
    here, there = pair
    here._end.sendall(HEADER.pack(MAGIC, PROTOCOL, 2, 0, 1, 1, 2, 1000) + b"{}" + bytes(10))
    here.close()
    with pytest.raises(ConnectionLost, match="middle"):
        there.recv(memoryview(bytearray(1000)), timeout=20)


def test_waiting_ends(pair: tuple[Wire, Wire]) -> None:
    with pytest.raises(TimeoutError):
        pair[0].recv(timeout=0.05)


def test_an_end_that_has_closed_is_gone_whatever_of_it_is_unread(pair: tuple[Wire, Wire]) -> None:
    here, there = pair
    here.sign("progress")
    assert not there.gone()
    here.close()
    assert there.gone()
    assert there.recv(timeout=1).kind == "progress"


def test_both_ends_prove_the_secret(served: tuple[str, list[Wire]]) -> None:
    address, met = served
    here = connect(address, SECRET, worker=5)
    until(lambda: met)
    here.send("hello", words={"x": 1})
    assert met[0].recv(timeout=20).words == {"x": 1}
    assert met[0].recv is not None
    here.close()
    with pytest.raises(ConnectionLost):
        connect(address, b"another secret, as long", worker=5)
    assert len(met) == 1


def test_a_server_that_does_not_know_the_secret_is_refused(tmp_path: Path) -> None:
    """One that admits anybody, to see their gradients."""
    listener = Listener(f"unix:{tmp_path}/s", b"x" * 16, lambda wire: wire.close())
    listener._admit = lambda end: bool(end.sendall(bytes(32)) or (end.recv(64) and end.sendall(bytes(32))) or True)  # type: ignore[method-assign]
    with pytest.raises(WireError, match="does not know the secret"):
        connect(listener.address, SECRET)
    listener.close()


def test_strangers_are_closed(served: tuple[str, list[Wire]]) -> None:
    """Silent ones, talkative ones, and more of them than are let in at a time; the right one still gets through."""
    address, met = served
    family, where = wire.parse(address)
    strangers = [socket.socket(family, socket.SOCK_STREAM) for _ in range(100)]
    for i, each in enumerate(strangers):
        each.settimeout(30)
        each.connect(where)
        if i % 2:
            with contextlib.suppress(OSError):
                each.sendall(os.urandom(100))
    began = time.monotonic()
    for each in strangers:
        try:
            while each.recv(1000):
                pass
        except ConnectionError:
            pass
        each.close()
    assert time.monotonic() - began < wire.HANDSHAKE_SECONDS + 15.0  # on a busy machine
    assert not met
    connect(address, SECRET).close()
    until(lambda: met)


def test_listens_on_loopback_unless_told(tmp_path: Path) -> None:
    listener = Listener("tcp::0", SECRET, lambda wire: wire.close())
    assert listener.address.startswith("tcp:127.0.0.1:")
    listener.close()
    with pytest.raises(WireError, match="secret has 5 bytes"):
        Listener("tcp::0", b"short", lambda wire: wire.close())
    for bad in ("localhost", "tcp:here", "unix:", "http://x:1"):
        with pytest.raises(WireError, match="is no address"):
            wire.parse(bad)


# Memory


def test_memory_is_shared_and_leaves_nothing() -> None:
    mine = SharedMemory.make(1000, 200)
    assert mine.fd is not None
    theirs = SharedMemory.map(os.dup(mine.fd), 1000, 200)
    mine.up.fill_(7)
    theirs.down.fill_(9)
    assert int(theirs.up.sum()) == 7000
    assert int(mine.down.sum()) == 1800
    mine.close()
    assert not [name for name in os.listdir("/dev/shm") if "meshfit" in name]


def test_memory_of_another_size_or_unsealed_is_refused(tmp_path: Path) -> None:
    mine = SharedMemory.make(1000, 200)
    assert mine.fd is not None
    with pytest.raises(WireError, match="were agreed"):
        SharedMemory.map(mine.fd, 100_000, 200)
    with open(tmp_path / "file", "wb+") as file:
        file.truncate(os.fstat(mine.fd).st_size)
        with pytest.raises(WireError, match="shrink"):
            SharedMemory.map(file.fileno(), 1000, 200)
    mine.close()


# Layout


def test_a_parcel_holds_tensors_of_all_kinds() -> None:
    named = {
        "a": torch.randn(3, 4),
        "half": torch.randn(5).half(),
        "last": torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        "empty": torch.randn(0, 3),
        "scalar": torch.randn(()),
        "turned": torch.randn(4, 6).t(),
        "odd": torch.randn(10, 2)[:, 0],
        "long": torch.arange(3),
    }
    parcel = Parcel.of(named)
    buffer = torch.zeros(parcel.bytes, dtype=torch.uint8)
    views = parcel.views(buffer)
    for name, tensor in named.items():
        views[name].copy_(tensor)
    for name, tensor in named.items():
        assert torch.equal(views[name], tensor)
        assert views[name].stride() == tensor.stride() or name in ("odd", "empty")
    assert all(view.data_ptr() % 64 == buffer.data_ptr() % 64 for view in views.values() if view.numel())
    assert sum(flat.nbytes for flat in parcel.flats(buffer)) == parcel.bytes
    assert parcel.bytes == sum(-(-t.numel() * t.element_size() // 64) * 64 for t in named.values())
    assert Parcel.of(named).digest == parcel.digest
    assert Parcel.of({**named, "a": torch.randn(4, 3)}).digest != parcel.digest


def test_parameters_are_split_by_bytes() -> None:
    lots = split([10, 1, 1, 1, 7, 10], 3)
    assert sorted(i for lot in lots for i in lot) == list(range(6))
    assert sorted(sum([10, 1, 1, 1, 7, 10][i] for i in lot) for lot in lots) == [10, 10, 10]
    model = nn.Sequential(*(nn.Linear(50, 50) for _ in range(8)))
    sizes = [sum(p.numel() for p in lot.values()) for lot in shares(model, 2)]
    assert max(sizes) - min(sizes) <= 50


# Compression


@pytest.mark.parametrize(("word", "share", "off"), [("fp16", 0.5, 1e-3), ("bf16", 0.5, 8e-3), ("int8", 0.26, 2e-2)])
def test_what_compression_loses_comes_later(word: str, share: float, off: float) -> None:
    torch.manual_seed(0)
    named = {"a": torch.randn(3000), "b": torch.randn(77, 13), "n": torch.ones(3, dtype=torch.bfloat16)}
    parcel = Parcel.of(named)
    codec = Codec(word, parcel)
    assert codec.bytes < parcel.bytes * share + 200
    buffer, packed = (torch.zeros(n, dtype=torch.uint8) for n in (parcel.bytes, codec.bytes))
    views = parcel.views(buffer)
    feedback, sums = Feedback(codec), [torch.zeros_like(flat) for flat in parcel.flats(buffer)]
    for step in range(1, 21):
        for name, tensor in named.items():
            views[name].copy_(tensor)
        feedback.pack(parcel.flats(buffer), packed)
        for total, part in zip(sums, codec.decode(packed), strict=True):
            total += part
        feedback.kept(packed)
        for total, flat in zip(sums, parcel.flats(buffer), strict=True):
            apart = float((total - flat * step).norm() / flat.norm())
            assert apart < off  # as after one step: it does not add up


@pytest.mark.parametrize("word", ["fp16", "bf16", "int8"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_compression_keeps_what_is_not_finite_and_forgets_it(word: str, bad: float) -> None:
    parcel = Parcel.of({"a": torch.zeros(2000)})
    codec = Codec(word, parcel)
    flat, packed = torch.randn(2000), torch.zeros(codec.bytes, dtype=torch.uint8)
    feedback = Feedback(codec)
    flat[5] = bad
    feedback.pack([flat], packed)
    assert not codec.decode(packed)[0].isfinite().all()
    feedback.taken_back([flat])
    flat[5] = 1.0
    feedback.pack([flat], packed)
    torch.testing.assert_close(codec.decode(packed)[0], flat, rtol=0, atol=0.05)


def test_a_large_gradient_in_fp16_is_cut_and_comes_later() -> None:
    parcel = Parcel.of({"a": torch.zeros(16)})
    codec, flat = Codec("fp16", parcel), torch.full((16,), 1e5)
    feedback, packed = Feedback(codec), torch.zeros(codec.bytes, dtype=torch.uint8)
    total = torch.zeros(16)
    for _ in range(2):
        feedback.pack([flat], packed)
        total += codec.decode(packed)[0]
        feedback.kept(packed)
        flat = torch.zeros(16)
    torch.testing.assert_close(total, torch.full((16,), 1e5), rtol=1e-3, atol=0)
