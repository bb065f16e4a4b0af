"""Does a sharded model train like one device on CUDA?

    python benchmarks/gpu_shard.py            # all three parts
    python benchmarks/gpu_shard.py --models gpt2,llama --parts two

    one    one process: recomputation, offload, precision and compiled blocks against plain training
    two    two ranks that share the GPU, over gloo (NCCL refuses that): zero=1, 2, 3 and what goes with them
    nccl   one rank with an NCCL group of its own: the same gathers and scatters as between GPUs, on streams

Each trains the models of the zoo for 20 AdamW steps and compares with a plain loop on the same GPU: losses, and
weights as one vector. Models whose library is not installed are left out.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

import meshfit
from benchmarks.zoo import CASES, Case, batches, mean_loss, take
from meshfit.axes.shard.axis import Shard
from meshfit.axes.shard.units import traced, units
from meshfit.data import tree
from meshfit.exchange.protocol import StepScalars
from meshfit.exchange.scatter import Scatter
from meshfit.exchange.update import Update
from meshfit.loss.objective import Objective

SAMPLES, BATCH, STEPS, LEARNING_RATE = 30, 8, 20, 1e-3
LOSS_LIMIT, WEIGHT_LIMIT = 1e-5, 1e-4
ONE = (
    "recompute=full",
    "recompute=selective",
    "offload=optimizer",
    "offload=parameters",
    "offload=parameters recompute=full",
)
TWO = (
    "data=2",
    "shard=2 zero=1",
    "shard=2 zero=2",
    "shard=2",
    "shard=2 zero=1 microbatches=2",
    "shard=2 recompute=full",
    "shard=2 offload=optimizer",
    "shard=2 offload=parameters",
)


def alone(case: Case) -> tuple[list[float], dict[str, Tensor]]:
    """A plain loop on the GPU."""
    model, data, losses = case.build().train().cuda(), tree.to_device(case.data(SAMPLES), torch.device("cuda")), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for _, index in zip(range(STEPS), batches(SAMPLES, BATCH), strict=False):
        loss = mean_loss(case, model, take(data, index.cuda()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.detach().cpu() for name, value in model.state_dict().items()}


def under(case: Case, plan: str) -> tuple[list[float], dict[str, Tensor]]:
    result = meshfit.fit(
        case.build(),
        case.data(SAMPLES),
        loss=case.loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=LEARNING_RATE),
        batch_size=BATCH,
        steps=STEPS,
        shuffle=False,
        plan=plan,
        progress=False,
    )
    return [step.loss for step in result.history], result.model.state_dict()


def over_nccl(case: Case, zero: int) -> tuple[list[float], dict[str, Tensor]]:
    """The engine by hand, in a group of one."""
    device, group = torch.device("cuda", 0), dist.group.WORLD
    model, data = case.build().train(), tree.to_device(case.data(SAMPLES), torch.device("cuda", 0))
    objective = Objective(case.loss)
    trace = traced(model, objective, take(case.data(SAMPLES), torch.arange(4)))
    assert not isinstance(trace, Exception), trace
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    names = tuple(name for name, _ in model.named_parameters())
    shards = Shard(degree=1, zero=zero, units=units(trace, names)).apply(model, group, device)
    exchange = Scatter(shards, world=group, copies=None, accumulate=False)
    update, losses = Update(optimizer), []
    for _, index in zip(range(STEPS), batches(SAMPLES, BATCH), strict=False):
        with shards.inside():
            loss = mean_loss(case, model, take(data, index.cuda()))
        exchange.arm(StepScalars(loss.detach(), 1.0))
        loss.backward()
        scalars = exchange.finish()
        update(exchange.gradients, scalars.loss, 1.0, exchange.norm)
        exchange.clear()
        losses.append(loss.item())
    shards.undo()
    return losses, model.state_dict()


def compare(what: str, case: Case, want: tuple[list[float], dict[str, Tensor]], run: Any) -> bool:
    """Print one line; whether it is within the limits."""
    first = not dist.is_initialized() or dist.get_rank() == 0
    try:
        losses, weights = run()
    except meshfit.MeshfitError as error:
        if first:
            print(f"{case.name:16} {what:32} refused: {error.headline}", flush=True)
        return True
    loss = max(abs(a - b) / abs(b) for a, b in zip(losses, want[0], strict=True))
    kept = {name: value.double() for name, value in want[1].items() if value.is_floating_point()}
    apart = sum((weights[name].cpu().double() - value).square().sum() for name, value in kept.items()) ** 0.5
    weight = float(apart / sum(value.square().sum() for value in kept.values()) ** 0.5)
    good = loss <= LOSS_LIMIT and weight <= WEIGHT_LIMIT
    if first:
        print(
            f"{case.name:16} {what:32} loss {loss:.1e}  weights {weight:.1e}  {'ok' if good else 'TOO FAR'}", flush=True
        )
    return good


def part(name: str, models: list[str]) -> int:
    """One of the three parts, in this process; how many runs were beyond the limits."""
    if name == "two":
        dist.init_process_group("gloo")
    elif name == "nccl":
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    bad = count = 0
    for case in CASES:
        if models and case.name not in models:
            continue
        try:
            case.build()
        except ImportError as error:
            print(f"{case.name:16} left out: {error}")
            continue
        try:
            want = alone(case)
        except RuntimeError as error:  # a loss that holds tensors of its own, on the CPU
            print(f"{case.name:16} left out: {str(error).splitlines()[0]}")
            continue
        runs: dict[str, Any] = {}
        if name == "nccl":
            runs = {f"nccl zero={zero}": lambda case=case, zero=zero: over_nccl(case, zero) for zero in (1, 2, 3)}
        else:
            plans = ONE if name == "one" else TWO
            if any("BatchNorm" in type(module).__name__ for module in case.build().modules()):
                plans = tuple(plan for plan in plans if "microbatches" not in plan)  # it is over each microbatch
            runs = {plan: lambda case=case, plan=plan: under(case, plan) for plan in plans}
        for what, run in runs.items():
            count += 1
            bad += not compare(what, case, want, run)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"{name}: {count - bad} of {count} within {LOSS_LIMIT} in loss and {WEIGHT_LIMIT} in weights", flush=True)
    return bad


def main() -> None:
    parser = argparse.ArgumentParser(description="Parity of sharding on one GPU.")
    parser.add_argument("--parts", default="one,two,nccl")
    parser.add_argument("--models", default="")
    parser.add_argument("--here", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.here:
        sys.exit(min(1, part(given.here, [name for name in given.models.split(",") if name])))
    bad = 0
    for name in given.parts.split(","):
        launcher = [sys.executable]
        if name == "two":
            launcher += ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29511"]
        command = [*launcher, __file__, "--here", name, "--models", given.models]
        bad += subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "4"}).returncode != 0
    sys.exit(min(1, bad))


if __name__ == "__main__":
    main()
