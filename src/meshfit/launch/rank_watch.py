"""What is known of ranks of this machine beyond what they send: who has stalled, is slow, holds other weights, and how
one died.

``Stalls`` finds it in the memory that ranks share with the caller; here it is told, on stderr and in the logs of the
ranks, and raised where a run cannot go on with it.
"""

import math
import os
import signal
import sys
from collections.abc import Callable, Collection
from typing import Any

from meshfit.errors import Died, MeshfitError
from meshfit.launch.heartbeat import SharedBoard, silence_of
from meshfit.launch.output import KEPT_LINES, Output
from meshfit.launch.stalls import Stall, Stalls


class RankWatch:
    """``stack(rank)`` lets a rank print its stack, even one that hangs. ``group``: see ``Stalls``."""

    def __init__(
        self,
        board: SharedBoard,
        size: int,
        output: Output,
        stack: Callable[[int], None],
        *,
        timeout: float,
        hang: float = math.inf,
        role: str = "rank",
        group: int = 0,
    ):
        self._output, self._stack, self._timeout = output, stack, timeout
        self.notes: list[str] = []
        """What was found of ranks that went on."""
        self.silence = silence_of(timeout, hang)
        how: dict[str, Any] = {"note": self._note, "role": role, "silence": self.silence, "hang": hang, "group": group}
        self._stalls = Stalls(board, size, self._tell, **how)

    @property
    def each(self) -> float:
        """Seconds from look to look."""
        return self._stalls.each

    def look(self, gone: Collection[int], *, together: bool) -> list[Stall]:
        """Report those that have stalled, and those that are slow, now and then; those that hang. ``together``: whether
        they wait for each other alone."""
        self._stalls.together = together
        self._stalls.look(gone=gone)
        self.compare(gone=gone)
        return [stall for stall in self._stalls.hung if stall.rank not in gone]

    def verdict(self, hung: list[Stall], gone: Collection[int]) -> Died:
        return self._stalls.verdict(hung, gone)

    def compare(self, *, gone: Collection[int] = (), last: bool = False) -> None:
        """Note ranks that are slow; raise where replicas differ, or collectives do."""
        self._stalls.compare(gone=gone, last=last)
        if (corrupt := self._stalls.corrupt()) is not None:
            raise corrupt

    def mismatch(self, failure: str, trace: str = "") -> None:
        """Raise on behalf of ranks that have called different collectives, if they did, whatever came of it."""
        if (error := self._stalls.mismatch(failure, trace)) is not None:
            raise error

    def blame(self, gave_up: str, gone: Collection[int]) -> None:
        """Raise on behalf of who stalled, if one did, where another gave up waiting for it."""
        error = self._stalls.blame(gave_up, self._timeout, gone=gone)
        if error is not None:
            raise error

    def step_of(self, rank: int) -> int:
        """That a rank was in when it was last heard from; 0: in none."""
        live = self._stalls.seen(rank)
        return 0 if live is None else live.step

    def _tell(self, stall: Stall | None, text: str) -> None:
        self._output.settle()
        if stall is None or self._stalls.hang > self._stalls.silence:  # else the verdict says all of it in a moment
            print(f"meshfit: {text}", file=sys.stderr, flush=True)
        if stall is None:
            return
        self._output.note(stall.rank, f"meshfit: {text}")
        if stall.why == "unheard":  # its threads cannot speak; the kernel can interrupt it
            self._stack(stall.rank)
            self._stalls.stacks[stall.rank] = interrupted(self._output.last(stall.rank, KEPT_LINES))

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self._output.settle()
        print(f"meshfit: {text}", file=sys.stderr, flush=True)


def at_step(step: int, error: MeshfitError, rank: int | None = None) -> MeshfitError:
    error.step, error.rank = step, rank
    return error


def interrupted(lines: list[str]) -> str:
    """The stack of the thread that the kernel interrupted, from what faulthandler printed of all."""
    begin = max((i for i, line in enumerate(lines) if line.startswith("Current thread")), default=len(lines))
    frames = [line for line in reversed(lines[begin + 1 :]) if line.startswith("  File")]
    ours = [i for i, line in enumerate(frames) if f"launch{os.sep}rank.py" in line]
    return "".join(f"{line}\n" for line in frames[(ours[-1] + 1 if ours else 0) :])


def death(who: str, code: int, step: int) -> tuple[str, str]:
    at = f" at step {step}" if step else ""
    if code >= 0:
        return f"{who} left{at} with exit code {code} before its work was done", ""
    name = signal.Signals(-code).name if -code in {*signal.Signals} else "unknown"
    out_of_memory = code == -signal.SIGKILL
    return (
        f"{who} was killed by signal {-code} ({name})",
        "if nobody sent it, the machine ran out of memory" if out_of_memory else "",
    )
