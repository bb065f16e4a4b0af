"""A model as meshfit sees it: one forward, as a value.

A trace is the list of what one forward did, in order: calls of modules taken as a whole, and the *glue* between
them (the functions that the code of larger modules calls by itself). Values are the tensors that flow between
events. Everything is plain data: it can be compared, printed, sent to another process, and costs nothing to keep.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import prod

from meshfit.anatomy.operations import Operation


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that flows between events."""

    id: int
    shape: tuple[int, ...]
    dtype: str
    """ "float32", "int64", ..."""

    bytes: int
    made_by: int
    """The event that made it; -1 for an input of the model, -2 for a constant that no event made."""

    used_by: tuple[int, ...] = ()
    """Events that read it, in order."""

    needs_grad: bool = False
    constant: bool = False
    """Depends on neither inputs nor parameters: any stage may compute it for itself."""

    storage: int = -1
    """Values of one number share memory: one is a view of the other."""


@dataclass(eq=False, slots=True)
class StorageUse:
    """Memory that an event works on and that may have to stay until backward."""

    storage: int = -1
    """Uses of one number are uses of the same memory."""

    bytes: int = 0
    """0 for what is there anyway: parameters, buffers, the model's inputs."""

    made: bool = False
    """By this event; otherwise it was there before."""

    saved: bool = False
    """Autograd saves it here."""

    dear: bool = False
    """Made here by a product, a convolution or attention: worth keeping when the rest is computed again."""

    flops: int = 0
    """What that took."""

    late: bool = False
    """Made here after the last tensor that is saved here."""


@dataclass(frozen=True, slots=True)
class EventCost:
    """What an event takes, for the batch that was traced. Backward is what autograd would run after it."""

    flops: int = 0
    flops_backward: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    kept: int = 0
    """Activation bytes that autograd keeps for backward, beyond parameters and the model's inputs."""

    rounded: int = 0
    """Bytes of the copies of its parameters in half precision that autocast makes, and autograd keeps."""

    passed: int = 0
    """Bytes of gradients of activations, at their most, while autograd goes through it: an operation's, in and out."""

    uses: tuple[StorageUse, ...] = field(default=(), compare=False, repr=False)
    """Of one event, for those who ask what would be kept if some of it were computed again; a sum has none."""

    forward: tuple[Operation, ...] = field(default=(), repr=False)
    """Operations of one event with their shapes, where they were asked for; a sum has none."""

    backward: tuple[Operation, ...] = field(default=(), repr=False)
    """Those that autograd runs because of it."""

    again: tuple[Operation, ...] = field(default=(), repr=False)
    """Of ``forward``, what backward computes again."""

    def __add__(self, other: "EventCost") -> "EventCost":
        return EventCost(
            self.flops + other.flops,
            self.flops_backward + other.flops_backward,
            self.bytes_read + other.bytes_read,
            self.bytes_written + other.bytes_written,
            self.kept + other.kept,
            self.rounded + other.rounded,
            max(self.passed, other.passed),
        )


@dataclass(frozen=True, slots=True)
class Event:
    """One call: of a module as a whole, or of a function in the glue between modules."""

    index: int
    kind: str
    """ "module" or "glue"."""

    name: str
    """The module's path ("layers.3.mlp"), or the function's name ("add")."""

    inside: str
    """Path of the innermost module whose code made this call; "" for the model itself."""

    reads: tuple[int, ...]
    """Ids of the values it takes, in order, each once."""

    writes: tuple[int, ...]
    """Ids of the values it makes."""

    mutates: tuple[int, ...] = ()
    """Ids of the values it changes in place."""

    parameters: tuple[str, ...] = ()
    """Canonical names of the parameters it uses."""

    buffers: tuple[str, ...] = ()
    cost: EventCost = EventCost()
    line: str = ""
    """file:line of the call, for messages."""

    changes: tuple[str, ...] = ()
    """Names of the buffers (or parameters) it writes: once per forward, in the stage of those who read them after."""

    within: tuple[str, ...] = ()
    """Paths of the modules under way, outermost first. Not always those above it in the tree: a model may call part of
    a module without calling the module."""


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    trained: bool
    stepped: str = ""
    """The dtype of its gradient, and in which it is stepped; "": its own."""
    computed: str = ""
    """The dtype of the copy that the model computes with (``precision=bf16-compute``); "": its own."""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def grad_bytes(self) -> int:
        return self.bytes * 2 if self.stepped == "float32" and self.dtype == "bfloat16" else self.bytes


@dataclass(frozen=True, slots=True)
class Block:
    """A module that repeats: same class, same shapes, one after another."""

    paths: tuple[str, ...]
    """Where it stands, in forward order: ("layers.0", "layers.1", ...). A block that stands once has one path."""

    kind: str
    """Its class name."""

    parameters: int
    """Bytes of one of them."""

    cost: EventCost
    """Of one of them."""


@dataclass(frozen=True, slots=True)
class Dynamic:
    """A place where Python looked at a tensor's value to decide what to do."""

    module: str
    line: str
    """file:line"""
    what: str
    """ "bool(tensor)", ".item()", ..."""
    depends_on: str
    """ "nothing", "inputs", "buffers", "random" or "activations": what the value was computed from."""


@dataclass(frozen=True)
class Trace:
    """One forward of a model on one batch."""

    events: tuple[Event, ...]
    values: dict[int, Value]
    inputs: tuple[int, ...]
    """Values of the batch, in the order of its leaves."""

    outputs: tuple[int, ...]
    parameters: dict[str, Parameter]
    """By canonical name: a tied parameter stands once, under the name it is first known by."""

    buffers: dict[str, Parameter]
    ties: dict[str, str]
    """Further names of tied parameters, each with its canonical name."""

    training: bool = True
    blocks: tuple[Block, ...] = ()
    dynamic: tuple[Dynamic, ...] = ()
    notes: tuple[str, ...] = ()
    """What had to be done to record it: "real tensors", "layers.3.moe taken as a whole", ..."""

    kinds: dict[str, str] = field(default_factory=dict)
    """Class name by module path, for every module of the model."""

    @property
    def cost(self) -> EventCost:
        return sum((event.cost for event in self.events), EventCost())

    @property
    def parameter_bytes(self) -> int:
        return sum(parameter.bytes for parameter in self.parameters.values())


def only(trace: Trace, some: Iterable[int]) -> Trace:
    """What some events of ``trace`` do, as a trace of its own."""
    kept = sorted(some)
    place = {old: new for new, old in enumerate(kept)}
    events = tuple(replace(trace.events[i], index=place[i]) for i in kept)
    used = {id for event in events for id in (*event.reads, *event.writes, *event.mutates)}
    values = {
        id: replace(
            value,
            made_by=place.get(value.made_by, -1 if value.made_by >= 0 else value.made_by),
            used_by=tuple(place[i] for i in value.used_by if i in place),
        )
        for id, value in trace.values.items()
        if id in used
    }
    named = {name for event in events for name in event.parameters}
    buffers = {name for event in events for name in event.buffers}
    made = {id for event in events for id in event.writes}
    return replace(
        trace,
        events=events,
        values=values,
        inputs=tuple(id for id, value in values.items() if id not in made),
        outputs=tuple(id for id in trace.outputs if id in made),
        parameters={name: p for name, p in trace.parameters.items() if name in named},
        buffers={name: b for name, b in trace.buffers.items() if name in buffers},
        ties={name: first for name, first in trace.ties.items() if first in named},
        blocks=(),
    )
