"""A worker's connection to one server: the parameters that the server owns, and the memory they travel through.

On a CPU the worker's parameters and gradients lie in that memory themselves: a gradient is where the server reads it as
soon as backward has made it, and new weights are in the parameters when the server has written them. On a GPU, or with
compression, there is a copy between.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshfit.errors import RankError
from meshfit.events import current
from meshfit.server.compress import Codec, Feedback
from meshfit.server.packing import Parcel
from meshfit.server.shared_memory import SharedMemory, view
from meshfit.server.wire import ConnectionLost, Message, Wire, WireError, connect

AGAIN_SECONDS = 0.05  # between two attempts to reach a server


class ServerConnection:
    """``statistics`` are BatchNorm's, by name, on the connection to the server that keeps them."""

    def __init__(
        self,
        address: str,
        secret: bytes,
        parameters: Mapping[str, nn.Parameter],
        statistics: Mapping[str, Tensor],
        *,
        worker: int,
        device: torch.device,
        compress: str = "none",
    ):
        self.address, self.secret, self.worker = address, secret, worker
        self.parameters, self.statistics = dict(parameters), dict(statistics)
        self.parcel, self._running = Parcel.of(self.parameters), Parcel.of(self.statistics)
        self.codec = Codec(compress, self.parcel)
        up = self.codec.bytes + self._running.bytes
        down = self.parcel.bytes + self._running.bytes
        self.shared = address.startswith("unix:")
        """Whether the server sees this memory itself."""
        self.memory = SharedMemory.make(up, down)
        self.counted = True
        """False: the ranks that hold parts of it count what is moved (worker_group.py)."""
        direct = device.type == "cpu"
        packed = not direct or compress != "none"
        self._gradient = self._buffer(device) if packed else self.memory.up[: self.parcel.bytes]
        self._weights = self.memory.down[: self.parcel.bytes] if direct else self._buffer(device)
        self.feedback = Feedback(self.codec) if compress != "none" else None
        self._packed = packed
        self.gradients = self.parcel.flats(self._gradient)
        self.views = self.parcel.views(self._gradient)
        for name, place in self.parcel.views(self._weights).items():
            p = self.parameters[name]
            place.copy_(p.detach())
            p.data = place
        self.wire: Wire | None = None
        self.version = 0
        self.incarnation = ""
        self.moved_up = self.moved_down = 0
        """Bytes of payload, by either way."""

    def _buffer(self, device: torch.device) -> Tensor:
        return torch.zeros(self.parcel.bytes, dtype=torch.uint8, device=device)

    # The connection

    def connect(self, patience: float) -> bool:
        """Reach the server, waiting until there is one. True: it is another start of it than the one known before, or
        the first. Its weights are then in the parameters."""
        until = time.monotonic() + patience
        while True:
            try:
                self.wire = connect(self.address, self.secret, worker=self.worker)
                return self._greet(self.wire)
            except WireError:
                self.close()
                raise
            except ConnectionLost as error:
                self.close()
                if time.monotonic() > until:
                    raise ConnectionLost(f"no server at {self.address} for {patience:g} s: {error}") from None
                time.sleep(AGAIN_SECONDS)

    def _greet(self, wire: Wire) -> bool:
        fds = [self.memory.fd] if self.shared and self.memory.fd is not None else []
        layout = [self.parcel.digest, self._running.digest, self.codec.word]
        wire.send(
            "hello",
            version=self.version,
            words={"layout": layout, "version": self.version, "incarnation": self.incarnation},
            fds=fds,
        )
        welcome = wire.recv(self._into, timeout=30.0)
        if welcome.kind == "error":
            raise WireError(welcome.words["headline"], *welcome.words["facts"])
        new = welcome.words["incarnation"] != self.incarnation
        self.incarnation = welcome.words["incarnation"]
        self.learning_rate = welcome.words["lr"]
        if new:
            self._arrived(welcome)
        return new

    def close(self) -> None:
        if self.wire is not None:
            self.wire.close()
            self.wire = None

    def send(self, kind: str, sequence: int, words: dict[str, Any] | None = None, *, push: bool = False) -> None:
        if self.wire is None:
            raise ConnectionLost("not connected")
        payload: Sequence[memoryview] = [view(self.memory.up)] if push and not self.shared else ()
        self.wire.send(kind, sequence=sequence, version=self.version, words=words, payload=payload)
        if push and self.counted:
            self.moved_up += self.memory.up.nbytes
            current().moved("push", self.memory.up.nbytes)

    def recv(self, timeout: float) -> Message:
        """The answer; new weights that come with it are then in the parameters."""
        if self.wire is None:
            raise ConnectionLost("not connected")
        message = self.wire.recv(self._into, timeout=timeout)
        if message.kind == "error":
            raise RankError(f"{message.words['headline']} (at {self.address})", *message.words["facts"])
        if message.kind == "weights":
            self._arrived(message)
        if "lr" in message.words:
            self.learning_rate = message.words["lr"]
        return message

    @property
    def _into(self) -> memoryview | None:
        return None if self.shared else view(self.memory.down)

    @torch.no_grad()
    def _arrived(self, message: Message) -> None:
        self.version = message.version
        if self.counted:
            self.moved_down += self.memory.down.nbytes
            current().moved("pull", self.memory.down.nbytes)
        if self._weights.device.type != "cpu":
            self._weights.copy_(self.memory.down[: self.parcel.bytes], non_blocking=False)
        running = self._running.views(self.memory.down[self.parcel.bytes :])
        for name, buffer in self.statistics.items():
            buffer.copy_(running[name])

    # The payload

    @torch.no_grad()
    def pack(self) -> None:
        """Have the gradient, and the statistics, in the memory that the server reads."""
        up = self.memory.up
        for name, p in self.parameters.items():
            if p.grad is not None and p.grad is not self.views[name]:  # made anew: a sparse one, say
                self.views[name].copy_(p.grad.to_dense() if p.grad.is_sparse else p.grad)
        if self.feedback is not None:
            host = [flat.cpu() for flat in self.gradients]
            self.feedback.pack(host, up[: self.codec.bytes])
        elif self._packed:
            up[: self.parcel.bytes].copy_(self._gradient)
        running = self._running.views(up[self.codec.bytes :])
        for name, buffer in self.statistics.items():
            running[name].copy_(buffer)

    def settle(self, taken: bool) -> None:
        """The gradient that was packed has become a step, or has not."""
        if self.feedback is None:
            return
        if taken:
            self.feedback.kept(self.memory.up[: self.codec.bytes])
        else:
            self.feedback.taken_back([flat.cpu() for flat in self.gradients])

    def clear(self) -> None:
        self._gradient.zero_()
        for name, p in self.parameters.items():
            if p.grad is not self.views[name]:
                p.grad = self.views[name]

    def release(self) -> None:
        """Give the parameters memory of their own again."""
        self.close()
        for p in self.parameters.values():
            p.data, p.grad = p.data.clone(), None
        self.memory.close()
