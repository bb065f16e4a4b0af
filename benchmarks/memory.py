"""Does a rank hold the bytes that the plan's cost foretells?

    python benchmarks/memory.py
    python benchmarks/memory.py --models gpt2,resnet10 --plans "data=2;shard=2"

Trains each model for three steps in CPU ranks under each plan, and counts in every rank the memory behind

    weights       the parameters, at rest
    gradients     the summed ones, and whole sums over microbatches at the most
    optimizer     the tensors of its state; under offload at the most, while a step runs
    activations   what a forward has made and not given back when it ends, gathered weights aside
    gathered      weights gathered at one time, at the most

each storage once, whoever shares it. Foretold is ``meshfit.plan_cost.cost``, from a trace on meta tensors. On CPU
ranks host memory is the same memory, so what a plan would put there is told by what it is for; state under
offload=optimizer is really moved, as it is on a GPU.

The table shows the rank that is furthest off. Exits with 1 if any is off by more than 3 %.
"""

import argparse
import functools
import gc
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))  # ranks look the models up under the name benchmarks.memory

from benchmarks.anatomy_live import LiveBytes
from benchmarks.zoo import Case, diffusers, seeded, take, torchvision, transformers
from meshfit.anatomy.record import TraceError
from meshfit.anatomy.trace import Trace
from meshfit.axes.offload.axis import Offloading
from meshfit.axes.offload.optimizer import Offloaded
from meshfit.axes.shard.units import traced
from meshfit.cost import Cost
from meshfit.data import tree
from meshfit.exchange.across import Across
from meshfit.exchange.allreduce import AllReduce
from meshfit.job import Job
from meshfit.launch.devices import Devices
from meshfit.launch.local import LocalRanks
from meshfit.launch.world import World
from meshfit.plan import Plan
from meshfit.plan_cost import cost
from meshfit.run import Run

LIMIT = 0.03
STEPS, SAMPLES = 3, 4  # samples a rank and microbatch
VOCABULARY, LENGTH, WIDTH, CLASSES = 1024, 64, 128, 10
DEVICES = Devices("cpu", None)
KINDS = ("weights", "gradients", "optimizer", "activations", "gathered")

PLANS = (
    "data=2",
    "shard=2 zero=1 microbatches=2",
    "shard=2 zero=2",
    "shard=2",
    "shard=4",
    "shard=2 recompute=full",
    "shard=2 recompute=selective",
    "shard=2 offload=optimizer",
    "shard=2 offload=parameters",
)


# Models: those of the zoo, wide enough that a few bytes a tensor do not matter


def unpadded(n: int) -> dict[str, Tensor]:
    ids = torch.randint(VOCABULARY, (n, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.clone()}


def text(n: int) -> dict[str, Tensor]:
    """Padded by some tokens. (transformers drop a mask of nothing but ones, which a trace cannot see.)"""
    batch = unpadded(n)
    return {**batch, "attention_mask": (torch.arange(LENGTH) < LENGTH - 4).long().expand(n, -1).contiguous()}


def questions(n: int) -> dict[str, Tensor]:
    ids = unpadded(n)["input_ids"]
    return {"input_ids": ids, "labels": ids.flip(1)}


def sentences(n: int) -> dict[str, Tensor]:
    batch = text(n)
    return {**batch, "labels": batch["labels"][:, 0] % CLASSES}


def images(n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, 3, LENGTH, LENGTH, generator=generator), torch.randint(CLASSES, (n,), generator=generator)


def labelled_images(n: int) -> dict[str, Tensor]:
    pixels, labels = images(n)
    return {"pixel_values": pixels, "labels": labels}


def noisy_images(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    pixels, labels = images(n)
    return (pixels, labels), pixels.flip(1)


SIZES = {"vocab_size": VOCABULARY, "num_attention_heads": 4, "max_position_embeddings": LENGTH}
LAYERS = {"hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "num_hidden_layers": 4}


@seeded
def gpt2() -> nn.Module:
    hf = transformers()
    config = hf.GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=WIDTH, n_layer=4, n_head=4)
    config.bos_token_id = config.eos_token_id = 0
    return hf.GPT2LMHeadModel(config)  # with its dropout


@seeded
def llama() -> nn.Module:
    hf = transformers()
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, **LAYERS, num_key_value_heads=2, use_cache=False))


@seeded
def mixtral() -> nn.Module:
    hf = transformers()
    experts = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    return hf.MixtralForCausalLM(hf.MixtralConfig(**SIZES, **LAYERS, **experts, use_cache=False))


@seeded
def bert() -> nn.Module:
    hf = transformers()
    return hf.BertForSequenceClassification(hf.BertConfig(**SIZES, **LAYERS, num_labels=CLASSES))


@seeded
def t5() -> nn.Module:
    hf = transformers()
    config = {"d_model": WIDTH, "d_kv": 32, "d_ff": 3 * WIDTH, "num_layers": 3, "num_heads": 4, "use_cache": False}
    return hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, **config))


@seeded
def vit() -> nn.Module:
    hf = transformers()
    config = {**LAYERS, "num_attention_heads": 4, "image_size": LENGTH, "patch_size": 8, "num_labels": CLASSES}
    return hf.ViTForImageClassification(hf.ViTConfig(**config))


@seeded
def resnet10() -> nn.Module:
    resnet = torchvision().models.resnet
    return resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1], num_classes=CLASSES)


@seeded
def unet() -> nn.Module:
    return diffusers().UNet2DModel(
        sample_size=LENGTH,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(32, 64, 128),
        down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )


CASES = (
    Case(name="gpt2", build=gpt2, data=text),
    Case(name="llama", build=llama, data=unpadded),
    Case(name="mixtral", build=mixtral, data=text),
    Case(name="bert", build=bert, data=sentences),
    Case(name="t5", build=t5, data=questions),
    Case(name="vit", build=vit, data=labelled_images),
    Case(name="resnet10", build=resnet10, data=images, loss=F.cross_entropy),
    Case(
        name="unet-diffusers",
        build=unet,
        data=noisy_images,
        loss=lambda outputs, targets: F.mse_loss(outputs.sample, targets),
    ),
)


# Foretold and measured


def job_of(case: Case, plan: Plan) -> Job:
    batch = SAMPLES * plan.shares * plan.microbatches
    return Job(
        model=case.build,
        data=case.data(batch * STEPS),
        loss=case.loss,
        optimizer=torch.optim.AdamW,
        batch_size=batch,
        steps=STEPS,
        plan=plan,
        devices=DEVICES,
        shuffle=False,
    ).settled()


@functools.cache
def trace_of(case: Case) -> tuple[Trace, torch.optim.Optimizer]:
    """Of one microbatch of one rank, under any plan."""
    job, model = job_of(case, Plan()), case.build().train()
    trace = traced(model, job.objective, take(case.data(SAMPLES), torch.arange(SAMPLES)), device="cpu")
    if isinstance(trace, TraceError):
        raise trace
    return trace, torch.optim.AdamW(model.parameters())


def measured(case: Case, plan: Plan) -> list[Cost]:
    """By rank."""
    job = job_of(case, plan)
    with LocalRanks(lambda world, _: watch(job, world), size=plan.devices, devices=DEVICES) as ranks:
        return ranks.results


def watch(job: Job, world: World) -> Cost:
    """Train in this rank, and see what it holds."""
    from meshfit.loop import train

    run = Run(job, world)
    kept, gathered, summed, state = watch_forwards(run), watch_gathers(run), watch_backwards(run), watch_state(run)
    for _ in train(run):
        pass
    held = {"activations": kept(), "gathered": gathered()}
    away: dict[str, int] = {}
    parts = away if run.plan.offloads("parameters") else held
    parts["weights"] = size_of(run.model.parameters())  # of one that is cut, a view of this rank's part
    parts["gradients"] = max(summed(), size_of(gradients(run)))
    parts["optimizer"] = size_of(tree.tensors(dict(run.optimizer.state)))
    if (offload := run.update.offload) is not None:
        held["optimizer"] = state()
        away["optimizer"] = size_of(
            one.host for each in offload.each for chunk in each.chunks for one in chunk.away.values()
        )
    if (moving := run.placed.layer(Offloading)) is not None:
        away["activations"] = moving.host.pool.bytes
    return Cost(held=held, host=away)


def gradients(run: Run) -> list[Tensor]:
    exchange = run.exchange.inner if isinstance(run.exchange, Across) else run.exchange
    if isinstance(exchange, AllReduce):
        return [bucket.flat for bucket in exchange._buckets]
    flats = [flat for unit in exchange.shards.units for flat in unit.trained]
    return [*(flat.gradient for flat in flats if flat.gradient is not None), *exchange._sums.values()]


def watch_forwards(run: Run) -> Callable[[], int]:
    """Returns what tells of the last one."""
    objective, kept = run.schedule.objective, 0

    def watched(model: nn.Module, batch: Any) -> Any:
        nonlocal kept
        with LiveBytes() as live:
            loss = objective(model, batch)
        gc.collect()
        rows = {row.untyped_storage()._cdata for row in rows_of(run)}
        kept = sum(size for at, (ref, size) in live._new.items() if not ref.expired() and at not in rows)
        return loss

    run.schedule.objective = watched
    return lambda: kept


def rows_of(run: Run) -> list[Tensor]:
    """Gathered weights that are here now."""
    shards = run.placed.shards
    flats = [] if shards is None else [flat for unit in shards.units for flat in unit.flats]
    return [flat.whole for flat in flats if flat.whole is not None]


def watch_gathers(run: Run) -> Callable[[], int]:
    shards, most = run.placed.shards, 0
    if shards is None or shards.zero < 3:
        return lambda: 0
    start = shards._start_gather

    def watched(unit: Any) -> None:
        nonlocal most
        start(unit)
        most = max(most, size_of(rows_of(run)))

    shards._start_gather = watched
    return lambda: most


def watch_backwards(run: Run) -> Callable[[], int]:
    shards, most = run.placed.shards, 0
    if shards is None:
        return lambda: 0
    exchange: Any = shards.exchange
    returned = exchange.returned

    def watched(*args: Any) -> None:
        nonlocal most
        most = max(most, size_of(gradients(run)))
        returned(*args)

    exchange.returned = watched
    return lambda: most


def watch_state(run: Run) -> Callable[[], int]:
    """Under offload=optimizer, what of the state is on the device at the most."""
    offload, most = run.update.offload, 0
    if not isinstance(offload, Offloaded):
        return lambda: 0
    send, offload.move = offload._send, True

    def watched(chunk: Any) -> None:
        nonlocal most
        most = max(most, size_of(tree.tensors(dict(run.optimizer.state))))
        send(chunk)

    offload._send = watched
    return lambda: most


def size_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind them, each counted once."""
    storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storage.nbytes() for storage in storages.values())


# Beside each other


@dataclass(frozen=True, kw_only=True)
class Line:
    model: str
    plan: str
    place: str
    """ "device" or "host"."""
    kind: str
    foretold: int
    measured: int
    """In the rank that is furthest off."""

    @property
    def off(self) -> float:
        return (self.measured - self.foretold) / max(self.foretold, 1)

    @property
    def ok(self) -> bool:
        return abs(self.off) <= LIMIT


def lines(case: Case, plan: Plan) -> list[Line]:
    want, got = cost(plan, *trace_of(case)), measured(case, plan)
    found = []
    for place, wanted in (("device", want.held), ("host", want.host)):
        held = [each.held if place == "device" else each.host for each in got]
        for kind in KINDS:
            size = wanted.get(kind, 0)
            far = max((each.get(kind, 0) for each in held), key=lambda bytes: abs(bytes - size))
            if size or far:
                at = {"model": case.name, "plan": str(plan), "place": place, "kind": kind}
                found.append(Line(**at, foretold=size, measured=far))
    return found


def table(found: list[Line]) -> Table:
    rows = Table("model", "plan", *KINDS, title="MiB a rank: foretold, measured, difference")
    for column in rows.columns[2:]:
        column.justify = "right"
    at = {(line.model, line.plan, line.place, line.kind): line for line in found}
    last = ""
    for model, plan, place in dict.fromkeys(key[:3] for key in at):
        if model != last:
            rows.add_section()
        cells = [at.get((model, plan, place, kind)) for kind in KINDS]
        here = plan if place == "device" else "  in host memory"
        rows.add_row(model if model != last else "", here, *(cell(line) if line else "" for line in cells))
        last = model
    return rows


def cell(line: Line) -> str:
    text = f"{mib(line.foretold)} {mib(line.measured)} {line.off:+.1%}"
    return text if line.ok else f"[red]{text}[/red]"


def mib(size: int) -> str:
    return f"{size / 2**20:.2f}"


def what_matters(found: list[Line]) -> Iterable[str]:
    """The two things that sharding and recomputation are for, as they came out."""
    at = {(line.model, line.plan, line.kind): line for line in found if line.place == "device"}
    models = list(dict.fromkeys(line.model for line in found))
    state = ("weights", "gradients", "optimizer")
    if all((model, plan, kind) in at for model in models for plan in ("data=2", "shard=4") for kind in state):
        yield "shard=4 beside data=2: weights, gradients and optimizer state a rank, and what is gathered beside them"
        for model in models:
            whole = sum(at[model, "data=2", kind].measured for kind in state)
            quarter = sum(at[model, "shard=4", kind].measured for kind in state)
            gathered = at[model, "shard=4", "gathered"]
            yield (
                f"  {model:15} {mib(whole)} to {mib(quarter)} MiB, {quarter / whole:.4f} of it, "
                f"and at most {mib(gathered.measured)} gathered (foretold {mib(gathered.foretold)})"
            )
    if all((model, plan, "activations") in at for model in models for plan in ("shard=2", "shard=2 recompute=full")):
        yield "recompute=full: activations a rank"
        for model in models:
            before, after = (at[model, p, "activations"] for p in ("shard=2", "shard=2 recompute=full"))
            yield (
                f"  {model:15} {mib(before.measured)} to {mib(after.measured)} MiB, "
                f"{after.measured / before.measured:.2f} of it (foretold {after.foretold / before.foretold:.2f})"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.name for case in CASES]
    parser.add_argument("--models", default=",".join(names), help="names, with commas between")
    parser.add_argument("--plans", default=";".join(PLANS), help="plans, with semicolons between")
    asked = parser.parse_args()
    if unknown := set(asked.models.split(",")) - set(names):
        parser.error(f"no model {', '.join(sorted(unknown))}; known: {', '.join(names)}")
    console, progress = Console(), Console(stderr=True)
    console.width = max(console.width, 150)
    found = []
    for case in (case for case in CASES if case.name in asked.models.split(",")):
        for plan in map(Plan.parse, asked.plans.split(";")):
            found += lines(case, plan)
            progress.print(f"{case.name:15} {plan}", highlight=False)
    console.print(table(found))
    for sentence in what_matters(found):
        console.print(sentence, highlight=False)
    far, over = max(found, key=lambda line: abs(line.off)), [line for line in found if not line.ok]
    where = f"{far.kind} of {far.model}, {far.plan}"
    verdict = "[red]FAIL[/red]" if over else "[green]PASS[/green]"
    console.print(
        f"{len(found) - len(over)} of {len(found)} within {LIMIT:.0%}; furthest {far.off:+.2%} ({where}): {verdict}",
        highlight=False,
    )
    return 1 if over else 0


if __name__ == "__main__":
    from benchmarks import memory  # ranks find its functions under this name

    sys.exit(memory.main())
