"""A model laid out over the ranks: the strategies of a plan, applied in their order.

What they need to know of the model (its units, its blocks) is found once, on the first rank, from one traced step, and
sent to the others: all must cut alike.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshfit.anatomy.again import recomputed_blocks
from meshfit.anatomy.record import TraceError
from meshfit.anatomy.trace import Trace
from meshfit.data import tree
from meshfit.errors import PlanError
from meshfit.layout.batchnorm import batch_norms
from meshfit.layout.compile import Blocks, compilable
from meshfit.layout.forward import is_wrapped, unwrap, wrap
from meshfit.layout.gather import Shards
from meshfit.layout.mesh import Mesh
from meshfit.layout.recompute import Recompute
from meshfit.layout.replicate import Replicate, check_ties, tied
from meshfit.layout.shard import Shard
from meshfit.layout.tensor import Parts
from meshfit.layout.tensor import Tensor as TensorAxis
from meshfit.layout.tensor_plan import plan_tensor
from meshfit.layout.tensor_region import TensorPlan
from meshfit.layout.units import Unit, traced, units
from meshfit.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the plan's strategies act on in one model."""

    tensor: TensorPlan | None = None
    units: tuple[Unit, ...] = ()
    blocks: tuple[str, ...] = ()
    """To compute again in backward."""
    compiled: tuple[str, ...] = ()
    """Blocks that can be compiled."""
    notes: tuple[str, ...] = ()


@dataclass
class Placed:
    """A model on this rank."""

    model: nn.Module
    mesh: Mesh
    parts: Parts | None = None
    """Of operations that are cut over the tensor axis."""
    shards: Shards | None = None
    compiled: Blocks | None = None
    """Where blocks can be compiled, but not the whole."""
    notes: list[str] = field(default_factory=list)

    @property
    def together(self) -> bool:
        """Whether the ranks meet in every forward: then all must run it, also those without a sample."""
        return self.shards is not None

    @property
    def plain(self) -> bool:
        """Whether nothing acts inside the model: only then can it be compiled as a whole."""
        return (
            self.shards is None
            and self.parts is None
            and not any(is_wrapped(module) for module in self.model.modules())
        )

    def inside(self) -> AbstractContextManager[None]:
        """Around whatever runs the model."""
        return nullcontext() if self.shards is None else self.shards.inside()

    def changed(self) -> None:
        """Call when weights were changed by other means than a step."""
        if self.shards is not None:
            self.shards.changed()

    def tensors(self, *, keep: bool = True) -> dict[str, Tensor]:
        """All weights and buffers, whole, on the CPU. All ranks call it together; those that do not ``keep`` them get
        none, and hold one at a time."""
        found, seen = {}, {}
        named = (
            *self.model.named_parameters(remove_duplicate=False),
            *self.model.named_buffers(remove_duplicate=False),
        )
        for name, tensor in named:
            if tensor not in seen:
                whole = self._whole(tensor, tensor.detach())
                seen[tensor] = whole.cpu().clone() if keep else None
            found[name] = seen[tensor]
        return found if keep else {}

    def wholes(self, mine: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """Tensors that go with parameters (gradients, optimizer state), whole, on the CPU: by the parameter's name,
        then by a name of their own. A rank without a slice of a parameter may lack them. All ranks call it together."""
        named = dict(self.model.named_parameters())
        if self.shards is None and self.parts is None:
            return {name: {key: t.detach().cpu().clone() for key, t in many.items()} for name, many in mine.items()}
        said: dict[str, dict[str, Tensor | torch.dtype]] = {}  # a dtype: it lies as the parameter does
        for name, many in mine.items():
            p = named[name]
            if p.numel() or not (self.shards and p in self.shards.place):  # else no optimizer ever steps it
                alike = {key: t.dim() and t.numel() == p.numel() for key, t in many.items()}
                said[name] = {key: t.dtype if alike[key] else t.cpu() for key, t in many.items()}
        every: list[Any] = [said]
        if self.mesh.world is not None:
            every *= dist.get_world_size(self.mesh.world)
            dist.all_gather_object(every, said, group=self.mesh.world)
        found: dict[str, dict[str, Tensor]] = {}
        for name, p in named.items():
            for key in dict.fromkeys(key for each in every for key in each.get(name, {})):
                value = next(each[name][key] for each in every if key in each.get(name, {}))
                if isinstance(value, torch.dtype):
                    value = self._whole(p, mine.get(name, {}).get(key), value).cpu().clone()
                found.setdefault(name, {})[key] = value
        return found

    def _whole(self, tensor: Tensor, mine: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        """All of what lies as ``tensor``, a parameter or buffer, does, and of which this rank has ``mine``."""
        if self.shards is not None and tensor in self.shards.place:
            mine = self.shards.whole(tensor, mine)  # type: ignore[arg-type]
        if mine is None:
            mine = torch.zeros_like(tensor, dtype=dtype)
        return mine if self.parts is None else self.parts.whole(tensor, mine)

    def undo(self) -> None:
        """Leave the model as it was found, but trained: whole, with its own forwards."""
        if self.shards is not None:
            self.shards.undo(torch.device("cpu"))
        if self.parts is not None:
            self.parts.undo()
        unwrap(self.model)


def place(
    plan: Plan,
    model: nn.Module,
    mesh: Mesh,
    device: torch.device,
    *,
    objective: Callable[[nn.Module, Any], Any],
    few: Callable[[], Any],
    same: bool,
    before_cut: Callable[[], None] = lambda: None,
) -> Placed:
    """Lay ``model`` out under ``plan``, in place. ``few`` gives some samples, for tracing a step.

    ``before_cut`` is called while the parameters are still whole: an optimizer made there sees their shapes.
    """
    ties = tied(model)
    acts_inside = plan.cuts or plan.recompute == "full" or (plan.joins_batchnorms and bool(batch_norms(model)))
    in_blocks = plan.compile == "block" or (plan.compile == "auto" and device.type == "cuda" and acts_inside)
    in_blocks &= plan.tensor == 1
    found = Found()
    if plan.cuts or plan.tensor > 1 or plan.recompute != "none" or in_blocks:
        found = _agreed(lambda: find(plan, model, objective, few(), device.type), mesh)
    if not plan.cuts and plan.tensor == 1:  # else only parts of it go there
        model.to(device)
    Replicate(degree=plan.shares, global_batchnorm=plan.batchnorm == "global").apply(
        model, mesh, same=same, device=device
    )
    before_cut()
    blocks = Blocks(model, found.compiled) if in_blocks and found.compiled else None
    placed = Placed(model, mesh, compiled=blocks, notes=list(found.notes))
    if found.tensor is not None:
        assert mesh.tensor is not None
        placed.parts = TensorAxis(degree=plan.tensor, plan=found.tensor).apply(model, mesh.tensor)
    if plan.cuts:
        placed.shards = Shard.of(plan, found.units).apply(model, mesh.shard, device)
        for path in found.blocks:  # computed again in backward, where nothing holds the whole's own open
            wrap(model.get_submodule(path), placed.shards.around(placed.shards.units[0]))
    else:
        model.to(device)
    if plan.recompute != "none":
        Recompute(word=plan.recompute, blocks=found.blocks).apply(model)
    check_ties(model, ties)
    return placed


def find(
    plan: Plan, model: nn.Module, objective: Callable[[nn.Module, Any], Any], batch: Any, device: str = "cuda"
) -> Found:
    """What the strategies of a plan act on, from one step of the model."""
    found = Found()
    if plan.tensor > 1:
        split = plan_tensor(model, lambda twin: _number(objective(twin, batch)), plan.tensor)
        if not split.regions:
            raise _splits_nothing(plan, split)
        found = replace(found, tensor=split, notes=tuple(str(split).splitlines()[:1]))
    if not plan.cuts and plan.recompute == "none" and plan.compile != "block" and device == "cpu":
        return found
    names = tuple(name for name, _ in model.named_parameters())
    trace = traced(model, objective, batch, device=device)
    if isinstance(trace, TraceError):
        why = f"the model cannot be traced ({trace.headline})"
        notes = []
        if plan.cuts:
            notes.append(f"shard: all parameters are gathered together, because {why}")
        if plan.recompute != "none":
            notes.append(f"recompute: none, because {why}")
        if plan.compile == "block":
            notes.append(f"compile: none, because {why}")
        return replace(found, units=(Unit(("",), names),), notes=(*found.notes, *notes))
    _check_changes(plan, trace)
    blocks = () if plan.recompute == "none" else recomputed_blocks(trace)
    compiled = compilable(trace, global_batchnorm=plan.joins_batchnorms)
    return replace(found, units=units(trace, names), blocks=blocks, compiled=compiled)


def _splits_nothing(plan: Plan, split: TensorPlan) -> PlanError:
    return PlanError(
        f"{plan}: tensor={plan.tensor} splits nothing of this model",
        *(f"{name}: {why}" for name, why in list(split.why.items())[:3]),
        *split.notes[:2],
        f"{replace(plan, tensor=1, data=plan.data * plan.tensor)} works",
    )


def _number(result: Any) -> Tensor:
    """What a step came to, as one number to go backward from."""
    if isinstance(result, tuple | list) and len(result) == 2 and isinstance(result[0], Tensor) and not result[0].dim():
        return result[0]  # a sum, and what it is over
    if isinstance(result, Tensor) and not result.dim():
        return result
    made = [t for t in tree.tensors(result) if t.is_floating_point() and t.requires_grad]
    return torch.stack([t.float().square().mean() for t in made]).sum() if made else torch.zeros(())


def _check_changes(plan: Plan, trace: Trace) -> None:
    """Weights that a step changes by itself must be the ones at rest, not copies gathered for a call."""
    changed = [(name, event.line) for event in trace.events for name in event.changes if name in trace.parameters]
    if changed and plan.zero == 3 and plan.cuts:
        whole = replace(plan, zero=2) if plan.shard > 1 else replace(plan, offload="optimizer")
        raise PlanError(
            f"{plan}: the model's own code changes {changed[0][0]}",
            f"at {changed[0][1]}: on a device that keeps a slice of it, what is changed is a copy",
            f"{whole} works: every device then holds it whole",
        )


def _agreed(find: Callable[[], Found], mesh: Mesh) -> Found:
    """What the first rank finds, on all ranks; its error too."""
    if mesh.world is None:
        return find()
    found: list[Any] = [None]
    if mesh.rank == 0:
        try:
            found[0] = find()
        except Exception as error:
            found[0] = error
    dist.broadcast_object_list(found)
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]
