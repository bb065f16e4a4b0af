"""Training as one rank of a plan does it, inside a distributed test; and what it is held against."""

import sys
from itertools import islice
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import meshfit
from benchmarks.collectives import Collectives
from benchmarks.zoo import ZOO
from meshfit.data.loader import Batch
from meshfit.job import Job
from meshfit.launch.world import World
from meshfit.loop import train
from meshfit.plan import Plan
from meshfit.run import Run

cloudpickle.register_pickle_by_value(sys.modules[__name__])

X = torch.randn(18, 8, generator=torch.Generator().manual_seed(1))
Y = torch.randn(18, 4, generator=torch.Generator().manual_seed(2))
BATCH = 8  # of 18 samples: the third batch has two, and with four ranks two of them none
ADAMW = lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)
SGD = lambda params: torch.optim.SGD(params, lr=3e-2, weight_decay=0.1, momentum=0.9)
FIT = {"loss": F.mse_loss, "optimizer": ADAMW, "batch_size": BATCH, "steps": 3, "devices": "cpu"}


def trained(model: nn.Module, plan: str, *, steps: int = 3, **asked: Any) -> tuple[Run, list[float], list[float]]:
    """Train as a rank does: alone for "data=1", else with the other ranks of this test."""
    alone = plan.startswith("data=1")
    world = World(0 if alone else dist.get_rank(), 1 if alone else dist.get_world_size(), torch.device("cpu"))
    how = {} if "step" in asked else {"loss": F.mse_loss}
    asked = {"data": (X, Y), "optimizer": ADAMW, "batch_size": BATCH, "steps": steps, "plan": plan, **how, **asked}
    job = Job(**{"model": model, **asked}).training().settled(count=world.size, kind="cpu")
    run = Run(job, world)
    seen = list(train(run))
    run.settle()
    return run, [step.loss for step in seen], [step.grad_norm for step in seen]


def counted_step(case: Any, plan: Plan) -> tuple[Job, Run, Batch, Collectives]:
    """The second step of a training in this rank, with two samples in each microbatch of each rank, and what is
    communicated in it: in the first, ranks also say what they have."""
    each = 2 * plan.shares * plan.microbatches
    job = Job(
        model=case.build,
        data=case.data(2 * each),
        loss=case.loss,
        optimizer=torch.optim.AdamW,
        batch_size=each,
        steps=2,
        plan=plan,
        shuffle=False,
    ).settled(count=plan.devices, kind="cpu")
    run = Run(job, World(dist.get_rank(), plan.devices, torch.device("cpu")))
    first, batch = islice(run.batches(), 2)
    run.schedule(first)
    run.exchange.finish()
    run.exchange.clear()
    with Collectives() as seen:
        run.schedule(batch)
        run.exchange.finish()
    return job, run, batch, seen


def built(make: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make()


def assert_verified(name: str, plan: str, *, samples: int, steps: int) -> None:
    """The model ``name`` of the zoo trains like one device; the last of its batches of 8 is a short one."""
    case = ZOO[name]
    verdict = meshfit.verify(
        case.build,
        case.data(samples),
        loss=case.loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        batch_size=8,
        check_steps=steps,
        clip=1.0,
        plan=plan,
        devices=f"cpu:{Plan.parse(plan).devices}",
    )
    assert verdict.equal, verdict


def assert_near(got: dict[str, Any], want: dict[str, Any]) -> None:
    """Tensor by tensor, as vectors: an adaptive optimizer makes much of the rounding of single elements."""
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        kind = torch.complex128 if tensor.is_complex() else torch.float64
        apart = (got[name].to(kind) - tensor.to(kind)).norm()
        assert (name, float(apart)) <= (name, 1e-5 + 1e-4 * float(tensor.to(kind).norm()))


def assert_alike(make: Any, plan: str, *, like: str = "data=1", **asked: Any) -> Run:
    """Losses, norms, weights, buffers and optimizer state are those of one device; and the model is left whole."""
    alone, *wanted = trained(built(make), like, **asked)
    model = built(make)
    before = {name: (p, p.shape, p.stride()) for name, p in model.named_parameters()}
    run, *series = trained(model, plan, **asked)
    torch.testing.assert_close(series, wanted, atol=1e-5, rtol=1e-4)
    want = {name: tensor.detach() for name, tensor in alone.model.state_dict().items()}
    got = run.placed.tensors()
    assert_near({name: got[name] for name in want}, want)
    some = {name for name, p in alone.model.named_parameters() if p.numel()}
    states, held = ({n: state for n, state in r.optimizer_state().items() if state and n in some} for r in (alone, run))
    assert held.keys() == states.keys()
    assert_near(
        *({f"{n} {key}": t for n, state in each.items() for key, t in state.items()} for each in (held, states))
    )
    run.close()
    assert_near(dict(model.state_dict()), want)
    for name, p in model.named_parameters():
        same, shape, stride = before[name]
        assert p is same
        assert p.shape == shape
        assert p.stride() == stride or p.is_contiguous()
    assert not any("forward" in vars(m) or "_call_impl" in vars(m) for m in model.modules())
    return run
