"""A worker as its server sees it, and what it has asked for."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from meshfit.exchange.compress import Codec
from meshfit.server.shared_memory import SharedMemory
from meshfit.server.wire import Message, Wire


@dataclass
class ClientRecord:
    """What is known of a worker beyond its connection: it may come back, and ask again for what was done."""

    applied: int = 0
    """Its last request that was carried out."""
    reply: dict[str, Any] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=dict)
    """What was answered to it."""
    given: Tensor | None = None
    """BatchNorm statistics as it was last given them."""
    turn: threading.Lock = field(default_factory=threading.Lock)
    """Held while one of its connections is served: a worker that comes back waits until its old one is done with."""


@dataclass
class Client:
    """A worker that is connected."""

    id: int
    wire: Wire
    memory: SharedMemory
    codec: Codec
    record: ClientRecord
    push: "Push | None" = None
    heard: float = field(default_factory=time.monotonic)
    """When it last said something, be it that it gets on."""
    ready: bool = False
    """It has reached all servers, and asked for its place: before that it is given none, since a server that it has not
    reached would step without it."""
    replaced: bool = False
    """It has connected anew: what this connection still has to say counts no more."""


@dataclass(frozen=True)
class Push:
    """A gradient that has come, whole; it is in the worker's memory until its step is done."""

    client: Client
    message: Message

    @property
    def words(self) -> dict[str, Any]:
        return self.message.words

    @property
    def gradients(self) -> list[Tensor]:
        return self.client.codec.decode(self.client.memory.up[: self.client.codec.bytes])

    @property
    def statistics(self) -> tuple[float, Tensor, Tensor]:
        """Samples, what its statistics have become, and what they were."""
        assert self.client.record.given is not None
        return float(self.words["samples"]), self.client.memory.up[self.client.codec.bytes :], self.client.record.given

    def reached(self, names: list[str]) -> set[str]:
        bits = int(self.words["reached"], 16)
        return {name for i, name in enumerate(names) if bits >> i & 1}


class ReadWriteLock:
    """Many may read the weights at a time, or one may change them."""

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._readers = 0

    @contextmanager
    def reading(self) -> Iterator[None]:
        with self._free:
            self._readers += 1
        try:
            yield
        finally:
            with self._free:
                self._readers -= 1
                self._free.notify_all()

    @contextmanager
    def changing(self) -> Iterator[None]:
        with self._free:
            while self._readers:
                self._free.wait()
            yield
