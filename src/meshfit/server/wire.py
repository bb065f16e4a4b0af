"""Framed messages between a worker and a model server, over one authenticated connection.

A message is a header, a few words as JSON, and raw bytes whose number the receiver knows beforehand. Every header names
the worker, the sequence number of what it asks, and the version of the weights it is about. Nothing is unpickled, and
nothing is allocated by what a peer says: words are limited, a payload must be as long as the buffer that waits for it.

Before the first message both ends prove that they know the secret, each over a number that the other drew, by HMAC.
Who cannot within ``HANDSHAKE_SECONDS`` is closed. The connection is not encrypted: over a network that others can write
to, run it through a tunnel.

Addresses are ``unix:PATH``, for processes of one host, or ``tcp:HOST:PORT``; ``tcp::0`` is any free port of loopback.
"""

import hmac
import json
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from meshfit.errors import MeshfitError

MAGIC = b"mf"
PROTOCOL = 3
"""Another number for each change of the kinds of messages, or of their words: both ends must have the same."""
HEADER = struct.Struct("!2sBBIQQIQ")  # magic, protocol, kind, worker, sequence, version, bytes of words, of payload
REQUESTS = ("hello", "join", "where", "meet", "push", "agree", "step", "drop", "pull", "state", "wait", "leave")
SIGNS = ("progress", "waits")  # of a worker that gets on; of a server that waits for others, and sees that they do
KINDS = (*REQUESTS, *SIGNS, "welcome", "reply", "again", "weights", "error")
WORDS_LIMIT = 1 << 20  # bytes
OTHER_VERSION = "it is another version of meshfit"
NONCE, MAC = 32, 32
SHORTEST_SECRET = 16
HANDSHAKE_SECONDS = 1.0
AGAIN_SECONDS = 0.05  # between two attempts to connect
STRANGERS = 32  # connections that may be at their handshake at a time; more are closed at once
FDS = 1  # descriptors that may come with a message
CLOSED = getattr(select, "POLLRDHUP", select.POLLHUP)  # the other end sends no more, whatever of it was not read yet


class WireError(MeshfitError):
    """What came is no message of ours, or not the one that was due."""


class ConnectionLost(ConnectionError):
    """The other end has closed the connection, or died."""


class TurnedAway(ConnectionLost):
    """The other end closed the connection when it had seen our proof: it knows another secret, or died just then."""


@dataclass(frozen=True, slots=True)
class Message:
    kind: str
    worker: int
    sequence: int
    """Of what a worker asks, counted by itself: the same one again is the same request."""
    version: int
    """Of the weights: how many updates they have seen."""
    words: dict[str, Any]
    payload: int = 0
    """Bytes that came with it."""
    fds: list[int] = field(default_factory=list)


class Wire:
    """One end of a connection. One thread sends and receives at a time; another may ``sign`` meanwhile."""

    def __init__(self, end: socket.socket, *, worker: int = 0):
        self._end, self.worker = end, worker
        self.local = end.family == socket.AF_UNIX
        self._sending = threading.Lock()

    def sign(self, kind: str) -> None:
        """A message without words, where it can be sent at once."""
        if not self._sending.acquire(blocking=False):
            return  # what is being sent is a sign as well
        try:
            if _polled(self._end, select.POLLOUT) == select.POLLOUT:  # then there is room for all of it
                self._end.sendall(HEADER.pack(MAGIC, PROTOCOL, KINDS.index(kind), self.worker, 0, 0, 2, 0) + b"{}")
        except OSError:
            pass  # whoever waits at this connection finds out
        finally:
            self._sending.release()

    def send(
        self,
        kind: str,
        *,
        sequence: int = 0,
        version: int = 0,
        words: dict[str, Any] | None = None,
        payload: memoryview | None = None,
        fds: Sequence[int] = (),
    ) -> None:
        text = json.dumps(words or {}, separators=(",", ":")).encode()
        size = 0 if payload is None else payload.nbytes
        head = HEADER.pack(MAGIC, PROTOCOL, KINDS.index(kind), self.worker, sequence, version, len(text), size) + text
        try:
            with self._sending:
                self._end.settimeout(None)
                if fds:
                    head = head[socket.send_fds(self._end, [head], list(fds)) :]
                self._end.sendall(head)
                if payload is not None:
                    self._end.sendall(payload)
        except OSError as error:
            raise ConnectionLost(str(error)) from None

    def recv(
        self,
        into: memoryview | None = None,
        *,
        timeout: float | None = None,
        check: Callable[[Message], None] = lambda message: None,
    ) -> Message:
        """The next message; its payload, if it has one, fills ``into``. ``check`` may refuse it by its words, before
        the payload is read. ``timeout``: seconds until it has begun; from then on, the same between two reads."""
        fds: list[int] = []
        try:
            self._end.settimeout(timeout)
            if self.local:
                head, fds, _, _ = socket.recv_fds(self._end, HEADER.size, FDS)
            else:
                head = self._end.recv(HEADER.size)
            if not head:
                raise ConnectionLost("the other end has left")
            return self._message(head + _exactly(self._end, HEADER.size - len(head)), fds, into, check)
        except BaseException as error:
            for fd in fds:
                os.close(fd)
            if isinstance(error, ValueError | RecursionError):
                raise WireError("the words of a message cannot be read", str(error)) from None
            if isinstance(error, OSError) and not isinstance(error, TimeoutError | ConnectionLost):
                raise ConnectionLost(str(error)) from None
            raise

    def _message(
        self, head: bytes, fds: list[int], into: memoryview | None, check: Callable[[Message], None]
    ) -> Message:
        magic, protocol, kind, worker, sequence, version, length, size = HEADER.unpack(head)
        if magic == MAGIC and protocol != PROTOCOL:
            raise WireError(f"the other end speaks protocol {protocol}, this one {PROTOCOL}", OTHER_VERSION)
        if magic != MAGIC or kind >= len(KINDS):
            raise WireError("what came over the connection is no message", f"it begins with {head[:4]!r}")
        if length > WORDS_LIMIT or size not in (0, 0 if into is None else into.nbytes):
            due = "none" if into is None else f"{into.nbytes} bytes"
            raise WireError(
                f"a {KINDS[kind]!r} of another size than agreed",
                f"{size} bytes of payload, {due} due; {length} bytes of words",
            )
        words = json.loads(_exactly(self._end, length))
        if not isinstance(words, dict):
            raise WireError("the words of a message are no object")
        message = Message(KINDS[kind], worker, sequence, version, words, size, fds)
        check(message)
        if size and into is not None:
            _fill(self._end, into)
        return message

    @property
    def host(self) -> str:
        """Of the other end."""
        with suppress(OSError):
            return "this host" if self._end.family == socket.AF_UNIX else str(self._end.getpeername()[0])
        return "a host that is gone"

    def gone(self) -> bool:
        """Whether the other end has closed, seen without waiting: also behind signs that nobody has read."""
        return bool(_polled(self._end, CLOSED))

    def close(self) -> None:
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()


def connect(address: str, secret: bytes, *, worker: int = 0, patience: float = 0.0) -> Wire:
    """Reach a server, and authenticate. ``ConnectionLost`` where nobody has answered for ``patience`` seconds,
    ``WireError`` where it is not ours."""
    until = time.monotonic() + patience
    while True:
        try:
            return Wire(_authenticated(address, secret), worker=worker)
        except TurnedAway:
            raise
        except ConnectionLost:
            if time.monotonic() >= until:
                raise
        time.sleep(AGAIN_SECONDS)


def _authenticated(address: str, secret: bytes, timeout: float = 10.0) -> socket.socket:
    family, where = parse(address)
    end = socket.socket(family, socket.SOCK_STREAM)
    try:
        end.settimeout(timeout)
        end.connect(where)
        _keep_alive(end)
        theirs, mine = _exactly(end, NONCE), secrets.token_bytes(NONCE)
        end.sendall(mine + _proof(secret, b"worker", theirs, mine))
        try:
            answer = _exactly(end, MAC)
        except ConnectionError as error:
            raise TurnedAway(f"what answers at {address} does not know our secret: {error}") from None
        if not hmac.compare_digest(answer, _proof(secret, b"server", theirs, mine)):
            raise WireError(f"what answers at {address} does not know the secret of this run")
        return end
    except BaseException as error:
        end.close()
        if isinstance(error, OSError) and not isinstance(error, TurnedAway):
            raise ConnectionLost(f"no server answers at {address}: {error}") from None
        raise


class Listener:
    """Admits whoever knows the secret; each connection is then handed to ``serve`` in a thread of its own."""

    def __init__(self, address: str, secret: bytes, serve: Callable[[Wire], None]):
        if len(secret) < SHORTEST_SECRET:
            raise WireError(f"the secret has {len(secret)} bytes", f"{SHORTEST_SECRET} at least, drawn at random")
        self.secret, self.serve = secret, serve
        family, where = parse(address)
        self._path = where if family == socket.AF_UNIX else None
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        if self._path is None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._unlink()
        self._socket.bind(where)
        if self._path is not None:
            os.chmod(self._path, 0o600)
        self._socket.listen(128)
        self._strangers = threading.BoundedSemaphore(STRANGERS)
        self._closed = False
        threading.Thread(target=self._accept, daemon=True, name="meshfit-accept").start()

    @property
    def address(self) -> str:
        """Where it can be reached, with the port that was chosen."""
        if self._path is not None:
            return f"unix:{self._path}"
        host, port = self._socket.getsockname()[:2]
        return f"tcp:{host}:{port}"

    def close(self) -> None:
        """Who is still at the handshake is closed after it."""
        self._closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._unlink()

    def _unlink(self) -> None:
        if self._path is not None:
            with suppress(FileNotFoundError):
                os.unlink(self._path)

    def _accept(self) -> None:
        while True:
            try:
                end, _ = self._socket.accept()
            except OSError:
                return
            if not self._strangers.acquire(blocking=False):
                end.close()
                continue
            threading.Thread(target=self._meet, args=(end,), daemon=True, name="meshfit-worker").start()

    def _meet(self, end: socket.socket) -> None:
        try:
            known = self._admit(end)
        except OSError:
            known = False
        finally:
            self._strangers.release()
        if known and not self._closed:
            _keep_alive(end)
            self.serve(Wire(end))
        else:
            end.close()

    def _admit(self, end: socket.socket) -> bool:
        until, nonce = time.monotonic() + HANDSHAKE_SECONDS, secrets.token_bytes(NONCE)
        end.settimeout(HANDSHAKE_SECONDS)
        end.sendall(nonce)
        answer = _exactly(end, NONCE + MAC, until)
        theirs, proof = answer[:NONCE], answer[NONCE:]
        if not hmac.compare_digest(proof, _proof(self.secret, b"worker", nonce, theirs)):
            return False
        end.sendall(_proof(self.secret, b"server", nonce, theirs))
        return True


def parse(address: str) -> tuple[socket.AddressFamily, Any]:
    """The family and the place of an address; a host that is left out is loopback."""
    kind, _, rest = address.partition(":")
    if kind == "unix" and rest:
        return socket.AF_UNIX, rest
    host, colon, port = rest.rpartition(":")
    if kind == "tcp" and colon and port.isdecimal():
        return (socket.AF_INET6 if ":" in host else socket.AF_INET), (host.strip("[]") or "127.0.0.1", int(port))
    raise WireError(f"{address!r} is no address", "unix:PATH or tcp:HOST:PORT")


def _polled(end: socket.socket, wanted: int) -> int:
    """Which of the events there are; one that is closed has an event of its own."""
    if end.fileno() < 0:
        return select.POLLNVAL
    poll = select.poll()
    poll.register(end, wanted)
    return sum(events for _, events in poll.poll(0))


def _proof(secret: bytes, role: bytes, servers: bytes, workers: bytes) -> bytes:
    return hmac.digest(secret, role + servers + workers, "sha256")


def _exactly(end: socket.socket, size: int, until: float | None = None) -> bytes:
    """``size`` bytes, all of them before ``until``."""
    read = bytearray(size)
    _fill(end, memoryview(read), until)
    return bytes(read)


def _fill(end: socket.socket, into: memoryview, until: float | None = None) -> None:
    while into.nbytes:
        if until is not None:
            end.settimeout(max(0.001, until - time.monotonic()))
        count = end.recv_into(into, min(into.nbytes, 1 << 24))
        if not count:
            raise ConnectionLost("the other end left in the middle of a message")
        into = into[count:]


def _keep_alive(end: socket.socket) -> None:
    """A process that dies closes its connection; a host that dies says nothing, and is asked."""
    if end.family == socket.AF_UNIX:
        return
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 15_000)):
        if hasattr(socket, option):
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
