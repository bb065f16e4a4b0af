"""The template: a process with torch imported, from which ranks are forked in milliseconds.

Importing torch takes a second or more; forking a process that has done so takes none of it. The template
imports ``PRELOAD``, starts no thread, and then serves its caller over a pair of sockets. (OpenBLAS has
threads of its own from the import of numpy on; it ends them before every fork and starts them again when
they are needed.)

A run is one more socket, which comes with one end of a channel for every rank to fork:

    caller -> template    (path, modules)         first: sys.path, and what to import before the ranks are forked
                          ("kill", ranks)         end these, and what they have started
                          ("stack", rank)         let a rank print its stack on its stderr
    template -> caller    ("forked", folder)      the ranks are there, and meet in this folder
                          ("exited", rank, code)  one has ended, with this exit code (-9: by signal 9)
                          ("stack",)              it is printed

Nothing is left behind. When the run's socket closes, its ranks are killed. When the caller is gone (the
kernel's signal, the end of file on the control socket, or another parent: whichever shows first) all
are. When the template is gone the kernel kills its ranks. A rank leads a process group of its own, and
what it started ends with it.
"""

import ctypes
import gc
import importlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import NoReturn

from meshfit.launch.channel import Channel

PRELOAD = ("torch", "torch.distributed", "meshfit.launch.arena", "meshfit.launch.rank")
MOST_FDS = 253  # that the kernel passes in one message
PR_SET_PDEATHSIG = 1


def serve(control: int, caller: int, also: tuple[str, ...], by_main_thread: bool) -> NoReturn:
    """Be the template of process ``caller`` until it is gone."""
    if by_main_thread:  # the kernel's signal comes when the *thread* that started us ends
        die_with_parent(signal.SIGTERM, caller)
    for name in PRELOAD:
        importlib.import_module(name)
    _load(also)
    gc.enable()
    Template(socket.socket(fileno=control), caller).serve()
    os._exit(0)


def _load(modules: Iterable[str]) -> None:
    """Import what ranks will need, once for all of them."""
    for name in modules:
        with suppress(Exception):  # a rank that needs it will say what is wrong
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that collecting garbage in a rank does not write to every page


def die_with_parent(number: int, parent: int) -> None:
    """Let the kernel send this process signal ``number`` when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it was too late to ask
        os._exit(1)


@dataclass(slots=True)
class ForkedRanks:
    channel: Channel
    folder: str
    stderr: int
    ranks: dict[int, int] = field(default_factory=dict)
    """By process id, those not yet reaped: while one stands here, its id cannot become another's."""
    caller_left: bool = False

    def kill(self, ranks: Collection[int] | None = None) -> None:
        """These, or all, and what they have started."""
        for pid, rank in self.ranks.items():
            if ranks is None or rank in ranks:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)


class Template:
    def __init__(self, control: socket.socket, caller: int):
        self.control, self.caller = control, caller
        self.awake, self.alarm = socket.socketpair()  # readable when a rank has ended
        self.runs: list[ForkedRanks] = []
        self.dismissed = False

    def serve(self) -> None:
        for end in (self.awake, self.alarm):
            end.setblocking(False)
        signal.set_wakeup_fd(self.alarm.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self.dismiss)
        for number in (signal.SIGUSR1, signal.SIGUSR2):  # until a rank can answer them
            signal.signal(number, signal.SIG_IGN)
        try:
            while not self.dismissed and os.getppid() == self.caller and self.turn():
                pass
        finally:
            for run in self.runs:
                run.kill()
            deadline = time.monotonic() + 2
            while self.runs and time.monotonic() < deadline:
                self.reap()
                time.sleep(0.002)

    def dismiss(self, *_: object) -> None:
        """The kernel says that the caller is gone. A scheduler that tells every process of a job to end says the same:
        the caller will answer it, when ranks have saved."""
        self.dismissed = os.getppid() != self.caller

    def turn(self) -> bool:
        """Wait for something to do, and do it. False when the caller is gone."""
        callers = [run.channel.fileno() for run in self.runs if not run.caller_left]
        ready = wait([self.control, self.awake, *callers], 1.0)
        if self.awake in ready:
            self.awake.recv(4096)
        for run in self.runs:
            if run.channel.fileno() in ready:
                self.obey(run)
        self.reap()
        return self.control not in ready or self.start()

    def start(self) -> bool:
        """Fork the ranks of a new run."""
        said, fds, _, _ = socket.recv_fds(self.control, 1, MOST_FDS)
        if not said:
            return False
        end, stdout, stderr, *ends = fds
        run = ForkedRanks(Channel(socket.socket(fileno=end)), tempfile.mkdtemp(prefix="meshfit-"), stderr)
        self.runs.append(run)
        with suppress(EOFError, ConnectionError):
            sys.path[:], modules = run.channel.recv()
            if not sys.modules.keys() >= set(modules):
                _load(modules)
        for rank, mine in enumerate(ends):
            if run.channel.poll():  # ended before it began
                break
            run.ranks[self.fork(run, stdout, mine, [end for end in ends if end != mine])] = rank
        for fd in (stdout, *ends):
            os.close(fd)
        with suppress(OSError):
            run.channel.send(("forked", run.folder))
        return True

    def fork(self, run: ForkedRanks, stdout: int, mine: int, others: list[int]) -> int:
        template, handled = os.getpid(), {signal.SIGCHLD, signal.SIGTERM}
        signal.pthread_sigmask(signal.SIG_BLOCK, handled)
        pid = os.fork()
        if pid == 0:
            try:
                die_with_parent(signal.SIGKILL, template)
                os.setpgid(0, 0)
                signal.set_wakeup_fd(-1)
                for number in handled:
                    signal.signal(number, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)
                os.dup2(stdout, 1)
                os.dup2(run.stderr, 2)
                for end in (self.control, self.awake, self.alarm, *(run.channel for run in self.runs)):
                    end.close()
                for fd in (stdout, *(run.stderr for run in self.runs), *others):
                    os.close(fd)
                importlib.import_module("meshfit.launch.rank").main(socket.socket(fileno=mine), run.folder)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(70)
        with suppress(OSError):  # the rank does the same: whichever comes first
            os.setpgid(pid, pid)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)
        return pid

    def obey(self, run: ForkedRanks) -> None:
        try:
            word = run.channel.recv()
        except (EOFError, ConnectionError):
            run.caller_left = True
            run.kill()
            return
        if word[0] == "kill":
            run.kill(word[1])
        elif word[0] == "stack":
            for pid in [pid for pid, rank in run.ranks.items() if rank == word[1]]:
                os.kill(pid, signal.SIGUSR1)
                time.sleep(0.05)
            run.channel.send(("stack",))

    def reap(self) -> None:
        """Report the ranks that have ended; forget the runs of which all have."""
        for run in list(self.runs):
            for pid, rank in list(run.ranks.items()):
                # Look first, reap after: until then the group's id is surely this rank's.
                if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                    continue
                run.kill([rank])  # what the rank has started and left
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                del run.ranks[pid]
                with suppress(OSError):
                    run.channel.send(("exited", rank, code))
            if not run.ranks:
                self.runs.remove(run)
                shutil.rmtree(run.folder, ignore_errors=True)
                run.channel.close()
                os.close(run.stderr)
