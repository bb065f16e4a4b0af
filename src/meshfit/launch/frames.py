"""Where the threads of this process are, from their Python frames: what a rank that gets nowhere is at.

They are read from what faulthandler prints of them. A frame object of another thread would hold all that its function
has, and whoever drops the last reference frees it: autograd graphs, generators with what is to be undone, in the wrong
thread and while the other one runs.
"""

import faulthandler
import linecache
import os
import re
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable
from functools import cache
from itertools import takewhile
from typing import Any, NamedTuple

from meshfit.launch.channel import memory_file

MOST_FRAMES = 12
OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
STDLIB = os.path.realpath(sysconfig.get_path("stdlib")) + os.sep
TORCH = f"{os.sep}torch{os.sep}"
WAITS = re.compile(
    r"\.wait\(|\bdist\.|barrier\(|broadcast|all_(reduce|gather|to_all)|reduce_scatter|\.gather\(|[._](recv|receive)\("
    r"|isend|\.item\(\)|\.tolist\(\)|\.cpu\(\)|synchronize\("
)
"""In a line of code: a wait for other ranks, or for a device that may wait for them."""


THREAD = re.compile(r"(?:Current t|T)hread 0x([0-9a-f]+)")
FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
ESCAPED = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")
PRINTING = threading.Lock()


class StackLine(NamedTuple):
    """Where a function is."""

    file: str
    number: int
    function: str

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}, line {self.number}, in {self.function}"


def _stacks() -> dict[int, list[StackLine]]:
    """Of all threads by their identity, innermost first; faulthandler prints 100 of each."""
    with PRINTING:
        page = _page()
        os.ftruncate(page, 0)
        os.lseek(page, 0, os.SEEK_SET)
        faulthandler.dump_traceback(page)
        text = os.pread(page, os.fstat(page).st_size, 0).decode("ascii", "replace")
    found: dict[int, list[StackLine]] = {}
    lines: list[StackLine] = []
    for line in text.splitlines():
        if thread := THREAD.match(line):
            lines = found[int(thread[1], 16)] = []
        elif frame := FRAME.fullmatch(line):
            lines.append(StackLine(_plain(frame[1]), int(frame[2]), _plain(frame[3])))
    return {thread: lines for thread, lines in found.items() if lines}


@cache
def _page() -> int:
    """A file to print on, which is there when no more can be opened."""
    return memory_file()


def _plain(text: str) -> str:
    return ESCAPED.sub(lambda found: chr(int(found[1] or found[2] or found[3], 16)), text)


def where(thread: int) -> str:
    """What a thread that gets nowhere is at: waits (for ranks), asks (a model server), excused, saves, or elsewhere."""
    stacks = _stacks()
    known = {each.ident for each in threading.enumerate()}
    places = [_place(lines) for ident, lines in stacks.items() if ident == thread or ident not in known]
    return next((place for place in places if place != "elsewhere"), "elsewhere")  # hooks run in threads of autograd's


def spot(thread: int, model: Any) -> str:
    """The line of a thread that says most, the user's own if there is one, and in which module of ``model`` it is:
    train.py, line 31, in forward of layers.3 (Block). For a thread that stands still: its frames are looked into."""
    lines = _stacks().get(thread, [])
    own = [line for line in lines if not _is_library(line.file)]
    inside = takewhile(lambda line: line.file != f"{OURS}loop.py", own)  # not where fit was called
    theirs = [line for line in inside if not line.file.startswith(OURS)]
    chosen = (theirs or own or lines)[:1]
    module = _module(thread)
    if not chosen or module is None:
        return str(chosen[0]) if chosen else ""
    named = {} if model is None else {id(each): name for name, each in model.named_modules()}
    name = named.get(id(module), "")
    kind = type(module).__name__
    return f"{chosen[0]} of {f'{name} ({kind})' if name else kind}"


def _module(thread: int) -> Any:
    """The innermost that a thread is in the call of."""
    for frame, _ in traceback.walk_stack(sys._current_frames().get(thread)):
        if frame.f_code.co_name == "_call_impl" and TORCH in frame.f_code.co_filename:
            return frame.f_locals.get("self")
    return None


def users_line() -> str:
    """The innermost line of this thread that is the user's: train.py, line 31, in forward. Empty: there is none."""
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        file = frame.f_code.co_filename
        if not _is_library(file) and not file.startswith(OURS) and "site-packages" not in file:
            return f"{os.path.basename(file)}, line {line}, in {frame.f_code.co_name}"
    return ""


def _place(lines: Iterable[StackLine]) -> str:
    for file, number, _ in lines:
        if file.endswith(f"launch{os.sep}channel.py") and file.startswith(OURS):
            return "excused"
        if f"{TORCH}distributed{os.sep}" in file:
            return "waits"
        if file.startswith(f"{OURS}server{os.sep}"):
            return "asks"
        if any(f"{TORCH}{part}{os.sep}" in file for part in ("_dynamo", "_inductor")):
            return "excused"
        if _is_library(file):
            continue
        if WAITS.search(linecache.getline(file, number)):
            return "waits"
        return "saves" if any(line.file.startswith(f"{OURS}checkpoint{os.sep}") for line in lines) else "elsewhere"
    return "elsewhere"


def stack(thread: int) -> str:
    """Of a thread, newest call last; and of Python's other threads that are in code which is not meshfit's."""
    text, stacks = "", _stacks()
    stacks.pop(threading.get_ident(), None)
    names = {each.ident: each.name for each in threading.enumerate()}
    for ident, lines in stacks.items():
        if ident != thread and _is_theirs(lines):
            text += f"  in thread {names.get(ident, ident)}:\n{_text(lines)}"
    return text + _text(stacks.get(thread, []))


def interrupted(lines: list[str]) -> str:
    """The stack of the thread that the kernel interrupted, from what faulthandler printed of all."""
    begin = max((i for i, line in enumerate(lines) if line.startswith("Current thread")), default=len(lines))
    frames = [line for line in reversed(lines[begin + 1 :]) if line.startswith("  File")]
    ours = [i for i, line in enumerate(frames) if f"launch{os.sep}rank.py" in line]
    return "".join(f"{line}\n" for line in frames[(ours[-1] + 1 if ours else 0) :])


def _is_library(file: str) -> bool:
    """Whether a file is Python's or torch's."""
    return TORCH in file or file.startswith("<") or (file.startswith(STDLIB) and "site-packages" not in file)


def _is_theirs(lines: Iterable[StackLine]) -> bool:
    """Whether the innermost frame that is neither Python's nor torch's is the user's."""
    innermost = next((line.file for line in lines if not _is_library(line.file)), OURS)
    return not innermost.startswith(OURS)


def _text(lines: Iterable[StackLine]) -> str:
    inside = takewhile(lambda line: line.file != f"{OURS}launch{os.sep}rank.py", lines)  # not how the rank was started
    told = [f'  File "{line.file}", line {line.number}, in {line.function}\n{_source(line)}' for line in inside]
    return "".join(reversed(told[:MOST_FRAMES]))


def _source(line: StackLine) -> str:
    text = linecache.getline(line.file, line.number).strip()
    return f"    {text}\n" if text else ""
