"""meshfit: train any PyTorch module over many devices, proven equal to one.

import meshfit

result = meshfit.fit(model, (x, y), loss=F.cross_entropy, optimizer=torch.optim.AdamW, epochs=5, plan="data=4")
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from meshfit.errors import CheckpointError, DataError, JobError, MeshfitError, NonFiniteError, PlanError, RankError
from meshfit.version import VERSION

if TYPE_CHECKING:
    from meshfit import data
    from meshfit.checkpoint.weights import load_weights
    from meshfit.evaluate import evaluate, predict
    from meshfit.fit import fit, steps
    from meshfit.job import Job
    from meshfit.loss.gather import gather
    from meshfit.phases import every
    from meshfit.plan import Plan
    from meshfit.planner.cluster import Cluster
    from meshfit.rehearse import Rehearsal, rehearse
    from meshfit.result import Result
    from meshfit.step import Step
    from meshfit.verify import Verdict, verify

__version__ = VERSION

__all__ = [
    "CheckpointError",
    "Cluster",
    "DataError",
    "Job",
    "JobError",
    "MeshfitError",
    "NonFiniteError",
    "Plan",
    "PlanError",
    "RankError",
    "Rehearsal",
    "Result",
    "Step",
    "Verdict",
    "data",
    "evaluate",
    "every",
    "fit",
    "gather",
    "load_weights",
    "predict",
    "rehearse",
    "steps",
    "verify",
]

_MODULES = {
    "Cluster": "meshfit.planner.cluster",
    "Job": "meshfit.job",
    "Plan": "meshfit.plan",
    "Rehearsal": "meshfit.rehearse",
    "Result": "meshfit.result",
    "Step": "meshfit.step",
    "Verdict": "meshfit.verify",
    "every": "meshfit.phases",
    "gather": "meshfit.loss.gather",
    "load_weights": "meshfit.checkpoint.weights",
    "predict": "meshfit.evaluate",
    "steps": "meshfit.fit",
}


def __getattr__(name: str) -> Any:
    """Import a public name, or a submodule, when it is first asked for: torch alone takes seconds."""
    where = _MODULES.get(name, f"{__name__}.{name}")
    try:
        module = import_module(where)
    except ModuleNotFoundError as error:
        if error.name != where:
            raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    return globals()[name] if name in globals() else getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """``meshfit.fit`` is the function, though the import of the module of that name would set the module."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("evaluate", "fit", "rehearse", "verify") and isinstance(value, ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)

    def __reduce__(self) -> Any:  # else a function that names ``meshfit`` could not be sent to ranks
        return import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Package
