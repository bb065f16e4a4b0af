"""How the buffers that a forward writes are updated: found by trying, on a few samples, before anything trains.

The call that writes them is made on all samples and on parts of them, from the same values. Where the batch first is
summed up, the result for all must be the sum, the sample-weighted mean, the maximum or the minimum of those for the
parts; what follows is then made again from that. Accepted is an update that, so made from parts, is that of the whole:
in double precision to 1e-6, for several partitions, with samples repeated and with noise on them, on the first call and
on the next. Anything else is refused, with what stands against it.
"""

from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from meshfit.axes.buffers.record import Uncombined
from meshfit.axes.buffers.trace import BufferUpdate
from meshfit.axes.buffers.trial import FEWER, TRIED, ModuleCall, Trial
from meshfit.axes.buffers.watch import Objective, Writes, home_of, may_write, named_state, undisturbed, writes
from meshfit.axes.data.batchnorm import batch_norms
from meshfit.data import tree
from meshfit.errors import in_short


@dataclass(frozen=True, kw_only=True)
class BufferWriter:
    """A module whose call updates buffers from the samples it is given."""

    path: str
    states: tuple[str, ...]
    updates: tuple[BufferUpdate, ...]
    opaque: tuple[str, ...]
    """Modules inside it that are not looked into."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """The buffers that a forward writes, as plain data."""

    kept: tuple[str, ...] = ()
    """Those that do not depend on samples: counters, what follows weights."""
    writers: tuple[BufferWriter, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)
    """Those that cannot be combined, and why."""
    parameters: tuple[str, ...] = ()
    """Those that are parameters, if not trained."""

    @property
    def combined(self) -> tuple[str, ...]:
        return tuple(name for writer in self.writers for name in writer.states)

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.kept, *self.combined, *self.refused)


def find(
    model: nn.Module,
    objective: Objective,
    few: Callable[[], Any],
    device: torch.device,
    arithmetic: Callable[[], AbstractContextManager[Any]] = nullcontext,
    *,
    tries: bool = True,
    tried: Callable[[], nn.Module] | None = None,
) -> Written:
    """``model`` stays as it is, and so do random numbers. ``device``: where it will train. Without ``tries`` they are
    only named. ``tried``: returns the model to try things on, where ``model`` is on meta."""
    if not may_write(model):
        return Written()
    tried = tried or (lambda: model)
    batch = _thirteen(few())
    with arithmetic():
        seen = writes(model, objective, batch, tried)
        if not seen.writers:
            return Written()
        if not tries:
            return Written(kept=tuple(seen.writers))
        return _Search(tried(), objective, tree.to_device(batch, home_of(tried())), device, seen).written()


def _thirteen(batch: Any) -> Any:
    if tree.by_sample(batch) is not None:
        samples = tree.size(batch)
        return tree.rows(batch, torch.arange(TRIED) % samples, samples)
    there = max((len(t) for t in tree.tensors(batch) if t.dim()), default=0)
    finite = torch.ones(there, dtype=torch.bool)
    for t in tree.tensors(batch):
        if t.dim() and len(t) == there and t.is_floating_point():
            finite &= t.reshape(there, -1).isfinite().all(1).cpu()
    good = finite.nonzero().flatten() if finite.any() else torch.arange(max(there, 1))
    rows = good[torch.arange(TRIED) % len(good)]
    return tree.map_tensors(lambda t: t[rows.to(t.device)] if t.dim() and len(t) == there else t, batch)


class _Search:
    """One model's."""

    def __init__(self, model: nn.Module, objective: Objective, batch: Any, device: torch.device, seen: Writes):
        self.model, self.objective, self.batch, self.device, self.seen = model, objective, batch, device, seen

    def written(self) -> Written:
        by_module: dict[str, list[str]] = defaultdict(list)
        refused, kept, writers = {}, [], []
        paths = {path for path in self.seen.writers.values() if path is not None}
        outermost = {p: min((o for o in paths if _inside(p, o)), key=len) for p in paths}
        trained = {name for name, p in self.model.named_parameters() if p.requires_grad}
        before = named_state(self.model)
        made = self._alike([name for name in self.seen.writers if name not in before])
        for name, writer in self.seen.writers.items():
            if name not in before:
                if not made.get(name):
                    refused[name] = "the forward makes it, from the samples"
            elif writer is None or not _inside(name, outermost[writer]):
                refused[name] = "it is written by code outside of the module that holds it"
            elif name in trained:
                refused[name] = "it is a weight that is trained, and the forward changes it by itself"
            else:
                by_module[outermost[writer]].append(name)
        calls = self._calls(list(by_module))
        for path, names in by_module.items():
            try:
                writer = self._writer(path, tuple(names), *calls[path])
            except Uncombined as error:
                counters = self._alike([name for name in names if before[name].numel() == 1])
                kept += [name for name in names if counters.get(name)]
                refused |= {name: f"{path or 'the model'}: {error}" for name in names if not counters.get(name)}
                continue
            if writer is None:
                kept += names
            else:
                writers.append(writer)
        held = tuple(name for name, _ in self.model.named_parameters() if name in self.seen.writers)
        return Written(kept=tuple(kept), writers=tuple(writers), refused=refused, parameters=held)

    def _alike(self, names: list[str]) -> dict[str, bool]:
        """Whether a forward leaves the same in these buffers for other samples: caches of positions and masks that it
        makes, counters of forwards."""
        if not names:
            return {}
        found = []
        for some in (slice(0, TRIED), slice(0, FEWER), slice(FEWER, TRIED)):
            batch = tree.map_tensors(torch.clone, tree.rows(self.batch, some, TRIED))
            with undisturbed(self.model):
                self.objective(self.model, batch)
                there = dict(self.model.named_buffers(remove_duplicate=False))
                found.append({name: there[name].detach().clone() for name in names if name in there})
        first, *others = found
        return {n: all(n in each and torch.equal(each[n], first[n]) for each in others) for n in names if n in first}

    def _calls(self, paths: list[str]) -> dict[str, tuple[Any, Any]]:
        """What each module is first called with, for all samples and for some."""
        every = self._given(paths, self.batch)
        some = self._given(paths, tree.rows(self.batch, slice(0, FEWER), TRIED))
        return {path: (every.get(path), some.get(path)) for path in paths}

    def _given(self, paths: list[str], batch: Any) -> dict[str, Any]:
        heard: dict[str, Any] = {}

        def listen(path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                own = {id(t) for t in (*self.model.parameters(), *self.model.buffers())}
                copied = lambda t: t if id(t) in own else t.detach().clone().requires_grad_(t.requires_grad)
                heard.setdefault(path, tree.map_tensors(copied, (args, kwargs)))
                return forward(*args, **kwargs)

            return run

        with undisturbed(self.model):
            for path in paths:
                module = self.model.get_submodule(path)
                module.__dict__["forward"] = listen(path, module.forward)
            self.objective(self.model, tree.map_tensors(torch.clone, batch))
        return heard

    def _writer(self, path: str, states: tuple[str, ...], call: Any, other: Any) -> BufferWriter | None:
        """None: they do not depend on samples."""
        if call is None or other is None:
            raise Uncombined("it is not called in every forward")
        module = self.model.get_submodule(path)
        held = {id(t) for t in (*self.model.parameters(), *self.model.buffers())}
        given = ModuleCall.of(call, other, held)
        choices = [_opaque(module, path, states), _norms(module, path)]
        refusal: Uncombined | None = None
        for opaque in dict.fromkeys(choices):
            one = Trial(self.model, module, states, given, opaque, self.device)
            try:
                updates = one.updates()
            except Uncombined as error:
                refusal = error
                continue
            except Exception as error:
                refusal = Uncombined(f"it cannot be called on parts of a batch: {in_short(error)}")
                continue
            if not any(update.exchanged for update in updates):
                return None
            reads = self.seen.read_later
            if later := [name for name in states if any(path not in stack for stack in reads.get(name, ()))]:
                raise Uncombined(f"{later[0]} is read again, by another module, after it was written")
            if self.seen.calls[path] > 1:
                raise Uncombined(f"it is called {self.seen.calls[path]} times in one forward")
            return BufferWriter(path=path, states=states, updates=updates, opaque=opaque)
        assert refusal is not None
        raise refusal


def _inside(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")


def _opaque(module: nn.Module, path: str, states: tuple[str, ...]) -> tuple[str, ...]:
    """The largest modules inside that hold none of the buffers."""
    found: list[str] = []
    prefix = f"{path}." if path else ""
    owners = {module.get_submodule(state.removeprefix(prefix).rpartition(".")[0]) for state in states}

    def visit(inner: nn.Module, at: str) -> None:
        for name, child in inner.named_children():
            place = f"{at}.{name}" if at else name
            if isinstance(child, nn.ModuleList | nn.ModuleDict) or owners & set(child.modules()):
                visit(child, place)
            else:
                found.append(place)

    visit(module, path)
    return tuple(found)


def _norms(module: nn.Module, path: str) -> tuple[str, ...]:
    norms = batch_norms(module)
    prefix = f"{path}." if path else ""
    return tuple(f"{prefix}{name}" for name, inner in module.named_modules() if inner in norms and name)
