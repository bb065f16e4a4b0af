"""What is kept, and what is computed twice, when modules are computed again in backward; and which are worth it.

Such a module keeps its inputs ("full"), or those and the results of its products, convolutions and attention
("selective"), instead of all that autograd saves in it.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from functools import cache

from meshfit.anatomy.blocks import Module, blocks, modules
from meshfit.anatomy.trace import Event, Trace

LARGE = 1 / 8
"""Share of all bytes kept above which a module made of others of one kind is opened."""

WORTH = 0.02
"""Share of all bytes kept that a block, or all that repeat it, must save."""


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
        saved = total - sum(after_recompute(trace, one, "full")[0].values())
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


def after_recompute(trace: Trace, paths: Collection[str], word: str = "full") -> tuple[dict[int, int], dict[int, int]]:
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
