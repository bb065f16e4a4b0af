"""What an event of a trace computes, as values: operations with their shapes and precisions.

    MatrixProduct    a batch of [m, k] x [k, n]
    FusedAttention   one kernel that never writes its scores
    Streaming        element-wise work: bytes read and written, in a number of kernels

Every aten operation becomes one of them: products and convolutions with their shapes, fused attention, and all else as
the bytes of the tensors that it takes and makes. Kernels are those that a GPU would choose (``kernels``), each on its
own, as in eager mode.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor

from meshfit.anatomy.flops import factors_of, tensors
from meshfit.cost import tallied
from meshfit.torch_private.kernels import (
    FUSED_ATTENTIONS,
    FUSED_ATTENTIONS_BACKWARD,
    GROUPED_PRODUCTS,
    RAGGED_ATTENTIONS,
    convolution_of_scripts,
    recurrence_on_cuda,
    recurrence_on_cuda_backward,
    scaled_product,
)
from meshfit.torch_private.operators import schema_of

aten = torch.ops.aten

BYTES = {"fp4": 0.5, "fp8": 1, "fp16": 2, "bf16": 2, "tf32": 4, "fp32": 4}
HALVES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
LOOKUPS = {aten.embedding, aten.index, aten.index_select, aten.gather, aten.nll_loss_forward, aten.nll_loss2d_forward}
"""They read the rows that they return, not the table."""
SCATTERS = {aten.nll_loss_backward, aten.nll_loss2d_backward}
"""They write zeros and, for each row, one number: what they take is hardly read."""


@dataclass(frozen=True, slots=True)
class MatrixProduct:
    """``count`` times ``batch`` products of [m, k] and [k, n]."""

    m: int
    n: int
    k: int
    batch: int = 1
    precision: str = "bf16"
    accumulate: bool = False
    """Into a sum in fp32 that is read and written, as gradients of weights over microbatches."""
    count: int = 1

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.batch * self.count

    @property
    def bytes(self) -> float:
        one = BYTES[self.precision]
        out = 8 if self.accumulate else max(2, one)
        each = one * self.k * (self.m + self.n) + out * self.m * self.n
        return float(each * self.batch * self.count)


@dataclass(frozen=True, slots=True)
class FusedAttention:
    """Queries of ``batch`` x ``heads`` x ``length`` against ``keys`` keys, in one kernel."""

    batch: int
    heads: int
    length: int
    keys: int
    width: int
    value_width: int = 0
    causal: bool = True
    kernel: str = "torch"
    """Of ``planner.operations.KERNELS``; torch: what scaled_dot_product_attention takes on the device."""
    backward: bool = False
    count: int = 1

    @property
    def flops(self) -> float:
        """Those that are computed: a causal mask leaves half."""
        pairs = self.batch * self.heads * self.length * self.keys * (0.5 if self.causal else 1.0)
        value = self.value_width or self.width
        both = 3 * self.width + 2 * value if self.backward else self.width + value
        return 2.0 * pairs * both * self.count

    @property
    def bytes(self) -> float:
        value = self.value_width or self.width
        tensors = 4 if self.backward else 1
        return 2.0 * self.batch * self.heads * (self.length + self.keys) * (self.width + value) * tensors * self.count


@dataclass(frozen=True, slots=True)
class Streaming:
    """Element-wise work, as bytes read and written."""

    bytes: float
    kernels: int = 1

    @property
    def flops(self) -> float:
        return 0.0


Operation = MatrixProduct | FusedAttention | Streaming


def kernels_of(operation: Operation) -> int:
    """Kernels that the host launches for it."""
    return operation.kernels if isinstance(operation, Streaming) else operation.count


def merged(operations: Iterable[Operation]) -> tuple[Operation, ...]:
    """The same work in few values: equal ones are counted, element-wise ones added up."""
    streamed, rest = Streaming(0.0, 0), []
    for operation in operations:
        if isinstance(operation, Streaming):
            streamed = Streaming(streamed.bytes + operation.bytes, streamed.kernels + operation.kernels)
        else:
            rest.append(operation)
    return (*tallied(rest), streamed) if streamed.kernels else tallied(rest)


def divided(operation: Operation, degree: int) -> Operation:
    """A rank's share of work without weights that ranks divide: by heads, by products of a batch, else by rows."""
    if isinstance(operation, Streaming):
        return replace(operation, bytes=operation.bytes / degree)
    if isinstance(operation, FusedAttention):
        by_heads = operation.heads % degree == 0
        many = {"heads": operation.heads // degree} if by_heads else {"length": ceil(operation.length / degree)}
        return replace(operation, **many)
    if operation.batch % degree == 0:
        return replace(operation, batch=operation.batch // degree)
    return replace(operation, m=ceil(operation.m / degree))


FORWARD_DIMS, BACKWARD_DIMS = (("n", "k"), ("k", "n")), (("k", "n"), ("n", "k"), ("m", "n"), ("n", "m"))
"""Where the dims of a weight may stand in a product: as [out, in] and as [in, out]; in backward, in that for the
gradient of the input, then of the weight itself."""


def with_part(
    operation: MatrixProduct, shape: tuple[int, ...], dim: int, share: float, *, backward: bool
) -> MatrixProduct | None:
    """The product with ``share`` of a weight along ``dim``; None: it is no product with a weight of this shape."""
    if len(shape) == 3 and operation.batch == shape[0] and {operation.m, operation.n, operation.k} >= {*shape[1:]}:
        if dim == 0:
            return replace(operation, batch=max(1, round(operation.batch * share)))
        shape, dim = shape[1:], dim - 1
    elif operation.batch > 1 or len(shape) < 2:
        return None
    rows, columns = shape[0], prod(shape[1:])
    for names in BACKWARD_DIMS if backward else FORWARD_DIMS:
        if (getattr(operation, names[0]), getattr(operation, names[1])) == (rows, columns):
            name = names[min(dim, 1)]
            return replace(operation, **{name: max(1, round(getattr(operation, name) * share))})
    return None


def fewer_rows(operation: Operation, degree: int, rows: Collection[int]) -> Operation:
    """Of every sequence a rank has some positions: its rows of each product, or, where rows are what is summed over,
    so many terms. ``rows``: numbers of rows that products of the forward have."""
    if isinstance(operation, MatrixProduct) and operation.batch == 1:
        name = "k" if operation.k in rows and operation.m not in rows else "m"
        return replace(operation, **{name: ceil(getattr(operation, name) / degree)})
    if isinstance(operation, FusedAttention):
        return replace(operation, length=ceil(operation.length / degree))
    if isinstance(operation, MatrixProduct):
        return replace(operation, m=ceil(operation.m / degree))
    return divided(operation, degree)


def part_of(operations: Iterable[Operation], flops: float) -> tuple[Operation, ...]:
    """All that is element-wise, and of products and attention as many, the largest first, as take no more than
    ``flops``."""
    found, left = [], flops * (1 + 1e-6)
    for operation in sorted(operations, key=lambda each: -each.flops):
        if operation.flops <= left:
            found.append(operation)
            left -= operation.flops
    return tuple(found)


def backward_of(operation: Operation) -> Operation:
    """What autograd would run because of it, as one: both products, or twice the bytes."""
    if isinstance(operation, MatrixProduct):
        return replace(operation, count=2 * operation.count)
    if isinstance(operation, FusedAttention):
        return replace(operation, backward=True)
    return Streaming(2 * operation.bytes, 2 * operation.kernels)


def operation_of(
    op: Any, func: Any, args: tuple, kwargs: dict[str, Any], out: Any, precision: str, size: Callable[[Tensor], float]
) -> Operation | None:
    """One that has run, but for views. ``op``: the packet of ``func``; ``precision``: of products of fp32 tensors;
    ``size``: bytes of a tensor."""
    linear = precision if precision != "fp8" else "bf16"  # fp8 is for products with weights

    def computed(x: Tensor, word: str = linear) -> str:
        return HALVES.get(x.dtype) or word

    if op in FUSED_ATTENTIONS or op in FUSED_ATTENTIONS_BACKWARD:
        return _attention(func, args, backward=op in FUSED_ATTENTIONS_BACKWARD)
    if op in RAGGED_ATTENTIONS:
        return _ragged(args)
    if op in GROUPED_PRODUCTS:
        return _grouped(args, out, computed(args[0]))
    if op is scaled_product:
        return MatrixProduct(args[0].shape[0], args[1].shape[1], args[0].shape[1], 1, "fp8")
    if (places := factors_of(op)) is not None and len(places) == 2:
        a, b = (args[i] for i in places)
        batch = a.shape[0] if a.dim() == 3 else 1
        word = computed(a, precision if b.dim() == 2 else linear)
        return MatrixProduct(a.shape[-2], b.shape[-1], a.shape[-1], batch, word)
    if op in (aten.convolution, aten.cudnn_convolution, aten.convolution_overrideable, convolution_of_scripts):
        return _convolution(args[1], args[0] if args[6] else out, computed(args[1]))  # transposed, or not
    if op is aten.convolution_backward:  # a product for each gradient that is wanted, of input and weight
        wanted = sum(bool(want) for want in args[-1][:2])
        over = args[1] if args[7] else args[0]
        return _convolution(args[2], over, computed(args[2]), wanted) if wanted else None
    if op in (recurrence_on_cuda, recurrence_on_cuda_backward, aten.mkldnn_rnn_layer, aten.mkldnn_rnn_layer_backward):
        return _recurrence(op, args, linear)
    return _streaming(op, args, kwargs, out, size)


def _convolution(weight: Tensor, over: Tensor, precision: str, count: int = 1) -> MatrixProduct:
    """As a product: the places that the kernel goes over, by what it takes at each."""
    places = over.numel() // max(1, over.shape[1])
    return MatrixProduct(places, weight.shape[0], prod(weight.shape[1:]), 1, precision, count=count)


def _grouped(args: tuple, out: Any, precision: str) -> MatrixProduct:
    """Rows that are dealt out to groups count as evenly dealt."""
    a, b, (made, *_) = args[0], args[1], tensors(out)
    groups = next((t.shape[0] for t in (a, b, made) if t.dim() == 3), 1)
    if made.dim() == 3 and a.dim() == 2:  # each group's gradient of its weight: the rows are summed over
        return MatrixProduct(a.shape[0], b.shape[-1], max(1, a.shape[1] // groups), groups, precision)
    rows = a.shape[-2] if a.dim() == 3 else max(1, a.shape[0] // groups)
    return MatrixProduct(rows, b.shape[-1], a.shape[-1], groups, precision)


def _recurrence(op: Any, args: tuple, precision: str) -> MatrixProduct:
    """All gates of all places at once."""
    weights = args[1:3] if op in (aten.mkldnn_rnn_layer, aten.mkldnn_rnn_layer_backward) else tensors(args[1])
    matrices = [w for w in weights if w.dim() == 2]
    gates = max(w.shape[0] for w in matrices)
    into = sum(w.numel() for w in matrices) // gates
    count = 2 if op in (recurrence_on_cuda_backward, aten.mkldnn_rnn_layer_backward) else 1
    return MatrixProduct(prod(args[0].shape[:-1]), gates, into, 1, precision, count=count)


def _attention(func: Any, args: tuple, *, backward: bool) -> FusedAttention:
    first = 1 if backward else 0
    query, key, value = args[first : first + 3]
    names = [argument.name for argument in schema_of(func).arguments]
    causal = bool(dict(zip(names, args, strict=False)).get("is_causal", False))
    batch, heads, length, width = query.shape
    return FusedAttention(batch, heads, length, key.shape[2], width, value.shape[3], causal, backward=backward)


def _ragged(args: tuple) -> FusedAttention:
    """Sequences of lengths of their own, [tokens, heads, width], as one."""
    query, key, value = args[:3]
    return FusedAttention(1, query.shape[-2], query.shape[-3], key.shape[-3], query.shape[-1], value.shape[-1], False)


def _streaming(
    op: Any, args: tuple, kwargs: dict[str, Any], out: Any, size: Callable[[Tensor], float]
) -> Streaming | None:
    """Bytes in and out. An empty tensor like another stands for a fused norm, which reads that one and writes it."""
    made, taken = tensors(out), tensors(args) + tensors(kwargs)
    if not made:
        return None
    written = sum(map(size, made))
    read = 0 if op in SCATTERS else sum(min(size(t), written) if op in LOOKUPS else size(t) for t in taken)
    return Streaming(float(read + written))
