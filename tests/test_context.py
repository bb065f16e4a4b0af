"""Functions of tensors that are cut over ranks, against the same on one device: results and gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshfit.axes.context import attend, carry, local, mix, shapes  # noqa: F401  # register their rules
from meshfit.axes.context.piece import Piece, attended, gathered, guarded
from meshfit.axes.context.span import SplitDim
from meshfit.axes.spec import whole_output
from meshfit.comm.group import ThreadGroup, in_threads

SAMPLES, LENGTH, WIDTH, RANKS = 2, 7, 6, 3  # 7 positions over 3 ranks: 2, 2 and 3

random = torch.Generator().manual_seed(0)
SQUARE = torch.randn(WIDTH, WIDTH, generator=random, dtype=torch.double)
TABLE = torch.randn(LENGTH, WIDTH, generator=random, dtype=torch.double)
MASK = torch.rand(SAMPLES, 1, LENGTH, LENGTH, generator=random) > 0.3
MASK |= torch.eye(LENGTH, dtype=torch.bool)
LABELS = torch.randint(0, WIDTH, (SAMPLES, LENGTH), generator=random)
LABELS[:, ::3] = -100
VOID = LABELS.masked_fill(LABELS < 0, 255)  # an index that no class has
CLASSES = torch.rand(WIDTH, generator=random, dtype=torch.double)
INDEX = torch.randint(0, WIDTH, (SAMPLES, LENGTH, 2), generator=random)


def heads(x: Tensor) -> Tensor:
    return x.view(SAMPLES, LENGTH, 2, 3).transpose(1, 2)


def eager(x: Tensor) -> Tensor:
    q = heads(x)
    scores = (q @ q.transpose(-1, -2)).masked_fill(~MASK, -1e9).softmax(-1)
    return (scores @ q).transpose(1, 2).reshape(SAMPLES, LENGTH, WIDTH)


def grouped(x: Tensor) -> Tensor:
    q = x.view(SAMPLES, LENGTH, 3, 2).transpose(1, 2)
    k = q[:, :1][:, :, None].expand(SAMPLES, 1, 3, LENGTH, 2).reshape(SAMPLES, 3, LENGTH, 2)
    return F.scaled_dot_product_attention(q, k, k, is_causal=True)


def three(x: Tensor) -> Tensor:
    """Heads that divide by the ranks."""
    return x.view(*x.shape[:-1], 3, -1).transpose(-2, -3)


def six(x: Tensor) -> Tensor:
    return x.view(*x.shape[:-1], 6, -1).transpose(-2, -3)


BIAS = torch.randn(3, LENGTH, LENGTH, generator=random, dtype=torch.double)


def in_place(x: Tensor) -> Tensor:
    y = x.clone()
    y += TABLE
    y[:, 2:4] = 0.0
    y.mul_(2).masked_fill_(TABLE > 0, 1.0)
    return y


def experts(x: Tensor) -> Tensor:
    flat = x.view(-1, WIDTH)
    best = flat.softmax(-1).topk(2, -1).indices
    out = torch.zeros_like(flat)
    for expert in range(WIDTH):
        rows, _ = torch.where(best == expert)
        out.index_add_(0, rows, flat[rows] * (expert + 1))
    return out.view(x.shape)


def layer(kind: type[nn.RNNBase], **how: Any) -> nn.RNNBase:
    torch.manual_seed(3)
    return kind(WIDTH, 4, **how).double()


LSTM, GRU = layer(nn.LSTM, num_layers=2, batch_first=True), layer(nn.GRU)
BOTH_WAYS = layer(nn.RNN, batch_first=True, bidirectional=True)


def lstm(x: Tensor) -> list[Tensor]:
    out, (hidden, cell) = LSTM(x)
    return [out, hidden, cell]


LOCAL: dict[str, Callable[[Tensor], Any]] = {
    "pointwise": lambda x: (x * 2 + TABLE - 1 / (x.abs() + 1)).tanh(),
    "broadcast": lambda x: x[:, None] * TABLE + x[..., :1].sum(),
    "where": lambda x: torch.where(TABLE > 0, x, x.mean(-1, keepdim=True)),
    "linear": lambda x: F.gelu(F.linear(x, SQUARE, CLASSES)),
    "norms": lambda x: F.layer_norm(x, (WIDTH,)) + F.rms_norm(x, (WIDTH,)),
    "rotate": lambda x: torch.cat((-x[..., 3:], x[..., :3]), -1) * TABLE.cos() + x,
    "chunk": lambda x: torch.stack(x.chunk(2, -1), 2).flatten(2),
    "split": lambda x: sum(part.sum(-1) for part in x.split([1, 2, 3], dim=-1)),
    "unbind": lambda x: [part.exp() for part in x.view(SAMPLES, LENGTH, 3, 2).permute(2, 0, 1, 3).unbind(0)],
    "flat": lambda x: F.linear(x.reshape(-1, WIDTH), SQUARE).view(SAMPLES, LENGTH, WIDTH),
    "position first": lambda x: F.linear(x.transpose(0, 1).reshape(-1, WIDTH), SQUARE).view(LENGTH, SAMPLES, WIDTH),
    "squeeze": lambda x: x[:, :, None].squeeze().unsqueeze(-1)[..., 0],
    "shift": lambda x: x[:, :-1] * TABLE[1:],
    "narrow": lambda x: x.narrow(1, 1, 6)[:, :5],
    "differences": lambda x: x[:, 1:] - x[:, :-1],
    "eager attention": eager,
    "attention": lambda x: F.scaled_dot_product_attention(heads(x), heads(x), heads(x), attn_mask=MASK),
    "causal": lambda x: F.scaled_dot_product_attention(heads(x), heads(x), heads(x), is_causal=True),
    "grouped": grouped,
    "three heads": lambda x: F.scaled_dot_product_attention(three(x), three(x * 2), three(x.tanh())),
    "three heads, causal": lambda x: F.scaled_dot_product_attention(three(x), three(x * 2), three(x), is_causal=True),
    "three heads, masked": lambda x: F.scaled_dot_product_attention(three(x), three(x * 2), three(x), attn_mask=MASK),
    "three heads, biased": lambda x: F.scaled_dot_product_attention(three(x), three(x * 2), three(x), attn_mask=BIAS),
    "three heads, crossed": lambda x: F.scaled_dot_product_attention(
        three(x), three(TABLE.expand(SAMPLES, -1, -1)), three(x)
    ),
    "six heads on three": lambda x: F.scaled_dot_product_attention(
        six(x), three(x)[..., :1], three(x)[..., 1:], is_causal=True, enable_gqa=True
    ),
    "linear attention": lambda x: x @ (x.softmax(-1).transpose(1, 2) @ x),
    "einsum": lambda x: torch.einsum("bqd,bkd->bqk", x, x) + torch.einsum("bqd,bqe->bde", x, x).sum(),
    "first position": lambda x: x[:, 0] * 2 + x.select(1, -1),
    "sums": lambda x: x.sum(1) + x.mean(dim=(0, 1)) + x.amax(-1).sum() + x.mean(),
    "tokens": lambda x: F.cross_entropy(x.view(-1, WIDTH), LABELS.view(-1)),
    "smooth tokens": lambda x: F.cross_entropy(x.transpose(1, 2), LABELS, weight=CLASSES, label_smoothing=0.1),
    "weighed tokens": lambda x: F.cross_entropy(x.transpose(1, 2), VOID, weight=CLASSES, ignore_index=255),
    "each token": lambda x: F.cross_entropy(x.flatten(0, 1), LABELS.flatten(), reduction="none"),
    "soft tokens": lambda x: F.cross_entropy(x.transpose(1, 2), x.softmax(-1).detach().transpose(1, 2)),
    "nll": lambda x: F.nll_loss(x.log_softmax(-1).flatten(0, 1), LABELS.flatten(), reduction="sum"),
    "squares": lambda x: F.mse_loss(x, TABLE.expand(SAMPLES, -1, -1)) + F.l1_loss(x, x.detach() + 1),
    "divergence": lambda x: F.kl_div(x.log_softmax(-1), TABLE.softmax(-1).expand_as(x), reduction="batchmean"),
    "picked": lambda x: x.gather(-1, INDEX),
    "best": lambda x: x.topk(2, dim=-1).values + x.max(-1).values[..., None],
    "casts": lambda x: x.float().to(torch.float64).type_as(x).contiguous().clone(),
    "repeat": lambda x: x.repeat(1, 1, 2) + x.repeat_interleave(2, dim=-1),
    "pad": lambda x: F.pad(x, (1, 2)),
}
CARRIED: dict[str, Callable[[Tensor], Any]] = {
    "lstm": lstm,
    "lstm, end unused": lambda x: LSTM(x)[0],
    "gru": lambda x: GRU(x.transpose(0, 1))[0],
    "gru, end alone": lambda x: GRU(x.transpose(0, 1))[1],
}
GATHERED: dict[str, Callable[[Tensor], Any]] = {
    "both ways": lambda x: BOTH_WAYS(x)[0],
    "backwards": lambda x: x.flip(1) + x[:, ::2].sum(1, keepdim=True),
    "running": lambda x: x.cumsum(1),
    "over positions": lambda x: x.softmax(1) + x.amax(1, keepdim=True),
    "by index": lambda x: x[:, torch.tensor([3, 0, 5])],
    "few": lambda x: x[:, 5:],
    "convolution": lambda x: F.conv1d(x.transpose(1, 2), SQUARE[:, :, None], padding=1),
    "windows": lambda x: x[:, 1:].reshape(SAMPLES, 3, 2, WIDTH).mean(2),
    "join": lambda x: torch.cat([TABLE[:1].expand(SAMPLES, 1, -1), x], 1),
    "own derivative": lambda x: Twice.apply(x),
    "own derivative, bound before": lambda x: twice(x),
    "in place": in_place,
    "experts": experts,
    "taken by a whole": lambda x: torch.zeros(SAMPLES, LENGTH, WIDTH, dtype=x.dtype).add_(x),
}


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 3


twice = Twice.apply


def number(out: Any) -> Tensor:
    """One number that every element counts in, differently."""
    out = out if isinstance(out, list | tuple) else [out]
    weights = [torch.linspace(1, 2, x.numel(), dtype=torch.double).view(x.shape) for x in out]
    return torch.stack([(x * w).sum() for x, w in zip(out, weights, strict=True)]).sum()


def start() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, LENGTH, WIDTH, generator=random, dtype=torch.double)
    return x, torch.randn(WIDTH, generator=random, dtype=torch.double)


def on_ranks(work: Callable[[ThreadGroup], Any], ranks: int = RANKS) -> list[Any]:
    with guarded():
        return in_threads(ThreadGroup.make(ranks), work)


def derived(
    f: Callable[[Tensor], Any], x: Tensor, scale: Tensor, group: ThreadGroup | None = None, **how: Any
) -> tuple:
    """What ``f`` makes, and its gradients: of ``x``, and of a parameter met by pieces and by wholes."""
    x, scale = x.clone().requires_grad_(), scale.clone().requires_grad_()
    given = x * scale
    if group is not None:
        span = SplitDim.even(1, LENGTH, group.size, **how)
        given = Piece(span.of(given, group.rank), span, group)
    out = f(given)
    loss = number(out) + scale.square().sum()
    (loss / (1 if group is None else group.size)).backward()
    made = whole_output(out)
    return [t.detach() for t in (made if isinstance(made, list | tuple) else [made])], x.grad, scale.grad, out


MASKED = {"masked", "biased"}


def _by_heads(name: str, layout: str) -> bool:
    """A mask would be needed of all positions: it is gathered unless the plan says so."""
    return "heads" in name and ("ulysses" in layout or (layout == "auto" and MASKED.isdisjoint(name.split())))


ORDERS = ("in order", "zigzag")
LAYOUTS = {
    "in order": {"attention": "gather"},
    "zigzag": {"attention": "gather", "zigzag": True},
    "ulysses": {"attention": "ulysses"},
    "zigzag ulysses": {"attention": "ulysses", "zigzag": True},
    "auto": {},
}


CASES = [
    (name, layout) for name in (*LOCAL, *CARRIED, *GATHERED) for layout in (LAYOUTS if "heads" in name else ORDERS)
]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_functions(name: str, layout: str) -> None:
    how = LAYOUTS[layout]
    f = (LOCAL | CARRIED | GATHERED)[name]
    want, x_grad, scale_grad, _ = derived(f, *start())
    gathered.clear()
    attended.clear()
    parts = on_ranks(lambda group: derived(f, *start(), group, **how))
    assert attended["ulysses"] == (RANKS if _by_heads(name, layout) else 0)
    if (
        name != "narrow" or layout != "zigzag"
    ):  # where the first rank, of the first and the last positions, would have none
        whole = name in GATHERED or (name in CARRIED and layout == "zigzag")
        assert bool(gathered) == whole, gathered
    for made, _, _, _ in parts:
        for got, wanted in zip(made, want, strict=True):
            torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(sum(part[1] for part in parts), x_grad)
    torch.testing.assert_close(sum(part[2] for part in parts), scale_grad)
