"""Where the threads of this process are, from their Python frames: what a rank that gets nowhere is at."""

import linecache
import os
import re
import sys
import sysconfig
import threading
import traceback
from itertools import takewhile
from types import FrameType
from typing import Any

MOST_FRAMES = 12
OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
STDLIB = os.path.realpath(sysconfig.get_path("stdlib")) + os.sep
TORCH = f"{os.sep}torch{os.sep}"
WAITS = re.compile(
    r"\.wait\(|\bdist\.|barrier\(|broadcast|all_(reduce|gather|to_all)|reduce_scatter|\.gather\(|[._](recv|receive)\("
    r"|isend|\.item\(\)|\.tolist\(\)|\.cpu\(\)|synchronize\("
)
"""In a line of code: a wait for other ranks, or for a device that may wait for them."""


def _frames() -> dict[int, FrameType]:
    """Of the other threads: with its own, a function would hold them all in a reference cycle, and with them the
    autograd graphs of a step, which pin the shapes of parameters that are then cut."""
    frames = sys._current_frames()
    frames.pop(threading.get_ident(), None)
    return frames


def where(thread: int) -> str:
    """What a thread that gets nowhere is at: waits, excused, saves, or elsewhere."""
    frames = _frames()
    if thread not in frames:
        return "elsewhere"
    known = {each.ident for each in threading.enumerate()}
    places = [_place(frame) for ident, frame in frames.items() if ident == thread or ident not in known]
    return next((place for place in places if place != "elsewhere"), "elsewhere")  # hooks run in threads of autograd's


def evaluates(thread: int) -> bool:
    """Whether a thread is at an evaluation, which may take much longer than a step."""
    frame = _frames().get(thread)
    return any(inner.f_code.co_filename == f"{OURS}evaluation.py" for inner, _ in traceback.walk_stack(frame))


def spot(thread: int, model: Any) -> str:
    """The line of a thread that says most, the user's own if there is one, and in which module of ``model`` it is:
    train.py, line 31, in forward of layers.3 (Block). For a thread that stands still: its frames are looked into."""
    frame = _frames().get(thread)
    frames = list(traceback.walk_stack(frame))
    own = [(f, n) for f, n in frames if not _is_library(f.f_code.co_filename)]
    inside = takewhile(lambda each: each[0].f_code.co_filename != f"{OURS}loop.py", own)  # not where fit was called
    theirs = [(f, n) for f, n in inside if not f.f_code.co_filename.startswith(OURS)]
    chosen = (theirs or own or frames)[:1]
    if not chosen:
        return ""
    inner, line = chosen[0]
    where = f"{os.path.basename(inner.f_code.co_filename)}, line {line}, in {inner.f_code.co_name}"
    called = next((f for f, _ in frames if f.f_code.co_name == "_call_impl" and TORCH in f.f_code.co_filename), None)
    module = None if called is None else called.f_locals.get("self")
    if module is None:
        return where
    named = {} if model is None else {id(each): name for name, each in model.named_modules()}
    name = named.get(id(module), "")
    kind = type(module).__name__
    return f"{where} of {f'{name} ({kind})' if name else kind}"


def users_line() -> str:
    """The innermost line of this thread that is the user's: train.py, line 31, in forward. Empty: there is none."""
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        file = frame.f_code.co_filename
        if not _is_library(file) and not file.startswith(OURS) and "site-packages" not in file:
            return f"{os.path.basename(file)}, line {line}, in {frame.f_code.co_name}"
    return ""


def _place(frame: FrameType) -> str:
    files = [inner.f_code.co_filename for inner, _ in traceback.walk_stack(frame)]
    for (inner, line), file in zip(traceback.walk_stack(frame), files, strict=True):
        if file.endswith(f"launch{os.sep}channel.py") and file.startswith(OURS):
            return "excused"
        if f"{TORCH}distributed{os.sep}" in file or file.startswith(f"{OURS}server{os.sep}"):
            return "waits"
        if any(f"{TORCH}{part}{os.sep}" in file for part in ("_dynamo", "_inductor")):
            return "excused"
        if _is_library(file):
            continue
        if WAITS.search(linecache.getline(file, line, inner.f_globals)):
            return "waits"
        return "saves" if any(each.startswith(f"{OURS}checkpoint{os.sep}") for each in files) else "elsewhere"
    return "elsewhere"


def stack(thread: int) -> str:
    """Of a thread, newest call last; and of Python's other threads that are in code which is not meshfit's."""
    text = ""
    frames = _frames()
    names = {each.ident: each.name for each in threading.enumerate()}
    for ident, frame in frames.items():
        if ident != thread and _is_theirs(frame):
            text += f"  in thread {names.get(ident, ident)}:\n{_lines(frame)}"
    return text + (_lines(frames[thread]) if thread in frames else "")


def _is_library(file: str) -> bool:
    """Whether a file is Python's or torch's."""
    return TORCH in file or file.startswith("<") or (file.startswith(STDLIB) and "site-packages" not in file)


def _is_theirs(frame: FrameType) -> bool:
    """Whether the innermost frame that is neither Python's nor torch's is the user's."""
    files = (inner.f_code.co_filename for inner, _ in traceback.walk_stack(frame))
    innermost = next((file for file in files if not _is_library(file)), OURS)
    return not innermost.startswith(OURS)


def _lines(frame: FrameType) -> str:
    lines = traceback.format_stack(frame)
    ours = [i for i, line in enumerate(lines) if line.startswith(f'  File "{OURS}launch{os.sep}rank.py"')]
    begin = ours[0] + 1 if ours else 0  # what comes before is how the rank was started
    return "".join(lines[begin:][-MOST_FRAMES:])
