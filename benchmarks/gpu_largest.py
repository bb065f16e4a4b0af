"""The largest GPT that trains on one GPU: plain torch, torch's own degree to save memory, and meshfit's.

    python benchmarks/gpu_largest.py
    python benchmarks/gpu_largest.py --degree "torch;offload=optimizer recompute=full" --layers 20,24

A GPT of width 5120 (0.315 billion parameters a layer), sequences of 2,048 tokens, one sequence a step, AdamW with fp32
weights and states, bf16 arithmetic. For every way the number of layers goes up by four until three steps no longer
fit, each number in a process of its own; then what fitted most is printed, with the time of a step, the peak on the
device and the peak of host memory.
"""

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.models import GPT, GptShape, token_loss

WIDTH, HEAD, LENGTH, VOCABULARY, STEPS = 5120, 128, 2048, 50304, 3
WAYS = {
    "torch": 20,
    "torch, checkpointed": 24,
    "FSDP2, checkpointed, offloaded": 16,
    "recompute=full": 24,
    "recompute=full offload=parameters": 16,
    "recompute=full offload=optimizer": 36,
}
"""What is tried, and the number of layers to begin with."""


def gpt(layers: int, *, checkpointed: bool = False) -> GPT:
    shape = GptShape(layers=layers, width=WIDTH, heads=WIDTH // HEAD, vocabulary=VOCABULARY, length=LENGTH)
    return GPT(shape, tied=False, checkpointed=checkpointed)


def data() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCABULARY, (STEPS, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4)


def by_torch(layers: int, *, checkpointed: bool, offloaded: bool) -> list[float]:
    if offloaded:
        model = _fsdp(gpt(layers, checkpointed=True))
    else:
        with torch.device("cuda"):
            model = gpt(layers, checkpointed=checkpointed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    seconds = []
    for tokens, targets in zip(*(t.cuda().split(1) for t in data()), strict=True):
        started = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            loss = token_loss(model(tokens), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        assert math.isfinite(loss.item())
        seconds.append(time.perf_counter() - started)
    return seconds


def _fsdp(model: GPT) -> nn.Module:
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy, offload_policy=CPUOffloadPolicy())
    fully_shard(model, mp_policy=policy, offload_policy=CPUOffloadPolicy())
    return model


def by_meshfit(layers: int, plan: str) -> list[float]:
    import meshfit

    host = "offload=parameters" in plan

    def build() -> GPT:
        with torch.device("cpu" if host else "cuda"):
            return gpt(layers)

    seconds, started = [], time.perf_counter()
    for step in meshfit.steps(
        build,
        data(),
        loss=token_loss,
        optimizer=adamw,
        batch_size=1,
        steps=STEPS,
        plan=f"{plan} precision=bf16 compile=none",
    ):
        assert math.isfinite(step.loss)
        seconds.append(time.perf_counter() - started)
        started = time.perf_counter()
    return seconds


def tried(way: str, layers: int) -> dict[str, float]:
    """One number of layers, in this process."""
    if way.startswith(("torch", "FSDP2")):
        seconds = by_torch(layers, checkpointed="checkpointed" in way, offloaded="offloaded" in way)
    else:
        seconds = by_meshfit(layers, way)
    return {
        "seconds": min(seconds[1:]),
        "device": torch.cuda.max_memory_allocated() / 2**30,
        "host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def billions(layers: int) -> float:
    return (12 * WIDTH * WIDTH * layers + 2 * VOCABULARY * WIDTH) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description="The largest GPT that trains on one GPU.")
    parser.add_argument("--degree", default=";".join(WAYS))
    parser.add_argument("--layers", default="", help="numbers of layers to try, instead of going up by four")
    parser.add_argument("--timeout", type=float, default=240, help="seconds for one number of layers")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print("RESULT" + json.dumps(tried(given.one[0], int(given.one[1]))))
        return
    for way in given.degree.split(";"):
        start = WAYS.get(way, 16)
        ladder = [int(n) for n in given.layers.split(",")] if given.layers else range(start, start + 40, 4)
        best = "nothing fitted"
        for layers in ladder:
            command = [sys.executable, str(Path(__file__)), "--one", way, str(layers)]
            try:
                ran = subprocess.run(command, capture_output=True, text=True, timeout=given.timeout)
            except subprocess.TimeoutExpired:
                print(f"    {way}: {layers} layers took longer than {given.timeout:.0f} s", flush=True)
                break
            if ran.returncode or "RESULT" not in ran.stdout:
                why = (ran.stderr.strip().splitlines() or [f"ended by signal {-ran.returncode}"])[-1]
                print(
                    f"    {way}: {layers} layers ({billions(layers):.1f} billion) do not fit: {why[:160]}", flush=True
                )
                break
            facts = json.loads(ran.stdout.rpartition("RESULT")[2])
            best = (
                f"{layers} layers, {billions(layers):5.2f} billion parameters, {facts['seconds']:6.2f} s a step, "
                + (f"{facts['device']:.0f} GiB on the device, {facts['host']:.0f} GiB on the host at most")
            )
            print(f"    {way}: {best}", flush=True)
        print(f"{way:34} {best}", flush=True)


if __name__ == "__main__":
    main()
