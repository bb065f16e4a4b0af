"""The caller's hold on the template: one per process, started early, kept for later runs."""

import atexit
import os
import socket
import subprocess
import sys
import sysconfig
import threading
from contextlib import suppress

from meshfit.errors import JobError
from meshfit.launch.channel import Channel, pair
from meshfit.launch.template import MOST_FDS

IN_TEMPLATE = "MESHFIT_TEMPLATE"  # set in the template's environment, where another would help nobody


class _Hold:
    """A template process and the socket that it listens to."""

    def __init__(self, also: tuple[str, ...]):
        self.control, theirs = socket.socketpair()
        thread = threading.current_thread() is threading.main_thread()
        code = (
            "import gc; gc.disable()\n"  # imports make no garbage: looking for it takes a tenth of their time
            f"import sys; sys.path[:] = {[str(entry) for entry in sys.path]!r}\n"
            "from meshfit.launch.template import serve\n"
            f"serve({theirs.fileno()}, {os.getpid()}, {also!r}, {thread})"
        )
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in the terminal is the caller's to handle
                pass_fds=(theirs.fileno(),),
                env={**os.environ, IN_TEMPLATE: "1"},
            )

    def end(self) -> None:
        self.control.close()
        self.process.terminate()
        try:
            self.process.wait(3)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


_lock = threading.Lock()
_hold: _Hold | None = None
_also: tuple[str, ...] = ()


def warm(*also: str) -> None:
    """Start the template, unless it runs already; does not wait for it.

    Called early, its imports overlap with the caller's own. ``also`` names modules that a template
    started by this call, or later, imports beyond what every rank needs.
    """
    global _hold, _also
    if IN_TEMPLATE in os.environ:
        return
    with _lock:
        _also += also
        if _hold is not None and _hold.process.poll() is not None:
            _hold.control.close()
            _hold = None
        if _hold is None:
            _hold = _Hold(_also)


def fork(size: int, modules: tuple[str, ...] = ()) -> tuple[Channel, list[Channel]]:
    """Ask the template for ``size`` ranks: the run's channel to it, and a channel to each rank.

    It imports those of ``modules`` that are of installed packages before it forks: once for all ranks, and for those of
    later runs. The user's own may change between two runs: ranks import them afresh.

    Does not wait for the template to be ready: what is sent to the ranks meanwhile waits for them.
    """
    if size > MOST_FDS - 3:
        raise JobError(f"{size} ranks on one machine", f"at most {MOST_FDS - 3} can be started")
    pairs = [pair() for _ in range(size + 1)]
    try:
        homes = tuple(sysconfig.get_path(kind) + os.sep for kind in ("purelib", "platlib"))
        files = ((name, getattr(sys.modules.get(name), "__file__", None) or "") for name in modules)
        pairs[0][0].send((list(sys.path), tuple(name for name, file in files if file.startswith(homes))))
        run, *ranks = (theirs.fileno() for _, theirs in pairs)
        for last in (False, True):
            warm()
            with _lock:
                assert _hold is not None
                try:
                    socket.send_fds(_hold.control, [b"."], [run, 1, 2, *ranks])
                    break
                except ConnectionError:  # killed a moment ago, and not yet gone
                    _hold.end()
                    if last:
                        raise
    finally:
        for _, theirs in pairs:
            theirs.close()
    return pairs[0][0], [ours for ours, _ in pairs[1:]]


@atexit.register
def _end() -> None:
    if _hold is not None:
        _hold.end()


def _forget() -> None:
    """In a child that the caller forked: the template is not its own."""
    global _hold, _lock
    _lock = threading.Lock()
    if _hold is not None:
        _hold.process.returncode = 0  # not this process's child
        with suppress(OSError):
            _hold.control.close()
        _hold = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
