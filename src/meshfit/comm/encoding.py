"""A value as bytes and back, without pickle: JSON, with the bytes of tensors behind it.

What is read is built from a closed list of kinds: the sender names no function that would be called. Of classes there
are dataclasses, named tuples, enumerations, dicts and lists with a name, of meshfit or of a module that this process
has imported itself; they are filled field by field, without their constructors.
"""

import base64
import builtins
import dataclasses
import enum
import functools
import importlib
import json
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshfit.errors import MeshfitError, RankError

HEAD = 8  # bytes that say how long the words are; the tensors' bytes follow them
DEEPEST = 200  # containers within each other


class Unreadable(MeshfitError):
    """What came from another rank is no value of ours."""


def dumps(value: Any) -> bytes:
    """``TypeError`` for what has no place in a message."""
    tensors: list[bytes] = []
    words = json.dumps(_said(value, tensors, 0), separators=(",", ":"), allow_nan=False).encode()
    return b"".join((len(words).to_bytes(HEAD, "big"), words, *tensors))


def loads(sent: Tensor | bytes) -> Any:
    raw = memoryview(sent.contiguous().numpy().data if isinstance(sent, Tensor) else sent).cast("B")
    try:
        end = HEAD + int.from_bytes(raw[:HEAD], "big")
        words = json.loads(bytes(raw[HEAD:end])) if end <= len(raw) else None
        if words is None and bytes(raw[HEAD:end]) != b"null":
            raise ValueError("it is cut short")
        return _read(words, _Tail(raw[end:]))
    except Unreadable:
        raise
    except (ValueError, TypeError, KeyError, LookupError, AttributeError, RecursionError, RuntimeError) as error:
        raise Unreadable("a message of another rank cannot be read", f"{type(error).__name__}: {error}") from None


# From values to words: those that JSON has not are lists that begin with their kind


def _said(value: Any, tensors: list[bytes], deep: int) -> Any:
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else ["float", repr(value)]
    if deep > DEEPEST:
        raise TypeError("a value within itself, or too deep, cannot be sent to another rank")
    inner = lambda each: _said(each, tensors, deep + 1)
    for kind, name in _CONTAINERS.items():
        if type(value) is kind:
            return [name, *map(inner, value)]
    if type(value) is dict:
        return ["dict", *([inner(key), inner(each)] for key, each in value.items())]
    if isinstance(value, Tensor | np.ndarray):
        return _said_tensor(value, tensors)
    if isinstance(value, np.generic):
        return ["scalar", _said_tensor(np.asarray(value), tensors)]
    if isinstance(value, BaseException):
        return _said_error(value, inner)
    return _said_named(value, inner) or _said_plain(value, inner)


_CONTAINERS: dict[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset", torch.Size: "size"}
_MADE: dict[str, Callable[[Iterator[Any]], Any]] = {name: kind for kind, name in _CONTAINERS.items()}


def _said_tensor(value: Tensor | np.ndarray, tensors: list[bytes]) -> list[Any]:
    """An array is said to be one; only dtypes that torch has too."""
    kind = "tensor" if isinstance(value, Tensor) else "array"
    tensor = value if isinstance(value, Tensor) else torch.from_numpy(np.array(value, order="C"))
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise TypeError(f"a tensor of layout {tensor.layout} on {tensor.device} cannot be sent to another rank")
    flat = tensor.detach().cpu().reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)
    tensors.append(flat.numpy().tobytes())
    return [kind, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]


def _said_error(error: BaseException, inner: Callable[[Any], Any]) -> list[Any]:
    """Ours and Python's own as they are; others by what they say."""
    if isinstance(error, MeshfitError):
        trace = error.trace if isinstance(error, RankError) else None
        return ["error", _path(type(error)), [error.headline, *error.facts], trace]
    known = type(error).__module__ == "builtins" and all(isinstance(arg, str | int | None) for arg in error.args)
    if known:
        args = [*error.args, error.filename] if isinstance(error, OSError) and error.filename else error.args
        return ["error", _path(type(error)), [str(arg) if not isinstance(arg, int) else arg for arg in args], None]
    kind = next(each for each in type(error).__mro__ if each.__module__ == "builtins")
    kind = kind if kind not in (UnicodeDecodeError, UnicodeEncodeError, UnicodeTranslateError) else ValueError
    return ["error", _path(kind), [f"{type(error).__name__}: {error}"], None]


def _said_named(value: Any, inner: Callable[[Any], Any]) -> list[Any] | None:
    """Of a class: by its name and fields."""
    kind = type(value)
    if isinstance(value, enum.Enum):
        return ["enum", _path(kind), value.name]
    if isinstance(value, dict):
        return ["named dict", _path(kind), *([inner(key), inner(each)] for key, each in value.items())]
    if isinstance(value, list):
        return ["named list", _path(kind), *map(inner, value)]
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return ["named tuple", _path(kind), *map(inner, value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        named = {
            each.name: getattr(value, each.name) for each in dataclasses.fields(value) if hasattr(value, each.name)
        }
        return ["dataclass", _path(kind), {name: inner(each) for name, each in named.items()}]
    return None


def _said_plain(value: Any, inner: Callable[[Any], Any]) -> list[Any]:
    match value:
        case torch.dtype() | torch.layout() | torch.memory_format():
            return ["torch", str(value).removeprefix("torch.")]
        case torch.device():
            return ["device", str(value)]
        case Path():
            return ["path", str(value)]
        case slice():
            return ["slice", inner(value.start), inner(value.stop), inner(value.step)]
        case range():
            return ["range", value.start, value.stop, value.step]
        case complex():
            return ["complex", repr(value)]
        case bytes() | bytearray():
            return ["bytes", base64.b64encode(value).decode()]
        case type() if _ours(_path(value)):
            return ["class", _path(value)]
        case bool() | int() | float() | str():  # of a class of its own
            return inner(next(kind for kind in (int, float, str) if isinstance(value, kind))(value))
    raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__} cannot be sent to another rank")


def _path(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _ours(path: str) -> bool:
    return path.startswith("meshfit.")


# And back


class _Tail:
    """The bytes of tensors, in the order in which they are named."""

    def __init__(self, raw: memoryview):
        self.raw = raw

    def take(self, dtype: torch.dtype, shape: list[int]) -> Tensor:
        if not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"{shape} is no shape")
        size = math.prod(shape) * dtype.itemsize
        if size > len(self.raw):
            raise ValueError(f"a tensor of {size} bytes, and {len(self.raw)} came")
        taken, self.raw = bytearray(self.raw[:size]), self.raw[size:]
        return (
            torch.frombuffer(taken, dtype=torch.uint8).view(dtype).view(shape)
            if size
            else torch.empty(shape, dtype=dtype)
        )


def _read(said: Any, tail: _Tail) -> Any:
    if not isinstance(said, list):
        return said
    inner = lambda each: _read(each, tail)
    kind, *rest = said
    if kind in _MADE:
        return _MADE[kind](map(inner, rest))
    match kind, rest:
        case "dict", _:
            return {inner(key): inner(value) for key, value in rest}
        case "tensor", [dtype, shape]:
            return tail.take(_dtype(dtype), shape)
        case "array", [dtype, shape]:
            return tail.take(_dtype(dtype), shape).numpy()
        case "scalar", [array]:
            return inner(array)[()]
        case "error", [path, args, trace]:
            return _error(path, args, trace)
        case "named dict", [path, *items]:
            return _named_dict(_class(path), [(inner(key), inner(value)) for key, value in items])
        case "named list", [path, *items]:
            return _named_list(_class(path), [inner(each) for each in items])
        case "named tuple", [path, *items]:
            return _named_tuple(_class(path), [inner(each) for each in items])
        case "dataclass", [path, dict(named)]:
            return _dataclass(_class(path), {name: inner(each) for name, each in named.items()})
        case "enum", [path, str(name)]:
            return _enum(_class(path), name)
        case "slice", [start, stop, step]:
            return slice(inner(start), inner(stop), inner(step))
    return _read_plain(kind, rest)


def _read_plain(kind: Any, rest: list[Any]) -> Any:
    match kind, rest:
        case "float", ["inf" | "-inf" | "nan" as text]:
            return float(text)
        case "torch", [str(name)]:
            return _dtype(name, torch.dtype, torch.layout, torch.memory_format)
        case "device", [str(name)]:
            return torch.device(name)
        case "path", [str(name)]:
            return Path(name)
        case "range", [int(start), int(stop), int(step)]:
            return range(start, stop, step)
        case "complex", [str(text)]:
            return complex(text)
        case "class", [str(path)] if _ours(path):
            return _class(path)
        case "bytes", [str(text)]:
            return base64.b64decode(text, validate=True)
    raise Unreadable("a message of another rank cannot be read", f"it holds a {str(kind)[:40]!r}")


def _dtype(name: str, *kinds: type) -> Any:
    found = getattr(torch, name) if name.isidentifier() else None
    if not isinstance(found, kinds or torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return found


def _class(path: str) -> type:
    """Modules of meshfit are imported, others must be there: no code runs because a message names it."""
    module, _, name = path.partition(":")
    if _ours(path):
        importlib.import_module(module)
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = vars(found).get(part) if found is not None else None
    if found is None:
        return _by_value(module, name)
    if not isinstance(found, type):
        raise TypeError(f"{path} is no class")
    return found


@functools.cache
def _by_value(module: str, name: str) -> type:
    """A class of the user's script, or of one of its functions: it came to this process with the job, under no name."""
    kinds, seen = [object], set[type]()
    for kind in kinds:
        if (kind.__module__, kind.__qualname__) == (module, name):
            return kind
        inner = [each for each in type.__subclasses__(kind) if each not in seen]
        kinds += inner
        seen.update(inner)
    raise KeyError(f"there is no class {module}:{name}")


def _dataclass(kind: type, named: dict[str, Any]) -> Any:
    if not dataclasses.is_dataclass(kind) or not named.keys() <= {each.name for each in dataclasses.fields(kind)}:
        raise TypeError(f"{kind} is no dataclass of these fields")
    made = object.__new__(kind)
    for name, value in named.items():
        object.__setattr__(made, name, value)
    return made


def _named_dict(kind: type, items: list[tuple[Any, Any]]) -> Any:
    """Hugging Face's outputs are such: their items are their attributes, too."""
    if not issubclass(kind, dict):
        raise TypeError(f"{kind} is no dict")
    base: Any = OrderedDict if issubclass(kind, OrderedDict) else dict
    made = base.__new__(kind)
    for field in dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ():
        object.__setattr__(made, field.name, None)
    for key, value in items:
        base.__setitem__(made, key, value)
        if dataclasses.is_dataclass(kind) and isinstance(key, str):
            object.__setattr__(made, key, value)
    return made


def _named_list(kind: type, items: list[Any]) -> Any:
    if not issubclass(kind, list):
        raise TypeError(f"{kind} is no list")
    made = list.__new__(kind)
    list.extend(made, items)
    return made


def _named_tuple(kind: type, items: list[Any]) -> Any:
    if not issubclass(kind, tuple) or len(getattr(kind, "_fields", ())) != len(items):
        raise TypeError(f"{kind} is no named tuple of {len(items)}")
    return tuple.__new__(kind, items)


def _enum(kind: type, name: str) -> Any:
    if not issubclass(kind, enum.Enum):
        raise TypeError(f"{kind} is no enumeration")
    return kind[name]


def _error(path: str, args: list[Any], trace: str | None) -> Exception:
    kind = _class(path) if path.startswith("meshfit") else vars(builtins)[path.removeprefix("builtins:")]
    ours = isinstance(kind, type) and issubclass(kind, MeshfitError)
    if not ours and not (isinstance(kind, type) and issubclass(kind, Exception) and kind.__module__ == "builtins"):
        raise TypeError(f"{path} is no exception")
    if not ours:
        return kind(*args)
    made = kind(*map(str, args))
    if trace is not None and isinstance(made, RankError):
        made.trace = str(trace)
    return made
