"""One module's call, tried on all samples and on parts of them: see find.py."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshfit import generators
from meshfit.axes.buffers.record import Record, Uncombined, update_of
from meshfit.axes.buffers.totals import Totals
from meshfit.axes.buffers.trace import BufferUpdate, Collect, Collected, Differs, Opaque, look_away
from meshfit.axes.buffers.watch import named_state, undisturbed
from meshfit.axes.data.batchnorm import batch_norms
from meshfit.data import tree
from meshfit.torch_private.modules import own_buffers, own_parameters

TRIED, FEWER = 13, 5
"""Samples, and fewer of them. Primes: dims that go with them are those of samples."""
PARTITIONS = ((6, 7), (2, 4, 7))
FP64, FP32, ROUNDED = 1e-6, 1e-4, 3e-2


@dataclass(frozen=True)
class ModuleCall:
    """What a module is called with: ``dims`` tells along which dim samples lie, by leaf; None: it has none."""

    given: Any
    dims: tuple[int | None, ...]

    @classmethod
    def of(cls, call: Any, other: Any, held: set[int]) -> "ModuleCall":
        """``other``: the same call with fewer samples."""
        leaves, theirs = list(tree.leaves(call)), list(tree.leaves(other))
        if len(leaves) != len(theirs):
            raise Uncombined("what it is called with depends on the number of samples")
        return cls(call, tuple(_samples_dim(*both, held) for both in zip(leaves, theirs, strict=True)))

    @property
    def samples(self) -> bool:
        return any(dim is not None for dim in self.dims)

    def rows(self, rows: Tensor, dtype: torch.dtype | None, device: torch.device, noise: bool) -> Any:
        dims = iter(self.dims)
        draws = torch.Generator().manual_seed(0)

        def leaf(value: Any) -> Any:
            dim = next(dims)
            if not isinstance(value, Tensor):
                return value
            given, value = value, value.detach()
            if dim is not None:
                if noise and value.is_floating_point():
                    value = value * (torch.rand(value.shape, generator=draws) + 0.5).to(value.device, value.dtype)
                each = value.shape[dim] // TRIED
                at = (rows[:, None] * each + torch.arange(each)).flatten()
                value = value.index_select(dim, at.to(value.device))
            floats = dtype is not None and value.is_floating_point()
            made = _laid_out(value.to(device=device, dtype=dtype if floats else None, copy=True), given)
            return made.requires_grad_().clone() if given.requires_grad else made  # no leaf: it may be written to

        return tree.map_leaves(leaf, self.given)


def _laid_out(tensor: Tensor, like: Tensor) -> Tensor:
    """``tensor`` with its dims in the order in memory that ``like`` has them: what reshapes it may have to copy."""
    order = sorted(range(like.dim()), key=lambda d: (-like.stride(d), d))
    back = [order.index(d) for d in range(like.dim())]
    return tensor.permute(order).contiguous().permute(back)


def _samples_dim(leaf: Any, again: Any, held: set[int]) -> int | None:
    if not isinstance(leaf, Tensor):
        if isinstance(leaf, int | float) and leaf != again:
            raise Uncombined(f"it is given a number that depends on the batch ({leaf})")
        return None
    if (leaf is again and id(leaf) in held) or (leaf.shape == again.shape and torch.equal(leaf, again)):
        return None
    if leaf.dim() == again.dim():
        found = [d for d in range(leaf.dim()) if leaf.shape[d] * FEWER == again.shape[d] * TRIED]
        rest = [d for d in range(leaf.dim()) if leaf.shape[d] != again.shape[d]]
        if found == rest and len(found) == 1:
            return found[0]
    raise Uncombined(f"it is given a tensor of shape {tuple(leaf.shape)} that depends on all samples at once")


@dataclass
class Trial:
    """The trials of one module's call."""

    model: nn.Module
    module: nn.Module
    states: tuple[str, ...]
    given: ModuleCall
    opaque: tuple[str, ...]
    device: torch.device

    def updates(self) -> tuple[BufferUpdate, ...]:
        try:
            proven = self._tried(torch.float64)
        except Uncombined:
            raise
        except Exception:  # not every code runs in double precision
            proven = None
        found = self._tried(None)
        if proven is not None and [_kinds(u) for u in found] != [_kinds(u) for u in proven]:
            raise Uncombined("its statistics are not the same in double precision")
        return found

    def _tried(self, dtype: torch.dtype | None) -> tuple[BufferUpdate, ...]:
        """By the values it starts from: as they are now, and after one update."""
        found: list[BufferUpdate] = []
        with self._borrowed(dtype) as states:
            limit = _limit(states, dtype, self.device)
            start = {name: t.detach().clone() for name, t in states.items()}
            every = torch.arange(TRIED)
            cases = [(every, sizes, False) for sizes in PARTITIONS]
            cases += [(every % 7, PARTITIONS[0], False), (every, PARTITIONS[0], True)]
            for some in (cases, cases[:3]) if self.given.samples else (cases[:1],):
                update, start = self._update(start, some, dtype, limit)
                if update not in found:
                    found.append(update)
        return tuple(found)

    def _update(
        self, start: dict[str, Tensor], cases: list, dtype: torch.dtype | None, limit: float
    ) -> tuple[BufferUpdate, dict[str, Tensor]]:
        """The update, and the values after it."""
        groups = []
        for rows, sizes, noise in cases:
            whole, *parts = (self._record(start, some, dtype, noise) for some in (rows, *rows.split(sizes)))
            groups.append((whole, parts, sizes))
        update = update_of(groups, limit)
        for (rows, sizes, noise), (whole, parts, _) in zip(cases, groups, strict=True):
            for part in parts if not update.exchanged else ():
                self._compare(part.final_states(), whole, limit)
            if update.exchanged:
                totals = Totals(Collected(update))
                for some in rows.split(sizes):
                    self._set(start)
                    collect = Collect([update], self._named(), dropout=False)
                    self._run(self.given.rows(some, dtype, self.device, noise), collect)
                    try:
                        totals.add(collect.done(self._named()), len(some))
                    except Differs:
                        raise Uncombined("what it does depends on the samples, or on the calls before") from None
                self._compare(totals.made({name: t.clone() for name, t in start.items()}), whole, limit)
        return update, {name: t.clone() for name, t in groups[0][0].final_states().items()}

    def _compare(self, made: dict[str, Tensor], whole: Record, limit: float) -> None:
        for name, want in whole.final_states().items():
            got = made[name]
            scale = want.double().abs().amax().item() if want.numel() else 0.0
            alike = got.shape == want.shape
            far = (got.double() - want.double()).abs().amax().item() if alike and want.numel() else 0.0
            if not alike or not far <= limit * (scale + limit):
                raise Uncombined(f"made from parts of a batch, {name} is not that of the whole")

    def _record(self, start: dict[str, Tensor], rows: Tensor, dtype: Any, noise: bool) -> Record:
        self._set(start)
        call = self.given.rows(rows, dtype, self.device, noise)
        record = Record(self._named(), self._pure(call))
        outputs = self._run(call, record)
        record.finish(self._named(), outputs)
        return record

    def _run(self, call: Any, watch: Opaque | None = None) -> Any:
        args, kwargs = call
        with generators.kept(self.device):
            torch.manual_seed(0)
            with nullcontext() if watch is None else watch.watching():
                return self.module.forward(*args, **kwargs)

    def _named(self) -> dict[str, Tensor]:
        every = named_state(self.model)
        return {name: every[name] for name in self.states}

    def _set(self, start: dict[str, Tensor]) -> None:
        """Have the buffers as at the start, each a tensor of its own."""
        for name, tensor in start.items():
            path, _, own = name.rpartition(".")
            module = self.model.get_submodule(path)
            new = tensor.clone()
            if own in own_parameters(module):
                own_parameters(module)[own] = nn.Parameter(new, requires_grad=False)
            else:
                own_buffers(module)[own] = new

    def _pure(self, call: Any) -> list[Tensor]:
        """Tensors that do not depend on samples."""
        held = [t for module in self.module.modules() for t in vars(module).values()]
        given = [leaf for dim, leaf in zip(self.given.dims, tree.leaves(call), strict=True) if dim is None]
        return [t for t in (*named_state(self.model).values(), *held, *given) if isinstance(t, Tensor)]

    @contextmanager
    def _borrowed(self, dtype: torch.dtype | None) -> Iterator[dict[str, Tensor]]:
        """The module with tensors of its own, where it will train; BatchNorms inside it take samples one by one."""
        with undisturbed(self.model):
            memo: dict[int, Tensor] = {}
            for module in self.module.modules():
                tensors: list[dict[str, Any]] = [own_parameters(module), own_buffers(module)]
                for held, name, tensor in [(one, *item) for one in tensors for item in one.items()]:
                    if tensor is not None:
                        held[name] = memo.setdefault(id(tensor), _copied(tensor, dtype, self.device))
                if module in batch_norms(self.module):
                    module.training = False
            for path in self.opaque:
                module = self.model.get_submodule(path)
                module.eval()  # no dropout: so that parts can be compared with the whole
                module.__dict__["forward"] = look_away(module.forward)
            yield self._named()


def _limit(states: dict[str, Tensor], dtype: torch.dtype | None, device: torch.device) -> float:
    """How far apart two ways of computing the same may be, of the largest element."""
    kinds = {t.dtype for t in states.values() if t.is_floating_point()}
    if dtype is None and (torch.is_autocast_enabled(device.type) or kinds & {torch.float16, torch.bfloat16}):
        return ROUNDED
    return FP32 if dtype is None and torch.float32 in kinds else FP64


def _copied(tensor: Tensor, dtype: torch.dtype | None, device: torch.device) -> Tensor:
    floats = dtype is not None and tensor.is_floating_point()
    new = tensor.detach().to(device=device, dtype=dtype if floats else None, copy=True)
    return nn.Parameter(new, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new


def _kinds(update: BufferUpdate) -> list[str]:
    return [update.statistics[at].kind for at in sorted(update.statistics)]
