"""Does the host wait for the GPU in a training step? Do evaluations make communicators, do steps leave memory taken?

    python benchmarks/syncs.py                          # needs a GPU; one is enough
    python benchmarks/syncs.py --only "expert,offload"  # cases whose line has one of these in it
    python benchmarks/syncs.py --backend gloo           # does the script work? on CPU ranks, where nothing is counted

A case trains a small model under a plan, in ranks that share one GPU over NCCL (``nccl_ranks.py``). Over two
steps in the middle of an epoch, when all is warm, it counts two ways how often the host waits:

    warned     by ``torch.cuda.set_sync_debug_mode``: .item(), blocking copies, nonzero, with the line of meshfit's code
    traced     cudaStreamSynchronize, cudaDeviceSynchronize and cudaEventSynchronize in the profiler's trace of two more

Then it evaluates ten times, with eighty steps between, and counts process groups, NCCL's communicators by its own log,
and bytes that torch has allocated on the GPU, after the first evaluation and after the last.

A case may wait as often as ``REASONS`` says, where it also says why. Exits with 0 if no case waits more often, none
makes communicators and none holds more than before, 1 otherwise, 4 if there is no GPU: then nothing was run.
"""

import argparse
import gc
import json
import math
import os
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.nccl_ranks import NOT_RUN, World, at_work, failure, gpu
from meshfit.plan import DEGREES

CASE_SECONDS = 60.0
WARM_UP, COUNTED, EVALUATE_EVERY, EVALUATIONS = 3, 2, 8, 10
SAMPLES, BATCH = 160, 8
MORE = 64 * 2**10
"""Bytes that may be allocated beyond what was after the first evaluation: whatever is under way just then."""
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
SOURCE = str(Path(__file__).parents[1] / "src")

STEP_BEFORE = "cudaEventSynchronize in no operation"
"""Once a step, under every plan: the loss of the step before is read, so that the host is never more than a step ahead
and a NaN is met. The GPU has this step's work by then."""

REASONS: dict[str, tuple[int, str]] = {
    "each_step": (2, "all ranks wait for the caller after each step: that is what each_step= asks for"),
    "data=2 expert=2": (36, "the model's own code, as below; and an expert that no token of a rank chose: did others?"),
    "mixture": (32, "the model's own code asks for the nonzero rows of 4 experts in 2 layers, and runs twice"),
    "offload=parameters": (12, "the optimizer steps on the CPU: gradients, their norm and the loss are waited for"),
    "exchange=": (3, "a rank whose targets are all left out must not step; an averaging says whether to stop"),
}
"""By a word of the case: how often two steps may wait, and why."""


@dataclass(frozen=True)
class Case:
    plan: str
    model: str = "gpt"
    clip: float | None = None
    each_step: bool = False

    @property
    def ranks(self) -> int:
        words = [word.split("=") for word in self.plan.split()]
        return math.prod(int(value) for key, value in words if key in DEGREES)

    @property
    def reason(self) -> tuple[int, str]:
        return next((said for word, said in REASONS.items() if word in str(self)), (0, ""))

    def __str__(self) -> str:
        notes = [self.model] * (self.model != "gpt") + ["clip"] * (self.clip is not None)
        notes += ["each_step"] * self.each_step
        return f"{self.plan} ({', '.join(notes)})" if notes else self.plan


CASES = (
    Case("data=2"),
    Case("data=2 precision=bf16"),
    Case("data=2 precision=fp16"),
    Case("data=2 microbatches=2"),
    Case("data=2", clip=1.0),
    Case("data=2", each_step=True),
    Case("data=2", model="batchnorm"),
    Case("shard=2 zero=1"),
    Case("shard=2 zero=2"),
    Case("shard=2"),
    Case("shard=2", clip=1.0),
    Case("shard=2 precision=bf16 recompute=full"),
    Case("shard=2 offload=optimizer"),
    Case("shard=2 offload=parameters"),
    Case("tensor=2 sequence=whole"),
    Case("tensor=2 sequence=split precision=bf16", clip=1.0),
    Case("context=2 attention=gather"),
    Case("context=2 attention=ulysses"),
    Case("expert=2", model="mixture"),
    Case("expert=2 precision=bf16", model="mixture"),
    Case("branch=2", model="ensemble"),
    Case("pipeline=2 microbatches=4"),
    Case("pipeline=2 schedule=zbv microbatches=4", clip=1.0),
    Case("data=2 exchange=local every=2"),
    Case("data=2 exchange=diloco every=2"),
    Case("data=2 tensor=2"),
    Case("data=2 shard=2"),
    Case("shard=2 tensor=2"),
    Case("shard=2 context=2"),
    Case("data=2 expert=2", model="mixture"),
    Case("expert=2 tensor=2", model="mixture"),
    Case("data=2 pipeline=2 microbatches=4"),
    Case("tensor=2 pipeline=2 microbatches=4"),
)


# In a rank


def rank() -> None:
    with at_work() as (world, asked):
        from benchmarks.nccl import cases

        known = cases()

        def count(said: dict[str, Any]) -> dict[str, Any]:
            return counted(Case(**said["case"]), said["evaluations"], known, world)

        asked(count)


def counted(case: Case, evaluations: int, known: dict[str, Any], world: Any) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from meshfit.drive import begin
    from meshfit.job import Job

    model = known[case.model]
    job = Job(
        model=model.build(),
        data=model.data(SAMPLES),
        valid=model.data(BATCH),
        valid_every=EVALUATE_EVERY,
        loss=model.loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        batch_size=BATCH,
        steps=10_000,
        clip=case.clip,
        plan=case.plan if "compile" in case.plan else f"{case.plan} compile=none",
    )
    training = begin(job.training(), lockstep=case.each_step)
    steps, cuda, result = iter(training), world.device.type == "cuda", {}
    with training:
        unread = [next(steps) for _ in range(WARM_UP)]
        if cuda:
            torch.cuda.synchronize()
        dist.barrier()
        with warned() if cuda else _nothing() as where:
            unread += [next(steps) for _ in range(COUNTED)]
        result["warned"] = where
        dist.barrier()
        with traced() if cuda else _nothing() as where:
            unread += [next(steps) for _ in range(COUNTED)]
        result["traced"] = where
        made, held = [], []
        for _ in range(1 + evaluations):
            while not (step := next(steps)).valid:
                pass
            made.append(communicators())
            gc.collect()
            held.append(torch.cuda.memory_allocated() if cuda else 0)
        result["loss"] = step.loss
    return {**result, "communicators": [made[0], made[-1]], "held": [held[0], held[-1]]}


@contextmanager
def _nothing() -> Iterator[list[str]]:
    yield []


@contextmanager
def warned() -> Iterator[list[str]]:
    """Where the host waited, by torch's own warnings."""
    import torch

    found: list[str] = []

    def show(message: Any, *_: Any, **__: Any) -> None:
        if "synchroniz" in str(message) and "prototype" not in str(message):  # the mode itself is one
            found.append(_line(traceback.extract_stack()))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")


def _line(stack: traceback.StackSummary) -> str:
    """The innermost line of meshfit's code, and what it called."""
    frames = [frame for frame in stack if "warnings" not in frame.filename and frame.filename != __file__]
    own = [i for i, frame in enumerate(frames) if frame.filename.startswith(SOURCE)]
    if not own:
        return " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in frames[:-4:-1])
    at = frames[own[-1]]
    inner = frames[-1]
    called = f" > {Path(inner.filename).name}:{inner.lineno} {inner.name}" if inner is not at else ""
    return f"{at.filename[len(SOURCE) + 1 :]}:{at.lineno} {at.line}{called}"


@contextmanager
def traced() -> Iterator[list[str]]:
    """The calls of CUDA in which the host waited, with the operations around them."""
    from torch.profiler import ProfilerActivity, profile, record_function

    found: list[str] = []
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace, record_function("steps"):
        yield found
    events = list(trace.events())
    step = next(event for event in events if event.name == "steps")
    for event in events:
        within = step.time_range.start <= event.time_range.start <= step.time_range.end
        if event.name in WAITS and within:
            around, parent = [], event.cpu_parent
            while parent is not None and parent.name != "steps":
                around.append(parent.name)
                parent = parent.cpu_parent
            found.append(f"{event.name} in {' < '.join(around[:4]) or 'no operation'}")
    for _ in range(COUNTED):
        if STEP_BEFORE in found:
            found.remove(STEP_BEFORE)


def communicators() -> int:
    """Process groups of this rank, and NCCL's communicators by its log."""
    import torch.distributed.distributed_c10d as c10d

    log = Path(os.environ.get("NCCL_DEBUG_FILE", "").replace("%p", str(os.getpid())))
    lines = log.read_text(errors="replace").count("Init COMPLETE") if log.is_file() else 0
    return len(c10d._world.pg_map) + lines


# In the caller


def shown(case: Case, answers: list[dict[str, Any]]) -> tuple[str, bool]:
    allowed, why = case.reason
    most = {kind: max(len(said[kind]) for said in answers) for kind in ("warned", "traced")}
    before, after = (max(said["communicators"][i] for said in answers) for i in (0, 1))
    more = max(said["held"][1] - said["held"][0] for said in answers)
    verdicts = {
        "NEW COMMUNICATORS": before != after,
        f"HOLDS {more / 2**10:.0f} KiB MORE": more > MORE,
        "WAITS": max(most.values()) > allowed,
    }
    good = not any(verdicts.values())
    line = f"{case.ranks} ranks  {case!s:<58} {most['warned']:3d} {most['traced']:3d}   {before:3d} {after:3d}  "
    line += ", ".join(word for word, so in verdicts.items() if so) or "ok"
    if good and max(most.values()):
        line += f" ({why})"
    for kind in ("warned", "traced"):
        places = Counter(place for said in answers for place in said[kind])
        line += "".join(f"\n      {kind} {count}x over ranks: {place}" for place, count in places.most_common(12))
    return line, good


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--backend", choices=["nccl", "gloo"], default="nccl")
    parser.add_argument("--only", default="", help="cases whose line has one of these in it; commas between")
    parser.add_argument("--seconds", type=float, default=CASE_SECONDS, help="a case that takes longer is cut")
    parser.add_argument("--evaluations", type=int, default=EVALUATIONS)
    parser.add_argument("--json", type=Path, help="write what was counted there")
    options = parser.parse_args()
    if options.rank:
        rank()
        return 0
    words = [word for word in options.only.split(",") if word]
    chosen = [case for case in CASES if not words or any(word in str(case) for word in words)]
    if options.backend == "nccl" and not gpu():
        print(f"NOT RUN: {len(chosen)} cases need a GPU, and there is none here")
        return NOT_RUN
    print(f"{'':<66} warned traced, communicators after the first and the last evaluation")
    world: World | None = None
    good, rows = True, []
    for case in sorted(chosen, key=lambda case: case.ranks):
        if world is None or world.size != case.ranks:
            if world is not None:
                world.close()
            os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT"}
            os.environ["NCCL_DEBUG_FILE"] = f"/tmp/nccl-{time.time_ns()}-%p.txt"
            world = World(__file__, case.ranks, options.backend)
            heard, ready = world.ready()
            if not ready:
                raise SystemExit(failure(heard[0]))
        answers, goes_on = world.run({"case": asdict(case), "evaluations": options.evaluations}, options.seconds)
        if "error" in answers[0]:
            line, fine = f"{case.ranks} ranks  {case!s:<58} FAIL  {failure(answers[0])}", False
        else:
            line, fine = shown(case, answers)
        rows.append({**asdict(case), "good": fine, "answers": answers})
        print(line, flush=True)
        good = good and fine
        if not goes_on:
            world.close()
            world = None
    if world is not None:
        world.close()
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    print(f"{sum(row['good'] for row in rows)} of {len(rows)} cases never wait for the GPU in a step, or have a reason")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
