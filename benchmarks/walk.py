"""Which files does a batch pass through, from the loader to the new weights?

    python benchmarks/walk.py
    python benchmarks/walk.py "shard=2 tensor=2"     # one plan, its files in the order of their first call

Trains a small GPT under each plan and notes every file of the package whose code the first rank runs, in any thread,
from where its third step asks for a batch until the weights are updated. What happens between steps (reporting, saving,
looking for NaN) is not on the way. A model server's own files are counted by what its worker calls.
"""

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

import meshfit
from benchmarks.zoo import ZOO
from meshfit.data.loader import Batch
from meshfit.drive import begin
from meshfit.job import Job
from meshfit.run import Run

PLANS = ("data=2", "shard=2 tensor=2", "pipeline=2 microbatches=2", "server=1 data=2")
PACKAGE = f"{Path(meshfit.__file__).parent}/"
STEPS, SEEN, MOST = 4, 3, 25


def note(run: Run) -> None:
    """Note in ``run.captured`` which files its step ``SEEN`` calls, until its update is counted."""
    files: dict[str, None] = {}
    run.captured["files"] = files
    batches, count, on_the_way = run.batches, run.coordination.count, False

    def watched() -> Iterator[Batch]:
        nonlocal on_the_way
        every = batches()
        while True:
            on_the_way = run.step == SEEN - 1
            try:
                yield next(every)
            except StopIteration:
                return

    def counted(batch: Batch) -> None:
        nonlocal on_the_way
        on_the_way = False
        count(batch)

    def called(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and on_the_way and frame.f_code.co_filename.startswith(PACKAGE):
            files.setdefault(frame.f_code.co_filename.removeprefix(PACKAGE))

    run.batches, run.coordination.count = watched, counted
    sys.setprofile(called)
    threading.setprofile(called)


def walk(plan: str) -> list[str]:
    case = ZOO["tied-gpt"]
    job = Job(
        model=case.build,
        data=case.data(16),
        loss=case.loss,
        optimizer=torch.optim.AdamW,
        batch_size=4,
        steps=STEPS,
        plan=plan,
    )
    with begin(job, lockstep=False, tap=note) as training:
        for _ in training:
            pass
    assert training.outcome is not None
    return list(training.outcome.captured["files"])


def main() -> int:
    plans = sys.argv[1:] or PLANS
    found = {plan: walk(plan) for plan in plans}
    for plan, files in found.items():
        print(f"{plan}: {len(files)} files")
        print("".join(f"  {name}\n" for name in files), end="")
    return 0 if all(len(files) <= MOST for files in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
