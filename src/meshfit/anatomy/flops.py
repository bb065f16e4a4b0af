"""Floating-point operations of one aten operation, forward and backward.

Forward takes torch's own formulas (``torch.utils.flop_counter``) and adds those it lacks. Backward is what autograd
will run because of the operation, known from its inputs alone:

    products      one product of the same size for each factor that needs a gradient
    convolution   one for the input, one for the weight, by torch's formula for ``convolution_backward``, which
                  overlooks groups in the gradient of the weight: too much by their number
    attention     five products: the scores again, then the gradients of values, scores, queries and keys.
                  A causal mask saves nothing here, as in torch's formulas: every score counts
    recurrent     twice the forward: fused kernels compute all their gradients or none

A multiplication and an addition are two operations. Whatever works element by element counts as bytes, not here.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils import flop_counter

from meshfit.torch_private.kernels import (
    FUSED_ATTENTIONS,
    FUSED_ATTENTIONS_BACKWARD,
    GROUPED_PRODUCTS,
    RAGGED_ATTENTIONS,
    convolution_of_scripts,
    grouped_product,
    recurrence_on_cuda,
    recurrence_on_cuda_backward,
    scaled_product,
)
from meshfit.torch_private.operators import qualified_name

aten = torch.ops.aten
Shape = Sequence[int]


def _attention(query: Shape, key: Shape, value: Shape, *, products: int) -> int:
    """Of (batch, heads, length, width) each: two products forward, five backward; keys may have fewer heads."""
    batch, heads, length, width = query
    scores = 2 * batch * heads * length * key[2]
    over_width = {2: 1, 5: 3}[products]  # the others run over the width of the values
    return scores * (over_width * width + (products - over_width) * value[3])


def _grouped_product(a: Shape, b: Shape) -> int:
    """Where a factor is one matrix, its rows or columns are dealt out to the groups: no more than a plain product."""
    groups = a[0] if len(a) == len(b) == 3 else 1
    return 2 * groups * a[-2] * a[-1] * b[-1]


def _recurrent_layer(x: Shape, into: Shape, back: Shape) -> int:
    """One layer, one direction: at every place of every sequence all gates, from the input and from the last state."""
    return 2 * prod(x[:-1]) * (prod(into) + prod(back))


def _recurrent(x: Shape, weights: Sequence[Shape]) -> int:
    """All layers and directions. Every matrix among the weights meets every place once."""
    return 2 * prod(x[:-1]) * sum(prod(weight) for weight in weights if len(weight) == 2)


FORMULAS: dict[Any, Callable[..., int]] = {
    **dict.fromkeys(FUSED_ATTENTIONS, lambda q, k, v, *_, **__: _attention(q, k, v, products=2)),
    **dict.fromkeys(FUSED_ATTENTIONS_BACKWARD, lambda grad, q, k, v, *_, **__: _attention(q, k, v, products=5)),
    **dict.fromkeys(GROUPED_PRODUCTS, lambda a, b, *_, **__: _grouped_product(a, b)),
    **dict.fromkeys(
        (aten.addmm_, aten.addbmm, aten.addbmm_, aten.baddbmm_), lambda added, a, b, *_, **__: 2 * prod(a) * b[-1]
    ),
    aten.mv: lambda a, b, *_, **__: 2 * prod(a),
    **dict.fromkeys((aten.addmv, aten.addmv_), lambda added, a, b, *_, **__: 2 * prod(a)),
    aten.mkldnn_rnn_layer: lambda x, into, back, *_, **__: _recurrent_layer(x, into, back),
    aten.mkldnn_rnn_layer_backward: lambda x, into, back, *_, **__: 2 * _recurrent_layer(x, into, back),
    recurrence_on_cuda: lambda x, weights, *_, **__: _recurrent(x, weights),
    recurrence_on_cuda_backward: lambda x, weights, *_, **__: 2 * _recurrent(x, weights),
}
"""What torch's counter lacks. ``FlopCounterMode(custom_mapping=FORMULAS)`` counts by them too."""

_OURS = {op: flop_counter.shape_wrapper(formula) for op, formula in FORMULAS.items()}

_FACTORS = {
    **dict.fromkeys((aten.mm, aten.bmm, scaled_product, *GROUPED_PRODUCTS), (0, 1)),
    **dict.fromkeys((aten.addmm, aten.addmm_, aten.baddbmm, aten.baddbmm_, aten.addbmm, aten.addbmm_), (1, 2)),
    aten.mv: (1,),  # the gradient of the matrix is an outer product: element by element
    **dict.fromkeys((aten.addmv, aten.addmv_), (2,)),
}
_CONVOLUTIONS = {aten.convolution, convolution_of_scripts, aten.cudnn_convolution, aten.convolution_overrideable}
_RECURRENT = {aten.mkldnn_rnn_layer, recurrence_on_cuda}


_SAME = {"transformers::grouped_mm_fallback": grouped_product}
"""Operations of libraries, by the one of torch that they stand in for, with the same arguments."""


def factors_of(op: Any) -> tuple[int, ...] | None:
    """Places of the factors among the arguments of a product; None: it is none."""
    return _FACTORS.get(op)


def known_as(op: Any) -> Any:
    return _SAME.get(qualified_name(op), op)


def has_flops(op: Any) -> bool:
    """Whether ``op`` (an overload packet, ``torch.ops.aten.mm``) has a formula."""
    return op in _OURS or op in flop_counter.flop_registry


def forward_flops(op: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> int:
    formula = _OURS.get(op) or flop_counter.flop_registry[op]
    return int(formula(*args, **kwargs, out_val=out))


def backward_flops(op: Any, args: Sequence[Any], out: Any, forward: int, needs: Callable[[Any], bool]) -> int:
    """What ``op``'s backward will take. ``needs(tensor)``: whether autograd wants a gradient of it."""
    if op in _FACTORS:
        return forward * sum(needs(args[i]) for i in _FACTORS[op])
    if op in _CONVOLUTIONS:
        x, weight = args[0], args[1]
        formula = flop_counter.flop_registry[aten.convolution_backward]
        wanted, unused = (needs(x), needs(weight), False), (None,) * 4  # groups and strides show in the shapes
        return formula(
            *(out.shape, x.shape, weight.shape, *unused, args[6], None, None, wanted), out_val=(x, weight, None)
        )
    if not any(needs(leaf) for leaf in tensors(args)):
        return 0
    if op in FUSED_ATTENTIONS:
        return _attention(args[0].shape, args[1].shape, args[2].shape, products=5)
    if op in RAGGED_ATTENTIONS:
        return forward * 5 // 2  # all its products are of one size
    return 2 * forward if op in _RECURRENT else 0


def tensors(tree: Any) -> list[Tensor]:
    """The tensors among an operation's arguments or results."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, (list, tuple)):
        return [leaf for part in tree for leaf in tensors(part)]
    return [leaf for part in tree.values() for leaf in tensors(part)] if isinstance(tree, dict) else []
