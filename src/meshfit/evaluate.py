"""``meshfit.evaluate`` and ``meshfit.predict``: a trained model over many devices, every sample once.

Results come back on the CPU, in the order of the samples.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from meshfit.data import tree
from meshfit.data.loader import Loader
from meshfit.data.source import Stream, few_samples, open_source
from meshfit.drive import everywhere
from meshfit.errors import clearly
from meshfit.evaluation import measure, outputs_of
from meshfit.job import Job
from meshfit.launch.world import World, from_environment
from meshfit.layout.precision import Precision
from meshfit.objective import TARGETS, Over, find_over
from meshfit.plan import Plan


@clearly
def evaluate(model: Any, data: Any, **asked: Any) -> dict[str, float]:
    """The loss and the metrics of ``model`` over ``data``: means in which every sample counts once.

    Takes of ``fit``'s keywords: loss, step, metrics, batch_size, plan, devices, precision.
    """
    job = _settled({"model": model, "data": data, "valid": data, **asked})
    return everywhere(job, _Evaluate(replace(job, model=job.build())))[0]


@clearly
def predict(model: Any, data: Any, **asked: Any) -> Any:
    """``model``'s outputs for every sample of ``data``, in order, on the CPU.

    ``data`` is given as to ``fit``: targets, the last of a tuple, are left out. Takes batch_size, plan, devices,
    precision.
    """
    job = _settled({"model": model, "data": data, **asked})
    parts = [part for found in everywhere(job, _Predict(replace(job, model=job.build()))) for part in found]
    return tree.concatenate([outputs for _, outputs in sorted(parts, key=lambda part: part[0])])


def _settled(asked: dict[str, Any]) -> Job:
    given = from_environment()
    job = Job.of(asked)
    return job.settled() if given is None else job.settled(count=given.size, kind=given.device.type)


@dataclass(frozen=True)
class _Evaluate:
    job: Job

    def __call__(self, world: World) -> dict[str, float]:
        job, loader, precision, model = _prepare(self.job, world)
        few = None if isinstance(loader.source, Stream) else few_samples(loader.source)
        own = job.loss is None and job.step is None
        known = not own or (isinstance(few, Mapping) and any(key in few for key in TARGETS))
        objective = job.objective if known else None
        over = Over() if few is None or objective is None else find_over(objective, model, few, world.device)
        return measure(model, loader, objective=objective, over=over, metrics=job.metrics, precision=precision)


@dataclass(frozen=True)
class _Predict:
    job: Job

    def __call__(self, world: World) -> list[tuple[int, Any]]:
        _, loader, precision, model = _prepare(self.job, world)
        return list(outputs_of(model, loader, precision))


def _prepare(job: Job, world: World):
    assert isinstance(job.plan, Plan)
    assert isinstance(job.batch_size, int)
    loader = Loader(
        source=open_source(job.data),
        batch_size=job.batch_size,
        rank=world.rank,
        ranks=world.size,
        device=world.device,
        shuffle=False,
    )
    return job, loader, Precision(job.plan.precision), job.build().to(world.device)
