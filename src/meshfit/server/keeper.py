"""What a model server owns: some of the weights, their optimizer, and the sum of their gradients.

It knows nothing of workers or connections: gradients are given to it dtype by dtype (exchange/parcel.py), and it steps.

    memory   weights, one gradient, optimizer state of its share; an averaged copy with ema
"""

import warnings
from collections.abc import Collection
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from meshfit.anatomy.probe_optimizer import probe_optimizer
from meshfit.errors import PlanError
from meshfit.exchange.parcel import Parcel, shares
from meshfit.exchange.update import Average, Update, Updated, total_norm
from meshfit.optimizers import Optimizers
from meshfit.server.running_statistics import RunningStatistics


class Keeper:
    """Of server ``index`` of ``servers``: its share of ``model``, which is moved into one buffer, in place.

    ``optimizer`` has all parameters, as on one device, so that groups and schedules are as there; what other servers
    own is then forgotten, and its memory freed. ``scheduler``, ``ema`` and ``clip`` are as in ``Update``; ``late`` as
    in a plan.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        scheduler: Any = None,
        *,
        index: int = 0,
        servers: int = 1,
        clip: float | None = None,
        ema: float | None = None,
        late: str = "none",
    ):
        if servers > 1 and not (kind := probe_optimizer(optimizer)).separate:
            raise PlanError(
                f"server={servers}: parts of the model are stepped apart, which {type(optimizer).__name__} cannot",
                kind.why,
                "server=1 works",
            )
        self.parameters = shares(model, servers)[index]
        self.statistics = RunningStatistics({}) if index else RunningStatistics.of(model)
        """BatchNorm's, of the whole model: the first server keeps them."""
        self.optimizer, self.scheduler, self.late = optimizer, scheduler, late
        mine = set(self.parameters.values())
        _restrict(optimizer, mine)
        for p in model.parameters():
            if p not in mine:
                p.data = torch.empty(0, dtype=p.dtype)
        self.parcel = Parcel.of(self.parameters)
        self.weights = torch.zeros(self.parcel.bytes, dtype=torch.uint8)
        for name, view in self.parcel.views(self.weights).items():
            p = self.parameters[name]
            view.copy_(p.detach())
            p.data, p.grad = view, None
        gradient = torch.zeros_like(self.weights)
        self._views, self.gradients = self.parcel.views(gradient), self.parcel.flats(gradient)
        """The sum: by name, and by dtype."""
        sparse = any(getattr(module, "sparse", False) for module in model.modules())
        self.update = Update(optimizer, clip=clip, may_fuse=not sparse)
        self.average = None if ema is None else Average(nn.ParameterList(self.parameters.values()), ema)
        self.steps = 0
        """Of the schedule."""

    def load(self, flats: list[Tensor], *, add: bool = False) -> None:
        """Take these gradients for the sum, or ``add`` them to it."""
        for mine, theirs in zip(self.gradients, flats, strict=True):
            mine.add_(theirs) if add else mine.copy_(theirs)

    def step(
        self,
        reached: set[str],
        *,
        loss: float,
        correction: float,
        norm: float,
        staleness: int = 0,
        usual: float = 0.0,
        ticks: int = 1,
    ) -> Updated:
        """Step with the sum. ``norm`` is of the gradients of all servers. ``usual``: the mean staleness; ``ticks``: by
        how many steps the schedule (and the average) goes on."""
        for name, p in self.parameters.items():
            p.grad = self._views[name] if name in reached else None
        with self._adapted(staleness, usual):
            updated = self.update(self.gradients, loss, correction, torch.tensor(norm, dtype=torch.float64))
        for _ in range(ticks):
            if self.scheduler is not None and updated.taken:
                self.scheduler.step()
                self.steps += 1
            if self.average is not None:
                self.average.update()
        for p in self.parameters.values():
            p.grad = None
        return updated

    @contextmanager
    def _adapted(self, staleness: int, usual: float):
        """late=damp: a gradient that is t updates late steps by 1/(1+t) of the learning rate. late=shorten: late
        gradients are momentum of their own, so the optimizer's memory, 1/(1-m) steps, is made shorter by as many steps
        as gradients are usually late."""
        groups = self.optimizer.param_groups
        before = [{key: group[key] for key in ("lr", "momentum", "betas") if key in group} for group in groups]
        for group in groups:
            if self.late == "damp":
                group["lr"] = group["lr"] / (1 + staleness)
            if self.late == "shorten" and group.get("momentum"):
                group["momentum"] = shortened(group["momentum"], usual)
            if self.late == "shorten" and "betas" in group:
                group["betas"] = (shortened(group["betas"][0], usual), *group["betas"][1:])
        try:
            yield
        finally:
            for group, kept in zip(groups, before, strict=True):
                group.update(kept)

    def square(self) -> float:
        """The squared norm of the sum."""
        return squared(self.gradients)

    @property
    def bytes(self) -> int:
        """That go down to a worker."""
        return self.parcel.bytes + self.statistics.bytes

    def fill(self, down: Tensor, *, averaged: bool = False) -> None:
        """Write the weights, and the statistics behind them, to ``down``."""
        if averaged and self.average is not None:
            views = self.parcel.views(down[: self.parcel.bytes])
            for name, tensor in zip(self.parameters, self.average.weights, strict=True):
                views[name].copy_(tensor)
        else:
            down[: self.parcel.bytes].copy_(self.weights)
        down[self.parcel.bytes :].copy_(self.statistics.buffer)

    # What a snapshot holds

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors (copied) and plain facts from which ``restore`` can go on."""
        tensors = {"weights": self.weights.clone(), "statistics": self.statistics.buffer.clone()}
        facts: dict[str, Any] = {"digest": self.parcel.digest, "steps": self.steps, "state": {}, "groups": []}
        for name, p in self.parameters.items():
            held = self.optimizer.state.get(p, {})
            facts["state"][name] = {k: v for k, v in held.items() if isinstance(v, int | float | None | bool)}
            tensors |= {f"state/{name}/{k}": v.detach().clone() for k, v in held.items() if isinstance(v, Tensor)}
        for group in self.optimizer.param_groups:
            plain = {k: list(v) if isinstance(v, tuple) else v for k, v in group.items() if k != "params"}
            facts["groups"].append({k: v for k, v in plain.items() if _plain(v)})
        if self.average is not None:
            tensors |= {f"average/{n}": t.clone() for n, t in zip(self.parameters, self.average.weights, strict=True)}
        if self.scheduler is not None:
            schedule = self.scheduler.state_dict()
            facts["schedule"] = schedule if _plain(schedule) else None
        return tensors, facts

    @torch.no_grad()
    def restore(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        if facts["digest"] != self.parcel.digest:
            raise ValueError("the snapshot is of another model, or of another split over servers")
        self.weights.copy_(tensors["weights"])
        self.statistics.buffer.copy_(tensors["statistics"])
        for name, p in self.parameters.items():
            held: dict[str, Any] = dict(facts["state"].get(name, {}))
            for key in (key for key in tensors if key.startswith(f"state/{name}/")):
                kept = tensors[key]
                held[key.removeprefix(f"state/{name}/")] = (
                    torch.empty_like(p, dtype=kept.dtype).copy_(kept) if kept.shape == p.shape else kept.clone()
                )
            if held:
                self.optimizer.state[p] = held
        self.steps = facts["steps"]
        load_schedule(self.optimizer, self.scheduler, facts)
        if self.average is not None:
            for name, mine in zip(self.parameters, self.average.weights, strict=True):
                mine.copy_(tensors[f"average/{name}"])


def load_schedule(optimizer: Optimizers, scheduler: Any, facts: dict[str, Any], done: int = 0) -> None:
    """Have ``scheduler``, which has been stepped ``done`` times, and the groups of ``optimizer`` as a keeper's facts
    say."""
    if scheduler is not None and facts["schedule"] is not None:
        scheduler.load_state_dict(facts["schedule"])
    elif scheduler is not None:  # its state is not plain values: stepped to where it was
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the optimizer has not stepped
            for _ in range(done, facts["steps"]):
                scheduler.step()
    for group, kept in zip(optimizer.param_groups, facts["groups"], strict=True):
        group.update({k: tuple(v) if isinstance(group.get(k), tuple) else v for k, v in kept.items()})


def _restrict(optimizer: Optimizers, kept: Collection[nn.Parameter]) -> None:
    """Let ``optimizer`` forget all parameters but ``kept``. Its groups stay, some maybe empty: schedules count them."""
    for group in optimizer.param_groups:
        names = group.get("param_names")
        if names is not None:
            group["param_names"] = [n for n, p in zip(names, group["params"], strict=True) if p in kept]
        group["params"] = [p for p in group["params"] if p in kept]
    for p in [p for p in optimizer.state if p not in kept]:
        del optimizer.state[p]


def shortened(momentum: float, steps: float) -> float:
    """Momentum with a memory, 1/(1-m), shorter by ``steps``; 0 where none is left."""
    return 1.0 - 1.0 / max(1.0, 1.0 / (1.0 - momentum) - steps) if momentum < 1.0 else momentum


def squared(flats: list[Tensor]) -> float:
    return float(total_norm(flats).double().square())


def _plain(value: Any) -> bool:
    """Whether JSON gives it back as it is."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _plain(one) for key, one in value.items())
    if isinstance(value, list):
        return all(_plain(one) for one in value)
    return value is None or isinstance(value, bool | int | float | str)
