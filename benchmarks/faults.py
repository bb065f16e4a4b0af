"""Named faults, put in one at a time: each must be caught by the tests that cover it.

    python benchmarks/faults.py                     all of benchmarks/faults.toml, on HEAD
    python benchmarks/faults.py --only tensor,cli   those with "tensor" or "cli" in their name, or of these packages
    python benchmarks/faults.py --part 2/4          every fourth, from the second on
    python benchmarks/faults.py --base REV          on another revision, with the tests that it has

Works in a git worktree of its own. A fault is a replacement of text, which must stand exactly once in src/meshfit, in
whichever file: so it survives moves. First all covering tests run without a fault: they must pass. What is left to
`make more` does not count. Exit code 1 if a fault is not caught or does not apply; or has no test, but for revisions of
before its test was written.
"""

import argparse
import contextlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PATIENCE = 600.0  # seconds for the tests of one fault


@dataclass(frozen=True)
class Fault:
    name: str
    package: str
    says: str
    tests: tuple[str, ...]
    changes: tuple[tuple[str, str], ...]

    def place(self, source: Path) -> tuple[Path, str] | None:
        """The file in which the fault goes, and that file's text with it; None where it does not apply."""
        texts = {path: path.read_text() for path in sorted(source.rglob("*.py"))}
        for old, new in self.changes:
            where = [path for path, text in texts.items() if old in text]
            if where:
                path, text = where[0], texts[where[0]]
                return (path, text.replace(old, new)) if len(where) == 1 and text.count(old) == 1 else None
        return None

    def covered_by(self, tree: Path) -> list[str]:
        """Those of its tests that a tree has."""
        return [test for test in self.tests if _defined(tree, test)]


def _defined(tree: Path, test: str) -> bool:
    path, *_, name = test.partition("[")[0].split("::")
    return (tree / path).is_file() and f"def {name}(" in (tree / path).read_text()


def read(only: str, part: str = "1/1") -> list[Fault]:
    """The faults asked for: words with commas between, and of these the ``part`` i/n."""
    table = tomllib.loads((ROOT / "benchmarks/faults.toml").read_text())
    every = [
        Fault(
            name, each["package"], each["says"], tuple(each["tests"]), tuple((old, new) for old, new in each["changes"])
        )
        for name, each in table.items()
    ]
    words = only.split(",")
    found = [fault for fault in every if any(word in fault.name or word == fault.package for word in words)]
    first, step = map(int, part.split("/"))
    return found[first - 1 :: step]


@contextlib.contextmanager
def worktree(revision: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="meshfit-faults-") as folder:
        tree = Path(folder) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), revision], check=True)
        try:
            if (ROOT / ".venv").exists():
                (tree / ".venv").symlink_to((ROOT / ".venv").resolve())
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def failure(tree: Path, tests: list[str], patience: float = PATIENCE) -> str | None:
    """The first test that fails, "" if all pass; None where they cannot be run."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([f"{tree}/src", f"{tree}/tests"])}
    try:
        done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=patience)
    except subprocess.TimeoutExpired:
        return f"no end after {patience:.0f} s"
    if done.returncode not in (0, 1) or (done.returncode and patience > PATIENCE):
        print(done.stdout[-2000:] + done.stderr[-2000:])
    failed = re.search(r"^(?:FAILED|ERROR) \S*?::(.*?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return {0: "", 1: failed[1] if failed else "a test"}.get(done.returncode)


def write(path: Path, text: str) -> None:
    path.write_text(text)
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)  # which goes by seconds and size


def outcome(fault: Fault, tree: Path) -> tuple[str, str]:
    """What became of it, and the test that caught it."""
    tests, found = fault.covered_by(tree), fault.place(tree / "src/meshfit")
    if found is None:
        return "does not apply", ""
    if not tests:
        return "no test", ""
    path, text = found
    before = path.read_text()
    write(path, text)
    try:
        failed = failure(tree, tests)
        return {"": "NOT CAUGHT", None: "tests do not run"}.get(failed, "caught"), failed or ""
    finally:
        write(path, before)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="faults with one of these in their name, or of these packages")
    parser.add_argument("--part", default="1/1", help="i/n: every n-th fault, from the i-th on")
    parser.add_argument("--base", default="HEAD", metavar="REV", help="the revision to put them into")
    asked = parser.parse_args()
    faults = read(asked.only, asked.part)
    found: list[str] = []
    with worktree(asked.base) as tree:
        tests = sorted({test for fault in faults for test in fault.covered_by(tree)})
        if (failed := failure(tree, tests, patience=PATIENCE * len(faults))) != "":
            print(f"the covering tests do not pass without a fault: {failed}")
            return 1
        print(f"{'fault':44} {'package':11} {'outcome':16} {'seconds':>7}  by")
        for fault in faults:
            began = time.perf_counter()
            said, by = outcome(fault, tree)
            found.append(said)
            print(f"{fault.name:44} {fault.package:11} {said:16} {time.perf_counter() - began:7.1f}  {by}", flush=True)
    print(", ".join(f"{found.count(said)} {said}" for said in dict.fromkeys(found)))
    fine = {"caught"} if asked.base == "HEAD" else {"caught", "no test"}
    return int(not found or not fine.issuperset(found))


if __name__ == "__main__":
    sys.exit(main())
