"""Whether a launcher started this process as one of several that know nothing of each other.

``srun -n2 python train.py`` starts two processes. Without a rendezvous each would train a model of its own, and nobody
would notice. torchrun tells its ranks of each other; srun, mpirun and Kubernetes do not, they only leave a count in the
environment. Where that count says "several", and no world of torchrun's joins them, training is refused with the
command that works.

    SLURM        SLURM_STEP_NUM_TASKS: set within an srun step alone. A batch script is one process whatever -n says,
                 and so is each task of an array
    MPI          OMPI_COMM_WORLD_SIZE, PMI_SIZE, MV2_COMM_WORLD_SIZE, ...
    Kubernetes   PET_NNODES, or a part of RANK, WORLD_SIZE, MASTER_ADDR. JOB_COMPLETION_INDEX alone is no evidence:
                 indexed jobs are sweeps, too
"""

import os
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from meshfit.errors import JobError

INDEPENDENT = "MESHFIT_INDEPENDENT"
WORLD = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
SIZES = {  # by launcher: processes in all, this one's number, processes of this host
    "srun": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", ""),
    "mpirun": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "mpirun (MVAPICH)": ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    "mpiexec": ("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS"),
    "jsrun": ("JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_LOCAL_SIZE"),
    "flux": ("FLUX_JOB_SIZE", "FLUX_TASK_RANK", ""),
}
LOCAL_RANKS = (
    "LOCAL_RANK",
    "SLURM_LOCALID",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "JSM_NAMESPACE_LOCAL_RANK",
    "PALS_LOCAL_RANKID",
    "FLUX_TASK_LOCAL_ID",
)
"""Where launchers say which process of its host one is."""


@dataclass(frozen=True, slots=True)
class Launched:
    """What the environment says of the launcher."""

    by: str
    count: int
    """Processes that it started: pods, for Kubernetes."""
    nodes: int
    said: str
    """The variables that say so."""


def number(environ: Mapping[str, str], name: str) -> int | None:
    """A variable as a whole number; of a range as in PET_NNODES=1:4, the larger."""
    text = environ.get(name, "").rpartition(":")[2]
    return int(text) if text.isdecimal() else None


def launched(environ: Mapping[str, str]) -> Launched | None:
    """The launcher that started several processes, this one among them, if there is one."""
    for by, (size, rank, local) in SIZES.items():
        count = number(environ, size)
        if count is not None and count > 1:
            here = number(environ, local) or 1
            nodes = number(environ, "SLURM_STEP_NUM_NODES") if by == "srun" else -(-count // here)
            said = ", ".join(f"{name}={environ[name]}" for name in (size, rank) if name in environ)
            return Launched(by, count, nodes or 1, said)
    pods = number(environ, "PET_NNODES") or number(environ, "NNODES") or 1
    if pods > 1:
        said = ", ".join(f"{n}={environ[n]}" for n in ("PET_NNODES", "NNODES", "PET_NODE_RANK") if n in environ)
        return Launched("a launcher of pods or nodes", pods, pods, said)
    return None


def check(*, independent: bool = False, devices: int | None = None, environ: Mapping[str, str] = os.environ) -> None:
    """Refuse to train where this is one of several processes that no world joins, unless ``independent`` trainings are
    asked for. ``devices``: as many as the plan names, for the command that would work."""
    has = [name for name in WORLD if name in environ]
    whole = len(has) == len(WORLD)
    if independent or environ.get(INDEPENDENT, "") not in ("", "0"):
        if whole and (number(environ, "WORLD_SIZE") or 1) > 1:
            raise JobError(
                "independent trainings were asked for, but this process is a rank of a world",
                f"{_values(environ, WORLD)}: its ranks train one model together",
                "start independent trainings without torchrun",
            )
        return
    found = launched(environ)
    agents = number(environ, "GROUP_WORLD_SIZE")  # torchrun's own processes that joined; one a node
    if whole:
        size, each = number(environ, "WORLD_SIZE") or 1, number(environ, "PET_NPROC_PER_NODE") or 1
        if each > 1 and "LOCAL_RANK" not in environ:
            raise JobError(
                f"this is the one process of a pod that is to have {each} ranks",
                f"{_values(environ, ('PET_NPROC_PER_NODE', 'WORLD_SIZE', 'RANK'))}, and no LOCAL_RANK",
                f"torchrun starts them, and reads these variables: {shlex.join(['torchrun', *_script()])}",
            )
        if found is not None and (agents == 1 if agents is not None else size == 1):
            told = f"torchrun was told of one node: {_values(environ, ('GROUP_WORLD_SIZE', 'WORLD_SIZE'))}"
            raise _refusal(found, devices, environ, told if agents is not None else f"WORLD_SIZE={size}")
        return
    if found is not None:
        raise _refusal(found, devices, environ)
    several = (number(environ, "WORLD_SIZE") or 1) > 1 or "RANK" in environ
    several |= "MASTER_ADDR" in environ and "JOB_COMPLETION_INDEX" in environ
    if several:
        missing = [name for name in WORLD if name not in environ]
        are = "are" if len(missing) > 1 else "is"
        raise JobError(
            f"this process is said to be one of several, but {' and '.join(missing)} {are} not set",
            f"{_values(environ, (*WORLD, 'JOB_COMPLETION_INDEX'))}: the ranks cannot find each other",
            f"torchrun sets all of it: {_torchrun(number(environ, 'WORLD_SIZE') or 2, 1, devices, 'HOST')}",
            "with HOST the first of the hosts",
            f"or unset {' '.join(has)} to train here alone",
        )


def _values(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    return ", ".join(f"{name}={environ[name]}" for name in names if name in environ)


def _refusal(found: Launched, devices: int | None, environ: Mapping[str, str], more: str = "") -> JobError:
    each = -(-found.count // found.nodes)
    if found.by == "srun":
        host, job = _first_host(environ), environ.get("SLURM_JOB_ID", "1")
        before = f"srun --nodes={found.nodes} --ntasks-per-node=1 "
    elif "mpi" in found.by:
        spread = "--map-by ppr:1:node" if found.by == "mpirun" else "-ppn 1"
        before = f"{found.by.split()[0]} -n {found.nodes} {spread} " if found.nodes > 1 else ""
        host, job = "HOST", "1"
    else:
        host, job, before = environ.get("PET_MASTER_ADDR", "HOST"), "1", ""
    if any(name.startswith("PET_") for name in environ):
        command = shlex.join(["torchrun", *_script()])  # it reads PET_NNODES and its kin by itself
    else:
        command = before + _torchrun(found.nodes, each, devices, host, job)
    return JobError(
        f"this process is one of {found.count} that {found.by} started, and they do not know of each other",
        f"{found.said}{f'; {more}' if more else ''}: each would train a model of its own",
        f"one training over all of them: {command}",
        "with HOST the first of the hosts" if "HOST:" in command else "",
        f"trainings apart, as in a sweep: fit(..., independent=True), or {INDEPENDENT}=1",
    )


def _torchrun(nodes: int, each: int, devices: int | None, host: str, job: str = "1") -> str:
    """Its command line; on each node as many processes as the plan needs, or as there were."""
    each = each if devices is None else max(1, -(-devices // nodes))
    words = ["torchrun", f"--nnodes={nodes}", f"--nproc-per-node={each}"]
    if nodes > 1:
        words += ["--rdzv-backend=c10d", f"--rdzv-endpoint={host}:29500", f"--rdzv-id={job}"]
    return shlex.join([*words, *_script()])


def _script() -> list[str]:
    script, *arguments = sys.argv or ["train.py"]
    return [script if script not in ("", "-c", "-m") else "train.py", *arguments]


def _first_host(environ: Mapping[str, str]) -> str:
    """Of a list as SLURM writes it: n[1-2], gpu-[003,007], a,b."""
    text = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    found = re.match(r"([^\[,]+)(?:\[(\d+))?", text)
    return f"{found[1]}{found[2] or ''}" if found else "HOST"


def local_rank(environ: Mapping[str, str] = os.environ) -> int | None:
    """Which process of its host this is, if a launcher says so."""
    return next((found for name in LOCAL_RANKS if (found := number(environ, name)) is not None), None)
