"""Processes that a launcher started beside each other do not train apart by mistake."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshfit
from meshfit.errors import JobError
from meshfit.launch import twins
from meshfit.launch.devices import Devices
from meshfit.launch.world import from_environment, own_gpu

SRUN = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gpu[03-04,09]", "SLURM_LOCALID": "0"}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NNODES": "2"}
WORLD = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}


def fit(**asked):
    sgd = lambda params: torch.optim.SGD(params, lr=0.1)
    data = torch.randn(4, 2), torch.randn(4, 1)
    return meshfit.fit(
        nn.Linear(2, 1), data, loss=F.mse_loss, optimizer=sgd, batch_size=4, steps=1, devices="cpu", **asked
    )


REFUSED = {
    "srun": SRUN | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_PROCID": "1"},
    "Open MPI": {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
    "hydra": {"PMI_SIZE": "2", "PMI_RANK": "0"},
    "MVAPICH": {"MV2_COMM_WORLD_SIZE": "2"},
    "Kubeflow": {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "head"},
    "an elastic job": {"PET_NNODES": "1:3"},
    "a pod of several ranks": WORLD | {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "WORLD_SIZE": "4"},
    "a size alone": {"WORLD_SIZE": "2"},
    "without an address": {"WORLD_SIZE": "2", "RANK": "0"},
    "a rank alone": {"RANK": "0"},
    "an indexed job with an address": {"JOB_COMPLETION_INDEX": "0", "MASTER_ADDR": "head"},
    "a world of one in each task": SRUN | WORLD | {"SLURM_STEP_NUM_TASKS": "2", "WORLD_SIZE": "1"},
    "torchrun of one node in each task": SRUN | WORLD | {"SLURM_STEP_NUM_TASKS": "2", "GROUP_WORLD_SIZE": "1"},
}


@pytest.mark.parametrize("environ", REFUSED.values(), ids=REFUSED)
def test_one_of_several_is_refused(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(JobError, match="torchrun"):
        fit()


ALONE = {
    "a batch script": BATCH,
    "one task": BATCH | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"},
    "a task of an array": BATCH | {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "8"},
    "mpirun -n 1": {"OMPI_COMM_WORLD_SIZE": "1", "PMIX_RANK": "0"},
    "an indexed job": {"JOB_COMPLETION_INDEX": "3"},
    "no number": {"WORLD_SIZE": "", "PMI_SIZE": "?"},
}


@pytest.mark.parametrize("environ", ALONE.values(), ids=ALONE)
def test_one_process_trains(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert fit().steps == 1


def test_independent_trainings_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    assert fit(independent=True).steps == 1
    monkeypatch.setenv("MESHFIT_INDEPENDENT", "1")
    assert fit().steps == 1
    for name, value in WORLD.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(JobError, match="a rank of a world"):
        fit()


def test_a_world_of_torchruns_passes() -> None:
    for more in ({}, SRUN | {"SLURM_STEP_NUM_TASKS": "2", "GROUP_WORLD_SIZE": "2"}, {"PET_NNODES": "2"}):
        twins.check(environ=WORLD | more)


def test_the_command_has_the_real_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "0.1"])
    with pytest.raises(JobError) as caught:
        twins.check(environ=REFUSED["srun"], devices=8)
    assert "SLURM_STEP_NUM_TASKS=2, SLURM_PROCID=1" in str(caught.value)
    assert (
        "srun --nodes=2 --ntasks-per-node=1 torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d "
        "--rdzv-endpoint=gpu03:29500 --rdzv-id=7 train.py --lr 0.1"
    ) in str(caught.value)
    with pytest.raises(JobError, match=r"all of them: torchrun --nnodes=1 --nproc-per-node=4 train\.py"):
        twins.check(environ=REFUSED["Open MPI"])
    with pytest.raises(JobError, match=r"all of them: torchrun train\.py"):
        twins.check(environ=REFUSED["Kubeflow"])


@pytest.mark.parametrize("said", [{"LOCAL_RANK": "1"}, {"SLURM_LOCALID": "1"}, {"OMPI_COMM_WORLD_LOCAL_RANK": "1"}])
def test_a_rank_takes_its_own_gpu(said: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, value in (WORLD | {"RANK": "1"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(JobError, match="LOCAL_RANK is not set, and this rank sees 2 GPUs"):
        from_environment()
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    world = from_environment()
    assert world is not None
    assert world.device == torch.device("cuda", 1)


def test_ranks_share_a_gpu_only_where_that_is_said() -> None:
    assert own_gpu(8, 1, {"LOCAL_RANK": "5"}) == 0  # each is shown its own
    assert own_gpu(8, 4, {"LOCAL_RANK": "3"}) == 3
    with pytest.raises(JobError, match=r"rank 5 of its host.*\n.*--nproc-per-node=4.*\n.*MESHFIT_RANKS_PER_GPU=2"):
        own_gpu(8, 4, {"LOCAL_RANK": "5"})
    assert own_gpu(8, 4, {"LOCAL_RANK": "5", "MESHFIT_RANKS_PER_GPU": "2"}) == 2
    assert own_gpu(8, 4, {"SLURM_LOCALID": "2"}) == 2


def test_the_cpu_is_taken_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, value in (WORLD | {"RANK": "1"}).items():
        monkeypatch.setenv(name, value)
    for asked in ("cpu", "cpu:2", Devices("cpu", None)):
        world = from_environment(asked)
        assert world is not None
        assert world.device == torch.device("cpu")


@pytest.mark.parametrize("said", [{"RANK": "2"}, {"RANK": "x"}, {"WORLD_SIZE": "many"}])
def test_a_place_that_is_none_is_refused(said: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (WORLD | said).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(JobError, match="no place in a world"):
        from_environment()


@pytest.mark.skipif(
    not (shutil.which("srun") and "SLURM_CONF" in os.environ), reason="needs srun, and SLURM_CONF of a cluster"
)
def test_srun_is_refused_and_batch_scripts_train(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        f"import sys\nsys.path[:0] = {sys.path!r}\nfrom tests.test_twins import fit\nfit()\nprint('trained')\n"
    )
    two = subprocess.run(["srun", "-N2", "-n2", sys.executable, script], capture_output=True, text=True, timeout=120)
    assert two.returncode != 0
    assert "trained" not in two.stdout
    assert "this process is one of 2 that srun started" in two.stderr
    one = subprocess.run(["srun", "-n1", sys.executable, script], capture_output=True, text=True, timeout=120)
    assert "trained" in one.stdout, one.stderr
