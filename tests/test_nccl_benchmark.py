"""What benchmarks/nccl.py would run, and what it says where it cannot."""

import os
import subprocess
import sys

from benchmarks.nccl import NOT_RUN, cells, equal, summary
from meshfit.plan import DEGREES, SCHEDULES, Plan


def test_every_axis_and_schedule_has_cells() -> None:
    plans = [Plan.parse(cell.plan) for cell in cells()]
    assert all(plan.devices == cell.world for plan, cell in zip(plans, cells(), strict=True))
    assert all(any(getattr(plan, axis) > 1 for plan in plans) for axis in DEGREES)
    one_queue = [Plan.parse(cell.plan) for cell in cells() if cell.one_queue]
    for some in (plans, one_queue):
        found = {(plan.pipeline, plan.schedule) for plan in some if plan.devices == plan.pipeline}
        assert found >= {(ranks, word) for ranks in (2, 3, 4) for word in SCHEDULES}
    assert len(set(cells())) == len(cells())


def test_without_a_gpu_nothing_passes() -> None:
    command = [sys.executable, "benchmarks/nccl.py", "--worlds", "2"]
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=120)
    assert done.returncode == NOT_RUN
    assert done.stdout.startswith("NOT RUN")


def test_a_cell_that_hangs_or_differs_is_no_success() -> None:
    fine = {"loss": 1e-7, "weights": 1e-7, "seconds": 1.0}
    assert equal(fine)
    assert not equal({**fine, "weights": 1e-3})
    assert not equal({"error": "cut after 60 s"})
    assert "1 of 2" in summary([fine, {"error": "cut after 60 s"}], "nccl")
    assert "1 hung" in summary([fine, {"error": "cut after 60 s"}], "nccl")
