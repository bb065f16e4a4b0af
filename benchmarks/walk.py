"""Which files does a batch pass through, from the loader to the new weights?

    python benchmarks/walk.py
    python benchmarks/walk.py "shard=2 tensor=2"     # one plan, its files in the order of their first call

Trains a small GPT under each plan and notes every file of the package whose code the first rank runs in its third step.
A model server's own files are counted by what its worker calls.
"""

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

import meshfit
from benchmarks.zoo import ZOO
from meshfit.drive import begin
from meshfit.job import Job
from meshfit.run import Run

PLANS = ("data=2", "shard=2 tensor=2", "pipeline=2 microbatches=2", "server=1 data=2")
PACKAGE = f"{Path(meshfit.__file__).parent}/"
STEPS, SEEN, MOST = 4, 3, 25


def note(run: Run) -> None:
    """Note in ``run.captured`` which files its step ``SEEN`` calls."""
    files: dict[str, None] = {}
    run.captured["files"] = files

    def called(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and run.step == SEEN - 1 and frame.f_code.co_filename.startswith(PACKAGE):
            files.setdefault(frame.f_code.co_filename.removeprefix(PACKAGE))

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
