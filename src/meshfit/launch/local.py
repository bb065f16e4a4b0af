"""LocalRanks on this machine: started, listened to, and ended without a trace.

    with LocalRanks(work, size=4, devices=devices) as ranks:
        for rank, message in ranks.messages():      # what ranks send, as it comes
            ...
        results = ranks.results                      # what work returned, by rank

The caller's script is not imported again: ``work`` travels by value. Whatever ends the block early (an
exception, a ``break``, Ctrl-C) ends the ranks; so does the death of the caller. When a rank fails, the
first cause is raised here: ranks that merely lost their connection to it do not hide it.
"""

import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NoReturn, Protocol, Self

from meshfit.errors import Died, RankError
from meshfit.launch import warm
from meshfit.launch.channel import encode, memory_file
from meshfit.launch.devices import Devices
from meshfit.launch.frames import interrupted
from meshfit.launch.heartbeat import SharedBoard
from meshfit.launch.importing import refuse_in_import
from meshfit.launch.output import KEPT_LINES, Output
from meshfit.launch.rank import Left, Raised, Returned, Start, Work
from meshfit.launch.stalls import Stall, Stalls
from meshfit.launch.system import oom_kills
from meshfit.launch.verdict import death
from meshfit.launch.world import World

ALL_GONE = 10.0  # seconds in which a killed process ends, whatever memory the kernel has to take back
SECOND_THOUGHT = 0.3  # seconds in which the true cause of a lost connection may still show


class Beside(Protocol):
    """Processes beside ranks (model servers), looked after while messages of ranks are waited for."""

    notes: list[str]

    @property
    def fds(self) -> list[int]: ...
    def watch(self) -> None: ...
    def look(self) -> None: ...
    def gone(self, worker: int) -> None: ...


@dataclass(eq=False, repr=False)
class LocalRanks:
    """``size`` processes, each running ``work(world, channel)``. Use it as a context."""

    work: Work
    _: KW_ONLY
    size: int
    devices: Devices
    timeout: float = 600.0
    """Seconds after which a collective that waits for another rank is an error."""
    hang: float = math.inf
    """Seconds after which a rank that stands still in a step is ended."""
    role: str = "rank"
    """What they are called."""
    meet: str = ""
    """Where they meet, if not in a folder of their own."""
    joined: bool = True
    """Whether they are in one process group."""
    expendable: Collection[int] = ()
    """Those whose death leaves the others at work, while there is one."""
    group: int = 1
    """Ranks of a worker group, which end together."""
    log: Path | None = None
    """A folder for what they print."""

    def __post_init__(self) -> None:
        self.beside: Beside | None = None
        self.lost: dict[int, str] = {}
        """Of the expendable: how they died."""
        self._ending: dict[int, int] = {}
        """Of the expendable: whose death ends them."""
        self._hung: dict[int, str] = {}
        """Of the expendable: why they were ended."""
        self._returned: dict[int, Any] = {}
        self._exited: dict[int, int] = {}
        self._left: dict[int, int] = {}
        """Of those that left by sys.exit: the step in which they did."""
        self._oom_kills = oom_kills()
        self._folder = ""  # where ranks meet; known once they have been forked

    def __enter__(self) -> Self:
        refuse_in_import()
        warm.warm()  # imports torch while we pickle
        with encode(self.work, what="the job", inside="job.") as work:
            self._run, self._channels = warm.fork(self.size, work.modules)
            self._open = set(range(self.size))
            self._output = Output(self.size, role=self.role, folder=self.log)
            self._board = SharedBoard(memory_file(), self.size)
            served = self.group > 1 or self.expendable or not self.joined  # each worker is alone with its ranks
            self._stalls = Stalls(
                self._board,
                self.size,
                self._tell,
                timeout=self.timeout,
                hang=self.hang,
                role=self.role,
                group=self.group if served else self.size,
            )
            try:
                for rank, channel in enumerate(self._channels):
                    with suppress(ConnectionError), self._output.ends(rank) as ends:  # messages() tells why
                        channel.send_fds(*ends, self._board.fd)
                        world = World(rank, self.size, self.devices.device(rank), self.meet)
                        channel.send(Start(world, self.timeout, self.joined, self._stalls.silence))
                        channel.send_encoded(work)
                self._output.start()
            except BaseException:
                self._end()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def messages(self, timeout: float | None = None) -> Iterator[tuple[int, Any]]:
        """What ranks send, with the rank it is from; ends when the work of all has returned.

        Raises the first failure of a rank, and ``TimeoutError`` when no rank has sent, returned or ended
        for ``timeout`` seconds.
        """
        suspect: tuple[int, Raised] | None = None  # has lost a connection: the cause may be elsewhere
        until, quiet = 0.0, time.monotonic()
        while not self._done:
            channels = {self._channels[rank].fileno(): rank for rank in self._open}
            others = [] if self.beside is None else self.beside.fds
            left = math.inf if timeout is None else quiet + timeout - time.monotonic()
            patience = min(self._stalls.each, left if suspect is None else until - time.monotonic())
            dead = self._dead
            ready = wait([self._run.fileno(), *channels, *others], 0 if dead else max(0.0, patience))
            quiet = time.monotonic() if ready else quiet
            self.watch()
            if self.beside is not None and not set(others).isdisjoint(ready):
                self.beside.look()
            if self._run.fileno() in ready:
                self._report()
                dead = self._dead
            if suspect and time.monotonic() >= until and not dead:
                self._fail(*suspect)
            if not ready and not dead and not suspect and timeout is not None and time.monotonic() >= quiet + timeout:
                raise TimeoutError(f"no {self.role} has sent anything for {timeout} s")
            for rank in dead.union(rank for fd, rank in channels.items() if fd in ready):
                for message in self._heard(rank):
                    if not isinstance(message, Raised):
                        yield rank, message
                    elif rank in self._ending:
                        continue  # it has lost a peer
                    elif not message.peer_gone:
                        yield from self._last_words()
                        self._fail(rank, message)
                    elif suspect is None:
                        suspect, until = (rank, message), time.monotonic() + SECOND_THOUGHT
            for rank in dead - self._returned.keys():  # now that all has been heard that it said
                try:
                    self._lose(rank)
                except Died:
                    yield from self._last_words()
                    raise
                if suspect is not None and suspect[0] in self._group_of(rank):
                    suspect = None
        if not self.lost and (wrong := self._stalls.compare(last=True)) is not None:
            raise wrong

    def _lose(self, rank: int) -> None:
        """Go on without a rank that died, and end those of its worker group; ``Died`` where others cannot go on."""
        live = self._stalls.seen(rank)
        step = self._left.get(rank, 0 if live is None else live.step)  # that it was in when it was last heard from
        headline, fact = death(f"{self.role} {rank}", code := self._exited[rank], step)
        peers = self._group_of(rank)
        if rank in self._hung:
            headline = self._hung[rank]
        elif rank in self._ending:
            headline = f"{self.role} {rank} ended with {self.role} {self._ending[rank]}, of the same worker"
        elif rank not in self.expendable or code >= 0 or len(self.lost.keys() | peers) == self.size:
            full = code == -signal.SIGKILL and oom_kills() > self._oom_kills
            if not full:
                self._raise_cause(headline, waited=code == -signal.SIGABRT)  # as NCCL ends one that has waited too long
            said = (f"{headline}: the machine ran out of memory",) if full else (headline, fact)
            error = Died(*said, *self._printed(rank), step=step)
            error.out_of_memory, error.rank = full, rank
            raise error
        self.lost[rank] = headline
        self._gone_beside(rank)
        self._open.discard(rank)
        if waiting := peers - self._exited.keys() - self._returned.keys() - self._ending.keys():
            self._ending |= dict.fromkeys(waiting, rank)
            with suppress(ConnectionError):
                self._run.send(("kill", sorted(waiting)))

    def _gone_beside(self, rank: int) -> None:
        if self.beside is not None:
            self.beside.gone(rank // self.group)

    def watch(self) -> None:
        """Report those that have stalled; now and then, and of those beside too."""
        if self._folder:  # else they are not there yet
            gone = self._exited.keys() | self._returned.keys() | self._hung.keys()
            self._stalls.together = self.joined and self.beside is None
            hung = self._stalls.look(gone)
            if (wrong := self._stalls.compare(gone)) is not None:
                raise wrong
            if hung:
                self._end_hung({stall.rank for stall in hung}, self._stalls.verdict(hung, gone))
        if self.beside is not None:
            self.beside.watch()

    def _end_hung(self, ranks: set[int], verdict: Died) -> None:
        """End those that hang, where the others go on without them; else, and where they have told the servers what may
        be wrong, raise what is known of them."""
        peers = set().union(*(self._group_of(rank) for rank in ranks))
        last = len(self.lost.keys() | peers) == self.size
        if verdict.agreed is not None or last or not ranks <= set(self.expendable):
            raise verdict
        self._hung |= dict.fromkeys(ranks, verdict.headline)
        self._output.settle()
        print(f"meshfit: {verdict}\nmeshfit: it is ended, and the others go on", file=sys.stderr, flush=True)
        with suppress(ConnectionError):
            self._run.send(("kill", sorted(ranks)))

    def _group_of(self, rank: int) -> set[int]:
        """Those that end together with it, itself too."""
        first = rank // self.group * self.group
        return set(range(first, first + self.group))

    @property
    def _dead(self) -> set[int]:
        """Ended before their work was done, and not yet given up."""
        return self._exited.keys() - self._returned.keys() - self.lost.keys()

    @property
    def _done(self) -> bool:
        return len(self._returned) + len(self.lost) == self.size

    @property
    def fds(self) -> list[int]:
        """Readable when there is something to hear, or to be told of."""
        return [] if self._done else [self._run.fileno(), *(self._channels[rank].fileno() for rank in self._open)]

    @property
    def notes(self) -> list[str]:
        """What became of those that did not stay, here and beside, in words."""
        return [*self._stalls.notes, *self.lost.values(), *([] if self.beside is None else self.beside.notes)]

    @property
    def folder(self) -> str:
        """Where they meet. Waits until they are there."""
        while not self._folder:
            self._report()
        return self._folder

    @property
    def results(self) -> list[Any]:
        """What work returned, by rank; None of those lost. Waits for it; messages not yet taken are dropped."""
        for _ in self.messages():
            pass
        return [self._returned.get(rank) for rank in range(self.size)]

    def send(self, rank: int, message: Any) -> None:
        """Send to one rank. One that has ended hears nothing; ``messages`` says why it ended."""
        with suppress(ConnectionError):
            self._channels[rank].send(message)

    def stacks(self) -> None:
        """Let every rank print its Python stack on stderr, even one that hangs."""
        for rank in range(self.size):
            self._output.settle()
            print(f"\n{self.role} {rank}:", file=sys.stderr)
            self._stack(rank)

    def _stack(self, rank: int) -> None:
        self._run.send(("stack", rank))
        while self._report() != "stack":
            pass
        self._output.settle()

    def _heard(self, rank: int) -> Iterator[Any]:
        """The next message of a rank, or all that is left of one that has ended."""
        channel = self._channels[rank]
        while rank in self._open and channel.poll():
            try:
                message = channel.recv()
            except (EOFError, ConnectionError):
                self._open.discard(rank)
                return
            if isinstance(message, Returned):
                self._returned[rank] = message.value
                self._gone_beside(rank)
            elif isinstance(message, Left):
                self._left[rank] = message.step
            else:
                yield message
            if rank not in self._exited:
                return  # others want to be heard too

    def _last_words(self) -> Iterator[tuple[int, Any]]:
        """What ranks had sent before one of them failed, and nobody has heard yet."""
        for rank in sorted(self._open):
            while rank in self._open and self._channels[rank].poll(0):
                for message in self._heard(rank):
                    if not isinstance(message, Raised):
                        yield rank, message

    def _report(self) -> str:
        """Note the next thing that the template reports."""
        try:
            word, *facts = self._run.recv()
        except (EOFError, ConnectionError):
            kind = Died if self.role == "rank" else RankError  # servers are started again with the ranks
            raise kind("the process that ranks are forked from has ended", "what it said last is on stderr") from None
        if word == "forked":
            (self._folder,) = facts
        elif word == "exited":
            rank, self._exited[rank] = facts
        return word

    def _fail(self, rank: int, raised: Raised) -> NoReturn:
        failure = f"{self.role} {rank} {raised.did}"
        if not raised.out_of_memory:
            self._raise_cause(failure, raised.trace, waited=raised.peer_gone)
        if raised.error is not None:
            raised.error.step = raised.step
            raise raised.error
        step = f"in step {raised.step}" if raised.step else ""
        error = RankError(failure, step, *self._printed(rank), trace=raised.trace, step=raised.step)
        error.out_of_memory, error.held = raised.out_of_memory, raised.held
        raise error

    def _raise_cause(self, failure: str, trace: str = "", *, waited: bool) -> None:
        """On behalf of the ranks of which a failure is a consequence, if that is known."""
        if (cause := self._stalls.cause(failure, trace, waited=waited, gone=self._exited.keys())) is not None:
            raise cause

    def _tell(self, text: str, stall: Stall | None) -> None:
        """Say what was found of ranks, on stderr; of one that has stalled also in its log, and have its stack."""
        self._output.settle()
        if stall is None or self._stalls.hang > self._stalls.silence:  # else the verdict says all of it in a moment
            print(f"meshfit: {text}", file=sys.stderr, flush=True)
        if stall is None:
            return
        self._output.note(stall.rank, f"meshfit: {text}")
        if stall.why == "unheard":  # its threads cannot speak; the kernel can interrupt it
            self._stack(stall.rank)
            self._stalls.stacks[stall.rank] = interrupted(self._output.last(stall.rank, KEPT_LINES))

    def _printed(self, rank: int) -> list[str]:
        """The last lines that a rank wrote, for an error about it."""
        self._output.settle()
        lines = self._output.last(rank)
        return ["the last it printed:", *(f"  {line}" for line in lines)] if lines else []

    def _end(self) -> None:
        """Let ranks go that have returned; end the others. None is left after it."""
        try:
            if self._done:
                for channel in self._channels:
                    with suppress(OSError):
                        channel.finish()
                if self._gone(within=1.0):
                    return
            with suppress(ConnectionError, RankError):
                while self._run.poll():
                    self._report()
                if self._folder:  # else nothing was forked, nor will be: the template sees that we left
                    self._run.send(("kill", list(range(self.size))))
                    self._gone(within=ALL_GONE)
        finally:
            os.close(self._board.fd)
            for channel in (self._run, *self._channels):  # what is left now, the template kills
                channel.close()
            self._output.close()
            if self._folder:  # a template that was killed could not
                shutil.rmtree(self._folder, ignore_errors=True)

    def _gone(self, *, within: float) -> bool:
        """Wait for all ranks to end."""
        deadline = time.monotonic() + within
        while len(self._exited) < self.size:
            if not self._run.poll(max(0.0, deadline - time.monotonic())):
                return False
            try:
                self._report()
            except RankError:  # the kernel has killed them with the template
                return True
        return True
