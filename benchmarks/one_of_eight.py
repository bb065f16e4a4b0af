"""One rank of eight at real size, on one GPU: step time, how much of its communication is exposed, and memory.

    python benchmarks/one_of_eight.py                                        # needs a GPU; one is enough
    python benchmarks/one_of_eight.py --layers 8 --only "shard=8,FSDP2"      # a quarter of the layers, some rows
    python benchmarks/one_of_eight.py --device cpu --small                   # does the script work?

This process is rank 0 of 8 (of 64 for the last row): collectives take the time of their bytes over 400 GB/s, as inside
a host, and over 25 GB/s, as between hosts, on streams of their own (``delayed.py``). A model in the shape of Llama 3 8B
(32 layers, width 4096, 32 heads, 8 of them for keys and values, vocabulary 128256), bf16 with fp32 weights, AdamW, a
sequence of 8192 tokens a rank; under tensor parallelism one for all ranks, in the pipeline one a microbatch; 32768 with
context=8. Arithmetic is compared with its equal: beside precision=bf16-compute FSDP2 by block with its own casts (all
in bf16: residuals and norms too), and with 2 ranks of torch's tensor parallelism (sequence and loss parallel); beside
precision=bf16, which is autocast (residuals and norms in fp32) and that of all other rows, FSDP2 within autocast. All
of them with bf16 weights and fp32 gradients on the wire, and fp32 logits in the loss.

    free       ms a step if communication took no time
    exposed    how much longer it takes over that bandwidth, as a share of what the communication itself takes
    memory     GiB at the most, and that over what ``meshfit.plan_cost.cost`` foretells
    computing  ms that the planner foretells for what is computed on an H200, and that over ``free``

What the other ranks would send is not known here: losses mean nothing, and a pipeline's stage waits for no other.
Exits with 0 if all goals are met (at most torch's time and memory; cost within 4 %), 1 if not, 4 without a GPU.
"""

import argparse
import faulthandler
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.models import Llama, LlamaShape, token_loss
from benchmarks.nccl_ranks import NOT_RUN, gpu
from meshfit.plan import Plan

WARM_UP, STEPS = 2, 3
BANDWIDTHS = {"free": math.inf, "400 GB/s": 400e9, "25 GB/s": 25e9}
LATENCY = 10e-6
COST_LIMIT, TIME_LIMIT = 0.04, 0.10
DEVICE = "8xH200"
"""For which the planner says how long computing takes."""


SMALL = LlamaShape(layers=4, width=64, heads=8, key_heads=8, inner=160, vocabulary=256, length=32)


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    ranks: int = 8
    plan: str = ""
    """meshfit's, precision=bf16 unless it says another; empty: a loop of torch's own."""
    peers: tuple[str, ...] = ()
    longer: int = 1
    """Sequences are so many times as long."""


ROWS = (
    Row("FSDP2"),
    Row("FSDP2 with autocast"),
    Row("shard=8 precision=bf16-compute", plan="shard=8 precision=bf16-compute", peers=("FSDP2",)),
    Row("shard=8", plan="shard=8", peers=("FSDP2 with autocast",)),
    Row("FSDP2 x torch tensor"),
    Row(
        "shard=4 tensor=2 precision=bf16-compute",
        plan="shard=4 tensor=2 precision=bf16-compute",
        peers=("FSDP2 x torch tensor",),
    ),
    Row("tensor=8", plan="tensor=8"),
    Row("pipeline=8", plan="pipeline=8 microbatches=8"),
    Row("context=8 shard=8", ranks=64, plan="context=8 shard=8", longer=4),
)


# Loops


@dataclass
class Loop:
    step: Callable[[], Any]
    foretold: Callable[[], tuple[dict[str, int], float]] = lambda: ({}, 0.0)
    """Bytes by kind, and seconds of what is computed."""


def built(shape: LlamaShape, device: torch.device) -> Llama:
    torch.manual_seed(0)
    with device:  # whole, on the device: that it starts from parts is another matter
        return Llama(shape)


def by_meshfit(row: Row, shape: LlamaShape, device: torch.device) -> Loop:
    from meshfit.drive import begin, here
    from meshfit.job import Job
    from meshfit.loss.objective import LossDenominator
    from meshfit.run import denominators

    found_by = denominators.find_denominator

    def find_denominator(*args: Any, **kwargs: Any) -> LossDenominator:
        found_by(*args, **kwargs)  # for its time and memory: losses of ranks that are not there mean nothing
        return LossDenominator(kind="targets", unit=shape.length)

    denominators.find_denominator = find_denominator
    precision = "" if "precision=" in row.plan else "precision=bf16"
    plan, runs = Plan.parse(f"{row.plan} {precision} compile=none"), []
    samples = plan.shares * plan.microbatches
    ids = torch.randint(shape.vocabulary // 8, (4 * samples, shape.length + 1))  # whose embeddings rank 0 holds
    job = Job(
        model=lambda: built(shape, device),
        data=(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()),
        loss=token_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-5),
        batch_size=samples,
        steps=100_000,
        shuffle=False,
        plan=str(plan),
    )

    def tap(run: Any) -> None:
        # Gathered parts are all this rank's own: some gradients are zero that should not be, and sums too small.
        run.phases[0].guard = None
        run.coordination.met = lambda error: None
        run.schedule.loss.correction = lambda batch, count: 1.0  # which the last stage knows
        runs.append(run)

    here.watched = lambda *_: nullcontext()  # for ranks that are not there
    steps = iter(begin(job.training(), lockstep=False, tap=tap))
    return Loop(lambda: next(steps), lambda: foretold(plan, shape, runs[0]))


def foretold(plan: Plan, shape: LlamaShape, run: Any) -> tuple[dict[str, int], float]:
    """By ``cost``, and by the planner for a device of this name."""
    from meshfit.axes.pipeline.stages import FoundStages, pipeline_of
    from meshfit.axes.shard.units import traced
    from meshfit.loss.objective import Objective
    from meshfit.plan_cost import costed
    from meshfit.planner.cluster import Cluster
    from meshfit.planner.plan_work import plan_work
    from meshfit.planner.predict import FINE
    from meshfit.planner.software import MESHFIT
    from meshfit.planner.step import StepModel

    with torch.device("meta"):
        model = Llama(shape)
    ids = torch.zeros(1, shape.length, dtype=torch.long)
    objective, content = Objective(token_loss), (ids, ids)
    fine = {"share": FINE} if plan.tensor > 1 else {}
    trace = traced(model, objective, content, device="cuda", plan=plan, operations=True, **fine)
    if isinstance(trace, Exception):
        raise trace
    found = dict(run.placed.found)
    if plan.pipeline > 1:
        found["pipeline"] = FoundStages(None, 0.0, trace=trace, cut=pipeline_of(plan).cut_of(trace))  # type: ignore
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    how = {"place": {"pipeline": 0}, "ahead": True, "estimates": True}
    costing = costed(plan, trace, optimizer, found=found, **how)
    work = plan_work(plan, [costing] * plan.pipeline, samples=1, tokens=shape.length, model_flops=0)
    items = StepModel(Cluster.of(DEVICE), MESHFIT)(work).items
    seconds = (items["computing"] + items["update"]) * MESHFIT.slack
    return costing.total.held | {"passed": costing.total.passed}, seconds


def _simple(
    model: nn.Module, shape: LlamaShape, device: torch.device, loss_of: Callable[[Tensor, Tensor], Tensor]
) -> Loop:
    ids = torch.randint(shape.vocabulary, (1, shape.length + 1), device=device)
    x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step() -> None:
        loss_of(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Loop(step)


def fsdp2(row: Row, shape: LlamaShape, device: torch.device) -> Loop:
    from torch.distributed.device_mesh import init_device_mesh

    model = built(shape, device)
    _fully_shard(model, init_device_mesh(device.type, (row.ranks,)))
    return _simple(model, shape, device, lambda x, y: token_loss(model(x), y))


def fsdp2_autocast(row: Row, shape: LlamaShape, device: torch.device) -> Loop:
    """As Accelerate runs it."""
    from torch.distributed.device_mesh import init_device_mesh

    model = built(shape, device)
    _fully_shard(model, init_device_mesh(device.type, (row.ranks,)))

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return token_loss(model(x), y)

    return _simple(model, shape, device, loss_of)


def _fully_shard(model: Llama, mesh: Any) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def fsdp2_tensor(row: Row, shape: LlamaShape, device: torch.device) -> Loop:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        loss_parallel,
        parallelize_module,
    )

    mesh = init_device_mesh(device.type, (row.ranks // 2, 2), mesh_dim_names=("shard", "tensor"))
    model, rows = built(shape, device), Shard(1)
    parallelize_module(
        model,
        mesh["tensor"],
        {
            "token": RowwiseParallel(input_layouts=Replicate(), output_layouts=rows),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=rows, output_layouts=Shard(-1), use_local_output=False),
        },
    )
    three, whole = (rows, None, None), (Replicate(), None, None)
    for block in model.blocks:
        parallelize_module(
            block,
            mesh["tensor"],
            {
                "norm1": SequenceParallel(),
                "norm2": SequenceParallel(),
                "attention": PrepareModuleInput(input_layouts=three, desired_input_layouts=whole),
                "attention.q": ColwiseParallel(),
                "attention.k": ColwiseParallel(),
                "attention.v": ColwiseParallel(),
                "attention.out": RowwiseParallel(output_layouts=rows),
                "mlp": PrepareModuleInput(input_layouts=(rows,), desired_input_layouts=(Replicate(),)),
                "mlp.gate": ColwiseParallel(),
                "mlp.up": ColwiseParallel(),
                "mlp.down": RowwiseParallel(output_layouts=rows),
            },
        )
    _fully_shard(model, mesh["shard"])

    loop = _simple(model, shape, device, lambda x, y: token_loss(model(x), y))
    inner = loop.step

    def step() -> None:
        with loss_parallel():
            inner()

    return Loop(step)


PEERS = {"FSDP2": fsdp2, "FSDP2 with autocast": fsdp2_autocast, "FSDP2 x torch tensor": fsdp2_tensor}


# A row, in a process of its own


def show_kernels(name: str, step: Callable[[], Any]) -> None:
    """Where the device's time goes in a step, to the errors."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    kernels = [each for each in seen.key_averages() if each.self_device_time_total and each.device_type.name == "CUDA"]
    kernels.sort(key=lambda each: -each.self_device_time_total)
    total = sum(each.self_device_time_total for each in kernels)
    lines = [
        f"    {each.self_device_time_total / 1e3:8.2f} ms {each.count:5} x {each.key[:130]}" for each in kernels[:40]
    ]
    print(f"{name}: kernels take {total / 1e3:.1f} ms", *lines, sep="\n", file=sys.stderr, flush=True)


def measure(row: Row, shape: LlamaShape, device: torch.device, profile: bool = False) -> dict[str, Any]:
    from benchmarks.delayed import LINK, connect

    connect(row.ranks)
    shape = replace(shape, length=shape.length * row.longer)
    began, cuda = time.perf_counter(), device.type == "cuda"
    wait = torch.cuda.synchronize if cuda else lambda: None
    loop = by_meshfit(row, shape, device) if row.plan else PEERS[row.name](row, shape, device)
    for _ in range(WARM_UP):
        loop.step()
    wait()
    found: dict[str, Any] = {"begun": time.perf_counter() - began, "ms": {}}
    if cuda:
        found["start_gib"] = torch.cuda.max_memory_allocated() / 2**30
    most: dict[str, float] = {}
    LINK.latency = LATENCY
    for word, bandwidth in BANDWIDTHS.items():
        LINK.bandwidth, LINK.latency = bandwidth, 0.0 if math.isinf(bandwidth) else LATENCY
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        loop.step()
        wait()
        LINK.bytes = LINK.calls = 0
        times = []
        for _ in range(STEPS):
            start = time.perf_counter()
            loop.step()
            wait()
            times.append(time.perf_counter() - start)
        found["ms"][word] = 1e3 * statistics.median(times)
        found |= {"bytes": LINK.bytes / STEPS, "calls": LINK.calls / STEPS}
        if cuda:
            most[word] = torch.cuda.max_memory_allocated() / 2**30
    found["gib"], found["gibs"] = max(most.values(), default=None), most
    if profile:
        LINK.bandwidth, LINK.latency = math.inf, 0.0
        show_kernels(row.name, loop.step)
    if not cuda:
        return found
    try:
        sizes, seconds = loop.foretold()
        found["foretold"] = {kind: size / 2**30 for kind, size in sizes.items()}
        found["foretold_ms"] = 1e3 * seconds
    except Exception as error:  # what was measured still counts
        found["foretold_error"] = f"{type(error).__name__}: {error}"
    return found


def shown(row: Row, found: dict[str, Any], peers: dict[str, dict[str, Any]]) -> tuple[str, bool]:
    ms, free = found["ms"], found["ms"]["free"]
    takes = {word: 1e3 * (found["bytes"] / bw + found["calls"] * LATENCY) for word, bw in BANDWIDTHS.items()}
    text, good = f"{row.name:<39} free {free:7.0f} ms", True
    for word in list(BANDWIDTHS)[1:]:
        share = (ms[word] - free) / takes[word] if takes[word] else 0.0
        text += f"   {word} {ms[word]:7.0f} ms, exposed {100 * share:3.0f} % of {takes[word]:.0f}"
    if found["gib"] is not None:
        text += f"   {found['gib']:6.2f} GiB"
        if found["gib"] > 1.02 * min(found["gibs"].values()):
            text += " (" + ", ".join(f"{word} {gib:.2f}" for word, gib in found["gibs"].items()) + ")"
    if found.get("foretold") and found["gib"] is not None:
        off = found["gib"] / sum(found["foretold"].values()) - 1
        kinds = ", ".join(f"{kind} {size:.2f}" for kind, size in found["foretold"].items())
        text += f"\n    {100 * off:+.1f} % of cost(): {kinds}"
        good = abs(off) <= COST_LIMIT
        text += "" if good else "  NOT WITHIN 4 %"
        off = found["foretold_ms"] / free - 1
        text += f"\n    computing foretold: {found['foretold_ms']:.0f} ms, {100 * off:+.0f} %"
        text += "" if abs(off) <= TIME_LIMIT else "  NOT WITHIN 10 %"
    if "foretold_error" in found:
        text, good = f"{text}\n    cost(): {found['foretold_error']}", False
    for name, peer in peers.items():
        ratios = {word: ms[word] / peer["ms"][word] for word in ms}
        text += f"\n    of {name}'s: " + ", ".join(f"{word} {ratio:.2f}" for word, ratio in ratios.items())
        met = max(ratios.values()) <= 1.0
        if found["gib"] is not None:
            text += f", memory {found['gib'] / peer['gib']:.2f}"
            met = met and found["gib"] <= peer["gib"]
        text += "  ok" if met else "  NOT MET"
        good = good and met
    began = f"began in {found['begun']:.0f} s" + (f", {found['start_gib']:.2f} GiB" if "start_gib" in found else "")
    return f"{text}\n    {began}; {found['calls']:.0f} collectives a step", good


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--row", default="", help=argparse.SUPPRESS)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="a tiny model: to try the script")
    parser.add_argument("--layers", type=int, default=0, help="fewer than 32")
    parser.add_argument("--length", type=int, default=0, help="of a sequence, instead of 8192")
    parser.add_argument("--only", default="", help="names of rows, commas between")
    parser.add_argument("--seconds", type=float, default=120.0, help="a row that takes longer is cut")
    parser.add_argument("--profile", action="store_true", help="show where the device's time goes, too")
    parser.add_argument("--json", type=Path, help="write what was measured there")
    options = parser.parse_args()
    shape = SMALL if options.small else LlamaShape()
    shape = replace(shape, layers=options.layers or shape.layers, length=options.length or shape.length)
    if options.row:
        row = next(row for row in ROWS if row.name == options.row)
        sys.stdin.readline()  # until the one before is done
        faulthandler.dump_traceback_later(0.8 * options.seconds)  # where it stands when it is cut
        print(json.dumps(measure(row, shape, torch.device(options.device), options.profile)), flush=True)
        os._exit(0)  # there is nobody to put the model together again with
    names = [name for name in options.only.split(",") if name]
    rows = [row for row in ROWS if not names or row.name in names]
    if options.device == "cuda" and not gpu():
        print(f"NOT RUN: {len(rows)} rows need a GPU, and there is none here (--device cpu --small: on the CPU)")
        return NOT_RUN
    print(f"Llama 3 8B's shape, {shape.layers} of its 32 layers, sequences of {shape.length}", flush=True)
    results, good, processes = {}, True, [_started(row, options) for row in rows[:1]]
    for i, row in enumerate(rows):
        processes += [_started(each, options) for each in rows[i + 1 : i + 2]]  # it loads torch meanwhile
        try:
            said, _ = processes[i].communicate("go\n", timeout=options.seconds)
            results[row.name] = json.loads(said.splitlines()[-1])
        except (subprocess.TimeoutExpired, IndexError, json.JSONDecodeError) as error:
            processes[i].kill()
            print(f"{row.name:<39} FAILED: {type(error).__name__}", flush=True)
            good = False
            continue
        text, fine = shown(row, results[row.name], {name: results[name] for name in row.peers if name in results})
        print(text, flush=True)
        good = good and fine
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    return 0 if good else 1


def _started(row: Row, options: argparse.Namespace) -> "subprocess.Popen[str]":
    asked = ["--row", row.name, "--device", options.device, "--layers", str(options.layers)]
    asked += ["--length", str(options.length), "--seconds", str(options.seconds)]
    asked += ["--small"] * options.small + ["--profile"] * options.profile
    return subprocess.Popen(
        [sys.executable, __file__, *asked], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


if __name__ == "__main__":
    sys.exit(main())
