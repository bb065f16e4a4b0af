"""Gradients of a sharded model: summed over ranks, each part to the rank that owns it, while backward still runs.

    memory    1/n of the gradients, and the whole ones of two units on their way (with zero=2 also of units that will be
              used again); with zero=1 over several microbatches the whole gradients, which are then scattered once
    traffic   P(n-1)/n bytes a microbatch for P bytes of gradients (zero=1: a step), one call a unit; over ``data``
              copies another 2(P/n)(d-1)/d; one small all_reduce a step

That small one carries what every rank must know before it steps: see scatter_scalars.py.

[Note: the same order everywhere]
Gradients may be complete in another order, or not at all, on one rank. With zero=3 each use of a unit is a scatter, as
soon as its gradient is complete: no whole gradient waits for the next. Ranks that use other units take part in each
other's (axes/shard/lockstep.py). With zero=1 and 2 each unit is scattered once a pass, used or not, in one order on all
ranks: the reverse of the forward, or once all ranks had the same order in a step, that. What a backward did not reach
is sent as zeros at its end. As in allreduce.py, a parameter that no rank reached is left without a gradient.

[Note: unannounced]
A reentrant checkpoint of the user's runs a graph of its own within backward, and a step may call backward itself while
its forward goes on: gradients then come unannounced, maybe after others of the same unit. They are scattered at the end
of the pass.
"""

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshfit.axes.shard.gather import Shards
from meshfit.axes.shard.lockstep import SCATTER
from meshfit.axes.shard.open_unit import OpenUnit
from meshfit.comm.flat import Flat, Lane
from meshfit.errors import JobError, RankError
from meshfit.events import current
from meshfit.exchange.protocol import StepScalars
from meshfit.exchange.scatter_scalars import ScatterScalars
from meshfit.exchange.update import total_norm

ROWS = 2  # units whose whole gradients are packed or on their way at a time


@dataclass(slots=True)
class _Flight:
    """A scatter under way."""

    unit: OpenUnit
    rows: list[Tensor]
    parts: list[Tensor]
    """Where the sums go, one a flat."""
    first: list[bool]
    """Of its step: it replaces what was there."""
    works: list[Any]
    event: Any
    """On GPUs."""
    began: float
    """When it was handed over."""


class Scatter:
    """Sums the gradients of ``shards`` over its group and over ``copies``, the ranks that own the same parts."""

    summed = True

    def __init__(
        self,
        shards: Shards,
        *,
        world: dist.ProcessGroup | None,
        copies: dist.ProcessGroup | None,
        accumulate: bool,
        mixed: bool = False,
        values: int = 0,
    ):
        """``mixed``: forwards and backwards of several microbatches come in any order, as in a pipeline. ``values``:
        numbers to be summed beside the loss."""
        self.shards, self.copies, self.mixed = shards, copies, mixed
        self.accumulate = accumulate or mixed
        """Sum whole gradients over microbatches, and scatter them once."""
        self.once = shards.zero < 3 or mixed
        """One scatter for each unit in a pass; else one for each use."""
        self.parameters = [p for flat in self._flats for p in flat.parameters]
        self._scalars = ScatterScalars(world, shards.device, values=values, parameters=len(self.parameters))
        self.degree = self._scalars.degree
        self.norm: Tensor | None = None
        """Of all gradients together, after ``finish``."""
        self._reached: set[int] = set()
        self._last = False
        self._under_way = False
        """Whether a pass has begun and not ended."""
        self._passes = self._usual_passes = 0
        """In this step so far, and in the one before: ranks must agree on which is the last while some still run
        forward."""
        self._ready: dict[OpenUnit, list[list[Tensor]]] = {}
        """Whole gradients, one row a flat, of each use that backward is done with."""
        self._sums: dict[Flat, Tensor] = {}
        """Whole gradients to which more may be added."""
        self._came: Counter[OpenUnit] = Counter()
        """How often backward came back from each, in this pass."""
        self._unannounced: set[OpenUnit] = set()
        """See the note."""
        self._expected: list[OpenUnit] | None = None
        self._returns: list[OpenUnit] = []
        self._agreed: list[OpenUnit] | None = None
        self._flying: list[_Flight] = []
        self._lane, self._copies = Lane(shards.scatter_group, shards.device), Lane(copies, shards.device)
        self._squares: dict[Flat, Tensor] = {}
        """Of gradients that went to host memory: summed before they left, where that is fast."""
        self._summing: dict[Flat, list[Any]] = {}
        self.remove()
        shards.on_pass, shards.on_return = self._begin_pass, self._returned
        shards.on_serve = lambda unit: self._send(unit, self._summed(unit, zeros=True))

    @property
    def _flats(self) -> list[Flat]:
        return [flat for unit in self.shards.units for flat in unit.trained]

    # As gradients are made

    def _begin_pass(self) -> None:
        if self.mixed and self._under_way:
            return
        self._end_pass()
        self._under_way = True
        self._passes += 1
        if self.shards.zero == 3:
            self.shards.lockstep.begin("train")
        self._forget_uses()  # of a forward that no backward followed

    def _forget_uses(self) -> None:
        for unit in self.shards.used:
            unit.pending_backward = 0
            unit.uses.clear()
        self.shards.used.clear()

    def _returned(self, unit: OpenUnit, gradients: tuple[Tensor | None, ...], again: bool) -> None:
        """Backward is done with one use of a unit."""
        given, rows = iter(gradients), []
        wait = self.once or again or unit.stays
        for flight in self._flying[: len(self._flying) + 1 - ROWS]:
            self._arrive(flight)  # without _land, which may talk to other copies: ranks return at other times
        for flat in unit.trained:
            theirs = [next(given) for _ in flat.parameters]
            self._reached.update(id(p) for p, g in zip(flat.parameters, theirs, strict=True) if g is not None)
            if not wait:
                rows.append(flat.pack(theirs, self.shards.device, borrow=self._lane.group is not None))
            elif flat in self._sums:
                flat.add(theirs, self._sums[flat])
            else:
                self._sums[flat] = flat.pack(theirs, self.shards.device)
        self._returns.append(unit)
        if again or self.shards.running:
            self._unannounced.add(unit)
        self._came[unit] += not wait
        if self.shards.running:
            if not wait:
                self._ready.setdefault(unit, []).append(rows)
        elif not wait:
            self._scatter(unit, rows)
        elif self.once:
            self._launch()
        elif unit.stays and not again and not unit.pending_backward:
            self._came[unit] = self.shards.used.count(unit)
            self._scatter(unit, self._summed(unit))

    def _launch(self) -> None:
        """Start the scatters that are next in order and complete."""
        if self._expected is None:
            self._expected = self._order()
        while self._expected and self._is_complete(self._expected[0]):
            self._scatter_next(self._expected)

    def _order(self) -> list[OpenUnit]:
        """In which order gradients will be complete in this pass."""
        if self.accumulate and not self._last:
            return []
        known = list(dict.fromkeys((self._agreed or [])[::-1]))[::-1]
        return known + [unit for unit in self.shards.units[::-1] if unit.trained and unit not in known]

    def _is_complete(self, unit: OpenUnit) -> bool:
        """Whether nothing will be added to its gradients."""
        return not unit.pending_backward and unit not in self._unannounced and unit.trained[0] in self._sums

    def _scatter_next(self, expected: list[OpenUnit]) -> None:
        unit = expected.pop(0)
        self._scatter(unit, self._summed(unit))

    def _summed(self, unit: OpenUnit, *, zeros: bool = False) -> list[Tensor]:
        nothing = lambda flat: torch.zeros(flat.padded, dtype=flat.grad_dtype, device=self.shards.device)
        own = {} if zeros else self._sums
        return [own.pop(flat) if flat in own else nothing(flat) for flat in unit.trained]

    def _end_pass(self) -> None:
        """After a backward: send what it did not reach as zeros, and what came unannounced."""
        if not self._under_way:
            return
        if self.once:
            self._launch()
        while self._expected:
            self._scatter_next(self._expected)
        for unit in () if self.once else self.shards.used[::-1]:
            if not self._came[unit]:
                self._came[unit] = self.shards.used.count(unit) if unit.stays else 1
                self._scatter(unit, self._summed(unit, zeros=not unit.stays))
            self._came[unit] -= 1
        if not self.accumulate or self._last:
            for unit in self.shards.units:
                more = self._ready.pop(unit, [])
                more += [self._summed(unit)] if any(flat in self._sums for flat in unit.trained) else []
                for rows in more:
                    self._scatter(unit, rows)
        if self.shards.zero == 3:
            self.shards.lockstep.end()
        if self._last and self._agreed is None:
            self._returns += (Counter(self.shards.used) - Counter(self._returns)).elements()
        elif not self._last:
            self._returns.clear()
        self._forget_uses()
        self._ready.clear()
        self._came.clear()
        self._expected, self._under_way = None, False

    def _scatter(self, unit: OpenUnit, rows: list[Tensor]) -> None:
        if self.shards.zero == 3:
            self.shards.lockstep.turn(SCATTER, unit.index)
        self._send(unit, rows)

    def _send(self, unit: OpenUnit, rows: list[Tensor]) -> None:
        """Hand whole gradients over; the sums come to ``flat.gradient`` of each of the unit's flats."""
        flats = unit.trained
        if self.shards.zero < 3 and any(flat in self._summing for flat in flats):
            raise JobError(
                "a gradient was added to after it had been summed over ranks",
                "reentrant checkpointing does that: checkpoint(..., use_reentrant=False) does not",
            )
        parts, firsts, began = [], [], time.perf_counter()
        for flat in flats:  # memory of the stream that computes: between steps it may hold activations
            if flat.gradient is None:
                flat.gradient = torch.empty_like(flat.mine, dtype=flat.grad_dtype, pin_memory=flat.mine.is_pinned())
        with self._lane.beside():
            for flat, row in zip(flats, rows, strict=True):
                assert flat.gradient is not None
                first, flat.filled = not flat.filled, True
                direct = first and flat.gradient.device == row.device
                part = flat.gradient if direct else torch.empty(flat.part, dtype=flat.grad_dtype, device=row.device)
                if self._lane.group is None:
                    part = part.copy_(row) if direct else row
                parts.append(part)
                firsts.append(first)
            if self._lane.group is not None:
                current().moved("reduce_scatter", sum(row.nbytes for row in rows))
            flight = _Flight(unit, rows, parts, firsts, self._lane.reduce_scatter(parts, rows), None, began)
            if self._lane.stream is not None:
                self._add(flight)
                flight.event = self._lane.event()
        self._flying.append(flight)
        while len(self._flying) > ROWS:
            self._land()

    def _land(self) -> None:
        """Wait for the oldest scatter, and have it in the gradients."""
        flight = self._flying.pop(0)
        self._arrive(flight)
        if self._lane.stream is None:
            self._add(flight)

    def _arrive(self, flight: _Flight) -> None:
        """Wait for a scatter, and let go of what it sent."""
        if not flight.rows:
            return
        for work in flight.works if self._lane.stream is None else ():
            work.wait()
        if self._lane.group is not None:
            current().arrived(flight.began)
        self._lane.wait(flight.event)
        flight.rows = []

    def _add(self, flight: _Flight) -> None:
        """What came goes to the gradients."""
        for flat, part, first in zip(flight.unit.trained, flight.parts, flight.first, strict=True):
            gradient = flat.gradient
            assert gradient is not None
            if flat in self._summing:  # those of other uses are on their way over the copies
                for work in self._summing[flat]:
                    work.wait()
                current().moved("all_reduce", part.nbytes)
                dist.all_reduce(part, group=self.copies)
            if part is gradient:
                continue
            self._squares.pop(flat, None)
            if first:
                gradient.copy_(part, non_blocking=True)
                self._squares[flat] = total_norm([part]).double().square()
            else:
                if gradient.is_cpu and part.is_cuda:  # a copy into it may still be under way
                    torch.cuda.current_stream(part.device).synchronize()
                gradient.add_(part.to(gradient.device))
        if self.copies is not None and not self._may_come(flight.unit):
            self._sum_copies(flight.unit)

    def _may_come(self, unit: OpenUnit) -> bool:
        """Whether more of a unit's gradient is expected in this step: the same answer on all ranks."""
        if self.shards.zero == 3:
            lockstep, last = self.shards.lockstep, self._passes == self._usual_passes
            return not last or not lockstep.scripted or lockstep.comes(SCATTER, unit.index)
        if not self._last or self._agreed is None or self._expected is None:  # this pass has sent nothing yet
            return True
        return unit in self._expected or unit in self._unannounced

    def _sum_copies(self, unit: OpenUnit) -> None:
        flats = [flat for flat in unit.trained if flat.filled and flat not in self._summing]
        if not flats or (self._lane.stream is None and any(flight.unit is unit for flight in self._flying)):
            return
        gradients = [flat.gradient for flat in flats if flat.gradient is not None]
        if self._lane.stream is not None and gradients[0].is_cpu:  # a copy into it may still be under way
            torch.cuda.current_stream(self.shards.device).synchronize()
        current().moved("all_reduce", sum(gradient.nbytes for gradient in gradients))
        works = self._copies.all_reduce(gradients)
        for flat in flats:
            self._squares.pop(flat, None)
            self._summing[flat] = works

    # A step, as the loop sees it

    def arm(self, own: StepScalars) -> None:
        """The next backward is the last of this step."""
        self._last = True
        if self.mixed:
            self._expected = None  # now they may go
        self._scalars.put(own)

    def finish(self) -> StepScalars:
        """Wait until every gradient, and the scalars of the step, are summed."""
        self._end_pass()
        self._expected = []  # no more will come: what is under way is summed over copies in the order it was sent in
        while self._flying:
            self._land()
        self._expected = None
        for unit in self.shards.units if self.copies is not None else ():
            self._sum_copies(unit)
        for work in {id(work): work for works in self._summing.values() for work in works}.values():
            work.wait()
        self.shards.settle()
        if self.shards.device.type == "cuda" and any(flat.mine.is_cpu for flat in self._flats if flat.filled):
            torch.cuda.current_stream(self.shards.device).synchronize()
        self._sum_scalars()
        self.norm = self._scalars.norm.to(self.gradients[0].device if self.gradients else self.shards.device)
        return self._scalars.total

    def _sum_scalars(self) -> None:
        """Have the gradients that any rank reached, in the parameters."""
        copies = 1 if self.copies is None else dist.get_world_size(self.copies)
        other = [flat.gradient for flat in self._flats if flat.filled and flat not in self._squares]
        square = total_norm([g for g in other if g is not None]).double().square().to(self.shards.device)
        square = (square + sum(self._squares.values())) / copies
        behind = [i for i, p in enumerate(self.parameters) if id(p) not in self._reached]
        self._scalars.sum(square, [unit.index for unit in self._returns], behind)
        if self._agreed is None:  # after the first step: scatters follow the order that all ranks had
            self._agreed = [*self._returns] if self._scalars.one_order else []
            if self.once:
                self.shards.lockstep.forget()
        anywhere = self._scalars.reached() if behind else [1.0] * len(self.parameters)
        for p, reached in zip(self.parameters, anywhere, strict=True):
            flat, i = self.shards.place[p]
            if p.grad is not None:
                raise RankError(
                    f"a parameter of shape {tuple(flat.shapes[i])} was used where it is not gathered",
                    "what uses it in training did not when the step was traced; this rank holds only a slice of it",
                    "data= instead of shard= works: every device then holds it whole",
                )
            here = flat.slices(i)[0]
            there = flat.filled and here.stop > here.start and reached
            p.grad = flat.piece(i, flat.gradient) if there and flat.gradient is not None else None

    @property
    def gradients(self) -> list[Tensor]:
        """Tensors that together hold every gradient of this rank once; they may be scaled in place."""
        return [flat.gradient for flat in self._flats if flat.filled and flat.gradient is not None]

    def clear(self) -> None:
        """Forget the gradients, ready for the next step; the weights have changed."""
        for flat in self._flats:
            flat.filled = False
            if not flat.mine.is_pinned():  # that takes long to be had again
                flat.gradient = None
        self.remove()
        self._reached.clear()
        self._returns.clear()
        self._squares.clear()
        self._summing.clear()
        self._last = False
        self._usual_passes, self._passes = self._passes, 0
        self.shards.changed()

    def remove(self) -> None:
        """Leave the parameters without gradients."""
        for parameter in self.parameters:
            parameter.grad = None
