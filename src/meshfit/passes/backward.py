"""Backward in two halves: gradients of a stage's inputs, at once; gradients of its weights, later.

The first half runs autograd towards the inputs alone, and keeps the gradients that arrive at the products and
convolutions where a weight comes in. The second half runs each of those once more, towards its weights alone. What
stays in the first half:

    weights that come in at several operations of a stage (shared layers): going on from one would pass by the others
    weights that come in elsewhere: at norms they cost next to nothing (and torch's kernel of GroupNorm may crash when
    asked for them alone), and recurrent layers and most ``autograd.Function`` compute all their gradients at once
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from meshfit.axes.tensor.functions import ColumnProduct
from meshfit.torch_private.autograd import PRODUCT_NODES

Node = Any

PRODUCTS = PRODUCT_NODES | {f"{ColumnProduct.__name__}Backward"}


@dataclass(eq=False)
class WeightBackward:
    """The second half."""

    outputs: Sequence[Tensor] = ()
    gradients: Sequence[Tensor | None] = ()
    """Where there was no first half: the whole backward."""

    weights: dict[Node, list[Tensor]] = field(default_factory=dict)
    """By the operation at which they come in."""

    arrived: dict[Node, tuple[Tensor | None, ...]] = field(default_factory=dict)
    """Gradients, at those operations."""

    def run(self) -> None:
        """Add the gradients of the weights, and let go of what they needed."""
        if self.outputs:
            torch.autograd.backward(self.outputs, self.gradients)
        for node, weights in self.weights.items():
            found = [(i, g) for i, g in enumerate(self.arrived.get(node, ())) if g is not None]
            if found:
                edges = [GradientEdge(node, i) for i, _ in found]
                torch.autograd.backward(edges, [g for _, g in found], inputs=weights)
        self.outputs, self.gradients, self.weights, self.arrived = (), (), {}, {}


def input_backward(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> WeightBackward:
    """The first half: add the gradients of ``inputs``, which are leaves."""
    if not inputs:
        return WeightBackward(outputs, gradients)
    later, now = _divided(outputs, inputs)
    second = WeightBackward(weights=later)
    hooks = [node.register_prehook(partial(second.arrived.__setitem__, node)) for node in later]
    try:
        torch.autograd.backward(outputs, gradients, inputs=[*inputs, *now], retain_graph=bool(later))
    finally:
        for hook in hooks:
            hook.remove()
    return second


def _divided(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[dict[Node, list[Tensor]], list[Tensor]]:
    """The weights that can wait, by the one operation where they come in; and those that cannot."""
    goals = {get_gradient_edge(t).node for t in inputs}
    roots = list(dict.fromkeys(get_gradient_edge(t).node for t in outputs))
    order = _from_the_leaves(roots)
    leads = {}  # whether a node leads to an input
    weights: dict[Node, frozenset[Node]] = {}  # what a node that leads to none leads to
    enters: dict[Node, set[Node | None]] = {}  # by weight: the operations at which it comes in
    for node in order:
        following = [after for after, _ in node.next_functions if after is not None]
        leads[node] = node in goals or any(leads[after] for after in following)
        if not leads[node]:
            own = {node} if not following and hasattr(node, "variable") else set()
            weights[node] = frozenset(own.union(*(weights[after] for after in following)))
            continue
        for after in following:
            for weight in weights.get(after, ()):
                enters.setdefault(weight, set()).add(node)
    for root in roots:
        for weight in weights.get(root, ()):
            enters.setdefault(weight, set()).add(None)
    now: list[Tensor] = []
    later: dict[Node, list[Tensor]] = {}
    for weight, where in enters.items():
        (node, *more) = where
        if more or node is None or node.name() not in PRODUCTS:
            now.append(weight.variable)
        else:
            later.setdefault(node, []).append(weight.variable)
    return later, now


def _from_the_leaves(roots: list[Node]) -> list[Node]:
    """Every node of the graph below ``roots``, each after those it leads to."""
    order: list[Node] = []
    seen: set[Node] = set()
    for root in roots:
        stack = [] if root in seen else [(root, iter(root.next_functions))]
        seen.add(root)
        while stack:
            node, following = stack[-1]
            for after, _ in following:
                if after is not None and after not in seen:
                    seen.add(after)
                    stack.append((after, iter(after.next_functions)))
                    break
            else:
                order.append(node)
                stack.pop()
    return order
