"""The watch of torchrun's ranks: there is no caller that looks, so the first two ranks do.

``Stalls`` finds what there is to say in the store that the ranks meet in; here it is said on stderr, raised where a run
cannot go on with it, and ranks that hang are ended: torchrun then ends, and may restart, all of them.
"""

import math
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from meshfit.launch.heartbeat import Heart, StoreBoard
from meshfit.launch.stalls import Stall, Stalls, timed_out
from meshfit.live import LIVE


@contextmanager
def watched(rank: int, size: int, timeout: float, hang: float = math.inf) -> Iterator[None]:
    """Around the work of one of torchrun's ranks: those that have stalled are reported, named where others lose
    patience with them, and ended after ``hang`` seconds."""
    board = None
    with suppress(RuntimeError, KeyError, ValueError):  # no store: a process group of the user's own
        board = StoreBoard() if size > 1 else None
    if board is None:
        yield
        return

    def speaks() -> bool:
        """The first rank does; the second where that cannot."""
        return rank == 0 or any(s.rank == 0 and s.why in ("stopped", "debugged", "unheard") for s in stalls.now())

    def tell(text: str, stall: Stall | None) -> None:
        if speaks():
            _say(text)

    def look() -> None:
        hung, wrong = stalls.look(), stalls.compare()
        LIVE.halt = wrong if rank == 0 else None
        if hung and speaks():
            _say(str(stalls.verdict(hung)))
            end(hung)

    def failed(error: Exception) -> None:
        _say(f"the store of the ranks does not answer: torchrun, or rank 0, is stopped or gone ({_headline(error)})")

    stalls = Stalls(board, size, tell, timeout=timeout, hang=hang)
    looks = {"after": look, "failed": failed} if rank < 2 else {}
    heart = Heart(board, rank, silence=stalls.silence, **looks)
    heart.start()
    try:
        yield
    except Exception as error:
        if (cause := stalls.cause(f"rank {rank} raised {_headline(error)}", waited=timed_out(error))) is not None:
            raise cause from error
        raise
    finally:
        heart.stop()
    if rank == 0 and (wrong := stalls.compare_at_end()) is not None:
        raise wrong


def end(stalls: list[Stall]) -> None:
    """End the ranks of torchrun that hang; it then ends the others. Where they are on other hosts, this one."""
    here = [stall for stall in stalls if stall.beat is not None and stall.beat.host == socket.gethostname()]
    for stall in here:
        assert stall.beat is not None
        for number in (signal.SIGCONT, signal.SIGKILL):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(stall.beat.pid, number)
    if not here:
        os._exit(1)


def _headline(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _say(text: str) -> None:
    print(f"meshfit: {text}", file=sys.stderr, flush=True)
