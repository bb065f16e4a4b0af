"""What a forward did, kept so that it can be done again: steps, and arguments in which every tensor is a reference.

A step is one call. Its arguments stand as they were given, except for what belongs to one run only:

    ValueRef      a value: an input, or what an earlier step made
    AttributeRef  a parameter, buffer or other attribute of the model, read when the step runs
    ModuleRef     a module of the model
    Device        the device of the recording: at replay, the model's own
    Object        an instance of some class that holds tensors: built again from a snapshot, once per replay,
                  so that what one step does to it the next step sees

Everything else (numbers, shapes, dtypes, tensors that the code made of numpy arrays) is taken as it was.
"""

import copy
import enum
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshfit.errors import MeshfitError


class TraceError(MeshfitError):
    """The forward of a model cannot be recorded, or a recording does not fit what it is replayed on."""


@dataclass(frozen=True, slots=True)
class ValueRef:
    id: int


@dataclass(frozen=True, slots=True)
class AttributeRef:
    kind: str
    """ "parameter", "buffer" or "attribute"."""
    path: str
    """Of the module."""
    attribute: str

    @property
    def name(self) -> str:
        return f"{self.path}.{self.attribute}" if self.path else self.attribute


@dataclass(frozen=True, slots=True)
class ModuleRef:
    path: str


@dataclass(frozen=True, slots=True)
class Device:
    as_text: bool = False
    """Its type ("cuda") rather than the device itself."""


@dataclass(frozen=True, eq=False)
class Object:
    number: int
    snapshot: Any
    """A deep copy in which references stand for tensors and modules."""
    references: tuple[Any, ...]
    """Those in it, in order."""


REFERENCES = (ValueRef, AttributeRef, ModuleRef, Device)

PLAIN = (
    *(int, float, bool, str, bytes, complex, type(None), type(...), type, range, slice, enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.Generator),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, functools.partial),
)
"""What holds no tensor of its own (functions are looked at where they are arguments)."""

SIMPLE = frozenset({int, float, bool, str, type(None), torch.dtype})
"""The commonest of them: a set is looked into faster than a class is asked."""

MARKS = (*REFERENCES, Object)


@dataclass(frozen=True, slots=True)
class Mode:
    """Switches of torch under which a step ran."""

    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    inference: bool = False


@dataclass(eq=False)
class Instruction:
    """One call, ready to be made again."""

    kind: str
    """ "module", "glue", "guard" (a value that Python read must be what it was) or "assign" (set an attribute)."""

    target: Any
    """The module's path; the function; what a guard calls; the ``AttributeRef`` that is assigned."""

    name: str
    inside: str
    line: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    outs: list[int] = field(default_factory=list)
    """Ids of the tensors in what it returns, each once; then of those it adds to its arguments; -1: of no use."""

    attributes: list[tuple[AttributeRef, int]] = field(default_factory=list)
    """Tensors the module leaves in its attributes and later steps read."""

    mutates: tuple[int, ...] = ()
    changes: tuple[str, ...] = ()
    """Names of the buffers and parameters it writes."""

    mode: Mode | None = None
    """If it differs from that in which the forward began."""

    checkpoint: int | None = None
    """Steps of one number run under one activation checkpoint."""

    expected: Any = None
    """What a guard must find."""

    frees: tuple[int, ...] = ()
    """Values of no use after this step."""

    number: int = -1
    """Its place while recording, by which costs are known."""

    within: tuple[str, ...] = ()

    @property
    def writes(self) -> tuple[int, ...]:
        """Ids of the values it makes."""
        return (*(id for id in self.outs if id >= 0), *(id for _, id in self.attributes))

    @property
    def reads(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(r.id for r in references((self.args, self.kwargs)) if isinstance(r, ValueRef)))

    @property
    def held(self) -> tuple[AttributeRef, ...]:
        return tuple(dict.fromkeys(r for r in references((self.args, self.kwargs)) if isinstance(r, AttributeRef)))


def marks(tree: Any) -> Iterator[Any]:
    """Every reference and ``Object`` in encoded arguments, in order."""
    if isinstance(tree, MARKS):
        yield tree
    elif isinstance(tree, tuple | list | dict | slice):
        items = (tree.start, tree.stop, tree.step) if isinstance(tree, slice) else tree
        for item in items.values() if isinstance(items, dict) else items:
            yield from marks(item)


def references(tree: Any) -> Iterator[Any]:
    """Every reference, those in objects too."""
    for mark in marks(tree):
        yield from mark.references if isinstance(mark, Object) else (mark,)


def objects_in(tree: Any) -> list[Object]:
    return [mark for mark in marks(tree) if isinstance(mark, Object)]


def contents(tree: Any, seen: dict[int, Any] | None = None) -> Iterator[Any]:
    """Tensors, modules and plain values in ``tree``, each object once: through containers, classes and slots."""
    seen = {} if seen is None else seen
    if type(tree) in SIMPLE or isinstance(tree, PLAIN):
        yield tree
        return
    if id(tree) in seen:
        return
    seen[id(tree)] = tree  # kept: an id must not be given away meanwhile
    if isinstance(tree, Tensor | nn.Module):
        yield tree
        return
    if isinstance(tree, Mapping):
        for item in tree.values():
            yield from contents(item, seen)
    elif isinstance(tree, tuple | list | set | frozenset):
        for item in tree:
            yield from contents(item, seen)
    for attribute in attributes(tree):
        yield from contents(attribute, seen)


def attributes(thing: Any) -> list[Any]:
    """Values of the attributes of an instance of any class."""
    found = list(getattr(thing, "__dict__", {}).values())
    for kind in type(thing).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if slot not in ("__dict__", "__weakref__") and hasattr(thing, slot):
                found.append(getattr(thing, slot))
    return found


def tensors(tree: Any) -> list[Tensor]:
    """Tensors in ``tree``, each once, also those in instances of classes nobody registered."""
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for leaf in contents(tree) if isinstance(leaf, Tensor)]


def holds_nothing(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether arguments are tensors and simple values alone: a call can leave no tensor in them."""
    return all(type(x) in SIMPLE or isinstance(x, Tensor) for x in (*args, *kwargs.values()))


def made(result: Any, given: Any, before: set[int]) -> list[Tensor]:
    """What a call made: tensors in its result, then those it left in the containers it was given."""
    new = tensors(result)
    known = before | {id(tensor) for tensor in new}
    return new + [tensor for tensor in tensors(given) if id(tensor) not in known]


def decode(tree: Any, resolve: Callable[[Any], Any]) -> Any:
    """Arguments for one run: ``resolve`` gives what a reference or an ``Object`` stands for."""
    if type(tree) in SIMPLE:
        return tree
    if isinstance(tree, MARKS):
        return resolve(tree)
    if type(tree) is dict:
        return {key: decode(value, resolve) for key, value in tree.items()}
    if isinstance(tree, tuple | list) and not isinstance(tree, torch.Size):
        return rebuilt(tree, [decode(item, resolve) for item in tree])
    if isinstance(tree, slice):
        return slice(*(decode(end, resolve) for end in (tree.start, tree.stop, tree.step)))
    return tree


def rebuilt(like: Any, items: list[Any]) -> Any:
    """A tuple or list of the type of ``like``."""
    return type(like)(*items) if hasattr(like, "_fields") else type(like)(items)


def build(thing: Object, resolve: Callable[[Any], Any]) -> Any:
    """A fresh instance of what ``thing`` is a snapshot of."""
    return copy.deepcopy(thing.snapshot, {id(reference): resolve(reference) for reference in thing.references})


def current_mode() -> Mode:
    autocast = tuple(
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")
    )
    return Mode(torch.is_grad_enabled(), autocast, torch.is_inference_mode_enabled())


class Get:
    """Read an attribute of a tensor, such as ``T`` or ``data``."""

    def __init__(self, attribute: str):
        self.attribute = self.__name__ = attribute

    def __call__(self, tensor: Tensor, *owner: Any) -> Any:
        return getattr(tensor, self.attribute)


class Set(Get):
    """Write an attribute of a tensor, such as ``requires_grad`` or ``data``."""

    def __call__(self, tensor: Tensor, *value: Any) -> None:
        setattr(tensor, self.attribute, *value)


class Apply:
    """Call an ``autograd.Function``."""

    def __init__(self, function: Any):
        self.function, self.__name__ = function, function.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function.apply(*args, **kwargs)
