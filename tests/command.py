"""The command line in a process of its own, forked from one that has imported it: a fresh Python takes 3 s to do so."""

import atexit
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from subprocess import CompletedProcess

_context = multiprocessing.get_context("forkserver")


def meshfit(folder: Path, *arguments: str, timeout: float = 120) -> "CompletedProcess[str]":
    """``meshfit ARGUMENTS`` in ``folder``, on a screen of 100 columns."""
    _context.set_forkserver_preload(["torch._dynamo", "meshfit.cli", "meshfit.drive"])
    with tempfile.TemporaryDirectory() as written:
        out, err = Path(written, "out"), Path(written, "err")
        process = _context.Process(target=_run, args=(folder, arguments, out, err, dict(os.environ), list(sys.path)))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            raise TimeoutError(f"meshfit {' '.join(arguments)} has not ended after {timeout} s")
        return CompletedProcess(arguments, process.exitcode, out.read_text(), err.read_text())


def _run(
    folder: Path, arguments: tuple[str, ...], out: Path, err: Path, environ: dict[str, str], path: list[str]
) -> None:
    for number, file in ((1, out), (2, err)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ | {"PYTHONPATH": os.pathsep.join(path), "COLUMNS": "100"})
    sys.path[:], sys.argv[:] = path, ["meshfit", *arguments]
    from meshfit.cli import main

    try:
        main()
    finally:
        atexit._run_exitfuncs()
