"""What operating systems do differently. Each is asked for what it can do, not for its name.

Linux      everything
macOS      no sealed memory, no /proc: memory between processes is a file without a name, and stalls are seen by
           what ranks say of themselves alone
Windows    no fork and no descriptors over sockets: one device, and ranks that torchrun starts
"""

import os
import sys
import time
from typing import Any

from meshfit.errors import PlanError

AWAY = 2**30  # where Windows locks a byte: what is locked there cannot be read by others
MOST_RANKS = 1024  # on one machine: each takes some hundred MB
BINARY = getattr(os, "O_BINARY", 0)  # Windows would change line ends


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def starts_processes() -> bool:
    """Whether a process can be started with open files of this one: ranks, servers and readers of data."""
    return hasattr(os, "fork")


def process_state(pid: int) -> str:
    """The kernel's letter for what a process of this host is at: R, it runs; S, it sleeps; T, it is stopped; t, by a
    debugger. Empty: it is gone, or there is no /proc."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def is_stopped(pid: int) -> bool:
    """Whether the kernel says that a process of this host is stopped (by SIGSTOP, or a debugger)."""
    return process_state(pid) in ("T", "t")


def peak_memory() -> int:
    """Bytes of this process in memory, at its most."""
    try:
        import resource
    except ImportError:  # Windows
        import psutil

        return psutil.Process().memory_info().peak_wset  # pyright: ignore[reportAttributeAccessIssue]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def oom_kills() -> int:
    """Processes of this machine that Linux has ended for want of memory; 0 where it does not say."""
    try:
        with open("/proc/vmstat") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), 0)
    except OSError:
        return 0


def check_ranks(plan: Any) -> None:
    """Refuse a plan for which processes are started where they cannot be, or not so many."""
    if plan.devices + plan.server > MOST_RANKS:
        raise PlanError(
            f"{plan} would start {plan.devices + plan.server} processes on this machine",
            f"{MOST_RANKS} at most; more are on several machines: torchrun --nnodes=...",
        )
    if not starts_processes() and plan.devices + plan.server > 1:
        raise PlanError(
            f"{plan}: ranks are forked processes, and {sys.platform} has no fork",
            'one device trains here: plan="data=1"',
            "several: in WSL 2, or ranks that torchrun starts",
        )


def lock_file(fd: int, *, patience: float | None = None, threads: bool = False) -> bool:
    """Take the system's lock of an open file, which goes with this process. Whether it came in ``patience`` seconds;
    None: however long it takes. ``threads``: against other threads of this process too, and on this machine alone."""
    began = time.monotonic()
    while not _try_lock(fd, threads):
        if patience is not None and time.monotonic() - began > patience:
            return False
        time.sleep(0.1 if patience is not None else 0.02)
    return True


def _try_lock(fd: int, threads: bool) -> bool:
    try:
        import fcntl
    except ImportError:
        return _try_windows_lock(fd)
    try:
        (fcntl.flock if threads else fcntl.lockf)(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _try_windows_lock(fd: int) -> bool:
    import msvcrt

    windows: Any = msvcrt
    at = os.lseek(fd, 0, os.SEEK_CUR)
    try:
        os.lseek(fd, AWAY, os.SEEK_SET)
        windows.locking(fd, windows.LK_NBLCK, 1)
    except OSError:
        return False
    finally:
        os.lseek(fd, at, os.SEEK_SET)
    return True


def read_at(fd: int, buffer: memoryview, start: int) -> int:
    """Fill ``buffer`` from byte ``start`` on. How many bytes there were."""
    done = 0
    if hasattr(os, "preadv"):
        while done < len(buffer) and (more := os.preadv(fd, [buffer[done:]], start + done)):
            done += more
        return done
    os.lseek(fd, start, os.SEEK_SET)
    while done < len(buffer) and (part := os.read(fd, min(len(buffer) - done, 2**24))):
        buffer[done : done + len(part)] = part
        done += len(part)
    return done


def sync_folder(path: Any) -> None:
    """Have the names in a folder on disk; where folders cannot be opened, as on Windows, the system sees to it."""
    if os.name == "nt":
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
