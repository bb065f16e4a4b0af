"""How long does each rank of a causal context plan compute, and with which attention kernel?

    python benchmarks/context_speed.py                                   # needs a GPU; one is enough
    python benchmarks/context_speed.py --tokens 8192,32768 --degrees 2,4

A block of attention as a GPT has it (16 heads of 128, bf16, causal), forward and backward, of one sequence of so many
tokens over so many ranks. Each rank is run alone, its part of what collectives bring made up (their time is not in it):
what is shown is what ranks compute. A step lasts as long as its slowest rank.

    masked     chunks in order, a mask that is given as a tensor: how it was
    in order   chunks in order, keys up to the rank's last position, no mask
    zigzag     two chunks a rank, one from either end: attention=gather, in the parts of axes/context/causal.py
    ulysses    some heads, all positions: attention=ulysses

``of even work``: over the time of one device for the whole sequence, divided by the ranks. Exits with 1 if that is more
than 1.25 for the slowest rank of zigzag, or if it takes another kernel than one device; 4 if there is no GPU.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[1]))

from meshfit.axes.context import attend, local, mix, shapes  # noqa: F401  # register their rules
from meshfit.axes.context.piece import Piece
from meshfit.axes.context.span import SplitDim
from meshfit.comm.group import CountingGroup

HEADS, CHANNELS, REPEATS, MORE = 16, 128, 7, 1.25
WAYS = {
    "masked": {"attention": "gather"},
    "in order": {"attention": "gather"},
    "zigzag": {"attention": "gather", "zigzag": True},
    "ulysses": {"attention": "ulysses"},
}


class Alone(CountingGroup):
    """Receives its own."""

    def all_to_all(self, rows: Tensor, sent: Sequence[int], taken: Sequence[int]) -> Tensor:
        return rows.clone()


def attended(way: str, q: Tensor, k: Tensor, v: Tensor, tokens: int, rank: int) -> Tensor:
    if way != "masked":
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert isinstance(q, Piece)
    (start, stop), keys = q.span.chunks(rank)[0], [x.whole().narrow(-2, 0, q.span.chunks(rank)[0][1]) for x in (k, v)]
    mask = torch.arange(start, stop, device="cuda")[:, None] >= torch.arange(stop, device="cuda")
    return Piece(F.scaled_dot_product_attention(q.local, *keys, attn_mask=mask), q.span, q.group)


def of_rank(way: str, tokens: int, degree: int, rank: int) -> Callable[[], None]:
    span = SplitDim.even(2, tokens, degree, **WAYS[way])  # type: ignore[arg-type]
    group = Alone(rank, degree)
    shape = (1, HEADS, span.counts[rank], CHANNELS)
    given = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]

    def step() -> None:
        made = attended(way, *(Piece(x, span, group) for x in given), tokens, rank)  # type: ignore[misc]
        made.local.backward(torch.ones_like(made.local))  # type: ignore[attr-defined]

    return step


def whole(tokens: int) -> Callable[[], None]:
    shape = (1, HEADS, tokens, CHANNELS)
    given = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]

    def step() -> None:
        made = F.scaled_dot_product_attention(*given, is_causal=True)
        made.backward(torch.ones_like(made))

    return step


def timed(step: Callable[[], None]) -> tuple[float, set[str]]:
    """Milliseconds, and names of the attention kernels."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    words = ("flash", "fmha", "cudnn", "sdpa", "attention")
    kernels = {event.key for event in seen.key_averages() if any(word in event.key.lower() for word in words)}
    step()
    taken = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        taken.append(start.elapsed_time(end))
    return statistics.median(taken), kernels


def kind(kernels: set[str]) -> str:
    found = {"cudnn" if "cudnn" in k.lower() else "flash" if "flash" in k.lower() else "efficient" for k in kernels}
    return "+".join(sorted(found)) or "none"


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--tokens", type=numbers, default=[8192, 32768])
    parser.add_argument("--degrees", type=numbers, default=[2, 4])
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no GPU")
        return 4
    table = Table("tokens", "ranks", "way", "kernel", "ms of each rank", "slowest", "of even work")
    fine = True
    for tokens in options.tokens:
        alone, kernels = timed(whole(tokens))
        table.add_row(str(tokens), "1", "one device", kind(kernels), "", f"{alone:.2f}", "")
        for degree in options.degrees:
            for way in WAYS:
                rows: list[Any] = [timed(of_rank(way, tokens, degree, rank)) for rank in range(degree)]
                slowest, used = max(ms for ms, _ in rows), kind(set().union(*(kernels for _, kernels in rows)))
                ms = " ".join(f"{each:.2f}" for each, _ in rows)
                table.add_row("", str(degree), way, used, ms, f"{slowest:.2f}", f"{slowest / alone * degree:.2f}")
                if way == "zigzag":
                    fine &= used == kind(kernels) and slowest <= MORE * alone / degree
                print(tokens, degree, way, used, ms, flush=True)
    console = Console()
    console.width = max(console.width, 128)
    console.print(table)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
