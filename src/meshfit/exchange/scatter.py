"""Gradients of a sharded model: reduce-scattered to the ranks that own each part, while backward still runs.

    memory    1/n of the gradients, and the whole ones of two units on their way (with zero=2 also of units that will be
              used again); with zero=1 over several microbatches the whole gradients, which are then scattered once
    traffic   P(n-1)/n bytes a microbatch for P bytes of gradients (zero=1: a step), one call a unit; over ``data``
              copies another 2(P/n)(d-1)/d; one small all_reduce a step: its scalars, the squared norm, what was reached

A unit's parameters are gathered, and their gradients scattered, in one call (axes/shard). A pass is one microbatch,
forward and backward; in a pipeline, where microbatches overlap, all of them.

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
from meshfit.exchange.update import StepScalars, sum_scalars, total_norm

MOST_IN_FLIGHT = 2  # units whose whole gradients are packed or on their way at a time


@dataclass(slots=True)
class _InFlight:
    """A reduce_scatter under way."""

    unit: OpenUnit
    rows: list[Tensor]
    """Whole gradients, one row a flat; none once they have been sent."""
    sums: list[tuple[Flat, Tensor, bool]]
    """Where this rank's part of each comes, and whether it is the first of its step, which replaces what was there."""
    works: list[Any]
    event: Any
    """On GPUs."""
    began: float


class Scatter:
    """Sums the gradients of ``shards`` over its group and over ``copies``, the ranks that own the same parts; ``world``
    is both."""

    summed = True

    def __init__(
        self,
        shards: Shards,
        *,
        world: dist.ProcessGroup | None,
        copies: dist.ProcessGroup | None,
        accumulate: bool,
        mixed: bool = False,
    ):
        """``accumulate``: whole gradients are summed over microbatches, and scattered once; ``mixed``: so too, and
        forwards and backwards of several microbatches come in any order, as in a pipeline."""
        self.shards, self.world, self.copies, self.mixed = shards, world, copies, mixed
        self.accumulate = accumulate or mixed
        self.per_use = shards.zero == 3 and not mixed
        """One scatter for each use of a unit; else one for each unit in a pass."""
        self.degree, self.rank = (1, 0) if world is None else (dist.get_world_size(world), dist.get_rank(world))
        self.parameters = [p for flat in self._flats for p in flat.parameters]
        self.norm: Tensor | None = None
        """Of all gradients together, after ``finish``."""
        # Of a step
        self._own = StepScalars()
        self._last = False
        """Whether the pass under way, or the next one, is its last."""
        self._passes = self._usual_passes = 0
        """So far, and in the step before: ranks must agree on which is the last while some still run forward."""
        self._reached: set[int] = set()
        """Parameters, by id."""
        self._returns: list[OpenUnit] = []
        """Units as their gradients came, in its last pass."""
        self._sums: dict[Flat, Tensor] = {}
        """Whole gradients to which more may be added."""
        self._squares: dict[Flat, Tensor] = {}
        """Squared norms of gradients that went to host memory: taken before they left, where that is fast."""
        self._summing: dict[Flat, list[Any]] = {}
        """Gradients that are being summed over the copies, and what to wait for."""
        # Of a pass
        self._under_way = False
        self._to_scatter: list[OpenUnit] | None = None
        """Unless ``per_use``: units in the order in which they go; None before the first of them is complete."""
        self._scattered: Counter[OpenUnit] = Counter()
        """With ``per_use``: for how many uses of each there was a scatter."""
        self._held_back: dict[OpenUnit, list[list[Tensor]]] = {}
        """... and whole gradients of uses that came while a forward ran."""
        # Of the training
        self._unannounced: set[OpenUnit] = set()
        """See the note."""
        self._agreed_order: list[OpenUnit] | None = None
        """In which gradients came on all ranks in the first step; none if they differed."""
        self._in_flight: list[_InFlight] = []
        self._lane, self._copies = Lane(shards.scatter_group, shards.device), Lane(copies, shards.device)
        self.remove()
        shards.exchange = self

    @property
    def _flats(self) -> list[Flat]:
        return [flat for unit in self.shards.units for flat in unit.trained]

    # As gradients are made: called by the shards

    def begin_pass(self) -> None:
        if self.mixed and self._under_way:
            return
        self._end_pass()
        self._under_way = True
        self._passes += 1
        if self.shards.zero == 3:
            self.shards.lockstep.begin("train")
        self.shards.forget_uses()  # of a forward that no backward followed

    def returned(self, unit: OpenUnit, gradients: tuple[Tensor | None, ...], again: bool) -> None:
        for flight in self._in_flight[: len(self._in_flight) + 1 - MOST_IN_FLIGHT]:
            self._wait_for(flight)  # not _finish_oldest, which may talk to other copies: ranks return at other times
        alone = self.per_use and not again and not unit.stays  # else it is added to those of other uses
        given, rows = iter(gradients), []
        for flat in unit.trained:
            own = [next(given) for _ in flat.parameters]
            self._reached.update(id(p) for p, g in zip(flat.parameters, own, strict=True) if g is not None)
            if alone:
                rows.append(flat.pack(own, self.shards.device, borrow=self._lane.group is not None))
            elif flat in self._sums:
                flat.add(own, self._sums[flat])
            else:
                self._sums[flat] = flat.pack(own, self.shards.device)
        self._returns.append(unit)
        if again or self.shards.running:
            self._unannounced.add(unit)
        if alone:
            self._scattered[unit] += 1
            if self.shards.running:
                self._held_back.setdefault(unit, []).append(rows)
            else:
                self._scatter(unit, rows)
        elif self.shards.running:
            return
        elif not self.per_use:
            self._scatter_complete()
        elif unit.stays and not again and not unit.pending_backward:
            self._scattered[unit] = self.shards.used.count(unit)
            self._scatter(unit, self._take_sums(unit))

    def serve(self, unit: OpenUnit) -> None:
        self._send(unit, [flat.zeros(self.shards.device) for flat in unit.trained])

    def _scatter_complete(self) -> None:
        """Start the scatters that are next in order and complete: nothing will be added to their gradients."""
        if self._to_scatter is None:
            known = self._agreed_order or []
            others = [unit for unit in self.shards.units[::-1] if unit.trained and unit not in known]
            self._to_scatter = [] if self.accumulate and not self._last else known + others
        while self._to_scatter:
            unit = self._to_scatter[0]
            if unit.pending_backward or unit in self._unannounced or unit.trained[0] not in self._sums:
                return
            self._scatter(self._to_scatter.pop(0), self._take_sums(unit))

    def _take_sums(self, unit: OpenUnit) -> list[Tensor]:
        zeros = lambda flat: flat.zeros(self.shards.device)
        return [self._sums.pop(flat) if flat in self._sums else zeros(flat) for flat in unit.trained]

    def _end_pass(self) -> None:
        """After a backward: send what it did not reach as zeros, and what came unannounced."""
        if not self._under_way:
            return
        used = self.shards.used
        if self.per_use:
            for unit in used[::-1]:
                if not self._scattered[unit]:
                    self._scattered[unit] = used.count(unit) if unit.stays else 1
                    self._scatter(unit, self._take_sums(unit))
                self._scattered[unit] -= 1
        else:
            self._scatter_complete()
            while self._to_scatter:
                unit = self._to_scatter.pop(0)
                self._scatter(unit, self._take_sums(unit))
        if not self.accumulate or self._last:
            for unit in self.shards.units:
                left = self._held_back.pop(unit, [])
                left += [self._take_sums(unit)] if any(flat in self._sums for flat in unit.trained) else []
                for rows in left:
                    self._scatter(unit, rows)
        if self.shards.zero == 3:
            self.shards.lockstep.end()
        if self._last and self._agreed_order is None:
            self._returns += (Counter(used) - Counter(self._returns)).elements()
        elif not self._last:
            self._returns.clear()
        self.shards.forget_uses()
        self._held_back.clear()
        self._scattered.clear()
        self._to_scatter, self._under_way = None, False

    # On their way

    def _scatter(self, unit: OpenUnit, rows: list[Tensor]) -> None:
        if self.shards.zero == 3:
            self.shards.lockstep.turn(SCATTER, unit.index)
        self._send(unit, rows)

    def _send(self, unit: OpenUnit, rows: list[Tensor]) -> None:
        """Begin to reduce-scatter whole gradients; the sums come to ``flat.gradient`` of each of the unit's flats."""
        if self.shards.zero < 3 and any(flat in self._summing for flat in unit.trained):
            raise JobError(
                "a gradient was added to after it had been summed over ranks",
                "reentrant checkpointing does that: checkpoint(..., use_reentrant=False) does not",
            )
        sums, began = [], time.perf_counter()
        for flat in unit.trained:  # memory of the stream that computes: between steps it may hold activations
            if flat.gradient is None:
                flat.gradient = torch.empty_like(flat.mine, dtype=flat.grad_dtype, pin_memory=flat.mine.is_pinned())
        with self._lane.beside():
            for flat, row in zip(unit.trained, rows, strict=True):
                assert flat.gradient is not None
                first, flat.filled = not flat.filled, True
                direct = first and flat.gradient.device == row.device
                part = flat.gradient if direct else torch.empty(flat.part, dtype=flat.grad_dtype, device=row.device)
                if self._lane.group is None:
                    part = part.copy_(row) if direct else row
                sums.append((flat, part, first))
            if self._lane.group is not None:
                current().moved("reduce_scatter", sum(row.nbytes for row in rows))
            works = self._lane.reduce_scatter([part for _, part, _ in sums], rows)
            flight = _InFlight(unit, rows, sums, works, None, began)
            if self._lane.stream is not None:
                self._add(flight)
                flight.event = self._lane.event()
        self._in_flight.append(flight)
        while len(self._in_flight) > MOST_IN_FLIGHT:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        """Wait for the oldest scatter, and add it to the gradients."""
        flight = self._in_flight.pop(0)
        self._wait_for(flight)
        if self._lane.stream is None:
            self._add(flight)

    def _wait_for(self, flight: _InFlight) -> None:
        """Wait for a scatter, and let go of what it sent."""
        if not flight.rows:
            return
        for work in flight.works if self._lane.stream is None else ():
            work.wait()
        if self._lane.group is not None:
            current().arrived(flight.began)
        self._lane.wait(flight.event)
        flight.rows = []

    def _add(self, flight: _InFlight) -> None:
        """Add what came to the gradients, and sum those over the copies once no more is to come."""
        for flat, part, first in flight.sums:
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
        if not self._last or self._agreed_order is None or self._to_scatter is None:  # this pass has sent nothing yet
            return True
        return unit in self._to_scatter or unit in self._unannounced

    def _sum_copies(self, unit: OpenUnit) -> None:
        flats = [flat for flat in unit.trained if flat.filled and flat not in self._summing]
        if not flats or (self._lane.stream is None and any(flight.unit is unit for flight in self._in_flight)):
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
        self._own, self._last = own, True
        if self.mixed:
            self._to_scatter = None  # now they may go

    def finish(self) -> StepScalars:
        """Wait until every gradient, and the scalars of the step, are summed."""
        self._end_pass()
        self._to_scatter = []  # none is left: what is in flight is summed over copies in the order it was sent in
        while self._in_flight:
            self._finish_oldest()
        self._to_scatter = None
        for unit in self.shards.units if self.copies is not None else ():
            self._sum_copies(unit)
        for work in dict.fromkeys(work for works in self._summing.values() for work in works):
            work.wait()
        self.shards.settle()
        if self.shards.device.type == "cuda" and any(flat.mine.is_cpu for flat in self._flats if flat.filled):
            torch.cuda.current_stream(self.shards.device).synchronize()
        reached = [id(p) in self._reached for p in self.parameters]
        order = hash(tuple(unit.index for unit in self._returns)) % 2**52  # a float64 holds it exactly
        orders = [order if rank == self.rank else 0 for rank in range(self.degree)]
        own = self._own.of_rank(self.rank, self.degree)
        scalars, sums = sum_scalars(own, [self._square(), *orders, *reached], self.world, self.shards.device)
        square, every_order, reached_anywhere = sums.split([1, self.degree, len(reached)])
        self.norm = square[0].sqrt().to(self.gradients[0].device if self.gradients else self.shards.device)
        if self._agreed_order is None:  # after the first step: scatters follow the order that all ranks had
            agree = len(set(every_order.tolist())) == 1
            self._agreed_order = list(dict.fromkeys(self._returns[::-1]))[::-1] if agree else []
            if not self.per_use:
                self.shards.lockstep.forget()
        self._set_gradients(reached if all(reached) else reached_anywhere.tolist())
        return scalars

    def _square(self) -> Tensor:
        """This rank's part of the squared norm: the copies have the same gradients."""
        copies = 1 if self.copies is None else dist.get_world_size(self.copies)
        other = [flat.gradient for flat in self._flats if flat.filled and flat not in self._squares]
        square = total_norm([g for g in other if g is not None]).double().square().to(self.shards.device)
        return (square + sum(self._squares.values())) / copies

    def _set_gradients(self, reached: list[bool] | list[float]) -> None:
        """Give the parameters that any rank ``reached`` their slices of the gradients."""
        for p, anywhere in zip(self.parameters, reached, strict=True):
            flat, i = self.shards.place[p]
            if p.grad is not None:
                raise RankError(
                    f"a parameter of shape {tuple(flat.shapes[i])} was used where it is not gathered",
                    "what uses it in training did not when the step was traced; this rank holds only a slice of it",
                    "data= instead of shard= works: every device then holds it whole",
                )
            here = flat.slices(i)[0]
            there = flat.filled and here.stop > here.start and anywhere
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
