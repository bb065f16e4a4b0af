"""A graph that torch.compile captured, compiled in pieces, so that gradients come while backward runs.

Compiled as one, all gradients come at the end of backward, and nothing is left to hide their sums behind. In pieces,
each of some megabytes of weights, those of the last piece come first. A graph is cut where least is handed from one
piece to the next: between blocks that is one activation, so pieces keep what the whole would keep. The last layer and
the loss stay in one piece, where compiling them together saves most: what is handed on between them is the largest.

torch does the same for its DistributedDataParallel, but cuts by bytes alone: what is handed on inside a block is kept
twice.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from meshfit.axes.spec import changes
from meshfit.torch_private.compilation import compiled_at, size_hint
from meshfit.torch_private.tensors import storage_id
from meshfit.torch_private.trees import tree_leaves

MOST_PIECES = 16
"""Of a model: more hide little more, and each takes a while to compile."""


@dataclass(frozen=True)
class InPieces:
    """A backend of torch.compile, around the one that compiles each piece."""

    least: int
    """Bytes of weights in a piece."""

    first: int = 0
    """... in that whose gradients come first."""

    backend: str = "inductor"

    def __call__(self, graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        starts = cuts(graph, self.least, self.first)
        try:
            return compiled_at(starts, graph, inputs, self.backend)
        except Exception as error:
            if not starts:
                raise
            logging.getLogger("meshfit").warning("compiled as one graph: it cannot be cut (%s)", error)
            return compiled_at([], graph, inputs, self.backend)


def cuts(graph: GraphModule, least: int, first: int = 0) -> list[Node]:
    """The first node of each piece after the first, from the last on; the last holds ``first`` bytes or more."""
    nodes = [node for node in graph.graph.nodes if node.op not in ("placeholder", "output")]
    arrive = _weights_by_first_use(graph, nodes)
    least = max(least, sum(arrive) // MOST_PIECES)
    handed_on = _handed_on(graph, nodes)
    found: list[Node] = []
    behind, opened, best = 0, None, None  # bytes of weights behind; when there were enough; the best cut since
    for at in range(len(nodes) - 1, 0, -1):
        behind += arrive[at]
        if behind < (least if found or not first else first):
            continue
        opened = behind if opened is None else opened
        size = handed_on[at]
        if size is not None and nodes[at].op == "call_function" and (best is None or size < best[0]):
            best = size, nodes[at], behind
        if best is not None and behind - opened >= least // 2:
            found.append(best[1])
            behind, opened, best = behind - best[2], None, None
    if best is not None and behind > best[2]:
        found.append(best[1])
    return found


def _weights_by_first_use(graph: GraphModule, nodes: list[Node]) -> list[int]:
    """Bytes of the weights that come in at each node, for the first time: there their gradients are complete."""
    place, arrive = {node: i for i, node in enumerate(nodes)}, [0] * len(nodes)
    for node in graph.graph.nodes:
        value = _value(node) if node.op == "placeholder" else None
        if node.op == "get_attr":
            value = getattr(graph, str(node.target), None)
        if isinstance(value, Tensor) and value.requires_grad:  # copies of weights, too: see bf16_compute.py
            uses = [place[user] for user in node.users if user in place]
            if uses:
                arrive[min(uses)] += _bytes(value)
    return arrive


def _handed_on(graph: GraphModule, nodes: list[Node]) -> list[int | None]:
    """What a cut before each node would hand on, in bytes; None where it must not be: something that was made before
    is changed in place afterwards."""
    given = {key for node in graph.graph.nodes if node.op == "placeholder" for key, _ in _memory(node)}
    place = {node: i for i, node in enumerate(nodes)}
    made: dict[int, list[int]] = {}  # by memory: where it was made, where it is read last, where changed last, bytes
    for i, node in enumerate(nodes):
        for key, size in _memory(node):
            if key not in given:
                life = made.setdefault(key, [i, i, -1, 0])
                life[1] = max(life[1], *(place.get(user, len(nodes)) for user in node.users), i)
                life[3] = max(life[3], size)
        if _changes(node) and node.args and isinstance(node.args[0], Node):
            for key, _ in _memory(node.args[0]):
                if key in made:
                    made[key][2] = i
    begins, bars = [0] * (len(nodes) + 2), [0] * (len(nodes) + 2)  # what begins to count at a node, less what ends
    for first, last, changed, size in made.values():
        begins[first + 1] += size
        begins[last + 1] -= size
        if changed > first:
            bars[first + 1] += 1
            bars[changed + 1] -= 1
    counts = zip(accumulate(begins), accumulate(bars), strict=True)
    return [None if barred else size for (size, barred), _ in zip(counts, nodes, strict=False)]


def _changes(node: Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return changes(name) or name in IN_PLACE or bool(node.kwargs.get("inplace"))


IN_PLACE = frozenset({"iadd", "isub", "imul", "itruediv", "setitem", "ipow", "iand", "ior", "ixor"})
"""Of the module ``operator``."""


def _value(node: Node) -> Any:
    return node.meta.get("example_value")


def _memory(node: Node) -> Iterator[tuple[int, int]]:
    """The memory of what a node returns, and how many bytes of it."""
    for leaf in tree_leaves(_value(node)):
        if isinstance(leaf, Tensor):
            yield storage_id(leaf), _bytes(leaf)


def _bytes(tensor: Tensor) -> int:
    size = tensor.element_size()
    for length in tensor.shape:
        size *= size_hint(length)
    return size
