"""A model laid out over the ranks: the strategies of a plan, applied in their order.

What they need to know of the model is found before: see find.py.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshfit.axes.branch.axis import Branch, Branched
from meshfit.axes.buffers import check as check_buffers
from meshfit.axes.buffers.find import Written
from meshfit.axes.buffers.find import find as find_written
from meshfit.axes.buffers.step import Buffers, look_away_from
from meshfit.axes.compile import Blocks
from meshfit.axes.context.axis import Context
from meshfit.axes.context.piece import gathered_output, guarded
from meshfit.axes.data import batchnorm
from meshfit.axes.data.axis import Replicate, check_ties, tied
from meshfit.axes.data.batchnorm import batch_norms
from meshfit.axes.expert import balance
from meshfit.axes.expert.axis import Expert, Owned
from meshfit.axes.find import Found, find, pipeline_of, split_of_part
from meshfit.axes.forward import is_wrapped, unwrap, wrap
from meshfit.axes.mesh import Mesh
from meshfit.axes.pipeline.axis import Staged
from meshfit.axes.pipeline.cut import Shell
from meshfit.axes.pipeline.weights import collect
from meshfit.axes.precision import Precision
from meshfit.axes.recompute.axis import Recompute
from meshfit.axes.shard.axis import Shard, buffers_to
from meshfit.axes.shard.gather import Shards
from meshfit.axes.tensor.axis import Parts
from meshfit.axes.tensor.axis import Tensor as TensorAxis
from meshfit.axes.tensor.ops import Group
from meshfit.axes.tensor.vocabulary import whole_output
from meshfit.comm.transport import Transport
from meshfit.plan import Plan
from meshfit.schedule.issue import pairs
from meshfit.schedule.pipeline import Forward


@dataclass
class Placed:
    """A model on this rank."""

    model: nn.Module
    """All of it, or with a pipeline or branches what this rank holds of it."""
    mesh: Mesh
    staged: Staged | None = None
    """This rank's stages of a pipeline."""
    transport: Transport | None = None
    """Between them and those of other ranks."""
    branched: Branched | None = None
    """This rank's branches."""
    parts: list[Parts | Owned] = field(default_factory=list)
    """Cuts of parameters, from the outside in: of operations over the tensor axis, then of experts over theirs."""
    groups: dict[str, Group] = field(default_factory=dict)
    """By axis: the ranks over which activations are split."""
    partial: tuple[str, ...] = ()
    """Parameters of the whole model of whose gradient several ranks of that axis have a part."""
    guards: ExitStack = field(default_factory=ExitStack)
    """What is to be undone at the end, beside what is put around forwards."""
    shards: Shards | None = None
    balances: bool = False
    """Whether an auxiliary loss is one over all ranks."""
    compiled: Blocks | None = None
    """Where blocks can be compiled, but not the whole."""
    caches: list[Any] = field(default_factory=list)
    """Configs of Hugging Face's in which ``use_cache`` was turned off for the training."""
    notes: list[str] = field(default_factory=list)
    written: Written = field(default_factory=Written)
    """Buffers that a forward writes, but for BatchNorm's."""
    buffers: Buffers = field(default_factory=Buffers)

    @property
    def apart(self) -> Staged | Branched | None:
        """Who knows what other ranks hold, if this one holds but some of the modules."""
        return self.staged or self.branched

    @property
    def together(self) -> bool:
        """Whether the ranks meet in every forward: then all must run it, also those without a sample."""
        return self.shards is not None or self.owned is not None or self.balances

    @property
    def owned(self) -> Owned | None:
        """Experts that are spread."""
        return next((each for each in self.parts if isinstance(each, Owned)), None)

    @property
    def plain(self) -> bool:
        """Whether nothing acts inside the model: only then can it be compiled as a whole."""
        return (
            self.apart is None
            and self.shards is None
            and not self.parts
            and not any(is_wrapped(module) for module in self.model.modules())
        )

    def inside(self) -> AbstractContextManager[None]:
        """Around whatever runs the model."""
        return nullcontext() if self.shards is None else self.shards.inside()

    @property
    def shape(self) -> nn.Module:
        """A model with all the names and shapes, if not the elements, of the whole."""
        return self.model if self.apart is None else self.apart.skeleton

    def forwards(self, step: Callable[[nn.Module, Any], Any], precision: Precision, device: torch.device) -> "Forwards":
        """``step(model, content)`` as a function of the content; None where the result is another rank's. All ranks
        that work on the same samples call it together."""
        return Forwards(self, step, precision, device)

    def changed(self) -> None:
        """Call when weights were changed by other means than a step."""
        if self.shards is not None:
            self.shards.changed()

    def tensors(self, *, keep: bool = True) -> dict[str, Tensor]:
        """All weights and buffers, whole, on the CPU. All ranks call it together; those that do not ``keep`` them get
        none, and hold one at a time."""
        found, seen = {}, {}
        for name, tensor in _named(self.model):
            if tensor not in seen:
                whole = self._whole(tensor, tensor.detach())
                seen[tensor] = whole.cpu().clone() if keep or self.apart is not None else None
            found[name] = seen[tensor]
        if self.apart is not None:
            every = self._collected({name: {"": tensor} for name, tensor in found.items()}, keep)
            found = {name: many[""] for name, many in every.items()}
            names = [*_named(self.apart.skeleton)]  # also those under which no rank holds it
            known = {tensor: found[name] for name, tensor in names if name in found}
            found |= {name: known[tensor] for name, tensor in names if tensor in known}
        return found if keep else {}

    def wholes(self, mine: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """Tensors that go with parameters (gradients, optimizer state), whole, on the CPU: by the parameter's name,
        then by a name of their own. A rank without a slice of a parameter may lack them. All ranks call it together."""
        found = self._wholes(mine)
        if self.apart is not None:
            found = self._collected(found, keep=True)
        return found

    def _collected(self, mine: dict[str, dict[str, Tensor]], keep: bool) -> dict[str, dict[str, Tensor]]:
        """What the ranks of the pipeline, or of the branches, have of it, together."""
        group = self.mesh.branch if self.staged is None else self.mesh.pipeline
        assert self.apart is not None
        assert group is not None
        return collect(mine, self.apart.owners, group, keep=keep)

    def _wholes(self, mine: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """Of the parameters that are here."""
        named = dict(self.model.named_parameters())
        if self.shards is None and not self.parts:
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
        for each in reversed(self.parts):
            mine = each.whole(tensor, mine)
        return mine

    def undo(self) -> None:
        """Leave the model as it was found, but trained: whole, with its own forwards. All ranks call it together."""
        if self.shards is not None:
            self.shards.undo(torch.device("cpu"))
        for each in reversed(self.parts):
            each.undo()
        unwrap(self.model)
        if self.apart is not None:
            self.parts, self.shards = [], None
            self.apart.undo(self.tensors())
        self.guards.close()
        for config in self.caches:
            config.use_cache = True
        if self.transport is not None:
            self.transport.close()
        self.mesh.close()


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer, under each of its names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


class Forwards:
    """See ``Placed.forwards``."""

    def __init__(
        self, placed: Placed, step: Callable[[nn.Module, Any], Any], precision: Precision, device: torch.device
    ):
        self._placed, self._step, self._precision, self._device = placed, step, precision, device
        self._stages = None
        if placed.branched is not None:
            self._step = placed.branched.objective(step, precision, device)
        if placed.staged is not None:
            assert placed.transport is not None
            how: dict[str, Any] = {
                "transport": placed.transport,
                "inside": placed.inside,
                "groups": placed.groups,
            }
            self._stages = Forward(placed.staged, step, precision=precision, device=device, **how)

    def __call__(self, content: Any) -> Any:
        if self._stages is not None:
            return gathered_output(whole_output(self._stages(content)))
        with self._precision.arithmetic(self._device), self._placed.inside():
            return gathered_output(whole_output(self._step(self._placed.model, content)))

    def finish(self) -> None:
        """Wait until all that was handed on to other stages has arrived: what is dropped before is lost to them."""
        if self._stages is not None:
            self._stages.flush()


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
    trains: bool = True,
    drops: bool = False,
    joins: bool = False,
) -> Placed:
    """Lay ``model`` out under ``plan``, in place. ``few`` gives some samples, for tracing a step.

    ``before_cut`` is called while the parameters are still whole: an optimizer made there sees their shapes.
    ``drops``: a step may be dropped after its forward. ``joins``: workers may come later.
    """
    ties = tied(model)
    acts_inside = plan.cuts or plan.recompute == "full" or (plan.joins_batchnorms and bool(batch_norms(model)))
    in_blocks = plan.compile == "block" or (plan.compile == "auto" and device.type == "cuda" and acts_inside)
    in_blocks &= plan.tensor == plan.expert == plan.context == 1 and not plan.apart
    spreads = plan.cuts or plan.tensor > 1 or plan.expert > 1 or plan.apart
    found, caches = Found(), _without_caches(model)
    if not spreads and plan.context == 1:  # else only parts of it go there
        model.to(device)
    written = Written()
    if trains and (plan.devices > 1 or plan.server or plan.microbatches > 1 or drops):
        arithmetic = lambda: Precision(plan.precision).arithmetic(device)
        asks = plan.buffers == "exact"
        written = _agreed(lambda: find_written(model, objective, few, device, arithmetic, tries=asks), mesh)
        by_rows = plan.sequence == "split" or (plan.sequence == "auto" and device.type == "cuda" and not plan.apart)
        check_buffers.check(plan, written, by_rows=by_rows and plan.tensor > 1, joins=joins)
    if spreads or plan.context > 1 or plan.recompute != "none" or in_blocks:
        whole = [writer.path for writer in written.writers if check_buffers.splits(plan)]
        found = _agreed(lambda: find(plan, model, objective, few(), device.type, whole), mesh)
    if not spreads:
        model.to(device)
    Replicate(degree=plan.shares).apply(model, mesh, same=same, device=device)
    before_cut()
    placed = Placed(
        model, mesh, notes=[*found.notes, *([CACHES_OFF] if caches else [])], caches=caches, written=written
    )
    placed.notes += check_buffers.notes(plan, written)
    if found.pipeline is not None:
        assert mesh.pipeline is not None
        placed.staged = pipeline_of(plan, found.pipeline.atoms).apply(model, found.pipeline, mesh.stage)
        placed.transport = Transport(mesh.pipeline, device, pairs(placed.staged.pipeline.schedule))
        placed.model = model = placed.staged.part
        ties = tied(model)
    if found.branch is not None:
        assert mesh.branch is not None
        placed.branched = Branch(degree=plan.branch).apply(model, found.branch, mesh.branch)
        placed.model = model = placed.branched.part
        ties = tied(model)
    if mesh.batch is not None and plan.batchnorm == "global" and plan.exchange == "allreduce":
        batchnorm.apply(model, mesh.batch)
    if mesh.batch is not None and not plan.apart and plan.in_step:
        placed.balances = balance.apply(model, mesh.batch)
    if plan.buffers == "exact" and check_buffers.splits(plan):
        placed.buffers = Buffers(model, written, mesh.batch, microbatches=plan.microbatches)
    if in_blocks and found.compiled:
        placed.compiled = Blocks(model, found.compiled, placed.guards)
    if found.tensor is not None:
        assert mesh.tensor is not None
        buffers_to(model, device)  # moved after they were cut they would be other objects, and not known as cut
        placed.partial = found.tensor.shared
        split = TensorAxis(degree=plan.tensor, plan=split_of_part(found.tensor, model)).apply(model, mesh.tensor)
        placed.parts.append(split)
        placed.groups["tensor"] = split.ranks
    if found.experts is not None:
        assert mesh.expert is not None
        expert = Expert(degree=plan.expert, plan=found.experts)
        tells = mesh.share < plan.expert and (mesh.tensor is None or dist.get_rank(mesh.tensor) == 0)
        placed.parts.append(expert.apply(model, mesh.expert, copies=plan.shard, tells=tells))
    again = [path for path in found.blocks if not isinstance(model.get_submodule(path), Shell)]
    if plan.cuts:
        shard = Shard.of(plan, found.units[mesh.part])
        placed.shards = shard.apply(model, mesh.shard, device, peers=mesh.terms)
        for path in again:  # computed again in backward, where nothing holds the whole's own open
            wrap(model.get_submodule(path), placed.shards.around(placed.shards.units[0]))
    else:
        model.to(device)
    if plan.recompute != "none":
        Recompute(word=plan.recompute, blocks=tuple(again)).apply(model)
    look_away_from(placed.buffers)
    if found.context is not None:
        assert mesh.context is not None
        placed.guards.enter_context(guarded())
        placed.groups["context"] = Context(degree=plan.context, plan=found.context).apply(model, mesh.context)
    check_ties(model, ties)
    return placed


CACHES_OFF = (
    "config.use_cache is off while training: a key-value cache serves generation, and hides packed position_ids"
)


def _without_caches(model: nn.Module) -> list[Any]:
    """Turn off the key-value caches that Hugging Face's models make even in training, where they were on; under every
    plan, as transformers' Trainer does. With a cache their masks do not keep packed documents apart, a block that is
    computed again fills it twice, and it cannot go from rank to rank."""
    configs: dict[int, Any] = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    found = [config for config in configs.values() if getattr(config, "use_cache", None) is True]
    for config in found:
        config.use_cache = False
    return found


F = TypeVar("F")


def _agreed(find: Callable[[], F], mesh: Mesh) -> F:
    """What the first rank finds, on all ranks; its error too."""
    if mesh.world is None:
        return find()
    found: Any = [None]
    if mesh.rank == 0:
        try:
            found[0] = find()
        except Exception as error:
            found[0] = error
    dist.broadcast_object_list(found)
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]
