"""Units of a sharded model at run time: gathered when a call needs them, dropped after it.

While a unit is open, its modules hold whole tensors in place of the parameters: outputs of ``_Gather``, whose backward
is given the whole gradients and hands them to the exchange. Autograd itself thus knows when a unit's gradients are
complete, however often it was called, and whatever its calls take or return.

[Note: what backward needs]
With zero=3 a unit is dropped after its call, but autograd saves weights. Hooks on saved tensors put a note in their
place (which unit, where in its row), and gather the unit again when backward asks for one. Nothing has to be foreseen:
a weight is never stale, whatever is done to the outputs of a block. Gathers that backward will ask for are those it
asked for last time, so the next one is started ahead.

[Note: the same order everywhere]
With zero=3 ranks meet in gathers, so all must use the units in the same order: that of the forward, the same on every
rank (see units.py). ``trail`` is a number made from the uses and gathers of a step; ranks compare theirs, since two
blocks of one size can be mistaken for each other without an error. With zero=1 and 2 all units are gathered before
anything runs: ranks need not use the same ones.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from meshfit.layout.flat import Flat, as_real
from meshfit.torch_compat import all_gather_single, in_backward


@dataclass(eq=False)
class OpenUnit:
    """A unit at run time."""

    index: int
    flats: list[Flat]
    places: list[list[tuple[nn.Module, str]]]
    """Where each parameter stands, in the order of the flats."""

    recurrent: list[nn.Module] = field(default_factory=list)
    """Of its modules, those that keep a list of their weights beside: nn.LSTM and its kin."""

    open: int = 0
    """Calls under way in it."""
    here: bool = False
    """Whether ``whole`` of its flats is there and right."""
    coming: Any = None
    """What to wait for before it is here."""
    left: int = 0
    """Uses that backward has not come back from."""
    narrow: torch.dtype | None = None
    """What the weights that autocast rounds are gathered as; None: as they are."""

    @property
    def trained(self) -> list[Flat]:
        return [flat for flat in self.flats if flat.trained]


@dataclass(frozen=True, slots=True)
class _Note:
    """In place of a saved weight."""

    unit: OpenUnit
    flat: Flat
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class _Kept:
    """Any other saved tensor. With hooks, torch leaves it to them to see that it was not changed since."""

    tensor: Tensor
    version: int


class Shards:
    """A model's units. ``units[0]`` is the whole's, open while anything runs."""

    def __init__(
        self,
        units: list[OpenUnit],
        *,
        zero: int,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ):
        self.units, self.zero, self.group, self.device = units, zero, group, device
        self.trail = 0
        self.running = False
        """Whether a forward is under way."""
        self.used: list[OpenUnit] = []
        """Units as this pass used them: backward will come back from each."""
        self.on_pass: Callable[[], None] = lambda: None
        """Called before a forward that will have a backward."""
        self.on_return: Callable[[OpenUnit, tuple[Tensor | None, ...], bool], None]
        """Given the whole gradients of a unit's trained parameters, once for each use of it; and whether that use was
        in backward, by a checkpoint that computes again (a reentrant one: others have no use for such gradients)."""
        self._hooked: list[nn.Module] = []
        self._storages: dict[int, tuple[OpenUnit, Flat]] = {}
        self._asked: list[OpenUnit] = []
        self._foreseen: list[OpenUnit] = []
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.place = {p: (flat, i) for unit in units for flat in unit.flats for i, p in enumerate(flat.parameters)}
        """The row that each parameter is cut in, and which of its parameters it is."""

    # Forward

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Around whatever runs the model."""
        assert not self.running
        if torch.is_grad_enabled():
            self.on_pass()
        self._foreseen, self._asked = self._asked, []
        if self.zero < 3:
            for unit in self.units:  # all at once: they stay, and each is waited for where it is needed
                self._start(unit)
        watched = saved_tensors_hooks(self._pack, self._unpack) if self.zero == 3 else nullcontext()
        self.running = True
        try:
            with watched, self.open(self.units[0]):
                yield
        finally:
            self.running = False

    def around(self, unit: OpenUnit, *, rounds: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """For a module's forward: the unit is open while it runs. ``rounds``: and as precise as the module needs it."""

        def wrapped(forward: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                if not unit.open:
                    with self.open(unit):
                        return run(*args, **kwargs)
                if rounds and unit.narrow not in (None, _autocast(self.device)):
                    self._widen(unit)
                return forward(*args, **kwargs)

            return run

        return wrapped

    def around_hooks(self, module: nn.Module, unit: OpenUnit) -> None:
        """The unit is open while the hooks of a module run, too."""
        module.__dict__["_call_impl"] = self.around(unit)(module._call_impl)
        self._hooked.append(module)

    @contextmanager
    def open(self, unit: OpenUnit) -> Iterator[None]:
        if unit.open or not unit.flats:
            yield
            return
        self._fetch(unit)
        unit.open += 1
        try:
            _put(unit, self._tensors(unit))
            yield
        finally:
            unit.open -= 1
            _put(unit, [p for flat in unit.flats for p in flat.parameters])

    def _widen(self, unit: OpenUnit) -> None:
        """Gather an open unit as it is, now and from now on: it is used where autocast does not round it."""
        unit.narrow, unit.here = None, False
        for flat in unit.flats:
            if flat.gathered != flat.dtype:
                flat.gathered, flat.whole = flat.dtype, None
        self._fetch(unit)
        _put(unit, self._tensors(unit))

    def _tensors(self, unit: OpenUnit) -> list[Tensor]:
        trained = [p for flat in unit.trained for p in flat.parameters]
        made: Iterator[Tensor] = iter(())
        if trained and torch.is_grad_enabled():
            again = in_backward()
            made = iter(_Gather.apply(self, unit, again, *trained))
            if not again:
                self.used.append(unit)
                unit.left += 1
                if self.zero == 3:
                    self.mark(unit)
        tensors: list[Tensor] = []
        for flat in unit.flats:
            assert flat.whole is not None
            if flat.trained and torch.is_grad_enabled():
                tensors += [next(made) if p.requires_grad else next(made).detach() for p in flat.parameters]
            else:
                tensors += flat.views(flat.whole)
        return tensors

    # Gathering

    def _fetch(self, unit: OpenUnit) -> None:
        """Have all of a unit here."""
        if unit.here or not unit.flats:
            return
        if self.zero == 3:
            self._asked.append(unit)
            self.mark(unit)
            for other in self.units[1:]:  # the whole's own are few, and needed everywhere
                if other.here and not other.open:
                    self.drop(other)
        with torch.inference_mode(False):
            self._start(unit)
            self._wait(unit)
        if self._side is not None and self.zero == 3:
            following = self._following()
            if following is not None:
                self._start(following)

    def mark(self, unit: OpenUnit) -> None:
        """Let the trail tell that ``unit`` was next."""
        self.trail = (self.trail * 31 + unit.index + 1) % 65521

    def _following(self) -> OpenUnit | None:
        """The unit that was asked for after these, last time."""
        count = len(self._asked)
        if self._foreseen[:count] != self._asked or len(self._foreseen) <= count:
            return None
        return self._foreseen[count]

    def _start(self, unit: OpenUnit) -> None:
        if unit.here or unit.coming is not None or not unit.flats:
            return
        if self._side is None:
            unit.coming = [work for flat in unit.flats if (work := self._gather(flat, wait=False)) is not None]
        else:
            self._side.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._side):
                for flat in unit.flats:
                    self._gather(flat, wait=True)
                unit.coming = self._side.record_event()
        for flat in unit.flats:
            assert flat.whole is not None
            self._storages[flat.whole.untyped_storage()._cdata] = (unit, flat)

    def _wait(self, unit: OpenUnit) -> None:
        if self._side is None:
            for work in unit.coming:
                work.wait()
        else:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(unit.coming)
            for flat in unit.flats:
                assert flat.whole is not None
                flat.whole.record_stream(current)
        unit.coming, unit.here = None, True

    def _gather(self, flat: Flat, *, wait: bool) -> Any:
        source = flat.mine
        if self.group is None and source.dtype == flat.gathered and source.device.type == self.device.type:
            flat.whole = source
            return None
        if flat.whole is None:
            flat.whole = torch.empty(flat.padded, dtype=flat.gathered, device=self.device)
        own = flat.whole[flat.first : flat.first + flat.part]
        if source.dtype != own.dtype or source.device.type != own.device.type:
            own.copy_(source, non_blocking=True)
            source = own
        if self.group is None:
            return None
        work = all_gather_single(as_real(flat.whole), as_real(source), group=self.group, async_op=True)
        if wait and work is not None:
            work.wait()
        return work

    def drop(self, unit: OpenUnit) -> None:
        unit.here = False
        for flat in unit.flats:
            if flat.whole is not None:
                self._storages.pop(flat.whole.untyped_storage()._cdata, None)
            flat.whole = None

    def changed(self) -> None:
        """The weights at rest are not what they were: what is gathered is out of date."""
        self.trail = 0
        for unit in self.units:
            if unit.coming is not None:
                self._wait(unit)
            if self.zero == 3:
                self.drop(unit)
            unit.here = False

    # What backward needs: see the note above

    def _pack(self, tensor: Tensor) -> Any:
        if tensor.layout is torch.strided and type(tensor) in (Tensor, nn.Parameter):
            found = self._storages.get(tensor.untyped_storage()._cdata)
            if found is not None:
                return _Note(*found, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))
        return _Kept(tensor.detach() if tensor.grad_fn is not None else tensor, tensor._version)  # no node holds itself

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, _Kept):
            if packed.tensor._version != packed.version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation:"
                    f" a tensor of shape {tuple(packed.tensor.shape)}, {packed.tensor._version - packed.version} times"
                )
            return packed.tensor
        self._fetch(packed.unit)
        assert packed.flat.whole is not None
        return packed.flat.whole.as_strided(packed.size, packed.stride, packed.offset).to(packed.dtype)

    # Whole tensors, for whoever saves or compares them

    def whole(self, parameter: nn.Parameter, mine: Tensor | None) -> Tensor:
        """All of a tensor that is cut as ``parameter`` is, of which ``mine`` is this rank's slice (None: nothing).

        All ranks of a copy call it together, for the same parameters in the same order.
        """
        found = self.place.get(parameter)
        if found is None:
            assert mine is not None
            return mine.detach()
        flat, i = found
        numel = flat.shapes[i].numel()
        row = torch.zeros(numel, dtype=flat.dtype if mine is None else mine.dtype, device=self.device)
        if mine is not None and mine.numel():
            row[flat.slices(i)[1]] = mine.detach().reshape(-1).to(self.device)
        if self.group is not None:
            dist.all_reduce(row, group=self.group)
        return row.new_empty(0).set_(row.untyped_storage(), 0, flat.shapes[i], flat.strides[i])

    def undo(self, device: torch.device) -> None:
        """Give every parameter back whole, on ``device``."""
        self.changed()
        for module in self._hooked:
            module.__dict__.pop("_call_impl", None)
        for unit in self.units:
            self._start(unit)
            if unit.flats:
                self._wait(unit)
            for flat in unit.flats:
                for p in flat.parameters:
                    p.grad = None
                row = self._exact(flat)
                flat.restore(row, device)
            if self.zero == 3:
                self.drop(unit)
            _refresh(unit)

    def _exact(self, flat: Flat) -> Tensor:
        """A flat's row in its own dtype."""
        assert flat.whole is not None
        if flat.gathered == flat.dtype:
            return flat.whole
        row = torch.empty(flat.padded, dtype=flat.dtype, device=self.device)
        mine = flat.mine.to(self.device)
        if self.group is None:
            return row.copy_(mine)
        all_gather_single(as_real(row), as_real(mine), group=self.group)
        return row


class _Gather(torch.autograd.Function):
    """From the slices of a unit's parameters to whole ones; backward sends the whole gradients off."""

    @staticmethod
    def forward(ctx: Any, shards: Shards, unit: OpenUnit, again: bool, *slices: Tensor) -> tuple[Tensor, ...]:
        ctx.shards, ctx.unit, ctx.again = shards, unit, again
        ctx.set_materialize_grads(False)
        return tuple(view for flat in unit.trained for view in flat.views(flat.whole))  # type: ignore[arg-type]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:  # type: ignore[override]
        shards, unit = ctx.shards, ctx.unit
        unit.left -= not ctx.again
        shards.on_return(unit, gradients, ctx.again)
        if shards.zero == 3 and not unit.open and unit.left <= 0 and len(unit.trained) == len(unit.flats):
            shards.drop(unit)
        return (None,) * (3 + len(gradients))


def _autocast(device: torch.device) -> torch.dtype | None:
    """What autocast rounds to now."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def _put(unit: OpenUnit, tensors: list[Tensor]) -> None:
    """Let the modules of a unit hold ``tensors`` as their parameters."""
    for places, tensor in zip(unit.places, tensors, strict=True):
        for module, name in places:
            module._parameters[name] = tensor  # type: ignore[assignment]
    _refresh(unit)


def _refresh(unit: OpenUnit) -> None:
    """Recurrent layers keep a list of their weights beside."""
    for module in unit.recurrent:
        module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]  # type: ignore[attr-defined]
