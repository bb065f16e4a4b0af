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

from meshfit.torch_private import (
    FUSED_ATTENTIONS,
    FUSED_ATTENTIONS_BACKWARD,
    GROUPED_PRODUCTS,
    RAGGED_ATTENTIONS,
    convolution_of_scripts,
    grouped_product,
    qualified_name,
    recurrence_on_cuda,
    recurrence_on_cuda_backward,
    scaled_product,
)

aten = torch.ops.aten
Shape = Sequence[int]


def _fused_attention(query: Shape, key: Shape, value: Shape, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return _attention(query, key, value, products=2)


def _fused_attention_backward(
    gradient: Shape, query: Shape, key: Shape, value: Shape, *_: Any, out_shape: Any = None, **__: Any
) -> int:
    return _attention(query, key, value, products=5)


def _attention(query: Shape, key: Shape, value: Shape, *, products: int) -> int:
    """Of (batch, heads, length, width) each: two products forward, five backward; keys may have fewer heads."""
    batch, heads, length, width = query
    scores = 2 * batch * heads * length * key[2]
    over_width = {2: 1, 5: 3}[products]  # the others run over the width of the values
    return scores * (over_width * width + (products - over_width) * value[3])


def _grouped_product(a: Shape, b: Shape, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Where a factor is one matrix, its rows or columns are dealt out to the groups: no more than a plain product."""
    groups = a[0] if len(a) == len(b) == 3 else 1
    return 2 * groups * a[-2] * a[-1] * b[-1]


def _added_product(_added: Shape, a: Shape, b: Shape, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return 2 * prod(a) * b[-1]


def _matrix_vector(a: Shape, _b: Shape, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return 2 * prod(a)


def _added_matrix_vector(_added: Shape, a: Shape, _b: Shape, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return 2 * prod(a)


def _recurrent_layer(x: Shape, into: Shape, back: Shape, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """One layer, one direction: at every place of every sequence all gates, from the input and from the last state."""
    return 2 * prod(x[:-1]) * (prod(into) + prod(back))


def _recurrent_layer_backward(x: Shape, into: Shape, back: Shape, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return 2 * _recurrent_layer(x, into, back)


def _recurrent(x: Shape, weights: Sequence[Shape], *_: Any, out_shape: Any = None, **__: Any) -> int:
    """All layers and directions. Every matrix among the weights meets every place once."""
    return 2 * prod(x[:-1]) * sum(prod(weight) for weight in weights if len(weight) == 2)


def _recurrent_backward(x: Shape, weights: Sequence[Shape], *_: Any, out_shape: Any = None, **__: Any) -> int:
    return 2 * _recurrent(x, weights)


FORMULAS: dict[Any, Callable[..., int]] = {
    **dict.fromkeys(FUSED_ATTENTIONS, _fused_attention),
    **dict.fromkeys(FUSED_ATTENTIONS_BACKWARD, _fused_attention_backward),
    **dict.fromkeys(GROUPED_PRODUCTS, _grouped_product),
    aten.addmm_: _added_product,
    aten.addbmm: _added_product,
    aten.addbmm_: _added_product,
    aten.baddbmm_: _added_product,
    aten.mv: _matrix_vector,
    aten.addmv: _added_matrix_vector,
    aten.addmv_: _added_matrix_vector,
    aten.mkldnn_rnn_layer: _recurrent_layer,
    aten.mkldnn_rnn_layer_backward: _recurrent_layer_backward,
    recurrence_on_cuda: _recurrent,
    recurrence_on_cuda_backward: _recurrent_backward,
}
"""What torch's counter lacks. ``FlopCounterMode(custom_mapping=FORMULAS)`` counts by them too."""

_OURS = {op: flop_counter.shape_wrapper(formula) for op, formula in FORMULAS.items()}

_FACTORS = {
    aten.mm: (0, 1),
    aten.bmm: (0, 1),
    **dict.fromkeys((scaled_product, *GROUPED_PRODUCTS), (0, 1)),
    aten.addmm: (1, 2),
    aten.addmm_: (1, 2),
    aten.baddbmm: (1, 2),
    aten.baddbmm_: (1, 2),
    aten.addbmm: (1, 2),
    aten.addbmm_: (1, 2),
    aten.mv: (1,),  # the gradient of the matrix is an outer product: element by element
    aten.addmv: (2,),
    aten.addmv_: (2,),
}
_CONVOLUTIONS = {aten.convolution, convolution_of_scripts, aten.cudnn_convolution, aten.convolution_overrideable}
_RECURRENT = {aten.mkldnn_rnn_layer, recurrence_on_cuda}


_SAME = {"transformers::grouped_mm_fallback": grouped_product}
"""Operations of libraries, by the one of torch that they stand in for, with the same arguments."""


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
