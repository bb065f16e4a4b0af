"""Sharded data parallelism (ZeRO): the ranks of the ``shard`` axis keep 1/n each, and gather what they need.

    zero=1   optimizer state cut; weights whole; gradients whole over several microbatches, scattered once a step
    zero=2   gradients cut too: scattered every microbatch
    zero=3   weights cut too: a unit's are gathered for its forward, and again for its backward

    memory   P/n of each kind that is cut, P of the others; zero=3 beside it the whole's own unit and the largest
             other one (on GPUs the two largest that follow each other)
    traffic  gathers: P(n-1)/n a step for zero=1 and 2, twice that a microbatch for zero=3; for scatters see
             exchange/scatter.py

Under bf16 and fp16 the weights that autocast would round anyway (those of Linear and convolutions, where nothing else
uses them) are gathered in that precision: half the bytes, the same numbers. A module that runs with autocast off is
found out at its first call, and its unit gathered as it is from then on. The parts that the optimizer steps stay as
they were built.

Not torch's FSDP2, for what it cannot do (docs/LOG.md): units that are there for several calls but not between them,
scalars, several dtypes in a block, ranks that differ in which parameters they reach, outputs that are views, parts
equal to the element, an optimizer that was made before.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshfit.anatomy.trace import Trace
from meshfit.axes.forward import wrap
from meshfit.axes.precision import DTYPES
from meshfit.axes.shard.cost import shard_cost
from meshfit.axes.shard.gather import Shards
from meshfit.axes.shard.open_unit import OpenUnit
from meshfit.axes.shard.units import ROUNDED, Unit
from meshfit.comm.flat import Flat
from meshfit.cost import Cost
from meshfit.plan import Plan
from meshfit.torch_private import has_forward_hooks, own_buffers, own_parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """Cut a model's parameters over the ``shard`` axis."""

    degree: int
    zero: int = 3
    units: tuple[Unit, ...]
    gathered: torch.dtype | None = None
    """What weights are gathered as where that changes nothing; None: as they are."""

    home: str = "device"
    """Where the parts live: "device", or "host" (and come to the device when gathered)."""

    @classmethod
    def of(cls, plan: Plan, units: tuple[Unit, ...]) -> "Shard":
        """What a plan says of it, for the units of one model."""
        return cls(
            degree=plan.shard,
            zero=plan.zero,
            units=units,
            gathered=DTYPES.get(plan.precision),
            home="host" if plan.offload == "parameters" else "device",
        )

    def apply(
        self,
        model: nn.Module,
        group: dist.ProcessGroup | None,
        device: torch.device,
        *,
        peers: dist.ProcessGroup | None = None,
    ) -> Shards:
        """Cut ``model`` in place. It may lie in host memory: only parts of it go to the device. ``peers``: the ranks
        that run the same modules on other samples, in ``group`` and in others."""
        rank = 0 if group is None else dist.get_rank(group)
        places: dict[str, list[tuple[nn.Module, str]]] = defaultdict(list)
        named = dict(model.named_parameters())
        names = {id(p): name for name, p in named.items()}
        for module in model.modules():
            for name, parameter in own_parameters(module).items():
                if parameter is not None:
                    places[names[id(parameter)]].append((module, name))
        opened = []
        ordered_units = sorted(self.units, key=lambda unit: unit.entrances != ("",))
        for index, unit in enumerate(ordered_units):
            kinds: dict[Any, list[str]] = defaultdict(list)
            for name in unit.parameters:
                if (p := named[name]).is_floating_point() or p.is_complex():
                    gathered = self._gathered_as(p, places[name]) if name in unit.rounded else p.dtype
                    kinds[p.dtype, p.requires_grad, gathered, unit.row(name)].append(name)
            flats, ordered = [], []
            for (_, _, gathered, _), together in kinds.items():
                flats.append(self._flat([named[name] for name in together], rank, gathered, device))
                ordered += [places[name] for name in together]
            recurrent = {m for each in ordered for m, _ in each if isinstance(m, nn.RNNBase)}
            narrow = self.gathered if any(flat.gathered != flat.dtype for flat in flats) else None
            opened.append(OpenUnit(index, flats, ordered, list(recurrent), narrow=narrow))
        shards = Shards(opened, zero=self.zero, group=group, device=device, peers=peers)
        for unit, open_unit in zip(ordered_units, opened, strict=True):
            entrances = [model.get_submodule(path) for path in unit.entrances if path]
            # Modules that hold a parameter of the unit open it too: where they are called without the entrance, as when
            # part of a block is computed again in backward.
            holders = [module for places in open_unit.places for module, _ in places]
            for module in dict.fromkeys((*entrances, *holders)) if open_unit.flats else ():
                wrap(module, shards.around(open_unit, rounds=bool(open_unit.narrow) and isinstance(module, ROUNDED)))
                if has_forward_hooks(module):
                    shards.around_hooks(module, open_unit)
        _rest_to(model, device, set(shards.place))
        return shards

    def cost(
        self,
        trace: Trace,
        *,
        copies: int = 1,
        microbatches: int = 1,
        ahead: bool = False,
        accumulate: bool = False,
    ) -> tuple[Trace, Cost]:
        """On the first rank, a step. ``ahead``: units are gathered ahead of their use, as on GPUs. ``accumulate``:
        whole gradients are summed over microbatches, as in a pipeline. In the trace that is returned, parameters are
        what the optimizer steps."""
        return shard_cost(
            trace,
            self.units,
            degree=self.degree,
            copies=copies,
            zero=self.zero,
            microbatches=microbatches,
            gathered=None if self.gathered is None else self.gathered.itemsize,
            ahead=ahead,
            host=self.home == "host",
            accumulate=accumulate or (self.zero == 1 and microbatches > 1),
        )

    def _gathered_as(self, p: nn.Parameter, places: list[tuple[nn.Module, str]]) -> torch.dtype:
        rounded = all(any(type(module).forward is kind.forward for kind in ROUNDED) for module, _ in places)
        return self.gathered if self.gathered and rounded and p.dtype == torch.float32 else p.dtype

    def _flat(self, parameters: list[nn.Parameter], rank: int, gathered: torch.dtype, device: torch.device) -> Flat:
        flat = Flat(parameters, self.degree, rank, gathered)
        if self.zero < 3 and gathered == flat.dtype and self.home == "device":  # the part is in the whole
            flat.whole = torch.empty(flat.padded, dtype=flat.dtype, device=device)
            flat.own(flat.whole[flat.first : flat.first + flat.part])
        elif self.home == "host":
            flat.own(torch.empty(flat.part, dtype=flat.dtype, pin_memory=device.type == "cuda"))
        else:
            flat.own(torch.empty(flat.part, dtype=flat.dtype, device=device))
        return flat


def _rest_to(model: nn.Module, device: torch.device, cut: set[nn.Parameter]) -> None:
    """Move buffers, and the parameters that are not cut, to the device."""
    buffers_to(model, device)
    for parameter in model.parameters():
        if parameter not in cut:
            parameter.data = parameter.data.to(device)


def buffers_to(model: nn.Module, device: torch.device) -> None:
    moved: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in own_buffers(module).items():
            if buffer is not None:
                own_buffers(module)[name] = moved.setdefault(id(buffer), buffer.to(device))
