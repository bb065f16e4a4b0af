"""Recomputation: a block keeps its inputs, and backward computes again what forward threw away.

    full        all of the block: at most a third more arithmetic
    selective   what is cheap: norms, activations, softmax, dropout. Products, convolutions and attention kernels are
                kept, so that hardly any arithmetic is done twice

    memory   full: the inputs of every block; selective: those and the results of its products. Beside either, in
             backward, what one block keeps by itself
    traffic  that of the block's own forward, once more: global BatchNorm's

Gradients are those of a plain forward, to the last bit. A block computed again sees what it saw at first (random
numbers, autocast, buffers, attributes, whether its samples count), and leaves the model as it found it: a running
statistic counts a batch once. What a block changes is learnt from its first call, for each mix of modules in
training and not. A block must not change its inputs in place: torch then refuses the backward.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshfit.anatomy.blocks import Module, blocks, modules
from meshfit.anatomy.trace import Event, Trace
from meshfit.cost import Cost
from meshfit.data import tree
from meshfit.layout.forward import wrap
from meshfit.layout.recompute_call import Call, Changes, is_empty_cache

LARGE = 1 / 8
"""Share of all bytes kept above which a module made of others of one kind is opened."""

WORTH = 0.02
"""Share of all bytes kept that a block, or all that repeat it, must save."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recompute:
    """Compute ``blocks`` again in backward."""

    word: str
    """ "selective" or "full"."""

    blocks: tuple[str, ...]
    """Paths of the modules computed again, none inside another: ("layers.0", ...)."""

    def apply(self, model: nn.Module) -> None:
        """In place, around each block's forward. Only where a gradient will be asked for: in training, with grad."""
        for path in self.blocks:
            module = model.get_submodule(path)
            wrap(module, lambda forward, module=module: _recomputed(module, forward, self.word == "selective"))

    def cost(self, trace: Trace) -> tuple[Trace, Cost]:
        """What is kept then, by the event that first keeps it, and the arithmetic done again, in its backward."""
        kept, again = _after(trace, self.blocks, self.word)
        events = tuple(
            replace(e, cost=replace(e.cost, kept=kept[e.index], flops_backward=e.cost.flops_backward + again[e.index]))
            for e in trace.events
        )
        return replace(trace, events=events), Cost(flops=sum(again.values()))


def recomputed_blocks(trace: Trace) -> tuple[str, ...]:
    """The modules to compute again: blocks that repeat, and between them the largest modules that hold no stack.

    Each halves at least what it keeps. An embedding or a head keeps nothing but its input: there is nothing to save.
    """
    repeats = {path: unit.paths for unit in trace.blocks or blocks(trace) if len(unit.paths) > 1 for path in unit.paths}
    called = {path for event in trace.events for path in _modules_of(event)}
    nested = {path.rpartition(".")[0] for path in trace.kinds}
    total = max(trace.cost.kept, 1)

    @cache
    def worth(paths: tuple[str, ...]) -> bool:
        one = paths[:1]
        alone = sum(event.cost.kept for event in trace.events if _block_of(event, one))
        saved = total - sum(_after(trace, one, "full")[0].values())
        return 2 * saved >= alone and saved * len(paths) >= WORTH * total and not _changes_inputs(trace, one)

    def stacks(module: Module) -> bool:
        """Whether a module is large and made of several of one kind: a tower of layers, say."""
        if any(path.startswith(f"{module.path}.") for path in repeats):
            return True
        kinds = Counter(child.kind for child in module.children if child.path in nested and child.name[-1:].isdecimal())
        return module.cost.kept > LARGE * total and (
            max(kinds.values(), default=0) > 1 or any(map(stacks, module.children))
        )

    def visit(module: Module) -> Iterator[str]:
        path = module.path
        taken = path in called and (path in repeats or not stacks(module))
        if path and taken and worth(repeats.get(path, (path,))):
            yield path
        else:
            for child in module.children:
                yield from visit(child)

    return tuple(visit(modules(trace)))


def _changes_inputs(trace: Trace, paths: Collection[str]) -> bool:
    within = {event.index: event for event in trace.events if _block_of(event, paths)}
    first: dict[int, int] = {}
    for value in sorted(trace.values.values(), key=lambda value: value.made_by):
        first.setdefault(value.storage, value.made_by)
    changed = {trace.values[value].storage for event in within.values() for value in event.mutates}
    return any(first[storage] not in within for storage in changed)


def _modules_of(event: Event) -> tuple[str, ...]:
    return (*event.within, event.name) if event.kind == "module" else event.within


def _block_of(event: Event, paths: Collection[str]) -> str | None:
    return next((path for path in _modules_of(event) if path in paths), None)


def _after(trace: Trace, paths: Collection[str], word: str) -> tuple[dict[int, int], dict[int, int]]:
    """Bytes kept and flops done again, by event, once the modules at ``paths`` are recomputed. A storage counts once,
    where it is first kept: outside of them if autograd saves it, inside if it comes from outside or is dear."""
    paths, calls, last = set(paths), [], None
    for event in trace.events:
        block = _block_of(event, paths)
        if block is not None and block == last and event.name != block:  # whole, each event is a call
            calls[-1][1].append(event)
        else:
            calls.append((block, [event]))
        last = block
    kept, again, held = defaultdict(int), defaultdict(int), set()

    def keep(event: Event, storage: int | str, size: int) -> None:
        kept[event.index] += 0 if storage in held else size
        held.add(storage)

    for block, events in calls:
        made = {use.storage for event in events for use in event.cost.uses if use.made}
        ended = False  # from the end on: whether something is saved later, so that what comes before is needed
        for event in reversed(events) if block is not None else ():
            late = {use.storage for use in event.cost.uses if not ended and use.late}
            saves = any(use.saved for use in event.cost.uses)
            skipped = {use for use in event.cost.uses if use.storage in late or not (ended or saves)}
            dear = {use for use in event.cost.uses if use.dear and use not in skipped and word == "selective"}
            again[event.index] = event.cost.flops - sum(use.flops for use in {*skipped, *dear} if use.made)
            ended |= saves
            for use in dear:
                keep(event, use.storage, use.bytes)
        for event in events:
            owners = {name.rpartition(".")[0] for name in event.changes} if block is not None else ()
            for name in event.buffers:  # as they were before: BatchNorm tells of its count alone, and changes all
                if name.rpartition(".")[0] in owners and name in trace.buffers:
                    keep(event, name, trace.buffers[name].bytes)
            for use in event.cost.uses:
                if use.saved if block is None else use.storage not in made:
                    keep(event, use.storage, use.bytes)
    return kept, again


def _recomputed(module: nn.Module, forward: Callable[..., Any], selective: bool) -> Callable[..., Any]:
    changes: Changes = {}

    def run(*args: Any, **kwargs: Any) -> Any:
        if not (module.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        args = tuple(None if is_empty_cache(arg) else arg for arg in args)
        kwargs = {name: None if is_empty_cache(arg) else arg for name, arg in kwargs.items()}
        call = Call(module, forward, args, kwargs, changes, selective)
        # All tensors by place: torch looks there for devices whose random numbers to restore, and for changes in place.
        return checkpoint(call, *tree.tensors((args, kwargs)), use_reentrant=False)

    return run
