"""What each rank of a rehearsal does: the program of one rank of a plan, up to two steps, alone in its process."""

import os
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from meshfit.axes.mesh import Mesh
from meshfit.comm.order_check import CollectiveLog, Operation
from meshfit.data import tree
from meshfit.data.loader import Batch, Loader
from meshfit.data.reading import Readers
from meshfit.errors import MeshfitError
from meshfit.job import Job
from meshfit.launch.channel import Channel
from meshfit.launch.system import cores
from meshfit.launch.world import World
from meshfit.loop import train
from meshfit.patches import replaced
from meshfit.rehearsal.meta import without_values
from meshfit.rehearsal.others import NeverHeard, Others
from meshfit.run import Run
from meshfit.torch_private import fake_ranks

OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
BETWEEN = tuple(os.path.join(OURS, *file) for file in (("patches.py",), ("comm", "order_check.py"), ("rehearsal", "")))
"""Files between the line that issues something and what logs it."""
LIBRARIES = (*{sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "purelib", "platlib")}, "<frozen")

NAMES = ("RANK", "LOCAL_RANK", "GROUP_RANK")
"""By which torchrun tells a process which it is."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What stopped a rank."""

    phase: str
    """building, data, first step, second step."""
    headline: str
    facts: tuple[str, ...] = ()
    where: str = ""
    """The last line of the user's own code."""
    trace: str = ""
    waits: bool = False
    """It waited in vain for another: the cause is there."""
    share: int | None = None
    """Of the batch, where its samples are the cause: all ranks that take it fail."""


@dataclass
class RankReport:
    """What a rank came to."""

    rank: int
    phase: str = "building"
    """Where it is: building, data, first step, second step."""
    log: list[Operation] = field(default_factory=list)
    failure: Failure | None = None
    asked_rank: str = ""
    """The line of the user's code that asked which rank it is."""
    samples: dict[int, list[int]] = field(default_factory=dict)
    """By share of the batch: those of the first step."""
    shapes: dict[int, list[Any]] = field(default_factory=dict)
    """By share: shapes and dtypes of each microbatch of the first step."""
    parameters: int = 0
    """Bytes that it keeps of the model's."""
    found: dict[str, Any] = field(default_factory=dict)
    """What the axes act on."""
    notes: list[str] = field(default_factory=list)
    steps: int = 0
    cpu: float = 0.0
    """Seconds that its process computed."""


@dataclass(frozen=True, slots=True)
class RankEnded:
    """From a rank to the caller: it says nothing more."""


@dataclass(frozen=True)
class RankWork:
    """The program of rank ``ranks[i]`` in the i-th process."""

    job: Job
    ranks: tuple[int, ...]
    size: int
    per_host: int
    shares: tuple[tuple[int, ...], ...]
    """By process: shares of the batch whose samples it reads beside its own."""
    meta: bool
    """Whether tensors have no values."""
    same: bool
    """Whether all ranks get the same model; else each builds its own."""
    steps: int = 2

    def __call__(self, world: World, channel: Channel) -> RankReport:
        rank = self.ranks[world.rank]
        report, began = RankReport(rank), time.process_time()
        if not self.same:
            local = {"LOCAL_RANK": rank % self.per_host, "LOCAL_WORLD_SIZE": self.per_host}
            os.environ |= {k: str(v) for k, v in {"RANK": rank, "WORLD_SIZE": self.size, **local}.items()}
        torch.set_num_threads(1 if rank else cores())  # the first rank tries the model, while the others wait
        fake_ranks.connect(rank, self.size, "meta" if self.meta else "cpu")
        log = CollectiveLog(Others(rank, channel), where)
        try:
            with log, as_on_gpus(), asking(report), without_values() if self.meta else nullcontext():
                self._run(report, rank, world.rank)
        except Exception as error:
            report.failure = failure_of(error, report.phase)
        finally:
            report.log, report.cpu = log.log, time.process_time() - began
            dist.destroy_process_group()
            channel.send(RankEnded())
        return report

    def _run(self, report: RankReport, rank: int, index: int) -> None:
        device = torch.device("meta" if self.meta else "cpu")
        run = Run(self.job, World(rank, self.size, device), same=self.same)
        report.found = dict(run.placed.found) if rank == 0 else {}
        report.notes, report.parameters = list(run.notes), sum(p.nbytes for p in run.model.parameters())
        if run.placed.shards is not None:
            run.placed.shards.lockstep.ahead = True  # as on GPUs
        for each in run.phases:
            each.guard = None  # it looks at gradients of ranks that are not there
        report.phase = "data"
        for share in self.shares[index]:
            self._read(report, run.loader, share)
        seen = run.epochs

        def epochs() -> Iterator[Batch]:
            for batch in seen():
                note_samples(report, run.share, batch, run.loader)
                report.phase = "second step" if run.step else "first step"
                yield batch
                report.phase = "data"

        run.epochs = epochs  # type: ignore[method-assign]
        for _ in train(run):
            report.steps += 1

    def _read(self, report: RankReport, loader: Loader, share: int) -> None:
        """The samples of the first step that another share of the batch takes."""
        same = ("source", "batch_size", "ranks", "device", "microbatches", "seed", "shuffle")
        readers = Readers.of(0)  # which read when they are asked
        other = Loader(
            **{name: getattr(loader, name) for name in same}, rank=share, workers=readers.workers, kind=readers.kind
        )
        try:
            note_samples(report, share, next(iter(other.epoch(0, 0))), other)
        except Exception as error:
            error.share = share  # type: ignore[attr-defined]
            raise
        finally:
            other.close()


def note_samples(report: RankReport, share: int, batch: Batch, loader: Loader) -> None:
    """Note the samples of the first step, and the shapes of its tensors."""
    if share in report.samples:
        return
    ids = batch.ids.tolist()
    size = -(-len(ids) // loader.ranks)
    report.samples[share] = ids[share * size : (share + 1) * size]
    report.shapes[share] = [
        [(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in tree.tensors(part.content)]
        for part in batch.microbatches
    ]


def failure_of(error: Exception, phase: str) -> Failure:
    """Without the frames of ours and of torch's, as far as there are others."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((OURS, TORCH, *LIBRARIES))]
    line = f"{near(own[-1].filename)}:{own[-1].lineno}" if own else ""
    first, *rest = [*(str(error).splitlines() or [""]), *getattr(error, "__notes__", [])]
    headline = first if isinstance(error, MeshfitError) else f"{type(error).__name__}: {first}"
    return Failure(
        phase,
        headline,
        tuple(fact.strip() for fact in rest[:6]),
        line,
        "".join(traceback.format_exception(error)),
        waits=isinstance(error, NeverHeard),
        share=getattr(error, "share", None),
    )


def near(file: str) -> str:
    """A path, from the current folder if it is in there."""
    here = os.getcwd() + os.sep
    return file.removeprefix(here)


def where() -> str:
    """The line that issued a collective: the user's, or ours."""
    frame = _frame_outside((*BETWEEN, TORCH, *LIBRARIES))
    if frame is None:
        return ""
    file = frame.f_code.co_filename
    name = file.removeprefix(os.path.dirname(OURS.rstrip(os.sep)) + os.sep)
    return sys.intern(f"{name if file.startswith(OURS) else near(file)}:{frame.f_lineno}")


def _frame_outside(files: tuple[str, ...]) -> FrameType | None:
    """The nearest frame of a file whose path begins with none of ``files``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(files):
        frame = frame.f_back
    return frame


@contextmanager
def asking(report: RankReport) -> Iterator[None]:
    """Notes where the user's code asks which rank it is: others may then do something else."""

    def noted(before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        _note(report)
        return before(*args, **kwargs)

    def looked_up(before: Callable[..., Any], self: Any, name: Any) -> Any:
        if name in NAMES and self is os.environ:
            _note(report)
        return before(self, name)

    lookup = lambda before: partial(looked_up, before)
    with (
        replaced(dist, "get_rank", lambda before: partial(noted, before), everywhere=True),
        replaced(type(os.environ), "__getitem__", lookup, everywhere=True),
    ):
        yield


def _note(report: RankReport) -> None:
    frame = _frame_outside((*BETWEEN, *LIBRARIES))
    file = "" if frame is None else frame.f_code.co_filename
    if frame is not None and not report.asked_rank and not file.startswith((OURS, TORCH)):
        report.asked_rank = f"{near(file)}:{frame.f_lineno}"


@contextmanager
def as_on_gpus() -> Iterator[None]:
    """Groups are those that ranks on GPUs have, but that all of them are fake."""
    made = Mesh.of.__func__  # type: ignore[attr-defined]

    def of(plan: Any, rank: int, size: int, **how: Any) -> Mesh:
        return made(Mesh, plan, rank, size, two_sums=True)

    def new_group(before: Callable[..., Any], *args: Any, backend: Any = None, **how: Any) -> Any:
        return before(*args, **how)

    with (
        replaced(Mesh, "of", lambda before: of, bind=staticmethod, real=of),
        replaced(dist, "new_group", lambda before: partial(new_group, before), everywhere=True),
    ):
        yield
