"""A worker's connection to one server: the parameters that the server owns, and the memory they travel through.

On a CPU the worker's parameters and gradients lie in that memory themselves: a gradient is where the server reads it as
soon as backward has made it, and new weights are in the parameters when the server has written them. On a GPU, or with
compression, there is a copy between.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from meshfit.errors import RankError
from meshfit.events import current
from meshfit.exchange.compress import Codec, Feedback
from meshfit.exchange.parcel import Parcel
from meshfit.server.shared_memory import SharedMemory, view
from meshfit.server.wire import AGAIN_SECONDS, ConnectionLost, Message, Wire, WireError, connect


class ServerConnection:
    """``statistics`` are BatchNorm's, by name, on the connection to the server that keeps them."""

    counts = True
    """Whether bytes of payload are noted here; else the ranks that hold parts of it do (worker_group.py)."""

    def __init__(
        self,
        address: str,
        secret: bytes,
        parameters: Mapping[str, nn.Parameter],
        statistics: Mapping[str, Tensor],
        *,
        worker: int,
        device: torch.device,
        compress: str,
    ):
        self.address, self.secret, self.worker = address, secret, worker
        self.parameters = dict(parameters)
        self.parcel, running = Parcel.of(parameters), Parcel.of(statistics)
        codec = Codec(compress, self.parcel)
        self.layout = [self.parcel.digest, running.digest, compress]
        self.memory = SharedMemory.make(codec.bytes + running.bytes, self.parcel.bytes + running.bytes)
        self.shared = address.startswith("unix:")
        """Whether the server sees this memory itself."""
        up, down = self.memory.up, self.memory.down
        self._sent, self._received = up[: codec.bytes], down[: self.parcel.bytes]
        ups, downs = running.views(up[codec.bytes :]), running.views(down[self.parcel.bytes :])
        self._statistics = [(buffer, ups[name], downs[name]) for name, buffer in statistics.items()]

        own = lambda: torch.zeros(self.parcel.bytes, dtype=torch.uint8, device=device)
        self._gradient = self._sent if device.type == "cpu" and compress == "none" else own()
        self._weights = self._received if device.type == "cpu" else own()
        self._feedback = Feedback(codec) if compress != "none" else None
        self._flats, self._gradients = self.parcel.flats(self._gradient), self.parcel.views(self._gradient)
        for name, place in self.parcel.views(self._weights).items():
            p = self.parameters[name]
            place.copy_(p.detach())
            p.data = place
        self.wire: Wire | None = None
        self.greeted = False
        self.version, self.incarnation, self.learning_rate = 0, "", 0.0
        self._request: tuple[Any, ...] = ()

    # The connection

    def connect(self, patience: float) -> bool:
        """Reach the server, waiting until there is one. True: it is another start of it than the one known before, or
        the first. Its weights are then in the parameters."""
        self.close()
        until = time.monotonic() + patience
        while True:
            try:
                self.wire = connect(self.address, self.secret, worker=self.worker)
                return self._greet(self.wire)
            except ConnectionLost as error:
                self.close()
                if time.monotonic() > until:
                    raise ConnectionLost(f"no server at {self.address} for {patience:g} s: {error}") from None
                time.sleep(AGAIN_SECONDS)
            except WireError:
                self.close()
                raise

    def _greet(self, wire: Wire) -> bool:
        fds = [self.memory.fd] if self.shared and self.memory.fd is not None else []
        words = {"layout": self.layout, "version": self.version, "incarnation": self.incarnation}
        wire.send("hello", version=self.version, words=words, fds=fds)
        welcome = wire.recv(self._into, timeout=30.0)
        if welcome.kind == "error":
            raise WireError(welcome.words["headline"], *welcome.words["facts"])
        new = welcome.words["incarnation"] != self.incarnation
        self.incarnation, self.learning_rate = welcome.words["incarnation"], welcome.words["lr"]
        if new:
            self._arrived(welcome)
        self.greeted = True
        return new

    def progress(self) -> None:
        """Say that this worker gets on; from any thread."""
        if self.greeted and (wire := self.wire) is not None:
            wire.sign("progress")

    def close(self) -> None:
        self.greeted = False
        if self.wire is not None:
            self.wire.close()
            self.wire = None

    def send(self, kind: str, sequence: int, words: dict[str, Any] | None = None) -> None:
        """Ask for something. Where the connection is lost meanwhile, ``recv`` says so."""
        self._request = kind, sequence, words
        if self.wire is None:
            return
        with suppress(ConnectionLost):
            payload = view(self.memory.up) if kind == "push" and not self.shared else None
            self.wire.send(kind, sequence=sequence, version=self.version, words=words, payload=payload)
        if kind == "push":
            self._count("push", self.memory.up)

    def send_again(self) -> None:
        """By its sequence number the server knows whether a request was carried out."""
        self.send(*self._request)

    def recv(self, timeout: float, waits: Callable[[], object] = lambda: None) -> Message:
        """The answer; new weights that come with it are then in the parameters. ``timeout``: seconds without a word;
        ``waits``: is called when the server says that it waits for others."""
        if self.wire is None:
            raise ConnectionLost("not connected")
        while (message := self.wire.recv(self._into, timeout=timeout)).kind == "waits":
            waits()
        if message.kind == "error":
            raise RankError(f"{message.words['headline']} (at {self.address})", *message.words["facts"])
        if message.kind == "weights":
            self._arrived(message)
        self.learning_rate = message.words.get("lr", self.learning_rate)
        return message

    @property
    def _into(self) -> memoryview | None:
        return None if self.shared else view(self.memory.down)

    @torch.no_grad()
    def _arrived(self, message: Message) -> None:
        self.version = message.version
        self._count("pull", self.memory.down)
        if self._weights is not self._received:
            self._weights.copy_(self._received)
        for buffer, _, received in self._statistics:
            buffer.copy_(received)

    def _count(self, kind: str, payload: Tensor) -> None:
        if self.counts:
            current().moved(kind, payload.nbytes)

    # The payload

    @torch.no_grad()
    def pack(self) -> None:
        """Have the gradient, and the statistics, in the memory that the server reads."""
        for name, p in self.parameters.items():
            if p.grad is not None and p.grad is not self._gradients[name]:  # made anew: a sparse one, say
                self._gradients[name].copy_(p.grad.to_dense() if p.grad.is_sparse else p.grad)
        if self._feedback is not None:
            self._feedback.pack([flat.cpu() for flat in self._flats], self._sent)
        elif self._gradient is not self._sent:
            self._sent.copy_(self._gradient)
        for buffer, sent, _ in self._statistics:
            sent.copy_(buffer)

    def settle(self, taken: bool) -> None:
        """The gradient that was packed has become a step, or has not."""
        if self._feedback is not None and taken:
            self._feedback.kept(self._sent)
        elif self._feedback is not None:
            self._feedback.taken_back([flat.cpu() for flat in self._flats])

    def clear(self) -> None:
        self._gradient.zero_()
        for name, p in self.parameters.items():
            if p.grad is not self._gradients[name]:
                p.grad = self._gradients[name]

    def release(self) -> None:
        """Give the parameters memory of their own again."""
        self.close()
        for p in self.parameters.values():
            p.data, p.grad = p.data.clone(), None
        self.memory.close()
