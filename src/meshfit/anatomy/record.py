"""Record one forward of a model: ``record(model, inputs)`` gives a ``Recording``.

It runs on a copy, on meta tensors where the model allows it: no memory, no arithmetic, and the model itself stays
as it is. Where a recording fails it says in whose code; that module is then taken as a whole and the forward is
recorded again. When too much would have to be taken as a whole, the next way is tried:

    plain      as the model runs
    compiling  libraries are told that they are being compiled: many then look at no values
    guards     values computed from the inputs alone may be looked at; replay checks that they are the same
    opened     and modules are opened as far as they go
    real       all of it again on real tensors, for kernels that refuse meta and for control flow on values

Each recording is made twice, under other random numbers and on the state that the first one left: what differs
between the two cannot be replayed.
"""

import contextlib
import hashlib
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from meshfit import generators
from meshfit.anatomy.copies import twin
from meshfit.anatomy.cost import Meter
from meshfit.anatomy.meta_kernels import Remembered
from meshfit.anatomy.record_build import built
from meshfit.anatomy.record_forward import Recorder
from meshfit.anatomy.record_known import GlueError, above
from meshfit.anatomy.record_program import REFERENCES, Instruction, Object, TraceError, tensors
from meshfit.anatomy.record_watch import line_of, watched
from meshfit.anatomy.replay import Recording
from meshfit.anatomy.trace import Dynamic, EventCost
from meshfit.data import tree
from meshfit.errors import in_short
from meshfit.patches import replaced
from meshfit.torch_private.compilation import COMPILER

__all__ = ["Recording", "TraceError", "record"]

SHARE = 0.05
"""Of all parameters: what a module may hold and still be taken as a whole without a need."""

LARGEST = 0.6
"""Of all parameters: the most that one module may hold which was taken as a whole because its code failed."""

Metering = Callable[[list[Tensor]], Meter] | None
"""Makes a meter, given the tensors that are there before the forward: parameters, buffers, inputs."""

WAYS_IN_WORDS = {
    "compiling": "libraries were told that they are being compiled",
    "guards": "values computed from the inputs were looked at: replay checks them",
    "opened": "modules opened as far as they go",
}

ATTEMPTS = (
    *((way, False, False) for way in ("plain", "compiling")),
    *((way, real, True) for real in (False, True) for way in ("plain", "compiling", "guards", "opened")),
)
"""A way, whether it is on real tensors, and whether modules that fail are taken as a whole. The first count only if
none must be: one whose code looks at values is run on zeros then, with all that it keeps for backward, where a library
that is told it is compiled may not look."""


ALWAYS_OPEN = (nn.ModuleList, nn.ModuleDict)
"""They are never called themselves."""

OPEN_IF_LARGE = (nn.Sequential, nn.TransformerEncoder, nn.TransformerDecoder)
"""Of torch.nn's own, those that call others in a row. (In eval mode the encoder may take a fast path of its own.)"""


def record(
    model: nn.Module,
    inputs: Any,
    *,
    training: bool = True,
    atoms: Iterable[str] | None = None,
    share: float = SHARE,
    meter: Metering = None,
) -> Recording:
    """One forward of ``model`` on ``inputs`` (a tensor; a tuple for several arguments; a dict for keywords).

    ``atoms`` names modules that must be taken as a whole. ``meter`` (the class) is made with the tensors that are
    there before the forward, entered for it, notified when each event starts and stops, and of the outputs; its costs
    are put into the events.
    """
    atoms = frozenset(atoms or ())
    known = {path for path, _ in model.named_modules()}
    if atoms - known:
        raise TraceError(f"atoms names no module of the model: {', '.join(sorted(atoms - known))}")
    failures: list[GlueError] = []
    coarse: _Attempt | None = None
    with generators.kept(*(t.device for t in (*model.parameters(), *model.buffers(), *tree.tensors(inputs)))):
        for way, real, repairs in ATTEMPTS:
            if real and _on_meta(model, inputs):
                break
            attempt = _Attempt(model, inputs, training, atoms, share, way, real)
            try:
                attempt.repair() if repairs else attempt.prove()
            except GlueError as error:
                failures.append(error)
                continue
            if attempt.largest() <= LARGEST:
                if real:
                    failed = [f"{error.why} ({error.line})" for error in failures[:1]]
                    attempt.before = failed or list(coarse.whole.values() if coarse else ())
                return attempt.finish(meter)
            coarse = coarse or attempt
        if coarse is not None:
            return coarse.finish(meter)
    raise _refusal(failures) from failures[-1].__cause__


@dataclass
class _Attempt:
    """Recordings of one of ``ATTEMPTS``, until one holds."""

    model: nn.Module
    inputs: Any
    training: bool
    forced: frozenset[str]
    share: float
    way: str
    real: bool
    whole: dict[str, str] = field(default_factory=dict)
    """Modules taken as a whole because their code failed, and why."""
    before: list[str] = field(default_factory=list)
    """Why earlier ways, on meta, did not do."""
    dynamic: dict[Dynamic, None] = field(default_factory=dict)
    not_on_meta: set[str] = field(default_factory=set)
    proven: tuple[Recorder, Any, dict[int, EventCost]] | None = None

    def repair(self) -> None:
        """Record; while the glue of a module fails, take that module as a whole."""
        while True:
            try:
                self.prove()
                return
            except GlueError as error:
                module = error.module
                if not module or module in self.whole or module in self.forced:
                    raise
                self.whole[module] = f"{error.why} ({error.line})"

    def prove(self) -> None:
        """Record twice; what differs fails."""
        copy = self.copy()
        seeds = (11, 7919)
        first, second = (self.once(copy, seed) for seed in seeds)
        one, other = (signature(recorder.steps, outputs) for recorder, outputs, _ in (first, second))
        if one == other:
            self.proven = first
            return
        at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
        recorder = max(first[0], second[0], key=lambda recorder: len(recorder.steps))
        step = recorder.steps[min(at, len(recorder.steps) - 1)]
        raise GlueError("two forwards in a row do different things", step.inside, step.line)

    def finish(self, meter: Metering) -> Recording:
        """The recording that is kept: a further one, if it is to be metered."""
        assert self.proven is not None
        recorder, outputs, costs = self.proven if meter is None else self.once(self.copy(), 11, meter)
        notes = ["real tensors" if self.real else "meta tensors"]
        notes += [f"not on meta tensors: {why}" for why in self.before[:1]]
        notes += [] if self.way == "plain" else [WAYS_IN_WORDS[self.way]]
        notes += [f"{module} taken as a whole: {why}" for module, why in self.whole.items()]
        notes += [note for note in recorder.notes if note not in notes]
        return built(
            self.model,
            recorder,
            outputs,
            self.inputs,
            training=self.training,
            costs=costs,
            dynamic=tuple(self.dynamic),
            notes=tuple(notes),
        )

    def copy(self) -> nn.Module:
        copy = twin(self.model, meta=not self.real)
        if copy.training != self.training:
            copy.train(self.training)
        return copy

    def once(self, copy: nn.Module, seed: int, meter: Metering = None) -> tuple[Recorder, Any, dict[int, EventCost]]:
        """One forward of ``copy``, watched: the recorder, what the model returned, encoded, and costs."""
        fresh = tree.map_tensors(self._input, self.inputs)
        atoms = _atoms(copy, share=self.share, forced=self.forced | set(self.whole), opened=self.way == "opened")
        recorder = Recorder(
            copy,
            list(tree.tensors(fresh)),
            atoms,
            owner=self.model,
            originals=list(tree.tensors(self.inputs)),
            guards=self.way in ("guards", "opened"),
            not_on_meta=self.not_on_meta,
        )
        before = recorder.attributes()
        with contextlib.ExitStack() as stack:
            if not self.real:
                stack.enter_context(torch.device("meta"))
                stack.enter_context(Remembered())
            if self.way == "compiling":
                stack.enter_context(_compiling())
            stack.enter_context(_eager())
            stack.enter_context(torch.set_grad_enabled(True))
            if meter is not None:
                known = [*copy.parameters(), *copy.buffers(), *tree.tensors(fresh)]
                recorder.meter = stack.enter_context(meter(known))
                if not self.real:  # torch takes recurrent layers apart there; their kernels keep something else
                    recurrent = {path for path, module in copy.named_modules() if isinstance(module, nn.RNNBase)}
                    recorder.not_on_meta |= recurrent
            _seed(seed)
            recorder.start()
            try:
                with watched(recorder):
                    outputs = tree.call(copy, fresh)
                if recorder.meter is not None:
                    recorder.meter.reach(tensors(outputs))
                recorder.check_draws()
                encoded = recorder.encode(outputs)
                recorder.assigned(before)
            except GlueError:
                raise
            except Exception as error:
                raise GlueError(in_short(error), recorder.inside, line_of(error)) from error
            finally:
                self.dynamic |= recorder.dynamic
        return recorder, encoded, {} if recorder.meter is None else recorder.meter.costs

    def _input(self, tensor: Tensor) -> Tensor:
        new = tensor.detach().clone() if self.real else torch.empty_like(tensor.detach(), device="meta")
        return new.requires_grad_(tensor.requires_grad)

    def largest(self) -> float:
        """Share of the parameters held by the largest module that had to be taken as a whole."""
        sizes = [sum(p.numel() for p in self.model.get_submodule(path).parameters()) for path in self.whole]
        return max(sizes, default=0) / max(1, sum(p.numel() for p in self.model.parameters()))


def _atoms(model: nn.Module, *, share: float, forced: Set[str], opened: bool) -> set[str]:
    """Paths of the modules taken as a whole: from the root down, the first that are worth no more than ``share`` of
    all parameters, or are torch.nn's own, or are ``forced``. ``opened`` goes down as far as it can.

    Large atoms mean little glue, and glue is where recordings fail: open a module only for the balance.
    """
    towards = {path for name in forced for path in above(name)} - forced
    sizes = {path: sum(p.numel() for p in module.parameters()) for path, module in model.named_modules()}
    atoms: set[str] = set()

    def visit(path: str, module: nn.Module) -> None:
        if path not in towards and whole(path, module):
            atoms.add(path)
            return
        for name, child in module.named_children():
            visit(f"{path}.{name}" if path else name, child)

    def whole(path: str, module: nn.Module) -> bool:
        if path in forced:
            return True
        if not path or isinstance(module, ALWAYS_OPEN):
            return False
        if isinstance(module, torch.jit.ScriptModule) or type(module).__name__ == "OptimizedModule":
            return True
        own = type(module).__module__.startswith("torch.nn.") and not (
            isinstance(module, OPEN_IF_LARGE)
            and (module.training or isinstance(module, nn.Sequential) or not torch.backends.mha.get_fastpath_enabled())
        )
        childless = next(module.children(), None) is None
        small = sizes.get(path, 0) <= share * sizes[""] and not opened
        return own or childless or small

    visit("", model)
    return atoms


def signature(steps: list[Instruction], outputs: Any) -> list[str]:
    """What two recordings must share: calls, their plain arguments, their constants."""

    def text(thing: Any) -> str:
        if isinstance(thing, Object):
            return f"object({type(thing.snapshot).__name__}, {[text(mark) for mark in thing.references]})"
        if isinstance(thing, (*REFERENCES, slice)):
            return repr(thing)
        if isinstance(thing, Tensor):
            data = b"" if thing.is_meta else thing.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            return f"{tuple(thing.shape)}{thing.dtype}{hashlib.sha256(data).hexdigest()}"
        if isinstance(thing, tuple | list):
            return f"[{', '.join(map(text, thing))}]"
        if isinstance(thing, dict):
            return f"{{{', '.join(f'{key}: {text(value)}' for key, value in thing.items())}}}"
        return repr(thing) if isinstance(thing, int | float | str | None | torch.dtype) else type(thing).__name__

    lines = [f"{s.kind} {s.name} {text(s.args)} {text(s.kwargs)} {s.outs} {text(s.expected)}" for s in steps]
    return [*lines, text(outputs)]


def _refusal(failures: list[GlueError]) -> TraceError:
    """The first failure is that of the plain way: what stands in the model's own code."""
    first = failures[0]
    rest = dict.fromkeys(f"otherwise: {error.why} ({error.line})" for error in failures[1:] if error.why != first.why)
    return TraceError(
        f"the forward of {first.module or 'the model itself'} cannot be recorded: {first.why}",
        first.line,
        *list(rest)[:3],
        "move that into a submodule of its own, which can then be taken as a whole",
    )


def _on_meta(model: nn.Module, inputs: Any) -> bool:
    return any(t.is_meta for t in (*model.parameters(), *model.buffers(), *tree.tensors(inputs)))


def _seed(seed: int) -> None:
    torch.random.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
    """Tell libraries that they are being compiled: they then take the path that looks at no values."""
    yes = lambda real: lambda: True
    with replaced(torch.compiler, "is_compiling", yes), replaced(torch.compiler, "is_exporting", yes):
        yield


def _eager() -> contextlib.AbstractContextManager[Any]:
    """Compiled modules run as they are written."""
    if COMPILER not in sys.modules:
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")
