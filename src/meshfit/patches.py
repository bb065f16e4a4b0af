"""Functions of torch and of libraries that are replaced for a while: in one thread, or everywhere.

``nn.Module.__call__`` while a forward is recorded, ``F.batch_norm`` while a global BatchNorm runs, and so on. While
anyone asks for it, the attribute holds a function that calls what the calling thread asked for, or what was found; the
last who leaves puts back what was found. So threads may enter and leave in any order, and others see no change.
"""

import builtins
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Function = Callable[..., Any]

_lock = threading.Lock()
_patches: "dict[tuple[int, str], _Patch]" = {}
_ABSENT = object()


class _Entry:
    def __init__(self, thread: int | None):
        self.thread = thread
        self.call: Function = lambda: None


class _Patch:
    """An attribute of ``owner`` (a class, a module, the globals of one) that is replaced."""

    def __init__(self, owner: Any, name: str, bind: Function, real: Function | None):
        self.owner, self.name = owner, name
        self.found = (owner if isinstance(owner, dict) else vars(owner)).get(name, _ABSENT)
        self.real: Function = real or self.found  # type: ignore[assignment]
        self.entries: tuple[_Entry, ...] = ()

        @functools.wraps(self.real)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self.call(None, *args, **kwargs)

        self._put(bind(call))

    def call(self, below: _Entry | None, /, *args: Any, **kwargs: Any) -> Any:
        """Of this thread's entries the last, or the last that was there before ``below``."""
        thread, entries = threading.get_ident(), self.entries
        if below is not None:
            entries = entries[: entries.index(below)] if below in entries else ()
        for entry in reversed(entries):
            if entry.thread is None or entry.thread == thread:
                return entry.call(*args, **kwargs)
        return self.real(*args, **kwargs)

    def restore(self) -> None:
        if self.found is not _ABSENT:
            self._put(self.found)
        elif isinstance(self.owner, dict):
            del self.owner[self.name]
        else:
            delattr(self.owner, self.name)

    def _put(self, value: Any) -> None:
        if isinstance(self.owner, dict):
            self.owner[self.name] = value
        else:
            setattr(self.owner, self.name, value)


@contextmanager
def replaced(
    owner: Any,
    name: str,
    make: Callable[[Function], Function],
    *,
    everywhere: bool = False,
    bind: Function = lambda call: call,
    real: Function | None = None,
) -> Iterator[None]:
    """Within it ``make(before)`` is called in place of ``owner.name``, in this thread or ``everywhere``; ``before`` is
    what would have been called without. ``bind`` and ``real``, for what is no plain function of ``owner``: how it is
    put there, and what to call where nothing is replaced."""
    key, entry = (id(owner), name), _Entry(None if everywhere else threading.get_ident())
    with _lock:
        patched = _patches.get(key)
        if patched is None:
            patched = _patches[key] = _Patch(owner, name, bind, real)
        entry.call = make(functools.partial(patched.call, entry))
        patched.entries = (*patched.entries, entry)
    try:
        yield
    finally:
        with _lock:
            patched.entries = tuple(each for each in patched.entries if each is not entry)
            if not patched.entries:
                patched.restore()
                del _patches[key]


@contextmanager
def unprinted() -> Iterator[None]:
    """Within it ``print`` shows nothing of what this thread prints; what is printed to a file of its own is written."""

    def make(before: Function) -> Function:
        return lambda *said, file=None, **how: None if file is None else before(*said, file=file, **how)

    with replaced(builtins, "print", make):
        yield
