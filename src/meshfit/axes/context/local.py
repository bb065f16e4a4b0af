"""Functions that a rank computes on its own positions: of each element by itself, or along a dim that is not cut.

What all ranks hold whole (masks, rotary tables, weights) is cut to the rank's positions where it meets a piece; its
gradient is then zero elsewhere, and right as a sum over ranks.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from meshfit.axes.context.piece import Piece, pieces, rule
from meshfit.axes.context.span import SplitDim
from meshfit.axes.spec import changes, name_of
from meshfit.comm.draws import own_draws
from meshfit.torch_private.trees import tree_leaves, tree_map

POINTWISE = """
abs neg negative positive sign sgn exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal sin cos tan asin
acos atan sinh cosh tanh atanh asinh acosh sigmoid erf erfc erfinv logit ceil floor round trunc frac relu relu6 gelu
silu elu selu celu mish softplus softsign hardtanh hardsigmoid hardswish leaky_relu logsigmoid log_sigmoid threshold
tanhshrink hardshrink softshrink isnan isinf isfinite logical_not bitwise_not nan_to_num rad2deg deg2rad lgamma
digamma add sub subtract rsub mul multiply div divide true_divide floor_divide remainder fmod pow float_power atan2
hypot maximum minimum fmax fmin eq ne lt le gt ge equal_ not_equal greater greater_equal less less_equal logical_and
logical_or logical_xor bitwise_and bitwise_or bitwise_xor where masked_fill clamp clamp_min clamp_max clip lerp
addcmul addcdiv isclose copysign ldexp xlogy square_ abs_ neg_ exp_ log_ sqrt_ rsqrt_ sigmoid_ tanh_ relu_ add_ sub_
mul_ div_ pow_ masked_fill_ clamp_ clamp_min_ clamp_max_ lerp_ addcmul_ addcdiv_ copy_ nan_to_num_ hardtanh_ elu_
leaky_relu_ silu_ __add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ __truediv__
__rtruediv__ __itruediv__ __div__ __rdiv__ __idiv__ __floordiv__ __rfloordiv__ __mod__ __rmod__ __pow__ __rpow__
__ipow__ __neg__ __pos__ __abs__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__ __rand__ __or__ __ror__ __xor__
__rxor__ __invert__ __iand__ __ior__
""".split()  # noqa: SIM905
"""Functions of each element by itself; several tensors are broadcast."""

UNARY = """
to type type_as float double half bfloat16 int long bool short char byte clone contiguous detach data cpu cuda alias
zero_ fill_ detach_ zeros_like ones_like empty_like full_like real imag conj resolve_conj resolve_neg
""".split()  # noqa: SIM905
"""Functions of each element of the first tensor; of others, the kind alone counts."""

RANDOM = """
dropout dropout_ native_dropout alpha_dropout rand_like randn_like randint_like bernoulli bernoulli_ normal_ uniform_
exponential_ rrelu
""".split()  # noqa: SIM905

NEW = ("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor")


def aligned(given: Any) -> tuple[SplitDim, int, Any] | None:
    """Tensors that are broadcast: how the result is cut, how many dims it has, and ``given`` with what this rank has of
    each. None if they do not fit together."""
    tensors = [x for x in tree_leaves(given) if isinstance(x, Tensor)]
    dims = max(x.dim() for x in tensors)
    first = pieces(tensors)[0]
    span = first.span.at(first.span.dim + dims - first.dim())
    rank = first.group.rank

    def own(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        dim = span.dim - dims + x.dim()
        if isinstance(x, Piece):
            if x.span == span.at(dim):
                return x.local
            x = x.whole()
        if dim < 0 or x.shape[dim] == 1:
            return x
        if x.shape[dim] != span.size:
            raise _Apart
        return span.at(dim).of(x, rank)

    try:
        return span, dims, tree_map(own, given)
    except _Apart:
        return None


class _Apart(Exception):
    pass


@rule(*POINTWISE)
def pointwise(func: Any, *args: Any, **kwargs: Any) -> Any:
    first = pieces((args, kwargs))[0]
    if changes(name_of(func)) and not isinstance(args[0], Piece):
        return NotImplemented  # a tensor that all ranks hold whole takes something from a piece
    if changes(name_of(func)):
        first = args[0]
        if any(x.dim() > first.dim() for x in tree_leaves(args) if isinstance(x, Tensor)):
            return NotImplemented
        rest = aligned((first, args[1:], kwargs))
    else:
        rest = aligned((None, args, kwargs))
    if rest is None:
        return NotImplemented
    span, dims, (target, own_args, own_kwargs) = rest
    if target is not None:
        func(target, *own_args, **own_kwargs)
        return first
    made = func(*own_args, **own_kwargs)
    if not isinstance(made, Tensor) or made.dim() != dims:
        return NotImplemented
    return Piece(made, span, first.group)


@rule(*UNARY)
def unary(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = tree_map(lambda y: y.local if isinstance(y, Piece) else y, (args, kwargs))
    if not isinstance(x, Piece):
        return func(x, *args, **kwargs)
    made = func(x.local, *args, **kwargs)
    if not isinstance(made, Tensor):
        return made
    return x if made is x.local else Piece(made, x.span, x.group)


@rule(*RANDOM)
def random(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Every rank draws for its own positions."""
    if not isinstance(x, Piece) or pieces((args, kwargs)):
        return NotImplemented
    drops = name_of(func).startswith("dropout")
    p, training = (*args, *(0.5, True)[len(args) :])[:2]
    idle = drops and not (kwargs.get("p", p) and kwargs.get("training", kwargs.get("train", training)))
    with nullcontext() if idle else own_draws(x.group, x.device):
        made = func(x.local, *args, **kwargs)
    return x if made is x.local else mapped(made, x.span, x.group)


@rule(*NEW)
def new(func: Any, x: Piece, *args: Any, **kwargs: Any) -> Any:
    """Of the kind of a piece, and of a shape of its own: whole."""
    return NotImplemented if pieces((args, kwargs)) else func(x.local, *args, **kwargs)


def mapped(made: Any, span: SplitDim, group: Any) -> Any:
    """What came of a piece, one tensor or several, all cut alike."""
    if isinstance(made, Tensor):
        return Piece(made, span, group)
    items = [Piece(part, span, group) for part in made]
    return items if isinstance(made, list) else tuple(items) if type(made) is tuple else type(made)(items)


def argument(args: tuple, kwargs: dict[str, Any], place: int, name: str, default: Any = None) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


# Along a dim


def _along(place: int, default: Any = None) -> Callable[..., Any]:
    """Functions along the dim that stands at ``place`` after the tensor; what they make has the same dims."""

    def act(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        dim = argument(args, kwargs, place, "dim", default)
        if not isinstance(x, Piece) or not isinstance(dim, int) or pieces((args, kwargs)):
            return NotImplemented
        if dim % x.dim() == x.span.dim:
            return NotImplemented
        return mapped(func(x.local, *args, **kwargs), x.span, x.group)

    return act


rule("softmax", "log_softmax", "softmin", "cumsum", "cumprod", "logcumsumexp")(_along(0))
rule("sort", "argsort", "glu")(_along(0, -1))
rule("normalize")(_along(1, 1))
rule("topk")(_along(1, -1))


@rule("gather")
def picked(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """By an index of as many dims, along one that is not cut."""
    dim, index = (args[0], args[1]) if name_of(func) == "gather" and len(args) == 2 else (None, None)
    dim, index = kwargs.get("dim", dim), kwargs.get("index", index)
    if not isinstance(dim, int) or not isinstance(index, Tensor) or index.dim() != x.dim():
        return NotImplemented
    dim %= x.dim()
    first = pieces((x, index))[0].span.dim
    if dim == first or x.shape[first] != index.shape[first] or (found := aligned((x, index))) is None:
        return NotImplemented
    span, _, (own, taken) = found
    made = torch.gather(own, dim, taken)
    return Piece(made, span, pieces((x, index))[0].group)


@rule("layer_norm", "rms_norm", "native_layer_norm")
def norm(func: Any, x: Any, shape: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(x, Piece) or pieces((args, kwargs)) or x.span.dim >= x.dim() - len(shape):
        return NotImplemented
    return mapped(func(x.local, shape, *args, **kwargs), x.span, x.group)


@rule("linear")
def linear(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(x, Piece) or pieces((args, kwargs)) or x.span.dim == x.dim() - 1:
        return NotImplemented
    return Piece(func(x.local, *args, **kwargs), x.span, x.group)


@rule("embedding")
def embedding(func: Any, first: Any, second: Any, *args: Any, **kwargs: Any) -> Any:
    """Both orders are torch's: (input, weight) of nn.functional, (weight, input) below it."""
    index = first if isinstance(first, Piece) else second
    if (isinstance(first, Piece) and isinstance(second, Piece)) or index.is_floating_point():
        return NotImplemented
    given = [x.local if x is index else x for x in (first, second)]
    return Piece(func(*given, *args, **kwargs), index.span, index.group)


@rule("one_hot")
def one_hot(func: Any, x: Piece, num_classes: int = -1) -> Any:
    return NotImplemented if num_classes < 0 else Piece(func(x.local, num_classes), x.span, x.group)


@rule("pad")
def pad(func: Any, x: Any, pad: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(x, Piece) or x.span.dim >= x.dim() - len(pad) // 2:
        return NotImplemented
    return Piece(func(x.local, pad, *args, **kwargs), x.span, x.group)
