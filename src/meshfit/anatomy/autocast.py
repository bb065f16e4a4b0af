"""What autocast to a half precision makes of the sizes of tensors, predicted from a forward in fp32.

torch ignores autocast on meta tensors, where traces are made. So each memory is noted as what it would hold: products,
convolutions and attention take and make halves, some functions (norms, softmax, losses) take and make fp32, and the
rest the widest of what it is given. Where an operation takes something in another precision than it has, autocast makes
a copy, and if autograd saves what the operation takes, it saves the copy: another one for each operation. Copies of
weights are made once a forward, and are counted apart: a weight may come as a half already.

Conversions in the model's own code (``x.float()``) do nothing in fp32, and are not seen.
"""

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from meshfit.anatomy.flops import has_flops
from meshfit.torch_private.kernels import BATCH_NORMS, log_softmax_kernel, softmax_kernel
from meshfit.torch_private.tensors import storage_id

aten = torch.ops.aten
E = TypeVar("E")

_LOSSES = (
    *(aten.nll_loss_forward, aten.nll_loss2d_forward, aten.mse_loss, aten.smooth_l1_loss, aten.huber_loss),
    *(aten.binary_cross_entropy_with_logits, aten.soft_margin_loss, aten.multi_margin_loss),
)
IN_FP32 = {
    "cpu": frozenset({*_LOSSES, log_softmax_kernel, aten.prod}),
    "cuda": frozenset(
        {
            *_LOSSES,
            *(aten.native_layer_norm, aten.native_group_norm, softmax_kernel, aten.logsumexp),
            *(aten.exp, aten.expm1, aten.log, aten.log10, aten.log2, aten.log1p, aten.reciprocal, aten.rsqrt),
            *(aten.pow, aten.softplus, aten.sum, aten.prod, aten.cumsum, aten.cumprod, aten.linalg_vector_norm),
            *(aten.acos, aten.asin, aten.cosh, aten.sinh, aten.tan, aten.erfinv, aten.norm, aten.renorm),
        }
    ),
}
"""What autocast runs in fp32, by device, of what models use. ``F.cross_entropy`` asks for the logarithm of its softmax
in the precision of its input, and is obeyed on GPUs; on CPUs autocast knows it as a whole."""

LIKE_THEIR_INPUT = frozenset({*BATCH_NORMS, aten.native_layer_norm, aten.native_group_norm})
"""What makes of halves halves, where autocast lets it, though its weights are in fp32."""


class RoundedSizes:
    """Bytes of memory and of saved copies under autocast. Tensors of other dtypes than fp32 are what they are."""

    def __init__(self, target: str, *, shared: bool = False):
        """``shared``: products that take the same tensor take the same copy (axes/shard/rounding.py)."""
        self._shared = shared
        self._in_fp32 = IN_FP32["cuda" if target == "cuda" else "cpu"]
        self._halves: set[int] = set()  # storages
        self._full: set[int] = set()  # ... of fp32 numbers, as far as the forward is concerned
        self._takes: dict[int, bool] = {}  # node -> whether its operation takes halves; others take both
        self._makes: dict[int, bool] = {}  # node -> whether its operation makes halves
        self._cast: set[int] = set()  # storages of which there is a copy that products share

    def book(self, op: Any, node: int | None, taken: Iterable[Tensor], made: list[Tensor]) -> None:
        """``op`` has made ``made`` out of ``taken``; ``node``: autograd's, if it recorded it."""
        given = {storage_id(t) for t in taken}
        low = has_flops(op)
        if low or op in self._in_fp32:
            if node is not None:
                self._takes.setdefault(node, low)
            made = made[:1] if low else []  # attention's statistics are in fp32
        else:
            taken = [*taken][:1] if op in LIKE_THEIR_INPUT else taken
            numbers = [storage_id(t) in self._halves for t in taken if t.dtype == torch.float32 and t.dim()]
            made = made[:1] if op in LIKE_THEIR_INPUT else made
            made = made if numbers and all(numbers) else []
        self._halves |= {key for t in made if t.dtype == torch.float32 and (key := storage_id(t)) not in given}
        if node is not None:
            self._makes[node] = low or (bool(made) and op not in self._in_fp32)

    def cast(self, op: Any, tensor: Tensor, size: int) -> int:
        """Bytes read and written to cast ``tensor`` to the precision that ``op`` computes in; backward casts the
        gradient back."""
        key, low = storage_id(tensor), has_flops(op)
        if tensor.dtype != torch.float32 or not (low or op in self._in_fp32) or low == (key in self._halves):
            return 0
        if low and self._shared and key in self._cast:
            return 0
        self._cast.add(key)
        return size + size // 2

    def save(self, tensor: Tensor) -> None:
        """Autograd saves it."""
        if tensor.dtype == torch.float32:
            self._full.add(storage_id(tensor))

    def size(self, key: int, size: int) -> int:
        """Of memory that has ``size`` bytes in the forward."""
        return size // 2 if key in self._halves else size

    def gradient_of(self, node: int, size: int) -> int:
        """Of a gradient that the backward of ``node`` reads or writes."""
        return size // 2 if self._makes.get(node) else size

    def gradient(self, op: Any, tensor: Tensor, size: int) -> tuple[int, int]:
        """Bytes of the gradient of what ``op`` takes or makes, in the precision that ``op`` computes in, and of the
        tensor's own gradient where that is another one, cast from the first."""
        key, low = storage_id(tensor), has_flops(op)
        own = self.size(key, size)
        if tensor.dtype != torch.float32 or not (low or op in self._in_fp32) or low == (key in self._halves):
            return own, 0
        return (size // 2 if low else size), own

    def kept(self, key: int, size: int, saves: Iterable[tuple[int, E]]) -> Iterator[tuple[E, int]]:
        """What is kept of memory that was saved, by (node, event): the event, and bytes."""
        itself = copied = False
        for node, event in saves:
            takes_half = self._takes.get(node)
            if key in self._full and takes_half is not None and takes_half != (key in self._halves):
                if not copied or not self._shared:
                    yield event, size // 2 if takes_half else size
                copied = True
            elif not itself:
                itself = True
                yield event, self.size(key, size)

    def rounds(self, key: int, saves: Iterable[tuple[int, E]]) -> list[E]:
        """Events that save memory which is there anyway, and would save a copy in half precision."""
        return [event for node, event in saves if key in self._full and self._takes.get(node)]
