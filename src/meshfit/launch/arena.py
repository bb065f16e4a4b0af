"""A message as bytes: what is small is pickled, what is large lies in memory that all receivers share.

Tensors and arrays of 64 KiB and more leave the pickle (as its out-of-band buffers) for an arena: one
anonymous file in memory, written once, sealed, and passed on as a file descriptor. Each receiver maps it
privately: it reads the sender's pages as they are and gets its own copy of a page when it first writes
to it. So a dataset sent to eight ranks is in memory once, and no rank can change what another sees.

Aliases survive: tensors on one storage arrive on one storage, tied parameters stay tied, arrays over the
same bytes arrive over the same bytes. Tensors on an accelerator arrive on the CPU.
"""

import io
import mmap
import os
import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import cloudpickle
import numpy
import torch

from meshfit.errors import JobError
from meshfit.launch.channel import memory_file, seal
from meshfit.torch_private.modules import parametrized, parts_of_parametrized
from meshfit.torch_private.tensors import storage_id, untyped

LARGE = 64 * 1024
ALIGNMENT = 64  # bytes, as torch aligns its own storages


@dataclass(slots=True)
class Encoded:
    """A message ready to be sent, any number of times. Owns its arena until closed."""

    inline: bytes

    arena: int | None
    """File descriptor of the arena, if anything is large."""

    modules: tuple[str, ...] = ()
    """What the receiver will import: where the classes and functions of the message come from."""

    def close(self) -> None:
        if self.arena is not None:
            os.close(self.arena)
            self.arena = None

    def __enter__(self) -> "Encoded":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def encode(
    message: Any, *, what: str = "the message", inside: str = "", remedy: str = "pass a function that builds it"
) -> Encoded:
    """Pickle ``message``. What cannot be pickled is a ``JobError`` that names the part of ``what``; ``inside`` is left
    out of that name, for what is wrapped around it."""
    try:
        body, views, modules = _pickle(message)
    except Exception as error:
        path, part, cause = _culprit(what, message, error)
        named = path.removeprefix(f"{what}.{inside}") if inside else path
        raise JobError(
            f"{what} cannot be sent to another process",
            f"{named} is a {type(part).__module__}.{type(part).__qualname__}",
            f"{type(cause).__name__}: {cause}",
            remedy,
        ) from error
    if len(body) >= LARGE:
        body, views = b"", [*views, memoryview(body)]
    size, slices = 0, []
    pieces: dict[tuple[int, int], tuple[int, memoryview]] = {}  # (address, bytes): the same bytes go in once
    for view in views:
        place = numpy.frombuffer(view, numpy.uint8).__array_interface__["data"][0], view.nbytes
        if place not in pieces:
            pieces[place] = size, view
            size += -(-view.nbytes // ALIGNMENT) * ALIGNMENT
        slices.append((pieces[place][0], view.nbytes, view.readonly))
    inline = pickle.dumps((body, size, slices), pickle.HIGHEST_PROTOCOL)
    return Encoded(inline, _write(size, pieces.values()) if views else None, modules)


def decode(inline: bytes, arena: int | None) -> Any:
    """The message. ``arena`` may be closed afterwards; its pages live as long as what was built on them."""
    body, size, slices = pickle.loads(inline)
    if arena is None:
        return pickle.loads(body)
    pages = memoryview(mmap.mmap(arena, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))
    views = []
    for start, length, readonly in slices:
        view = pages[start : start + length]
        views.append(view.toreadonly() if readonly else view)
    if not body:  # too large to come inline: the last slice
        body = views.pop()
    return pickle.loads(body, buffers=views)


def _write(size: int, pieces: Iterable[tuple[int, memoryview]]) -> int:
    """A sealed file in memory: nobody can write to it, or map it so that writes are shared."""
    fd = memory_file()
    os.ftruncate(fd, size)
    for start, view in pieces:
        done = 0
        while done < view.nbytes:  # one call moves 2 GiB at most
            done += os.pwrite(fd, view[done:], start + done)
    seal(fd, writes=True)
    return fd


def _pickle(message: Any) -> tuple[bytes, list[memoryview], tuple[str, ...]]:
    """The pickle, the large buffers it refers to, in order, and the modules it names."""
    views: list[memoryview] = []

    def keep_inline(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes >= LARGE:
            views.append(view)
        return view.nbytes < LARGE

    file = io.BytesIO()
    pickler = _Pickler(file, pickle.HIGHEST_PROTOCOL, buffer_callback=keep_inline)
    pickler.dump(message)
    return file.getvalue(), views, tuple(sorted(pickler.modules - {"__main__", "builtins"}))


class _Pickler(cloudpickle.Pickler):
    """cloudpickle, but a storage is one buffer, and is written once however many tensors lie on it."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._storages: dict[int, torch.UntypedStorage] = {}
        self.modules: set[str] = set()

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | FunctionType) and obj.__module__:
            self.modules.add(obj.__module__)
        if type(obj) is torch.Tensor:
            rebuild, args = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            if args and isinstance(args[0], torch.UntypedStorage):  # torch rebuilds from typed ones alone
                args = (_typed_storage(args[0], torch.uint8), *args[1:])
            return rebuild, args
        if isinstance(obj, torch.TypedStorage):  # made anew by each tensor that is pickled
            return _typed_storage, (untyped(obj), obj.dtype)
        if isinstance(obj, torch.UntypedStorage) and obj.device.type != "meta":
            first = self._storages.setdefault(storage_id(obj), obj)
            if first is not obj:
                return _same, (first,)
            flat = torch.empty(0, dtype=torch.uint8).set_(obj.cpu())
            return _storage, (pickle.PickleBuffer(flat.numpy().data),)
        if isinstance(obj, torch.nn.Module) and (parts := parts_of_parametrized(obj)) is not None:
            return parametrized, parts
        return super().reducer_override(obj)


def _same(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    return storage


def _typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _storage(buffer: memoryview | bytearray) -> torch.UntypedStorage:
    if not len(buffer):
        return torch.UntypedStorage(0)
    flat = torch.frombuffer(buffer, dtype=torch.uint8)
    if flat.nbytes < LARGE:  # came inline: an ordinary storage, aligned and resizable
        flat = flat.clone()
    return flat.untyped_storage()


def _culprit(path: str, part: Any, error: Exception) -> tuple[str, Any, Exception]:
    """The innermost part that cannot be pickled: its path, itself, and why."""
    for _ in range(8):
        for name, inner in _parts(path, part):
            try:
                _pickle(inner)
            except Exception as reason:
                path, part, error = name, inner, reason
                break
        else:
            break
    return path, part, error


def _parts(path: str, part: Any) -> Iterator[tuple[str, Any]]:
    """What ``part`` is made of, each with its path."""
    match part:
        case FunctionType():
            names = part.__code__.co_freevars
            for name, cell in zip(names, part.__closure__ or (), strict=True):
                yield f"{name!r}, used by {path},", cell.cell_contents
            for name in part.__code__.co_names:
                if name in part.__globals__:
                    yield f"{name!r}, used by {path},", part.__globals__[name]
            yield from ((f"a default of {path}", value) for value in part.__defaults__ or ())
        case MethodType():
            yield f"{path}.__self__", part.__self__
        case partial():
            yield from _parts(path, [part.func, *part.args, *part.keywords.values()])
        case dict():
            yield from ((f"{path}[{key!r}]", value) for key, value in part.items())
        case list() | tuple() | set() | frozenset():
            yield from ((f"{path}[{i}]", value) for i, value in enumerate(part))
        case _ if not isinstance(part, type):
            yield from ((f"{path}.{name}", value) for name, value in getattr(part, "__dict__", {}).items())
