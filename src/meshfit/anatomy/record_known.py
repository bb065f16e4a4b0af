"""Tensors of a running forward, and what stands for them in the steps that are kept.

A tensor is known by identity: as a value that a step made, or by its place in the model. One that is neither was made
from numpy arrays and lists, and is a constant; unless it was computed where nobody looked, which is an error.
"""

import copy
import functools
import os
import sys
import types
from collections.abc import Iterator
from enum import Flag, auto
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from meshfit import patches
from meshfit.anatomy.record_program import (
    PLAIN,
    AttributeRef,
    Device,
    Instruction,
    ModuleRef,
    Object,
    ValueRef,
    contents,
    rebuilt,
)
from meshfit.torch_private.modules import own_buffers, own_parameters
from meshfit.torch_private.tensors import storage_id

OWN = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep, patches.__file__)


class Origin(Flag):
    """What a value was computed from."""

    NOTHING = 0
    INPUT = auto()
    PARAMETER = auto()
    BUFFER = auto()
    RANDOM = auto()
    RAGGED = auto()
    """Its size may depend on values: of ``nonzero``, a mask as an index, ..."""


class GlueError(Exception):
    """The code of an open module does something that cannot be recorded."""

    def __init__(self, why: str, module: str, line: str):
        super().__init__(f"{why}: {module or 'the model itself'}, {line}")
        self.why, self.module, self.line = why, module, line


class Known:
    """What a recording knows so far: its steps, its values, and the names of the model's tensors."""

    def __init__(self, model: nn.Module, atoms: set[str], device: torch.device):
        self.model, self.atoms, self.device = model, atoms, device
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.steps: list[Instruction] = []
        self.values: list[Tensor] = []
        self.sources: list[Origin] = []
        """By the number of the value."""
        self.tracked: list[bool] = []
        """Whether autograd followed a value when its step was done; by number, too."""
        self.numbers: dict[int, int] = {}
        """Numbers of values, by identity of the tensor."""
        self.held: dict[int, AttributeRef] = {}
        self.constants: set[int] = set()
        self.objects: dict[int, tuple[Object, list[Any]]] = {}
        self.storages: set[int] = set()
        self.dark: dict[int, str] = {}
        """Storages computed where nobody looked, and by what."""
        self.kept: list[Any] = []
        """Whatever is known by identity must live."""
        self.stack: list[str] = []
        """Paths of the open modules that are running."""
        self.hold_model()

    @property
    def inside(self) -> str:
        return self.stack[-1] if self.stack else ""

    def fail(self, why: str) -> NoReturn:
        raise GlueError(why, self.inside, line_of_call())

    def hold_model(self) -> None:
        """Know the model's tensors by name; the first name of a tensor is the one that counts."""
        for path, module in self.model.named_modules():
            for kind, owned in (("parameter", own_parameters(module)), ("buffer", own_buffers(module))):
                for name, tensor in owned.items():
                    if tensor is not None:
                        self._hold(tensor, AttributeRef(kind, path, name))
            for name, thing in vars(module).items():
                if isinstance(thing, Tensor | torch.Generator):
                    self._hold(thing, AttributeRef("attribute", path, name))

    def _hold(self, thing: Any, held: AttributeRef) -> None:
        if id(thing) not in self.held and id(thing) not in self.numbers:
            self.held[id(thing)] = held
            self.kept.append(thing)
            if isinstance(thing, Tensor):
                self.storages.add(storage(thing))

    def new(self, tensor: Tensor, source: Origin) -> int:
        self.values.append(tensor)
        self.sources.append(source)
        self.tracked.append(tensor.requires_grad)
        self.numbers[id(tensor)] = len(self.values) - 1
        self.storages.add(storage(tensor))
        return len(self.values) - 1

    def find(self, tensor: Tensor) -> Any:
        """What stands for ``tensor`` in a step's arguments."""
        number = self.numbers.get(id(tensor))
        if number is not None:
            if tensor.requires_grad and not self.tracked[number]:
                self.fail("code that cannot be watched gave a tensor its gradient")
            return ValueRef(number)
        if id(tensor) in self.held:
            return self.held[id(tensor)]
        if id(tensor) in self.constants:
            return tensor
        self.hold_model()  # a module may have set an attribute since
        if id(tensor) in self.held:
            return self._left_behind(self.held[id(tensor)], tensor)
        if storage(tensor) in self.dark:
            self.fail(f"a tensor comes from code that cannot be watched ({self.dark[storage(tensor)]})")
        if isinstance(tensor, nn.Parameter):
            self.fail("it runs a module that is not part of the model: a teacher, say, can be made one (self.teacher)")
        if tensor.requires_grad or tensor.is_meta:
            self.fail("a tensor comes from code that cannot be watched")
        self.kept.append(tensor)
        self.constants.add(id(tensor))
        return tensor

    def _left_behind(self, held: AttributeRef, tensor: Tensor) -> Any:
        """A tensor that a module left in an attribute during this forward: one more thing its step made."""
        path = next((path for path in above(held.path) if path in self.atoms), None)
        step = next((step for step in reversed(self.steps) if step.kind == "module" and step.target == path), None)
        if step is None:
            return held
        del self.held[id(tensor)]
        ref = ValueRef(self.new(tensor, self.sources_of(step) | Origin.PARAMETER))
        step.attributes.append((held, ref.id))
        return ref

    def encode(self, tree: Any) -> Any:
        """Arguments with references in the place of what belongs to this run."""
        if isinstance(tree, Tensor):
            return self.find(tree)
        kind = type(tree)
        if kind is dict:
            return {key: self.encode(value) for key, value in tree.items()}
        if kind is slice:
            return slice(self.encode(tree.start), self.encode(tree.stop), self.encode(tree.step))
        if isinstance(tree, torch.device):
            return Device() if tree.type == self.device.type else tree
        if isinstance(tree, str):
            return Device(as_text=True) if tree == self.device.type and tree != "cpu" else tree
        if isinstance(tree, tuple | list) and kind is not torch.Size:
            if kind in (tuple, list) or hasattr(tree, "_fields") or not hasattr(tree, "__dict__"):
                return rebuilt(tree, [self.encode(item) for item in tree])
            return self._object(tree)
        if id(tree) in self.held:
            return self.held[id(tree)]
        if isinstance(tree, nn.Module):
            return ModuleRef(self.paths[id(tree)]) if id(tree) in self.paths else tree
        if isinstance(tree, types.FunctionType | types.MethodType | functools.partial):
            self._check_function(tree)
            return tree
        return tree if isinstance(tree, PLAIN) else self._object(tree)

    def _check_function(self, function: Any) -> None:
        """A function that carries tensors or modules would carry those of the recording into every replay."""
        if isinstance(function, functools.partial):
            held: Any = (function.func, function.args, function.keywords)
        elif isinstance(function, types.MethodType):
            held = (function.__func__, function.__self__)
        else:
            held = tuple(cell.cell_contents for cell in function.__closure__ or () if _filled(cell))
        for thing in contents(held):
            if isinstance(thing, Tensor | nn.Module):
                self.fail("a function that holds tensors is an argument")
            if thing is not function and isinstance(thing, types.FunctionType | types.MethodType | functools.partial):
                self._check_function(thing)

    def _object(self, thing: Any) -> Any:
        """An instance of some class: the same one as before, unless the glue has changed it since."""
        found = list(contents(thing))
        if id(thing) in self.objects and _same(self.objects[id(thing)][1], found):
            return self.objects[id(thing)][0]
        self.kept.append(thing)
        inside = [leaf for leaf in found if isinstance(leaf, Tensor) or id(leaf) in self.paths or id(leaf) in self.held]
        memo = {id(leaf): self.encode(leaf) for leaf in inside}
        try:
            snapshot = copy.deepcopy(thing, dict(memo))
        except Exception as error:
            if memo:
                self.fail(f"a {type(thing).__name__} cannot be copied ({type(error).__name__}: {error})")
            return thing
        marks = [mark for mark in memo.values() if not isinstance(mark, Tensor)]
        new = Object(len(self.kept), snapshot, tuple(marks))
        self.objects[id(thing)] = (new, found)
        return new

    def settle(self, trees: Any) -> None:
        """What a step did to an object is part of that object from now on."""
        for key, (thing, _) in list(self.objects.items()):
            if any(thing is other for other in trees):
                owner = next(kept for kept in self.kept if id(kept) == key)
                self.objects[key] = (thing, list(contents(owner)))

    def sources_of(self, step: Instruction) -> Origin:
        """What the arguments of a step were computed from."""
        source = Origin.NOTHING
        for id in step.reads:
            source |= self.sources[id]
        for held in step.held:
            source |= Origin.PARAMETER if held.kind == "parameter" else Origin.BUFFER
        return source


def above(path: str) -> Iterator[str]:
    """``path`` and the modules it lies in, innermost first."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def storage(tensor: Tensor) -> int:
    """A number that tensors share which share memory."""
    try:
        return storage_id(tensor)
    except (RuntimeError, NotImplementedError):  # sparse, nested, batched
        return id(tensor)


def line_of_call() -> str:
    """file:line of the nearest frame that is neither torch's nor ours."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(OWN):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _same(one: list[Any], other: list[Any]) -> bool:
    """Whether two lists of contents are of the same tensors and equal plain values."""
    return len(one) == len(other) and all(
        a is b or (type(a) is type(b) and isinstance(a, int | float | str | bytes) and a == b)
        for a, b in zip(one, other, strict=True)
    )
