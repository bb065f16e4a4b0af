"""Units of a sharded model at run time: gathered (unsharded) when a call needs them, dropped (resharded) after it.

While a unit is open, its modules hold whole tensors in place of the parameters: outputs of ``Gather``, whose backward
is given the whole gradients and passes them to the exchange. Autograd itself thus knows when a unit's gradients are
complete, however often it was called, and whatever its calls take or return.

What runs in backward by code of the user's own (a checkpoint, an ``autograd.Function`` that computes something again)
opens units too, and is given outputs of ``Again``: gradients asked for by ``torch.autograd.grad`` go on to the tensors
that the forward was given, which is what that code asks for; those of a ``backward()`` go to the exchange at once.

With zero=3 a unit is dropped after its call, and gathered again when backward asks for a weight that it saved
(open_unit.py). Ranks meet in gathers, and need not use the same units: see lockstep.py, which also knows what is
gathered next, so that it is started ahead. With zero=1 and 2 all units are gathered before anything runs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from meshfit.axes.axis import Applied
from meshfit.axes.shard.lockstep import GATHER, SCATTER, Lockstep, Meeting
from meshfit.axes.shard.open_unit import Again, Edge, Gather, OpenUnit, SavedWeights
from meshfit.axes.shard.rounding import SharedCopies
from meshfit.comm.flat import Flat, Lane
from meshfit.errors import PlanError
from meshfit.events import current
from meshfit.torch_private.autograd import in_backward
from meshfit.torch_private.groups import all_gather_rows
from meshfit.torch_private.modules import unwrap_call, wrap_call
from meshfit.torch_private.tensors import call_a_parameter, storage_id, version


class GradientExchange(Protocol):
    """What is told of gradients: exchange/scatter.py."""

    def begin_pass(self) -> None:
        """Before a forward that will have a backward."""

    def returned(self, unit: OpenUnit, gradients: tuple[Tensor | None, ...], again: bool) -> None:
        """Backward is done with a use of a unit: the whole gradients of its trained parameters. ``again``: a use within
        backward, by a reentrant checkpoint."""

    def serve(self, unit: OpenUnit) -> None:
        """Take part in a scatter of a unit's gradients that other ranks want."""


class Shards(Applied):
    """A model's units. ``units[0]`` is the whole's, open while anything runs."""

    meets = True

    def __init__(
        self,
        units: list[OpenUnit],
        *,
        zero: int,
        group: dist.ProcessGroup | None,
        device: torch.device,
        peers: dist.ProcessGroup | None = None,
        scatter: dist.ProcessGroup | None = None,
    ):
        """``peers``: the ranks that run the same units, in this group and in others. ``scatter``: those of ``group``
        again, over a communicator where gradients do not wait for gathers, nor gathers for them."""
        self.units, self.zero, self.group, self.device = units, zero, group, device
        self.scatter_group = group if scatter is None else scatter
        self.exchange: GradientExchange | None = None
        """None: nothing trains."""
        self.place = {p: (flat, i) for unit in units for flat in unit.flats for i, p in enumerate(flat.parameters)}
        """The row that each parameter is cut in, and which of its parameters it is."""
        self.used: list[OpenUnit] = []
        """Units as this pass used them: backward will come back from each."""
        self.lockstep = Lockstep(group if peers is None else peers, self._serve, ahead=device.type == "cuda")
        """Gathers are started ahead on GPUs, where they run beside what the rank computes."""
        self.running = False
        """Whether a forward is under way."""
        self._first, self._trial = True, False
        """No pass is over yet, and it is looked at more closely; what runs is not one, and may fail."""
        self._lane = Lane(group, device)
        self._saved = SavedWeights(self._unshard)
        self._anchor = torch.empty(0, requires_grad=True)
        """What autograd sees the whole parameters come from."""
        self._copies = SharedCopies()
        self._widened: list[tuple[OpenUnit, torch.dtype | None]] = []
        """Units that a pass without training gathered as they are, and what they are gathered as otherwise."""
        self._hooked: list[nn.Module] = []

    # Forward

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Around whatever runs the model."""
        assert not self.running
        exchange = self.exchange if torch.is_grad_enabled() else None
        self._trial = torch.is_grad_enabled() and exchange is None
        while self._widened:
            self._gather_as(*self._widened.pop())
        if exchange is not None:
            exchange.begin_pass()
        elif self.zero == 3:
            self.lockstep.begin("evaluate")
        if self.zero < 3:
            for unit in self.units:  # all at once: they stay, and each is waited for where it is needed
                self._start_gather(unit)
        watched = self._saved.watched() if self.zero == 3 else nullcontext()
        self.running = True
        try:
            with watched, self.open(self.units[0]):
                yield
            self._first &= self._trial
            if exchange is None:
                self.lockstep.end()
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error):
                raise
            raise PlanError(
                "shard=: the step differentiates by torch.func (grad, jacrev, hessian), which torch refuses where what"
                " is saved for backward is watched, as it is here to drop gathered weights",
                "data= takes it as it is; torch.autograd.grad(..., create_graph=True) can be sharded too",
            ) from error
        finally:
            self.running = False

    def around(self, unit: OpenUnit, *, rounds: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """For a module's forward: the unit is open while it runs. ``rounds``: and as precise as the module needs it."""

        def wrapped(forward: Callable[..., Any]) -> Callable[..., Any]:
            if not unit.flats:
                return forward

            def run(*args: Any, **kwargs: Any) -> Any:
                if not unit.open:
                    with self.open(unit):
                        return run(*args, **kwargs)
                if rounds and unit.gather_dtype not in (None, _autocast(self.device)):
                    self._widen(unit)
                elif rounds and args and unit.gather_dtype is not None:
                    args = (self._copies(args[0], unit.gather_dtype), *args[1:])
                return forward(*args, **kwargs)

            return run

        return wrapped

    def around_hooks(self, module: nn.Module, unit: OpenUnit) -> None:
        """The unit is open while the hooks of a module run, too."""
        wrap_call(module, self.around(unit))
        self._hooked.append(module)

    @contextmanager
    def open(self, unit: OpenUnit) -> Iterator[None]:
        if unit.open or not unit.flats:
            yield
            return
        self._unshard(unit)
        unit.open += 1
        try:
            tensors = self._tensors(unit)
            unit.put(tensors)
            versions = [*map(version, tensors)]
            yield
        finally:
            unit.open -= 1
            unit.close()
        for p, tensor in zip(unit.parameters, tensors, strict=True):
            if tensor.requires_grad and not p.requires_grad:  # the forward has asked for it: see phases.py
                p.requires_grad_(True)
        changed = versions != [*map(version, tensors)]
        if changed or (self._first and not self._trial):
            self._check(unit, changed)

    def _check(self, unit: OpenUnit, changed: bool) -> None:
        """Refuse a forward that changes weights, if what it changes is a copy. ``changed``: it is known to."""
        for flat in unit.flats:
            if flat.whole is None or storage_id(flat.whole) == storage_id(flat.mine):
                continue
            now = flat.whole[flat.first : flat.first + flat.part]
            if changed or not torch.allclose(now, flat.mine.to(now), rtol=0.0, atol=0.0, equal_nan=True):
                held = {f"{type(module).__name__}.{name}" for places in unit.places for module, name in places}
                raise PlanError(
                    "the model's own code changes weights, which are cut over devices",
                    f"it is one of {', '.join(sorted(held)[:8])}: what was changed was a copy, gathered for this call",
                    "with zero=2 and precision=fp32, or with data= instead of shard=, every device holds them whole",
                )

    def _widen(self, unit: OpenUnit) -> None:
        """Gather an open unit as it is, now and, in training, from now on: it is used where autocast does not round
        it. Trials and evaluations may run without autocast: what they need is not what training needs."""
        if self.exchange is None or not torch.is_grad_enabled():
            self._widened.append((unit, unit.gather_dtype))
        self._gather_as(unit, None)
        self._unshard(unit)
        unit.put(self._tensors(unit))

    def _gather_as(self, unit: OpenUnit, dtype: torch.dtype | None) -> None:
        """From its next gather on ``dtype`` for what autocast rounds."""
        if unit.prefetch is not None:
            self._wait_for_gather(unit)
        unit.gather_dtype, unit.unsharded = dtype, False
        for flat in unit.flats:
            if flat.rounds:
                self._saved.forget(flat)
                flat.gathered, flat.whole = dtype or flat.dtype, None

    def _tensors(self, unit: OpenUnit) -> list[Tensor]:
        made: Iterator[Tensor] = iter(())
        if unit.trained and torch.is_grad_enabled():
            if in_backward():
                given = [tensor for use in unit.uses for tensor in use.saved_tensors]
                made = iter(Again.apply(self._anchor.clone(), self, unit, *given))
            else:
                with saved_tensors_hooks(Edge, Edge.tensor):
                    whole = Gather.apply(self._anchor, self, unit)
                unit.uses.append(whole[0].grad_fn)
                made = iter(whole)
                self.used.append(unit)
                unit.pending_backward += 1
        tensors: list[Tensor] = []
        for flat in unit.flats:
            assert flat.whole is not None
            if flat.trained and torch.is_grad_enabled():
                tensors += [next(made) if p.requires_grad else next(made).detach() for p in flat.parameters]
            else:
                tensors += flat.views(flat.whole)
        for tensor in tensors:
            call_a_parameter(tensor)
        return tensors

    # Gathering

    def _unshard(self, unit: OpenUnit) -> None:
        """Have all of a unit here."""
        if unit.unsharded or not unit.flats:
            return
        if self.zero == 3:
            for other in self.units[1:]:  # the whole's own are few, and needed everywhere
                if other.unsharded and not other.open and not (other.stays and self.running):
                    self.reshard(other)
        with torch.inference_mode(False):
            if self.zero == 3 and unit.prefetch is None:
                self.lockstep.turn(GATHER, unit.index)
            self._start_gather(unit)
            self._wait_for_gather(unit)
            following = self.lockstep.following() if self.zero == 3 else None
            if following is not None and not self.units[following].unsharded and self.units[following].prefetch is None:
                self.lockstep.turn(GATHER, following)
                self._start_gather(self.units[following])

    def _serve(self, meeting: Meeting) -> None:
        """Take part in a collective that other ranks want."""
        unit = self.units[meeting.unit]
        if meeting.kind == SCATTER:
            assert self.exchange is not None
            self.exchange.serve(unit)
            return
        with torch.inference_mode(False):
            if not unit.unsharded and unit.prefetch is None:
                self._start_gather(unit)
                self.reshard(unit)
                return
            with self._lane.beside():  # it is needed here as it is
                rows = [torch.empty(flat.padded, dtype=flat.gathered, device=self.device) for flat in unit.flats]
                for work in self._gather(unit.flats, rows):
                    work.wait()

    def _start_gather(self, unit: OpenUnit) -> None:
        if unit.unsharded or unit.prefetch is not None or not unit.flats:
            return
        with self._lane.beside():
            for flat in unit.flats:
                if self._is_whole(flat):
                    flat.whole = flat.mine
                elif flat.whole is None:
                    flat.whole = torch.empty(flat.padded, dtype=flat.gathered, device=self.device)
            rows = {flat: flat.whole for flat in unit.flats if flat.whole is not None and flat.whole is not flat.mine}
            unit.prefetch = self._gather([*rows], [*rows.values()]), self._lane.event()
        for flat in unit.flats:
            self._saved.know(unit, flat)

    def _wait_for_gather(self, unit: OpenUnit) -> None:
        works, event = unit.prefetch
        with current().waiting("gather") if works else nullcontext():
            for work in works:
                work.wait()
        self._lane.wait(event)
        unit.prefetch, unit.unsharded = None, True

    def _is_whole(self, flat: Flat) -> bool:
        """Whether this rank's part is all of it, as it is gathered."""
        mine = flat.mine
        return self.group is None and mine.dtype == flat.gathered and mine.device.type == self.device.type

    def _gather(self, flats: list[Flat], rows: list[Tensor]) -> list[Any]:
        sources = []
        for flat, row in zip(flats, rows, strict=True):
            source, own = flat.mine, row[flat.first : flat.first + flat.part]
            if source.device.type != own.device.type:  # cast where it is fast, and out of pinned memory
                source = source.to(own.device, non_blocking=True)
            if source.dtype != own.dtype or self.group is None:
                source = own.copy_(source)
            sources.append(source)
        if self.group is not None:
            current().moved("all_gather", sum(row.nbytes for row in rows))
        return self._lane.gather(rows, sources)

    def reshard(self, unit: OpenUnit) -> None:
        if unit.prefetch is not None:
            self._wait_for_gather(unit)
        unit.unsharded = False
        for flat in unit.flats:
            self._saved.forget(flat)
            flat.whole = None

    def forget_uses(self) -> None:
        """No backward comes back from them any more."""
        for unit in self.used:
            unit.pending_backward = 0
            unit.uses.clear()
        self.used.clear()

    def settle(self) -> None:
        """Before the weights at rest change: wait for gathers that nothing waited for."""
        for unit in self.units:
            if unit.prefetch is not None:
                self._wait_for_gather(unit)

    def changed(self) -> None:
        """The weights at rest are not what they were: what is gathered is out of date."""
        self.lockstep.reset()
        self.settle()
        for unit in self.units:
            if self.zero == 3:
                self.reshard(unit)
            unit.unsharded = False

    # Whole tensors, for whoever saves or compares them

    def weight(self, parameter: Tensor) -> float:
        return 1.0 if parameter in self.place else 1 / self.degree

    def whole(self, parameter: Tensor, tensor: Tensor) -> Tensor:
        """All of a tensor that is cut as ``parameter`` is; ``tensor`` is this rank's slice, maybe empty.

        All ranks of a copy call it together, for the same parameters in the same order.
        """
        found = self.place.get(parameter)  # type: ignore[call-overload]
        if found is None:
            return tensor
        flat, i = found
        row = torch.zeros(flat.shapes[i].numel(), dtype=tensor.dtype, device=self.device)
        if tensor.numel():
            row[flat.slices(i)[1]] = tensor.detach().reshape(-1).to(self.device)
        if self.group is not None:
            dist.all_reduce(row, group=self.group)
        return row.new_empty(0).set_(row.untyped_storage(), 0, flat.shapes[i], flat.strides[i])

    def part(self, parameter: Tensor, tensor: Tensor, *, copies: bool = True) -> Tensor:
        """This rank's slice of a ``tensor`` of the parameter's whole shape; without ``copies`` a view, if it can be."""
        found = self.place.get(parameter)  # type: ignore[call-overload]
        if found is None or not tensor.dim() or tensor.shape != found[0].shapes[found[1]]:
            return tensor
        return found[0].cut(found[1], tensor) if copies else found[0].look(found[1], tensor)

    def undo(self) -> None:
        """Give every parameter back whole, in host memory."""
        self.changed()
        for module in self._hooked:
            unwrap_call(module)
        for unit in self.units:
            self._start_gather(unit)
            if unit.flats:
                self._wait_for_gather(unit)
            for flat in unit.flats:
                for p in flat.parameters:
                    p.grad = None
                flat.restore(self._exact(flat), torch.device("cpu"))
            if self.zero == 3:
                self.reshard(unit)
            unit.in_modules.refresh()

    def _exact(self, flat: Flat) -> Tensor:
        """A flat's row in its own dtype."""
        assert flat.whole is not None
        if flat.gathered == flat.dtype:
            return flat.whole
        row = torch.empty(flat.padded, dtype=flat.dtype, device=self.device)
        mine = flat.mine.to(self.device)
        if self.group is None:
            return row.copy_(mine)
        all_gather_rows([row], [mine], self.group)
        return row


def _autocast(device: torch.device) -> torch.dtype | None:
    """What autocast rounds to now."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
