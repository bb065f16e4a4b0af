"""Attention on pieces on a GPU: FlashAttention or cuDNN's, without a mask, and the numbers of one device."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshfit.axes.context import attend, local, mix, shapes  # noqa: F401  # register their rules
from meshfit.axes.context.piece import Piece, guarded
from meshfit.axes.context.span import SplitDim
from meshfit.comm.group import ThreadGroup, in_threads
from meshfit.torch_private.kernels import attention_kernel

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SAMPLES, LENGTH, RANKS, CHANNELS = 2, 250, 2, 64  # no multiple of four: uneven chunks


def given(heads: int, seed: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(SAMPLES, heads, LENGTH, CHANNELS, generator=random).to("cuda", torch.bfloat16)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=["equal", "grouped"])
@pytest.mark.parametrize("attention", ["gather", "ulysses"])
@pytest.mark.parametrize("zigzag", [False, True], ids=["in order", "zigzag"])
@pytest.mark.parametrize("kernel", [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION], ids=["flash", "cudnn"])
def test_no_other_kernel_is_needed(kernel: SDPBackend, zigzag: bool, attention: str, heads: tuple[int, int]) -> None:
    more = {"is_causal": True, "enable_gqa": heads[0] != heads[1]}
    tensors = [given(count, seed) for seed, count in enumerate((heads[0], heads[1], heads[1]))]
    weights = given(heads[0], 9)
    exact = [x.double().requires_grad_() for x in tensors]
    with sdpa_kernel(SDPBackend.MATH):
        want = F.scaled_dot_product_attention(*exact, **more)
    (want * weights).sum().backward()
    span = SplitDim.even(2, LENGTH, RANKS, zigzag=zigzag, attention=attention)

    def work(group: ThreadGroup) -> tuple[Tensor, list[Tensor]]:
        own = [span.of(x, group.rank).clone().requires_grad_() for x in tensors]
        made: Any = F.scaled_dot_product_attention(*(Piece(x, span, group) for x in own), **more)  # type: ignore
        with torch.autograd.set_multithreading_enabled(False):  # ranks wait for each other in their own threads
            (made.local * span.of(weights, group.rank)).sum().backward()
        return made.local.detach(), [x.grad for x in own]  # type: ignore[misc]

    with guarded(), sdpa_kernel(kernel):
        taken = attention_kernel(*tensors, scale=None, grouped=more["enable_gqa"])  # type: ignore[misc]
        assert taken is not None
        assert taken.cudnn == (kernel == SDPBackend.CUDNN_ATTENTION)
        parts = in_threads(ThreadGroup.make(RANKS), work)
    for rank, (made, gradients) in enumerate(parts):
        torch.testing.assert_close(made.double(), span.of(want.detach(), rank), rtol=2e-2, atol=2e-2)
        for got, x in zip(gradients, exact, strict=True):
            torch.testing.assert_close(got.double(), span.of(x.grad, rank), rtol=5e-2, atol=5e-2)  # type: ignore[arg-type]
