"""meshfit: train any PyTorch module over many devices, proven equal to one.

import meshfit

result = meshfit.fit(model, (x, y), loss=F.cross_entropy, optimizer=torch.optim.AdamW, epochs=5, plan="data=4")
"""

from meshfit import data
from meshfit.checkpoint.weights import load_weights
from meshfit.errors import CheckpointError, DataError, JobError, MeshfitError, NonFiniteError, PlanError, RankError
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
from meshfit.version import VERSION

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
