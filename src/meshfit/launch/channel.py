"""Messages between two processes of one run, over a private pair of sockets.

    caller, rank = pair()
    caller.send({"step": 3})              rank.recv() -> {"step": 3}

A frame is two lengths, then the pickle; a message with large tensors brings the descriptor of its arena
along. Messages are unpickled, which runs what they say: so a channel is only ever one end of a socket
pair that this process made itself, never anything with an address.
"""

import os
import socket
import struct
import tempfile
import threading
from contextlib import suppress
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshfit.launch.arena import Encoded

FRAME = struct.Struct("!?Q")  # does a descriptor come along; bytes that follow


class Channel:
    """One end. ``send`` blocks while the other end is slow to read; any thread may send."""

    def __init__(self, end: socket.socket):
        self._end = end
        self._sending = threading.Lock()

    def send(self, message: Any) -> None:
        with encode(message) as encoded:
            self.send_encoded(encoded)

    def send_encoded(self, encoded: "Encoded") -> None:
        """Send what ``encode`` made; the same one may go to many channels, and lies in memory once."""
        frame = FRAME.pack(encoded.arena is not None, len(encoded.inline))
        with self._sending:
            if encoded.arena is None:
                self._end.sendall(frame + encoded.inline)
            else:
                socket.send_fds(self._end, [frame], [encoded.arena])
                self._end.sendall(encoded.inline)

    def recv(self) -> Any:
        """The next message; waits for it. ``EOFError`` when the other end is gone."""
        from meshfit.launch.arena import decode

        frame, fds, _, _ = socket.recv_fds(self._end, FRAME.size, 1)
        try:
            large, size = FRAME.unpack(frame + self._read(FRAME.size - len(frame)))
            return decode(self._read(size), fds[0] if large else None)
        finally:
            for fd in fds:
                os.close(fd)

    def send_fds(self, *fds: int) -> None:
        """Hand on open files; ``recv_fds`` at the other end gets them."""
        socket.send_fds(self._end, [b"."], fds)

    def recv_fds(self, count: int) -> list[int]:
        said, fds, _, _ = socket.recv_fds(self._end, 1, count)
        if not said:
            raise EOFError("the other end of the channel is gone")
        return fds

    def poll(self, timeout: float | None = 0) -> bool:
        """Would ``recv`` find something (a message, or the end) within ``timeout`` seconds?"""
        return bool(wait([self._end], timeout))

    def finish(self) -> None:
        """Say that nothing more will be sent: the other end's ``recv`` gets ``EOFError``."""
        self._end.shutdown(socket.SHUT_WR)

    def until_finished(self) -> None:
        """Wait until the other end finishes or is gone; drop what it still sends."""
        with suppress(ConnectionError):
            while self._end.recv(1 << 16):
                pass

    def close(self) -> None:
        self._end.close()

    def fileno(self) -> int:
        return self._end.fileno()

    def _read(self, size: int) -> bytes:
        parts = []
        while size:
            part = self._end.recv(min(size, 1 << 20))
            if not part:
                raise EOFError("the other end of the channel is gone")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def memory_file() -> int:
    """The descriptor of a new file in memory. It has no name, so nothing is left when all have gone who have it."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("meshfit", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def seal(fd: int, *, writes: bool = False) -> None:
    """Nobody can take pages of a memory file from those who map it; nor, with ``writes``, write to it."""
    if hasattr(os, "memfd_create"):
        import fcntl

        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE * writes)


def pair() -> tuple[Channel, socket.socket]:
    """A channel, and the bare socket of its other end, to be handed to another process."""
    ours, theirs = socket.socketpair()
    return Channel(ours), theirs


def encode(message: Any, **words: str) -> "Encoded":
    """See ``arena.encode``; imports it, and cloudpickle with it, on first use."""
    from meshfit.launch.arena import encode

    return encode(message, **words)
