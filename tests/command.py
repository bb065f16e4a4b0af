"""Pythons of their own, forked from one that has imported meshfit: a fresh one needs 4 s of a core to do so, and the
template of its ranks, which is forked, too, as much again."""

import atexit
import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import sys
import tempfile
import time
import weakref
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired

import torch

from meshfit.launch import template, warm

MESHFIT = "-c", "from meshfit.cli import main; main()"

TORCHRUN = (
    "-c",
    """
import atexit, runpy, sys
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

def rank(*arguments):
    sys.argv[:] = arguments
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # a process of multiprocessing's leaves without

meet = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}
config = LaunchConfig(1, 1, 2, run_id="tests", start_method="fork", monitor_interval=0.1, **meet)
elastic_launch(config, rank)(*sys.argv[1:])
""",
)
"""``torchrun --standalone --nproc-per-node=2``, by torchrun's own agent, but for its ranks, which are forked."""

_context = multiprocessing.get_context("forkserver")


class Forked:
    """What ``subprocess.Popen([sys.executable, *arguments], start_new_session=True)`` would start: a script, "-m" and
    a module, or "-c" and code, and what these are given. Signals, children and exit codes are those of any Python, but
    for Ctrl-C that nobody catches."""

    def __init__(self, *arguments: object, folder: Path | None = None, **environ: str):
        _context.set_forkserver_preload(["torch._dynamo", "meshfit.cli", "meshfit.drive"])
        self.args, self._said = [str(each) for each in arguments], Path(tempfile.mkdtemp())
        asked = (self.args, folder or Path.cwd(), self._said, {**os.environ, **environ}, list(sys.path))
        self._process = _context.Process(target=_run, args=asked)
        self._process.start()
        weakref.finalize(self, _end, self._process, self._said)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        return (self._said / "out").read_text(), (self._said / "err").read_text()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(*arguments: object, folder: Path | None = None, timeout: float = 120, **environ: str) -> CompletedProcess[str]:
    process = Forked(*arguments, folder=folder, **environ)
    said = process.communicate(timeout)
    return CompletedProcess(process.args, process.wait(), *said)


def meshfit(folder: Path, *arguments: str, timeout: float = 120) -> CompletedProcess[str]:
    """``meshfit ARGUMENTS`` in ``folder``, on a screen of 100 columns."""
    return run(*MESHFIT, *arguments, folder=folder, timeout=timeout, COLUMNS="100")


class _Template(warm._Hold):
    """The template of a process that has no thread yet, and has imported what a template imports."""

    def __init__(self) -> None:
        self.control, theirs = socket.socketpair()
        caller, pid = os.getpid(), os.fork()
        if not pid:
            try:
                os.setsid()
                os.environ[warm.IN_TEMPLATE] = "1"
                self.control.close()
                template.serve(theirs.detach(), caller, (), True)
            finally:
                os._exit(1)
        theirs.close()
        self.process = _Child(pid)  # type: ignore[assignment]


class _Child:
    """What the caller asks of the ``subprocess.Popen`` of its template."""

    def __init__(self, pid: int):
        self.pid, self.returncode = pid, None

    def poll(self) -> int | None:
        if self.returncode is None and os.waitpid(self.pid, os.WNOHANG)[0]:
            self.returncode = 0
        return self.returncode

    def wait(self, timeout: float = 60) -> None:
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise TimeoutExpired("template", timeout)
            time.sleep(0.005)

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def _end(process: multiprocessing.Process, folder: Path) -> None:
    if process.exitcode is None:
        process.kill()
    shutil.rmtree(folder, ignore_errors=True)


def _run(arguments: list[str], folder: Path, said: Path, environ: dict[str, str], path: list[str]) -> None:
    os.setsid()
    warm._hold = _Template()
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(said / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ | {"PYTHONPATH": os.pathsep.join(path)})
    if "OMP_NUM_THREADS" in environ:  # a fresh one would read it when it imports torch
        torch.set_num_threads(int(environ["OMP_NUM_THREADS"]))
    option = arguments[0] in ("-c", "-m")
    sys.path[:], sys.argv[:] = path, [arguments[0], *arguments[2:]] if option else arguments
    try:
        if arguments[0] == "-c":
            exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
        elif arguments[0] == "-m":
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(arguments[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()
