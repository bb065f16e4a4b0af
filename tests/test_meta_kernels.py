"""What operators make of meta tensors is remembered: it is what they would have made."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshfit.anatomy import meta_kernels
from meshfit.anatomy.meta_kernels import Remembered

X = torch.empty(4, 6, 8, device="meta")
IMAGE = torch.empty(2, 3, 9, 9, device="meta").to(memory_format=torch.channels_last)

CALLS = {
    "product": lambda: F.linear(X, torch.empty(5, 8, device="meta"), torch.empty(5, device="meta")),
    "transposed": lambda: X.transpose(0, 2) + 1,
    "sum": lambda: X.sum((0, 1), keepdim=True),
    "several": lambda: X.max(1),
    "norm": lambda: F.layer_norm(X, (8,)),
    "integers": lambda: X.argmax(-1),
    "division of integers": lambda: X.long() / 2,
    "true": lambda: X.long() * True,
    "one": lambda: X.long() * 1,
    "one half": lambda: X.long() * 0.5,
    "cat": lambda: torch.cat([X, X], 1),
    "channels last": lambda: F.conv2d(IMAGE, torch.empty(4, 3, 3, 3, device="meta")),
    "attention": lambda: F.scaled_dot_product_attention(X[None], X[None], X[None]),
    "view": lambda: X.view(4, 48),
    "reshape": lambda: X.transpose(0, 1).reshape(-1),
    "complex": lambda: torch.view_as_complex(X.view(4, 6, 4, 2)).conj() * 2,
    "chunk": lambda: X.chunk(3, 1),
    "where": lambda: torch.where(X > 0, X, torch.zeros((), device="meta")),
    "recurrent": lambda: nn.LSTM(8, 5, device="meta")(X)[0],
}


def said(result: Tensor | tuple[Tensor, ...]) -> list[tuple]:
    every = [result] if isinstance(result, Tensor) else [*result]
    return [
        (t.shape, t.stride(), t.dtype, t.device, t.storage_offset(), t.untyped_storage().nbytes(), t.is_conj())
        for t in every
    ]


@pytest.mark.parametrize("name", CALLS)
def test_as_without(name: str) -> None:
    wanted = said(CALLS[name]())
    for _ in range(2):
        with Remembered():
            assert said(CALLS[name]()) == wanted


def test_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And only where it is asked again of the same: not after another default dtype, nor of other strides."""
    results: dict = {}
    monkeypatch.setattr(meta_kernels, "_results", results)
    with Remembered():
        for _ in range(3):
            X.sum(1)
        assert len(results) == 1
        X.transpose(0, 1).sum(1)
        assert len(results) == 2
        assert X.long().mul(0.5).dtype == torch.float32
        torch.set_default_dtype(torch.float64)
        try:
            assert X.long().mul(0.5).dtype == torch.float64
        finally:
            torch.set_default_dtype(torch.float32)


def test_memory_that_is_shared_stays_so() -> None:
    with Remembered():
        for _ in range(2):
            x = torch.empty(4, 6, device="meta")
            assert x.view(-1).untyped_storage()._cdata == x.untyped_storage()._cdata
            assert torch.ops.aten._unsafe_view(x, [24]).untyped_storage()._cdata == x.untyped_storage()._cdata
            assert x.add_(1) is x
            first, second = x + 1, x + 1
            assert first.untyped_storage()._cdata != second.untyped_storage()._cdata


def test_gradients() -> None:
    weight = torch.empty(5, 8, device="meta", requires_grad=True)
    with Remembered():
        for _ in range(2):
            (grad,) = torch.autograd.grad(F.linear(X, weight).sum(), weight)
            assert (grad.shape, grad.is_meta) == (weight.shape, True)
