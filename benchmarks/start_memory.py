"""Host memory of every rank at the start and at the end of a training under torchrun, of a model given as a function.

    python benchmarks/start_memory.py                              # 0.5 billion parameters, shard=4 and tensor=4
    python benchmarks/start_memory.py --layers 32 --width 4096     # Llama-8B's shape
    python benchmarks/start_memory.py --as-object                  # the model itself, for comparison

Peaks are the largest resident memory (VmHWM) beyond that of a process that has trained a small model before: until the
weights are in place, and from the last step until the training is over. ``share`` is what a rank holds of the weights;
``unit`` the largest block, or the embedding.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GIB = 2**30
VOCABULARY = 32000
SLACK = 0.1
"""GiB that may be the allocator's: what it keeps, and has kept from the model before."""


class Block(nn.Module):
    def __init__(self, width: int, heads: int, groups: int, inner: int):
        super().__init__()
        self.heads, self.groups = heads, groups
        self.before, self.after = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, width // heads * groups, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        batch, length, _ = x.shape
        q = self.q(y).view(batch, length, self.heads, -1).transpose(1, 2)
        k, v = (f(y).view(batch, length, self.groups, -1).transpose(1, 2) for f in (self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(batch, length, -1))
        y = self.after(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, width: int, layers: int):
        super().__init__()
        heads = width // 128
        self.embed = nn.Embedding(VOCABULARY, width)
        blocks = [Block(width, heads, max(1, heads // 4), width * 7 // 2) for _ in range(layers)]
        self.layers = nn.ModuleList(blocks)
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        for p in self.parameters():  # a second time, as transformers does
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)).flatten(0, 1)


def resident(word: str) -> int:
    """VmRSS or VmHWM, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(word))
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def rank(width: int, layers: int, plan: str, as_object: bool, one_gpu: bool) -> None:
    """One rank, under torchrun: prints what it saw."""
    if one_gpu:
        from benchmarks.nccl_ranks import RIG

        os.environ |= RIG | {"NCCL_HOSTID": f"host{os.environ['RANK']}"}
    import meshfit
    from meshfit.axes import place
    from meshfit.drive import begin

    build = lambda: Llama(width, layers)
    with torch.device("meta"):
        shape = build()
    weights = sum(p.nbytes for p in shape.parameters())
    units = [*shape.layers, shape.embed, shape.head]
    ids = torch.randint(VOCABULARY, (8, 17), generator=torch.Generator().manual_seed(0))
    asked: dict[str, Any] = {
        "loss": lambda out, targets: F.cross_entropy(out, targets.flatten()),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.01, foreach=False),
        "steps": 2,
        "batch_size": 4,
        "plan": plan,
        "devices": "auto" if one_gpu else "cpu",
    }
    data = ids[:, :-1], ids[:, 1:]
    meshfit.fit(lambda: Llama(512, 2), data, progress=False, **asked)  # imports, connections, CUDA's own memory
    base = resident("VmRSS")
    job = meshfit.Job(build() if as_object else build, data, **asked).training()
    forget_peak()
    seen: dict[str, Any] = {}

    def in_place(*_: Any) -> None:
        seen["start"] = resident("VmHWM") - base
        if one_gpu:
            seen["gpu_start"] = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()

    last = "fill" if not as_object else "look_away_from"  # what ``place`` calls when weights are where they belong
    before = getattr(place, last)
    setattr(place, last, lambda *given: (before(*given), in_place()))
    training = begin(job, lockstep=False)
    with training:
        for step in training:
            loss = step.loss
            del step
            seen["trained"] = resident("VmHWM") - base
            seen["held"] = resident("VmRSS") - base
            forget_peak()
    seen |= {"end": resident("VmHWM") - base, "left": resident("VmRSS") - base, "loss": loss}
    if one_gpu:
        seen |= {"gpu_left": torch.cuda.memory_allocated(), "gpu_trained": torch.cuda.max_memory_allocated()}
    seen |= {"weights": weights, "unit": max(sum(p.nbytes for p in unit.parameters()) for unit in units)}
    print("SEEN " + json.dumps(seen | {"rank": int(os.environ["RANK"])}), flush=True)


def measured(arguments: argparse.Namespace, plan: str) -> list[dict[str, Any]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    size = arguments.ranks
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size), "--master-port", str(port)]
    command += [__file__, "--rank", "--plan", plan, "--width", str(arguments.width), "--layers", str(arguments.layers)]
    command += ["--as-object"] * arguments.as_object + ["--one-gpu"] * arguments.one_gpu
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    found = [json.JSONDecoder().raw_decode(said)[0] for said in done.stdout.split("SEEN ")[1:]]  # ranks share a line
    if len(found) < size:
        sys.exit(done.stderr[-4000:])
    return sorted(found, key=lambda each: each["rank"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1536)
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--plan", action="append", help="default: shard and tensor over all ranks")
    parser.add_argument("--as-object", action="store_true")
    parser.add_argument("--one-gpu", action="store_true", help="ranks share one GPU, as in benchmarks/nccl_ranks.py")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        rank(arguments.width, arguments.layers, arguments.plan[0], arguments.as_object, arguments.one_gpu)
        return
    for plan in arguments.plan or [f"shard={arguments.ranks}", f"tensor={arguments.ranks}"]:
        found = measured(arguments, plan)
        weights, unit = found[0]["weights"] / GIB, found[0]["unit"] / GIB
        share = weights / arguments.ranks
        print(f"{plan}: {weights:.2f} GiB of weights; share {share:.2f}, unit {unit:.2f}, both {share + unit:.2f} GiB")
        for each in found:
            start, end, left = (each[key] / GIB for key in ("start", "end", "left"))
            more = end - each["held"] / GIB
            fits = "within" if start <= share + unit + SLACK and more <= unit + SLACK else "above"
            print(
                f"  rank {each['rank']}   start {start:.2f}   a step {each['trained'] / GIB:.2f}   held after it"
                f" {each['held'] / GIB:.2f}   end {end:.2f}   left {left:.2f} GiB   {fits}"
            )
            if arguments.one_gpu:
                start, step, left = (each[key] / GIB for key in ("gpu_start", "gpu_trained", "gpu_left"))
                print(f"    on the GPU: start {start:.2f}   a step {step:.2f}   left {left:.2f} GiB")


if __name__ == "__main__":
    main()
