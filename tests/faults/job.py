"""The training that faults are injected into: python -m tests.faults.job '{"plan": "data=2", ...}'

It has what a resumed run must bring back: dropout, Adam's moments, a schedule, samples in an order that is shuffled in
each epoch, 77 of them in batches of 8. The last line of its output is a JSON object with a digest of weights, losses,
learning rates and samples, step by step.
"""

import hashlib
import inspect
import json
import os
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import meshfit
from meshfit.launch.devices import Devices
from meshfit.step import Step
from tests.faults.inject import Fault

HANG = 5.0  # seconds


def build(dropout: float = 0.1) -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 32),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(32, 32),
        nn.ReLU(),
        nn.Linear(32, 32),
        nn.Linear(32, 4),
    )


def data(seed: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(77, 8, generator=draw)
    return x, x[:, :4].argmax(1)


def weights(result: meshfit.Result) -> str:
    found = hashlib.sha256()
    for name, tensor in result.model.state_dict().items():
        found.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return found.hexdigest()


def digest(result: meshfit.Result) -> str:
    found = hashlib.sha256(weights(result).encode())
    for step in result.history:
        found.update(repr((step.step, step.loss, step.lr, step.samples)).encode())
    return found.hexdigest()


def patience() -> dict[str, Any]:
    """Short, and by the names that this revision has for it."""
    if "hang_timeout" in inspect.signature(meshfit.fit).parameters:
        return {"hang_timeout": HANG}
    return {"timeout": 2 * HANG}


class HostOfItsOwn:
    """What holds it lets NCCL take the process that it is sent to for a host of its own: two ranks may then share a
    GPU. It works while a rank takes its work over, before it meets the others."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _own_host, ()


def _own_host() -> HostOfItsOwn:
    os.environ["NCCL_HOSTID"] = f"host{os.getpid()}"
    return HostOfItsOwn()


def train(asked: dict[str, Any]) -> dict[str, Any]:
    fault = Fault(**asked.pop("fault")) if asked.get("fault") else None
    asked.pop("fault", None)
    slow, plan, given = asked.pop("step_seconds", 0.0), asked.pop("plan"), data(asked.pop("data_seed", 5))
    torch.manual_seed(0)
    model = build(asked.pop("dropout", 0.1))
    if "valid_every" in asked:
        asked["valid"] = given
    host = HostOfItsOwn()
    adamw = lambda params, host=host: torch.optim.AdamW(params, lr=1e-2)
    devices: Any = Devices("cuda", (0, 0)) if asked.pop("device", "cpu") == "cuda" else "cpu"
    defaults: dict[str, Any] = {
        "loss": F.cross_entropy,
        "optimizer": adamw if fault is None else lambda params: fault.install(adamw(params)),
        "scheduler": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200),
        "batch_size": 8,
        "steps": 60,
        "seed": 3,
        "devices": devices,
        "progress": False,
    }

    def told(step: Step) -> None:
        print(f"step {step.step}", flush=True)
        time.sleep(slow)

    hears = "each_step" if slow else "callbacks"  # which do not hold ranks up
    result = meshfit.fit(model, given, plan=plan, **{hears: [told]}, **(defaults | patience() | asked))
    return {
        "digest": digest(result),
        "weights": weights(result),
        "steps": max(step.step for step in result.history),
        "samples": max(step.samples for step in result.history),
        "losses": {step.step: step.loss for step in result.history},
        "notes": list(result.notes),
    }


if __name__ == "__main__":
    try:
        print(json.dumps(train(json.loads(sys.argv[1]))), flush=True)
    except meshfit.MeshfitError as error:
        print(f"meshfit: {error}", file=sys.stderr)
        sys.exit(1)
