"""The head whose logits a cross entropy reads, and nothing else: found in the trace of a step.

Looked for, from the cross entropy back: functions of shapes and of single logits, then a call of an ``nn.Linear``.
"""

from dataclasses import dataclass

from meshfit.anatomy.trace import Event, Trace
from meshfit.axes.head_loss.logits import BY_CHUNKS
from meshfit.axes.tensor.sliced import MOVES, SHAPES

BETWEEN = {name.strip("_") for name in BY_CHUNKS | MOVES | SHAPES.keys() | {"clone", "view_as"}}
"""Functions that may stand between a head and its loss, as a trace calls them."""

NAMES = {"cross_entropy", "CrossEntropyLoss"}

LOOKED_FOR = "looked for: an nn.Linear whose output goes to a cross entropy alone, through views, .float() or scaling"


@dataclass(frozen=True, slots=True)
class HeadPath:
    """From a head to its loss."""

    head: str
    """Path of the layer."""
    events: tuple[int, ...]
    """Its call, what is done to the logits, the loss."""


class NoHead(Exception):
    """There is none; with the reason."""


def head_of(trace: Trace) -> HeadPath:
    """The one with the most logits, if there are several; raises ``NoHead``."""
    paths: list[HeadPath] = []
    why: NoHead | None = None
    for loss in (event for event in trace.events if _kind(trace, event) in NAMES):
        try:
            paths.append(_path(trace, loss))
        except NoHead as reason:
            why = why or reason
    if not paths:
        raise why or NoHead("no cross entropy is called in a step")
    return max(paths, key=lambda path: trace.values[trace.events[path.events[0]].writes[0]].bytes)


def _kind(trace: Trace, event: Event) -> str:
    return trace.kinds.get(event.name, "") if event.kind == "module" else event.name


def _path(trace: Trace, loss: Event) -> HeadPath:
    events, value = [loss.index], loss.reads[0]
    while True:
        made_by = trace.values[value].made_by
        if made_by < 0:
            raise NoHead(f"what {loss.name} reads ({loss.line}) is made by no layer of the model")
        event = trace.events[made_by]
        events.append(event.index)
        if why := _otherwise(trace, value, events):
            raise NoHead(why, "logits that are read otherwise have to be there")
        if event.kind == "module" and trace.kinds.get(event.name) == "Linear":
            calls = sum(each.name == event.name and each.kind == "module" for each in trace.events)
            if calls > 1:
                raise NoHead(f"{event.name} is called {calls} times in a step")
            return HeadPath(event.name, tuple(reversed(events)))
        activations = [read for read in event.reads if trace.values[read].needs_grad]
        waits = event.kind == "glue" and event.name in BETWEEN and not event.parameters and not event.mutates
        if not waits or len(activations) != 1:
            what = f"{event.name} ({trace.kinds[event.name]})" if event.kind == "module" else event.name
            raise NoHead(f"between the last layer and {loss.name} stands {what} ({event.line})")
        value = activations[0]


def _otherwise(trace: Trace, value: int, known: list[int]) -> str:
    """Who else reads a value on the way from head to loss."""
    readers = [trace.events[reader] for reader in trace.values[value].used_by if reader not in known]
    if readers:
        return f"logits are also read by {readers[0].name} ({readers[0].line})"
    return "logits are also returned by the step" if value in trace.outputs else ""
