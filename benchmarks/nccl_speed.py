"""How fast are meshfit's plans over NCCL, beside what one would write by hand with torch?

    python benchmarks/nccl_speed.py                                  # needs a GPU; one is enough
    python benchmarks/nccl_speed.py --only shard --turns 5           # one family: data, shard, tensor, pipeline
    python benchmarks/nccl_speed.py --backend gloo --small --turns 1 # does the script work? on CPU ranks

Two ranks on one GPU over real NCCL (``nccl_ranks.py``). A GPT of 12 layers and width 768, vocabulary 50304, bf16 with
weights in fp32, fused AdamW. Batches of 16 x 1024 tokens a rank; under pipeline parallelism, where ranks see the same
samples, 16 x 1024 in all; under tensor parallelism, whose traffic is slowest over sockets, 4 x 1024. In the families
data and shard the head is the embedding (124M parameters); in tensor and pipeline it has a weight of its own on both
sides, because torch's hand-written plans cannot tie them there.

    data       DDP; its model compiled; its model and loss compiled as one       data=2 compile=none, compile=whole
    shard      FSDP2 by block, bf16 weights and fp32 gradients on the wire,      shard=2 precision=bf16-compute
               with its own casts alone; its blocks compiled                     compile=none, compile=block
               FSDP2 within autocast; its blocks compiled                        shard=2 compile=none, compile=block
    tensor     parallelize_module by columns and rows, vocabulary and loss       tensor=2 sequence=whole, split,
               too; with sequence parallelism; that with blocks compiled         compile=block
    pipeline   Schedule1F1B over two PipelineStages, four microbatches;          pipeline=2 microbatches=4
               its blocks compiled                                               compile=none, compile=block

Arithmetic is compared with its equal: precision=bf16-compute and FSDP2's own casts compute all in bf16, autocast (all
other rows) leaves residuals and norms in fp32.

Every loop is built once and stays, and they take turns: a step to warm up, then some that are timed together. Shown
is the median over the turns of the slower rank's milliseconds a step, and the most memory of a rank from a loop's
start to the end of its first turn, without what the others hold. meshfit's loops are those of ``meshfit.fit``, which
report loss and gradient norm too; torch's batches lie on the GPU already.

Exits with 0 if all goals are met, 1 if not, 4 if there is no GPU: then nothing was run.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.models import GPT, GptShape, token_loss
from benchmarks.nccl_ranks import NOT_RUN, World, at_work, failure, gpu

WARM_UP, STEPS, TURNS = 2, 4, 3
ROW_SECONDS = 120.0
MICROBATCHES = 4


@dataclass(frozen=True)
class Size(GptShape):
    samples: int = 16


SMALL = Size(layers=4, width=48, heads=4, vocabulary=160, length=16, samples=8)


@dataclass(frozen=True, slots=True)
class Row:
    family: str
    name: str
    meshfit: str = ""
    """A plan, precision=bf16 unless it says another; empty: a loop of torch's own."""
    goals: tuple[tuple[str, float, float | None], ...] = ()
    """(peer, of its time, of its memory): at most so much."""


ROWS = (
    Row("data", "DDP"),
    Row("data", "DDP compiled"),
    Row("data", "DDP compiled with loss"),
    Row("data", "meshfit data compile=none", "data={n} compile=none", (("DDP", 1.0, 1.0),)),
    Row(
        "data",
        "meshfit data compile=whole",
        "data={n} compile=whole",
        (("DDP compiled", 0.95, 0.6), ("DDP compiled with loss", 1.0, None)),
    ),
    Row("shard", "FSDP2"),
    Row("shard", "FSDP2 compiled blocks"),
    Row("shard", "FSDP2 autocast"),
    Row("shard", "FSDP2 autocast compiled blocks"),
    Row(
        "shard",
        "meshfit shard bf16-compute compile=none",
        "shard={n} precision=bf16-compute compile=none",
        (("FSDP2", 0.98, 1.0),),
    ),
    Row(
        "shard",
        "meshfit shard bf16-compute compile=block",
        "shard={n} precision=bf16-compute compile=block",
        (("FSDP2 compiled blocks", 0.98, 1.0),),
    ),
    Row("shard", "meshfit shard compile=none", "shard={n} compile=none", (("FSDP2 autocast", 0.98, None),)),
    Row(
        "shard",
        "meshfit shard compile=block",
        "shard={n} compile=block",
        (("FSDP2 autocast compiled blocks", 0.98, None),),
    ),
    Row("tensor", "torch tensor"),
    Row("tensor", "torch tensor sequence"),
    Row("tensor", "torch tensor sequence compiled blocks"),
    Row(
        "tensor",
        "meshfit tensor sequence=whole",
        "tensor={n} sequence=whole compile=none",
        (("torch tensor", 1.0, None),),
    ),
    Row(
        "tensor",
        "meshfit tensor sequence=split",
        "tensor={n} sequence=split compile=none",
        (("torch tensor sequence", 1.0, None),),
    ),
    Row(
        "tensor",
        "meshfit tensor compile=block",
        "tensor={n} sequence=split compile=block",
        (("torch tensor sequence compiled blocks", 1.0, None),),
    ),
    Row("context", "meshfit context gather", "context={n} attention=gather compile=none"),
    Row("context", "meshfit context ulysses", "context={n} attention=ulysses compile=none"),
    Row("context", "meshfit context gather compile=block", "context={n} attention=gather compile=block"),
    Row("pipeline", "torch pipelining 1F1B"),
    Row("pipeline", "torch pipelining 1F1B compiled blocks"),
    Row(
        "pipeline",
        "meshfit pipeline compile=none",
        f"pipeline={{n}} microbatches={MICROBATCHES} compile=none",
        (("torch pipelining 1F1B", 1.0, None),),
    ),
    Row(
        "pipeline",
        "meshfit pipeline compile=block",
        f"pipeline={{n}} microbatches={MICROBATCHES} compile=block",
        (("torch pipelining 1F1B compiled blocks", 1.0, None),),
    ),
)


# In a rank


class Bench:
    """What every loop is built from."""

    def __init__(self, size: Size, family: str, device: torch.device):
        self.size, self.family, self.device = size, family, device
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

    def model(self) -> GPT:
        torch.manual_seed(0)
        return GPT(self.size, tied=self.family in ("data", "shard"))

    @property
    def samples(self) -> int:
        """Of a batch, over all ranks."""
        if self.family in ("data", "shard"):
            return self.size.samples * self.ranks
        return self.size.samples if self.family == "pipeline" else self.size.samples // 4

    def tokens(self) -> tuple[Tensor, Tensor]:
        """Four batches."""
        draw = torch.Generator().manual_seed(0)
        ids = torch.randint(self.size.vocabulary, (4 * self.samples, self.size.length + 1), generator=draw)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's, on the device, over and over."""
        own = slice(self.rank * self.size.samples, (self.rank + 1) * self.size.samples)
        own = own if self.family in ("data", "shard") else slice(None)
        chunks = zip(*(t.split(self.samples) for t in self.tokens()), strict=True)
        ready = [(x[own].to(self.device), y[own].to(self.device)) for x, y in chunks]
        while True:
            yield from ready

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        """DTensors in a group of their own: no fused kernel takes both kinds together."""
        kinds: dict[type, list[Tensor]] = {}
        for parameter in parameters:
            kinds.setdefault(type(parameter.data), []).append(parameter)
        return torch.optim.AdamW([{"params": some} for some in kinds.values()], lr=3e-4, fused=True)

    def bf16(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, dtype=torch.bfloat16)


Loop = Callable[[], Any]
"""One step; what it returns is the loss."""


def by_meshfit(bench: Bench, plan: str) -> Loop:
    """The steps of ``meshfit.fit``, which can wait for their turn between two of them."""
    from meshfit.drive import begin
    from meshfit.job import Job

    job = Job(
        model=bench.model(),
        data=bench.tokens(),
        loss=token_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4),
        batch_size=bench.samples,
        steps=100_000,
        shuffle=False,
        plan=plan.format(n=bench.ranks) + ("" if "precision=" in plan else " precision=bf16"),
    )
    training = begin(job.training(), lockstep=False)
    steps, unread = iter(training), deque()

    def step() -> Tensor | float:
        unread.append(next(steps))
        while len(unread) > 1 and unread[0].reading.ready:
            unread.popleft()
        return unread[-1]

    return step


def _simple(bench: Bench, forward: Callable[[Tensor, Tensor], Tensor], parameters: Any) -> Loop:
    optimizer, batches = bench.optimizer(parameters), bench.batches()

    def step() -> Tensor:
        x, y = next(batches)
        loss = forward(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def ddp(bench: Bench, compiled: str = "") -> Loop:
    from torch.nn.parallel import DistributedDataParallel

    devices = [bench.device] if bench.device.type == "cuda" else None
    model: Any = DistributedDataParallel(
        bench.model().to(bench.device), device_ids=devices, gradient_as_bucket_view=True
    )
    called = torch.compile(model) if compiled == "model" else model

    def forward(x: Tensor, y: Tensor) -> Tensor:
        with bench.bf16():
            return token_loss(called(x), y)

    return _simple(bench, torch.compile(forward) if compiled == "loss" else forward, model.parameters())


def fsdp2(bench: Bench, compiled: bool = False, autocast: bool = False) -> Loop:
    """``autocast``: as Accelerate runs it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(bench.device.type, (bench.ranks,))
    wire = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    policy = MixedPrecisionPolicy(**wire, cast_forward_inputs=not autocast)
    model = bench.model().to(bench.device)
    for block in model.blocks:
        if compiled:
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)

    def forward(x: Tensor, y: Tensor) -> Tensor:
        with bench.bf16() if autocast else nullcontext():
            return token_loss(model(x), y)

    return _simple(bench, forward, model.parameters())


def torch_tensor(bench: Bench, sequence: bool = False, compiled: bool = False) -> Loop:
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

    mesh = init_device_mesh(bench.device.type, (bench.ranks,))
    model = bench.model().to(bench.device)
    between = Shard(1) if sequence else Replicate()
    outer: dict[str, Any] = {
        "token": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "place": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    inner: dict[str, Any] = {
        "attention.qkv": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=between),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=between),
    }
    if sequence:
        whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        outer |= {"norm": SequenceParallel()}
        inner |= {"norm1": SequenceParallel(), "norm2": SequenceParallel(), "attention": whole, "mlp": whole}
    parallelize_module(model, mesh, outer)
    for block in model.blocks:
        parallelize_module(block, mesh, inner)
        if compiled:
            block.compile()
    optimizer, batches = bench.optimizer(model.parameters()), bench.batches()

    def step() -> Tensor:
        x, y = next(batches)
        with loss_parallel():
            with bench.bf16():
                loss = token_loss(model(x), y)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


class Stage(nn.Module):
    """The first or last half of a GPT."""

    def __init__(self, model: GPT, rank: int, ranks: int, device: torch.device):
        super().__init__()
        cut = [len(model.blocks) * r // ranks for r in range(ranks + 1)]
        self.blocks = model.blocks[cut[rank] : cut[rank + 1]]
        self.token, self.place = (model.token, model.place) if rank == 0 else (None, None)
        self.norm, self.head = (model.norm, model.head) if rank == ranks - 1 else (None, None)
        self.device_type = device.type

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(self.device_type, dtype=torch.bfloat16):
            if self.token is not None and self.place is not None:
                x = self.token(x) + self.place(torch.arange(x.shape[1], device=x.device)[None])
            for block in self.blocks:
                x = block(x)
            return x if self.norm is None or self.head is None else self.head(self.norm(x))


def torch_pipelining(bench: Bench, compiled: bool = False) -> Loop:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    module = Stage(bench.model(), bench.rank, bench.ranks, bench.device).to(bench.device)
    if compiled:
        for block in module.blocks:
            block.compile()
    stage = PipelineStage(module, bench.rank, bench.ranks, bench.device)

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        with bench.bf16():
            return token_loss(logits, targets)

    schedule = Schedule1F1B(stage, n_microbatches=MICROBATCHES, loss_fn=loss)
    optimizer, batches = bench.optimizer(module.parameters()), bench.batches()
    first, last = bench.rank == 0, bench.rank == bench.ranks - 1

    def step() -> Tensor | float:
        x, y = next(batches)
        losses: list[Tensor] = []
        if first:
            schedule.step(x, **({"target": y, "losses": losses} if last else {}))
        else:
            schedule.step(**({"target": y, "losses": losses} if last else {}))
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean().detach() if losses else 0.0

    return step


PEERS: dict[str, Callable[[Bench], Loop]] = {
    "DDP": ddp,
    "DDP compiled": lambda bench: ddp(bench, "model"),
    "DDP compiled with loss": lambda bench: ddp(bench, "loss"),
    "FSDP2": fsdp2,
    "FSDP2 compiled blocks": lambda bench: fsdp2(bench, compiled=True),
    "FSDP2 autocast": lambda bench: fsdp2(bench, autocast=True),
    "FSDP2 autocast compiled blocks": lambda bench: fsdp2(bench, compiled=True, autocast=True),
    "torch tensor": torch_tensor,
    "torch tensor sequence": lambda bench: torch_tensor(bench, sequence=True),
    "torch tensor sequence compiled blocks": lambda bench: torch_tensor(bench, sequence=True, compiled=True),
    "torch pipelining 1F1B": torch_pipelining,
    "torch pipelining 1F1B compiled blocks": lambda bench: torch_pipelining(bench, compiled=True),
}


def rank() -> None:
    loops: dict[str, Loop] = {}
    torch._dynamo.config.recompile_limit = 64  # all rows compile the same classes, some with other shapes
    torch._dynamo.config.automatic_dynamic_shapes = False
    with at_work() as (world, asked):

        def turn(said: dict[str, Any]) -> dict[str, Any]:
            row = next(row for row in ROWS if row.name == said["row"])
            size, new = SMALL if said["small"] else Size(), row.name not in loops
            cuda = world.device.type == "cuda"
            began, before = time.perf_counter(), 0
            if new:
                gc.collect()
                if cuda:
                    torch.cuda.synchronize()
                    torch.cuda.empty_cache()
                    before = torch.cuda.memory_allocated()
                bench = Bench(size, row.family, world.device)
                loops[row.name] = by_meshfit(bench, row.meshfit) if row.meshfit else PEERS[row.name](bench)
            loop, loss = loops[row.name], None
            for _ in range(WARM_UP if new else 1):
                loss = loop()
            settled = time.perf_counter() - began
            gc.collect()
            if cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            dist.barrier()
            start = time.perf_counter()
            for _ in range(said["steps"]):
                loss = loop()
            if cuda:
                torch.cuda.synchronize()
            took = (time.perf_counter() - start) / said["steps"]
            peak = (torch.cuda.max_memory_allocated() - before) / 2**30 if cuda and new else None
            value = float(loss.loss if hasattr(loss, "reading") else loss)  # type: ignore[union-attr, arg-type]
            return {"ms": 1e3 * took, "gib": peak, "loss": value, "begun": settled}

        asked(turn)


# In the caller


def measure(rows: list[Row], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """By row: ms of each turn, GiB, or what went wrong."""
    found: dict[str, dict[str, Any]] = {row.name: {"ms": []} for row in rows}
    world: World | None = None
    for turn in range(options.turns):
        for row in rows:
            if "error" in found[row.name]:
                continue
            if world is None:
                world = World(__file__, options.ranks, options.backend, fast=True)
                heard, ready = world.ready()
                if not ready:
                    raise SystemExit(failure(heard[0]))
            asked = {"row": row.name, "small": options.small, "steps": options.steps}
            heard, goes_on = world.run(asked, ROW_SECONDS)
            if "error" in heard[0]:
                found[row.name]["error"] = failure(heard[0])
                print(f"{row.name}: {found[row.name]['error']}", flush=True)
            else:
                one = found[row.name]
                one["ms"].append(max(said["ms"] for said in heard))
                one["loss"] = max(said["loss"] for said in heard)
                if heard[0]["gib"] is not None:
                    one.setdefault("gib", max(said["gib"] for said in heard))
                    one.setdefault("gib_ranks", [said["gib"] for said in heard])
                spent = f"{heard[0]['begun']:.0f} s to begin, " if not turn else ""
                print(
                    f"turn {turn + 1}  {row.name:<44} {spent}{one['ms'][-1]:.1f} ms  loss {one['loss']:.3f}", flush=True
                )
            if not goes_on:
                world.close()
                world = None
    if world is not None:
        world.close()
    return found


def shown(rows: list[Row], found: dict[str, dict[str, Any]]) -> tuple[list[str], bool]:
    """The table's lines, and whether all goals are met."""
    lines, good = [f"{'':<44} {'ms':>8} {'GiB':>6}"], True
    for row in rows:
        one = found[row.name]
        if not one["ms"]:
            lines.append(f"{row.name:<44} {'failed':>8}")
            good = good and not row.goals
            continue
        ms, gib = statistics.median(one["ms"]), one.get("gib")
        text = f"{row.name:<44} {ms:8.1f} {'' if gib is None else format(gib, '6.2f'):>6}"
        for peer, of_time, of_memory in row.goals:
            if peer not in found:  # it was not asked for
                continue
            if not found[peer]["ms"]:
                text, good = f"{text}   {peer} failed", False
                continue
            ratio = ms / statistics.median(found[peer]["ms"])
            met = ratio <= of_time
            text += f"   {ratio:.2f} of {peer}'s time (goal {of_time:.2f}"
            if gib is not None and "gib" in found[peer]:
                memory = gib / found[peer]["gib"]
                met = met and (of_memory is None or memory <= of_memory)
                text += f"), {memory:.2f} of its memory" + (f" (goal {of_memory:.2f}" if of_memory else "")
            text += f"{')' if not text.endswith('memory') else ''} {'ok' if met else 'NOT MET'}"
            good = good and met
        lines.append(text)
    return lines, good


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--backend", choices=["nccl", "gloo"], default="nccl")
    parser.add_argument("--small", action="store_true", help="a tiny model: to try the script")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--steps", type=int, default=STEPS, help="timed in each turn")
    parser.add_argument("--only", default="", help="families, or words in the name of a row; commas between")
    parser.add_argument("--skip", default="", help="words in the name of rows to leave out; commas between")
    parser.add_argument("--json", type=Path, help="write what was measured there")
    options = parser.parse_args()
    if options.rank:
        rank()
        return 0
    words = [word for word in options.only.split(",") if word]
    rows = [row for row in ROWS if not words or any(word == row.family or word in row.name for word in words)]
    rows = [row for row in rows if not any(word in row.name for word in options.skip.split(",") if word)]
    if options.backend == "nccl" and not gpu():
        print(f"NOT RUN: {len(rows)} rows need a GPU, and there is none here (--backend gloo --small: on CPU ranks)")
        return NOT_RUN
    found = measure(rows, options)
    lines, good = shown(rows, found)
    print(*lines, sep="\n")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
