"""What each rank of a rehearsal does: the program of one rank of a plan, up to two steps, alone in its process."""

import os
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
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
    """Whether all ranks are handed the same model; else each builds its own."""
    steps: int = 2

    def __call__(self, world: World, channel: Channel) -> RankReport:
        rank = self.ranks[world.rank]
        report, began = RankReport(rank), time.process_time()
        if not self.same:
            local = {"LOCAL_RANK": rank % self.per_host, "LOCAL_WORLD_SIZE": self.per_host}
            os.environ |= {k: str(v) for k, v in {"RANK": rank, "WORLD_SIZE": self.size, **local}.items()}
        torch.set_num_threads(1 if rank else cores())  # the first rank tries the model, while the others wait
        fake_ranks.connect(rank, self.size, "meta" if self.meta else "cpu")
        log, phase = CollectiveLog(Others(rank, channel), where), ReachedPhase()
        try:
            with log, as_on_gpus(), asking(report), ExitStack() as stack:
                if self.meta:
                    stack.enter_context(without_values())
                self._run(report, rank, world.rank, phase)
        except Exception as error:
            report.failure = failure_of(error, phase.name)
        finally:
            report.log, report.cpu = log.log, time.process_time() - began
            dist.destroy_process_group()
            channel.send(RankEnded())
        return report

    def _run(self, report: RankReport, rank: int, index: int, phase: "ReachedPhase") -> None:
        device = torch.device("meta" if self.meta else "cpu")
        run = Run(self.job, World(rank, self.size, device), same=self.same)
        report.found = dict(run.placed.found) if rank == 0 else {}
        report.notes, report.parameters = list(run.notes), sum(p.nbytes for p in run.model.parameters())
        if run.placed.shards is not None:
            run.placed.shards.lockstep.ahead = True  # as on GPUs
        for each in run.phases:
            each.guard = None  # it looks at gradients of ranks that are not there
        phase.name = "data"
        for share in self.shares[index]:
            self._read(report, run.loader, share)
        seen = run.epochs

        def epochs() -> Iterator[Batch]:
            for batch in seen():
                tell(report, run.share, batch, run.loader)
                phase.name = "second step" if run.step else "first step"
                yield batch
                phase.name = "data"

        run.epochs = epochs  # type: ignore[method-assign]
        for _ in train(run):
            report.steps += 1

    def _read(self, report: RankReport, loader: Loader, share: int) -> None:
        """The samples of the first step that another share of the batch takes."""
        other = replaced_rank(loader, share)
        try:
            tell(report, share, next(iter(other.epoch(0, 0))), other)
        except Exception as error:
            found = failure_of(error, "data")
            raise ShareError(share, found) from error
        finally:
            other.close()


class ShareError(Exception):
    """Samples of another share of the batch cannot be read."""

    def __init__(self, share: int, failure: Failure):
        super().__init__(share, failure)
        self.share, self.failure = share, failure


@dataclass
class ReachedPhase:
    """Where a rank is."""

    name: str = "building"


def replaced_rank(loader: Loader, share: int) -> Loader:
    """The loader of another share of the batch, which reads when it is asked."""
    readers = Readers.of(0)
    return Loader(
        source=loader.source,
        batch_size=loader.batch_size,
        rank=share,
        ranks=loader.ranks,
        device=loader.device,
        microbatches=loader.microbatches,
        seed=loader.seed,
        shuffle=loader.shuffle,
        workers=readers.workers,
        kind=readers.kind,
    )


def tell(report: RankReport, share: int, batch: Batch, loader: Loader) -> None:
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
    if isinstance(error, ShareError):
        return replace(error.failure, share=error.share)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((OURS, TORCH, *LIBRARIES))]
    line = f"{near(own[-1].filename)}:{own[-1].lineno}" if own else ""
    first, *rest = [*(str(error).splitlines() or [""]), *getattr(error, "__notes__", [])]
    headline = first if isinstance(error, MeshfitError) else f"{type(error).__name__}: {first}"
    trace = "".join(traceback.format_exception(error))
    return Failure(
        phase, headline, tuple(fact.strip() for fact in rest[:6]), line, trace, waits=isinstance(error, NeverHeard)
    )


def near(file: str) -> str:
    """A path, from the current folder if it is in there."""
    here = os.getcwd() + os.sep
    return file.removeprefix(here)


def where() -> str:
    """The line that issued a collective: the user's, or ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((*BETWEEN, TORCH, *LIBRARIES)):
        frame = frame.f_back
    if frame is None:
        return ""
    file = frame.f_code.co_filename
    name = file.removeprefix(os.path.dirname(OURS.rstrip(os.sep)) + os.sep)
    return sys.intern(f"{name if file.startswith(OURS) else near(file)}:{frame.f_lineno}")


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

    with ExitStack() as stack:
        stack.enter_context(replaced(dist, "get_rank", lambda before: partial(noted, before), everywhere=True))
        lookup = partial(replaced, type(os.environ), "__getitem__", everywhere=True)
        stack.enter_context(lookup(lambda before: partial(looked_up, before)))
        yield


def _note(report: RankReport) -> None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((*BETWEEN, *LIBRARIES)):
        frame = frame.f_back
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
