"""A run in processes of its own, looked at from outside: how long it takes, what it leaves behind, where it listens.

Every process of a run has a mark in its environment, whoever started it: so those that outlive their caller are found.
"""

import ipaddress
import json
import math
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MARK = "MESHFIT_FAULT_RUN"
LEAVE_SECONDS = 5.0  # in which the last process of a run must be gone


@dataclass
class Outcome:
    """What became of a run."""

    code: int | None
    """Exit code; None: it had to be ended."""
    seconds: float
    out: str
    err: str
    orphans: list[str] = field(default_factory=list)
    """Command lines of processes that were left."""
    open_ports: list[str] = field(default_factory=list)
    """Addresses beyond loopback at which it listened."""
    said: list[tuple[float, str]] = field(default_factory=list)
    """Lines of stderr, and when they came."""

    @property
    def hung(self) -> bool:
        return self.code is None

    @property
    def result(self) -> dict[str, Any]:
        """Its last words, where it came to its end."""
        lines = self.out.strip().splitlines()
        return json.loads(lines[-1]) if self.code == 0 and lines and lines[-1].startswith("{") else {}

    @property
    def digest(self) -> str:
        return self.result.get("digest", "")

    @property
    def notes(self) -> list[str]:
        return self.result.get("notes", [])

    def told_after(self, mark: str) -> float:
        """Seconds from a fault, which has made the file ``mark``, to the first line of meshfit's that follows it."""
        try:
            made = os.stat(mark).st_mtime
        except OSError:
            return math.nan
        return next((at - made for at, line in self.said if at >= made and line.startswith("meshfit: ")), math.nan)

    @property
    def says(self) -> str:
        """What it says is wrong, in one line."""
        lines = [line.strip() for line in self.err.splitlines() if "meshfit: " in line or "Error: " in line]
        return (lines or self.err.strip().splitlines()[-1:] or [""])[0].removeprefix("meshfit: ")


class Watched:
    """A process, its children and theirs."""

    def __init__(self, command: list[str], **environ: str):
        self.mark = secrets.token_hex(8)
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        env = {**os.environ, MARK: self.mark, "PYTHONPATH": path, **environ}
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._err: list[tuple[float, str]] = []
        self.open_ports: set[str] = set()
        self._readers = [
            threading.Thread(target=self._read_out, daemon=True),
            threading.Thread(target=self._read_err, daemon=True),
            threading.Thread(target=self._look, daemon=True),
        ]
        for thread in self._readers:
            thread.start()

    def _read_out(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)

    def _read_err(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._err.append((time.time(), line))

    def _look(self) -> None:
        while self.process.poll() is None:
            self.open_ports |= {str(each) for each in listening(self.pids()) if not each.address.is_loopback}
            time.sleep(0.5)

    def pids(self) -> list[int]:
        """All that are alive, the caller first."""
        return sorted(pid for pid in _pids() if f"{MARK}={self.mark}" in _environ(pid))

    def ranks(self) -> list[int]:
        """Processes that the template has forked, in order."""
        parents = {pid: _parent(pid) for pid in self.pids()}
        return [pid for pid, parent in parents.items() if _parent(parent) == self.process.pid]

    def readers(self) -> list[int]:
        """Processes that ranks have started to read data."""
        ranks = self.ranks()
        return [pid for pid in self.pids() if _parent(pid) in ranks]

    def wait_for(self, word: str, limit: float) -> bool:
        """Until a line of its output begins with ``word``."""
        until = time.monotonic() + limit
        while not any(line.startswith(word) for line in self.lines):
            if time.monotonic() > until or self.process.poll() is not None:
                return False
            time.sleep(0.02)
        return True

    def end(self, limit: float) -> Outcome:
        """Wait; what is left after ``limit`` seconds is ended."""
        try:
            code: int | None = self.process.wait(max(0.1, limit - (time.monotonic() - self.began)))
        except subprocess.TimeoutExpired:
            code = None
        seconds = time.monotonic() - self.began
        until = time.monotonic() + LEAVE_SECONDS
        while code is not None and self.pids() and time.monotonic() < until:
            time.sleep(0.1)
        left = self.pids()
        orphans = [] if code is None else [_command(pid) for pid in left]
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        for thread in self._readers:
            thread.join(5)
        err = "".join(line for _, line in self._err)
        return Outcome(code, seconds, "".join(self.lines), err, orphans, sorted(self.open_ports), self._err)


def run(
    asked: dict[str, Any],
    *,
    limit: float,
    act: Callable[[Watched], None] = lambda run: None,
    before: Sequence[str] = (),
    python: Sequence[str] = (sys.executable,),
    **environ: str,
) -> Outcome:
    """The job of job.py; ``act`` does something to it from outside. ``before``: a command that runs it; ``python``: the
    one that its module is given to."""
    watched = Watched([*before, *python, "-m", "tests.faults.job", json.dumps(asked)], **environ)
    try:
        act(watched)
    finally:
        outcome = watched.end(limit)
    return outcome


# What the kernel says


@dataclass(frozen=True)
class Address:
    address: ipaddress.IPv4Address | ipaddress.IPv6Address
    port: int

    def __str__(self) -> str:
        return f"{self.address}:{self.port}"


def listening(pids: list[int]) -> list[Address]:
    """Where these processes listen, over TCP."""
    held = set()
    for pid in pids:
        with suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    held.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
    found = []
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                _, local, _, state, *rest = line.split()
                if state == "0A" and f"socket:[{rest[5]}]" in held:
                    found.append(_address(local))
    return found


def _address(text: str) -> Address:
    host, port = text.split(":")
    raw = b"".join(bytes.fromhex(host[i : i + 8])[::-1] for i in range(0, len(host), 8))  # words of the machine's order
    address = ipaddress.ip_address(raw)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        address = address.ipv4_mapped
    return Address(address, int(port, 16))


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _environ(pid: int) -> str:
    """Empty of one that has ended and is not yet waited for."""
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace")
    except OSError:
        return ""


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _command(pid: int) -> str:
    try:
        return f"{pid} {Path(f'/proc/{pid}/cmdline').read_text()[:60]}".replace("\0", " ")
    except OSError:
        return str(pid)
