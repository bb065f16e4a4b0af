"""Pythons of their own, forked from one that has imported meshfit: a fresh one needs 4 s of a core to do so."""

import atexit
import multiprocessing
import os
import runpy
import shutil
import signal
import sys
import tempfile
import weakref
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired

import torch

_context = multiprocessing.get_context("forkserver")


class Forked:
    """What ``subprocess.Popen([sys.executable, *arguments], start_new_session=True)`` would start: a script and what it
    is given, or "-c", code and what that is given. Signals, children and exit codes are those of any Python, but for
    Ctrl-C that nobody catches."""

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
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def meshfit(folder: Path, *arguments: str, timeout: float = 120) -> "CompletedProcess[str]":
    """``meshfit ARGUMENTS`` in ``folder``, on a screen of 100 columns."""
    process = Forked("-c", "from meshfit.cli import main; main()", *arguments, folder=folder, COLUMNS="100")
    said = process.communicate(timeout)
    return CompletedProcess(arguments, process.wait(), *said)


def _end(process: multiprocessing.Process, folder: Path) -> None:
    if process.exitcode is None:
        process.kill()
    shutil.rmtree(folder, ignore_errors=True)


def _run(arguments: list[str], folder: Path, said: Path, environ: dict[str, str], path: list[str]) -> None:
    os.setsid()
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(said / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ | {"PYTHONPATH": os.pathsep.join(path)})
    if "OMP_NUM_THREADS" in environ:  # a fresh one would read it when it imports torch
        torch.set_num_threads(int(environ["OMP_NUM_THREADS"]))
    code = arguments[0] == "-c"
    sys.path[:], sys.argv[:] = path, ["-c", *arguments[2:]] if code else arguments
    try:
        if code:
            exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
        else:
            runpy.run_path(arguments[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()
