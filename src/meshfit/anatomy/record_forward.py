"""The recorder: what a watched forward does becomes steps.

It is a mode of torch's functions, which hands it the glue; ``record_watch`` hands it the calls of modules and the
operators below. Tensors are known by identity, so all of them are kept until the forward ends.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshfit import generators
from meshfit.anatomy.cost import Meter
from meshfit.anatomy.record_known import GlueError, Known, Origin, above, line_of_call, storage
from meshfit.anatomy.record_meta import DEVICES, all_on_meta, on_meta, on_zeros
from meshfit.anatomy.record_program import (
    Apply,
    AttributeRef,
    Get,
    Instruction,
    Set,
    ValueRef,
    current_mode,
    made,
    objects_in,
    tensors,
)
from meshfit.anatomy.replay import Environment, run
from meshfit.anatomy.trace import Dynamic
from meshfit.data import tree
from meshfit.errors import in_short
from meshfit.torch_private.autograd import checkpoint_now
from meshfit.torch_private.modules import own_buffers
from meshfit.torch_private.operators import in_function_transform, schema_of, without_torch_function
from meshfit.torch_private.tensors import version

READS = {
    **{"item": ".item()", "__bool__": "bool(tensor)", "__int__": "int(tensor)", "__float__": "float(tensor)"},
    **{"__index__": "tensor as an index", "__contains__": "in tensor", "__complex__": "complex(tensor)"},
    **{"tolist": ".tolist()", "numpy": ".numpy()", "__array__": "numpy array of a tensor", "equal": "torch.equal"},
    **{"allclose": "torch.allclose", "is_nonzero": "is_nonzero", "_is_all_true": "all", "_is_any_true": "any"},
}
"""Functions whose result is a value in Python, and how the code spells them."""

SIZES = ("shape", "size", "numel", "__len__", "stride", "nelement")


class Recorder(TorchFunctionMode, Known):
    """The steps of one forward of ``model``, whose modules named in ``atoms`` are taken as a whole.

    ``inputs`` are the tensors the forward will be called with, ``originals`` the user's tensors and ``owner`` the
    user's model: from these a value that Python reads is computed when the recording itself has none (meta).
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: list[Tensor],
        atoms: set[str],
        *,
        owner: nn.Module,
        originals: list[Tensor],
        guards: bool,
        not_on_meta: set[str],
    ):
        TorchFunctionMode.__init__(self)
        Known.__init__(self, model, atoms, _device_of(owner, originals))
        self.owner, self.originals, self.guards = owner, originals, guards
        self.not_on_meta = not_on_meta
        """Modules found not to run on meta."""
        self.meter: Meter | None = None
        self.meta = any(t.is_meta for t in (*inputs, *model.parameters(), *model.buffers()))
        self.inputs = [self.new(tensor, Origin.INPUT) for tensor in inputs]
        self.dynamic: dict[Dynamic, None] = {}
        self.notes: dict[str, None] = {}
        self.busy = 0
        """Not 0: what runs belongs to a step, or to the recorder itself."""
        self.seen = Origin.NOTHING
        """What the operators of the running step drew or sized by values."""
        self.looked = False
        """Whether the running step read a value of a tensor in Python."""
        self.start()

    def start(self) -> None:
        """Take switches and random state as they are now for those of the start."""
        self.start_mode, self.draws = current_mode(), generators.places()

    # Steps

    def module(self, path: str, module: nn.Module, call: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A module is called that is taken as a whole."""
        with self.unwatched():
            return self._step("module", path, path, functools.partial(call, module), args, kwargs, module)

    def glue(self, target: Any, name: str, call: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A function is called; at replay it is ``target``."""
        with self.unwatched():
            return self._step("glue", target, name, call, args, kwargs)

    def _step(
        self,
        kind: str,
        target: Any,
        name: str,
        call: Callable,
        args: tuple,
        kwargs: dict[str, Any],
        module: nn.Module | None = None,
    ) -> Any:
        """Run ``call``, and keep it if it made or changed a tensor."""
        self.check_draws()
        step = self._instruction(kind, target, name, args, kwargs)
        step.within = tuple(self.stack)
        given = tensors((args, kwargs))
        owned = [] if module is None else [*module.parameters(), *module.buffers()]
        before = [(tensor, version(tensor), tensor.requires_grad) for tensor in (*given, *owned)]
        self.seen, self.looked = Origin.NOTHING, False
        if self.meta:
            args, kwargs = on_meta(args), on_meta(kwargs)
        result = self._run(step.number, call, args, kwargs, module)
        if module is not None or isinstance(target, Apply):  # it may draw as it likes: at replay it does so again
            self.draws = generators.places()
        if self.looked and module is not None and any(isinstance(leaf, int | float) for leaf in tree.leaves(result)):
            self.fail(f"{name} returns numbers that it reads from tensors")  # another batch has others
        found = made(result, (args, kwargs), {id(tensor) for tensor in given})
        changed = [t for t, was, tracked in before if (version(t), t.requires_grad) != (was, tracked)]
        if isinstance(target, Set):
            changed.extend(given[:1])
        if found or changed or kind == "module":
            self._keep(step, found, changed, owned)
        return result

    def _instruction(self, kind: str, target: Any, name: str, args: tuple, kwargs: dict[str, Any]) -> Instruction:
        step = Instruction(kind, target, name, self.inside, line_of_call(), self.encode(args), self.encode(kwargs))
        mode, pack = current_mode(), checkpoint_now()
        if pack is not None:
            self.kept.append(pack)
            step.checkpoint = id(pack)
        step.number, step.mode = len(self.steps), None if mode == self.start_mode else mode
        return step

    def _keep(self, step: Instruction, found: list[Tensor], changed: list[Tensor], owned: list[Tensor]) -> None:
        source = self.sources_of(step) | self.seen
        for tensor in owned:
            source |= Origin.PARAMETER if isinstance(tensor, nn.Parameter) else Origin.BUFFER
        step.mutates = tuple(dict.fromkeys(self.numbers[id(t)] for t in changed if id(t) in self.numbers))
        step.changes = tuple(dict.fromkeys(self.held[id(t)].name for t in changed if id(t) in self.held))
        for number in step.mutates:
            self.sources[number] |= source
            self.tracked[number] = self.values[number].requires_grad
        self.steps.append(step)
        step.outs = [-1 if self._is_parameter(tensor) else self.new(tensor, source) for tensor in found]
        passed = objects_in((step.args, step.kwargs))
        self.settle(passed)
        for thing in passed:
            if thing.references:
                self.note(f"a {type(thing.snapshot).__name__} is passed on")

    def _is_parameter(self, tensor: Tensor) -> bool:
        return id(tensor) in self.held and self.held[id(tensor)].kind == "parameter"

    def _run(self, number: int, call: Callable, args: tuple, kwargs: dict, module: nn.Module | None) -> Any:
        """Run a step; where it cannot run on meta, in a way that it can."""
        path = None if module is None else self.paths[id(module)]
        metered = functools.partial(self._metered, number)
        problem = "cannot run on meta"
        if path not in self.not_on_meta:
            try:
                return metered(call, args, kwargs)
            except GlueError:
                raise
            except Exception as error:
                if not self.meta:
                    raise
                problem = in_short(error)
        with contextlib.suppress(Exception):
            return all_on_meta(metered, call, args, kwargs)
        if module is not None and path is not None:
            with contextlib.suppress(Exception):
                result = on_zeros(metered, self._know, module, args, kwargs)
                self.not_on_meta.add(path)
                self.looked = True  # numbers that it returns are those of zeros
                self.note(f"{path} run on zeros for the shapes of what it makes")
                return result
        return self.fail(problem)

    def _know(self, there: list[Tensor]) -> None:
        if self.meter is not None:
            self.meter.know(there)

    def _metered(self, number: int, call: Callable, args: tuple, kwargs: dict) -> Any:
        if self.meter is None:
            return call(*args, **kwargs)
        self.meter.start(number)
        try:
            return call(*args, **kwargs)
        finally:
            self.meter.stop()

    # State that the glue leaves in the model

    def attributes(self) -> dict[AttributeRef, Tensor]:
        """Tensors in the attributes of open modules."""
        found: dict[AttributeRef, Tensor] = {}
        for path, module in self.model.named_modules():
            if any(outer in self.atoms for outer in above(path)):
                continue  # replayed by the module itself
            for kind, owned in (("buffer", own_buffers(module)), ("attribute", vars(module))):
                for name, thing in owned.items():
                    if isinstance(thing, Tensor):
                        found[AttributeRef(kind, path, name)] = thing
        return found

    def set(self, path: str, name: str, value: Any) -> None:
        """The glue sets an attribute of a module: of one taken as a whole, which may read it, or a tensor."""
        module = self.model.get_submodule(path)
        within = any(outer in self.atoms for outer in above(path))
        was = own_buffers(module).get(name, vars(module).get(name))
        if not (within or isinstance(value, Tensor)) or (value is was and isinstance(value, Tensor)):
            return
        if isinstance(value, nn.Module | nn.Parameter):
            self.fail(f"{path}.{name} is set to another {type(value).__name__}")
        with self.unwatched():
            held = AttributeRef("buffer" if name in own_buffers(module) else "attribute", path, name)
            step = self._instruction("assign", held, held.name, (value,), {})
            step.changes = (held.name,)
            self.steps.append(step)
            self.note(f"{held.name} is set in the forward")

    def assigned(self, before: dict[AttributeRef, Tensor]) -> None:
        """Add a step for every tensor that came into an open module in another way, next to the step that made it."""
        done = {step.target for step in self.steps if step.kind == "assign"}
        for held, tensor in self.attributes().items():
            if tensor is before.get(held) or held in done:
                continue
            self.stack = [held.path]
            value = self.find(tensor)
            makers = [i for i, step in enumerate(self.steps) if isinstance(value, ValueRef) and value.id in step.outs]
            step = Instruction("assign", held, held.name, held.path, "", (value,), changes=(held.name,))
            step.line = self.steps[makers[-1]].line if makers else ""
            self.steps.insert(makers[-1] + 1 if makers else len(self.steps), step)
            self.note(f"{held.name} is set in the forward")
        self.stack = []

    # Values that Python reads

    def read(self, function: Callable, what: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The value, if it can be known to hold at replay; and a step that checks it, if it may not."""
        with self.unwatched():
            self.check_draws()
            step = self._instruction("guard", function, what, args, kwargs)
            source = self.sources_of(step)
            depends = _depends_on(source)
            self.dynamic[Dynamic(self.inside, step.line, what, depends)] = None
            if depends == "activations" or (depends in ("inputs", "buffers") and not self.guards):
                self.fail(f"{what} looks at a value that depends on {depends}")
            unknown = any(tensor.is_meta for tensor in tensors((args, kwargs)))
            value = self._evaluate(step) if unknown else function(*args, **kwargs)
            if source:
                self._guard(step, value)
            return value

    def _guard(self, step: Instruction, value: Any) -> None:
        step.expected = value
        self.steps.append(step)

    def _check_size(self, function: Callable, name: str, args: tuple, kwargs: dict[str, Any], size: Any) -> None:
        """A size that depends on values is baked into what follows: replay must find the same."""
        step = self._instruction("guard", function, name, args, kwargs)
        source = self.sources_of(step)
        if Origin.RAGGED in source:
            self.dynamic[Dynamic(self.inside, step.line, f"size of a tensor ({name})", _depends_on(source))] = None
            self._guard(step, size)

    def _evaluate(self, read: Instruction) -> Any:
        """A value that the recording does not have, from the steps that lead to it, on real tensors."""
        needed, steps = set(read.reads), []
        for step in reversed(self.steps):
            touched = {storage(self.values[id]) for id in needed}
            if needed & {*step.outs} or any(storage(self.values[id]) in touched for id in step.mutates):
                steps.insert(0, step)
                needed |= set(step.reads)
        values = dict(zip(self.inputs, (t.detach().clone() for t in self.originals), strict=True))
        env = Environment(self.owner, values, device=self.device)
        result: list[Any] = []
        function = lambda *args, **kwargs: result.append(read.target(*args, **kwargs))
        last = Instruction("glue", function, read.name, read.inside, read.line, read.args, read.kwargs)
        try:
            with without_torch_function(), torch.no_grad():
                run([*steps, last], env)
        except Exception as error:
            self.fail(f"{read.name} looks at a value that cannot be known ({in_short(error)})")
        return result[0]

    # Watching

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        """What runs within belongs to a step, or to the recorder itself."""
        self.busy += 1
        try:
            yield
        finally:
            self.busy -= 1

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.busy or in_function_transform():
            self.looked |= getattr(func, "__name__", "") in READS
            return func(*args, **kwargs)
        name = getattr(func, "__name__", type(func).__name__)
        if name in ("__get__", "__set__"):
            name = func.__self__.__name__
            func = (Get if func.__name__ == "__get__" else Set)(name)
        if self.meta and name in ("cpu", "cuda"):
            return self.glue(func, name, lambda tensor, *args, **kwargs: tensor, args, kwargs)
        if self.meta and name in DEVICES:
            return DEVICES[name](self.device)
        if name in READS:
            return self.read(func, READS[name], args, kwargs)
        if name == "_assert" and isinstance(args[0], Tensor):
            return None  # it says something of values, and makes none
        if name == "register_hook":
            self.fail("a hook is registered on the gradient of a tensor")  # it is no step, and would be lost
        if name in ("__repr__", "__format__", "__str__"):
            return func(*args, **kwargs)
        result = self.glue(func, name.strip("_") if name.endswith("__") else name, func, args, kwargs)
        if name in SIZES:
            self._check_size(func, name, args, kwargs, result)
        return result

    def operator(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Told of every operator, at the bottom."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.seen |= Origin.RANDOM
        if torch.Tag.dynamic_output_shape in func.tags and (schema_of(func).name != "aten::index" or _masks(args)):
            self.seen |= Origin.RAGGED
        if not self.busy and any(
            storage(t) in self.storages or storage(t) in self.dark for t in tensors((args, kwargs))
        ):
            for tensor in tensors(result):
                if storage(tensor) not in self.storages:
                    self.kept.append(tensor)
                    self.dark[storage(tensor)] = str(func)

    def check_draws(self) -> None:
        if (now := generators.places()) != self.draws:
            self.draws = now
            self.dynamic[Dynamic(self.inside, line_of_call(), "random number in Python", "random")] = None
            self.fail("Python draws a random number")

    def note(self, text: str) -> None:
        self.notes[text] = None


def _depends_on(source: Origin) -> str:
    if Origin.PARAMETER in source:
        return "activations"
    if Origin.BUFFER in source:
        return "buffers"
    if Origin.INPUT in source:
        return "inputs"
    return "random" if Origin.RANDOM in source else "nothing"


def _device_of(model: nn.Module, inputs: list[Tensor]) -> torch.device:
    every = [t.device for t in (*model.parameters(), *model.buffers(), *inputs)]
    real = next((device for device in every if device.type != "meta"), None)  # a model without weights runs on inputs
    return real or next(iter(every), torch.device("cpu"))


def _masks(args: Any) -> bool:
    return any(t.dtype in (torch.bool, torch.uint8) for t in tensors(args[1:]))
