"""How much memory logits take, and what is left of it with ``recompute=loss`` and ``offload=activations``.

    python benchmarks/head_loss.py            # one GPU: 4 sequences of 8,192 tokens, with and without the chunked loss
    python benchmarks/head_loss.py --all      # more plans: with activations offloaded, without recomputed blocks
    python benchmarks/head_loss.py --tiny     # on a CPU, with a 32nd of width, classes and tokens
    python benchmarks/head_loss.py --foretell # what meshfit.plan_cost says of the first, without a GPU

A GPT of the 1.3B shape (24 layers of width 2,048) whose head is its embedding of 131,072 entries. Each plan trains in a
process of its own, in bf16 arithmetic over fp32 weights with AdamW. Printed is the peak less weights, gradients and
optimizer state, as the plan's cost foretells it, and as it is: on a GPU by torch's allocator, on a CPU by following
every storage; then the time of a step, the loss of the last, and what the plan took with starting. Exits with 1 if
``recompute=full+loss`` takes more than a fifth of ``recompute=full``, or one of them fails.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import meshfit
from benchmarks.models import GPT, GptShape, token_loss
from meshfit.anatomy.record import TraceError
from meshfit.axes.offload import activations as saved
from meshfit.axes.offload import axis
from meshfit.axes.shard.units import traced
from meshfit.loss.objective import Objective
from meshfit.plan import Plan
from meshfit.plan_cost import cost

PAIR = ("recompute=full", "recompute=full+loss")
MORE = (
    "recompute=full offload=activations",
    "recompute=full+loss offload=activations",
    "recompute=loss",
    "recompute=loss offload=activations",
)
GOAL = 1 / 5
STEPS = 3


@dataclass(frozen=True)
class Size(GptShape):
    layers: int = 24
    width: int = 2048
    heads: int = 16
    vocabulary: int = 131_072
    length: int = 8192
    sequences: int = 4


TINY = Size(layers=24, width=64, heads=2, vocabulary=4096, length=256, sequences=4)
"""A 32nd of width, classes and length: each tensor is a 1,024th of its own."""


TINY_WINDOW = 2**18
"""Bytes of activations on their way, where all are few."""


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


class PeakBytes(TorchDispatchMode):
    """The most that was alive at one time of what operations made, and is not of the host's copies."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        for tensor in _tensors(made):
            storage = tensor.untyped_storage()
            if storage._cdata not in given and storage._cdata not in self._alive and not tensor.is_meta:
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                self._now += storage.nbytes()
        if self._now > self.peak:  # of what is known, something may be gone
            for key in [key for key, (storage, _) in self._alive.items() if storage.expired()]:
                self._now -= self._alive.pop(key)[1]
            self.peak = max(self.peak, self._now)
        return made


def _tensors(tree: Any) -> list[Tensor]:
    found = torch.utils._pytree.tree_leaves(tree)
    return [leaf for leaf in found if isinstance(leaf, Tensor) and leaf.layout is torch.strided]


def measured(plan: str, size: Size, device: str) -> dict[str, float]:
    """One plan, in this process."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(size.vocabulary, (size.sequences * STEPS, size.length + 1), generator=generator)
    torch.manual_seed(0)
    with torch.device(device):
        model = GPT(size)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    peak: Callable[[], int] = torch.cuda.max_memory_allocated
    seconds, watch, loss = [], None, math.nan
    if device == "cpu":
        watch = PeakBytes()
        watch.__enter__()
    started = time.perf_counter()
    for step in meshfit.steps(
        model,
        (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()),
        loss=token_loss,
        optimizer=adamw,
        batch_size=size.sequences,
        steps=STEPS,
        shuffle=False,
        devices=1 if device == "cuda" else "cpu:1",
        plan=f"{plan} precision=bf16 compile=none",
    ):
        loss = step.loss
        seconds.append(time.perf_counter() - started)
        started = time.perf_counter()
        if len(seconds) == 1 and device == "cuda":
            torch.cuda.reset_peak_memory_stats()
    held = 4 * weights if watch is None else 3 * weights  # of which a CPU has seen the weights made before
    most = peak() if watch is None else watch.peak
    return {"beside": most - held, "seconds": min(seconds[1:]), "loss": loss}


def foretold(plan: str, size: Size, device: str) -> float:
    """Bytes, by the trace of a step on meta tensors."""
    asked = Plan.parse(f"{plan} precision=bf16")
    with torch.device("meta"):
        model, tokens = GPT(size), torch.zeros(size.sequences, size.length, dtype=torch.long)
    trace = traced(model, Objective(loss=token_loss), (tokens, tokens), device=device, plan=asked)
    assert not isinstance(trace, TraceError)
    found = cost(asked, trace, adamw(model.parameters()))
    return found.most - sum(found.held[kind] for kind in ("weights", "gradients", "optimizer"))


def main() -> int:
    parser = argparse.ArgumentParser(description="Memory of logits, and without them.")
    parser.add_argument("--tiny", action="store_true", help="a small model, on a CPU")
    parser.add_argument("--foretell", action="store_true", help="run nothing")
    parser.add_argument("--all", action="store_true", help="other plans beside the two that are compared")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    size, device = (TINY, "cpu") if given.tiny else (Size(), "cuda")
    if given.tiny:
        saved.WINDOW = axis.WINDOW = TINY_WINDOW
    if given.one:
        print("RESULT" + json.dumps(measured(given.one, size, device)))
        return 0
    logits = size.sequences * size.length * size.vocabulary * 4
    print(f"logits in fp32: {logits / 2**20:,.0f} MiB; peak less weights, gradients and optimizer state:", flush=True)
    found = {plan: compared(plan, size, device, given) for plan in PAIR}
    if given.foretell:
        share = found[PAIR[1]]["foretold"] / found[PAIR[0]]["foretold"]
    else:
        share = found[PAIR[1]].get("beside", math.nan) / found[PAIR[0]].get("beside", math.nan)
    print(f"{PAIR[1]} over {PAIR[0]}: {share:.3f}, goal: at most {GOAL}", flush=True)
    for plan in MORE if given.all else ():
        compared(plan, size, device, given)
    return int(not share <= GOAL)


def compared(plan: str, size: Size, device: str, given: argparse.Namespace) -> dict[str, float]:
    """What is foretold of a plan, and what a process of its own measured; printed."""
    facts = {"foretold": foretold(plan, size, device)}
    print(f"{plan:44} foretold {facts['foretold'] / 2**20:9,.1f} MiB", end="\n" if given.foretell else "", flush=True)
    if given.foretell:
        return facts
    started = time.perf_counter()
    command = [sys.executable, str(Path(__file__)), "--one", plan, *(["--tiny"] if given.tiny else [])]
    ran = subprocess.run(command, capture_output=True, text=True)
    took = time.perf_counter() - started
    if ran.returncode or "RESULT" not in ran.stdout:
        print(f"  failed after {took:.0f} s:\n{ran.stderr[-1500:]}", flush=True)
        return facts
    facts |= json.loads(ran.stdout.rpartition("RESULT")[2])
    said = f"  measured {facts['beside'] / 2**20:9,.1f}  {facts['seconds']:6.2f} s  loss {facts['loss']:.5f}"
    print(f"{said}  in all {took:.0f} s", flush=True)
    return facts


if __name__ == "__main__":
    sys.exit(main())
