"""What a rank that rehearses gets from ranks of which most are not there.

What carries facts is really exchanged, between those ranks that run, by way of the caller: what one rank broadcasts,
messages of a pipeline, gathered objects, sums of a few numbers. A rank that does not run says what the nearest one
says. Large tensors are exchanged as if all ranks were like this one: a sum is its own term times their number, a gather
its own part so many times. Tensors without values (on meta) only have their shapes.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshfit.errors import RankError
from meshfit.launch.channel import Channel
from meshfit.torch_private.groups import COLLECTIVES
from meshfit.torch_private.trees import tree_leaves

Key = tuple[Any, ...]

FEW = 4096
"""Elements up to which a sum is made of what ranks really have."""


class NeverHeard(RankError):
    """What a rank waits for never comes: nobody issues it."""


@dataclass(frozen=True, slots=True)
class Said:
    """From a rank to the caller: ``value`` under ``key``."""

    key: Key
    value: Any


@dataclass(frozen=True, slots=True)
class Question:
    """From a rank to the caller, which answers with a list: what each of ``ranks`` said under ``key``."""

    key: Key
    ranks: tuple[int, ...]
    group: tuple[int, ...]
    """All that take part."""


@dataclass(frozen=True, slots=True)
class Never:
    """The answer where some of those will never say it."""

    missing: tuple[int, ...]


@dataclass
class Others:
    """Does what this rank issues; ``rank`` is its number in the world."""

    rank: int
    channel: Channel
    _count: Counter[Key] = field(default_factory=Counter)

    def __call__(self, method: str, group: dist.ProcessGroup, communicator: str, args: tuple[Any, ...]) -> "Done":
        kind, _ = COLLECTIVES[method]
        if method in ("send", "recv"):
            return self._message(method, group, communicator, args)
        if kind == "broadcast":
            return self._broadcast(group, communicator, args)
        tensors = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
        if method == "allgather" and not any(_moves(t) for t in tensors):
            return self._gather_facts(group, communicator, args)
        if method == "allreduce" and not tensors[0].is_meta and tensors[0].numel() <= FEW:
            return self._reduce_facts(group, communicator, args)
        if not any(t.is_meta for t in tensors):
            getattr(Alike(group), kind)(args)
        return Done(tensors)

    def _number(self, *key: Any) -> int:
        self._count[key] += 1
        return self._count[key]

    def _ask(self, key: Key, ranks: Sequence[int], group: Sequence[int] = ()) -> list[Any]:
        self.channel.send(Question(key, tuple(ranks), tuple(group or ranks)))
        answer = self.channel.recv()
        if isinstance(answer, Never):
            waited = ", ".join(f"rank {rank}" for rank in answer.missing)
            raise NeverHeard(f"rank {self.rank} waits for ever for what {waited} should issue")
        return answer

    def _message(self, method: str, group: dist.ProcessGroup, communicator: str, args: tuple[Any, ...]) -> "Done":
        (tensor,), peer = args[0], dist.get_process_group_ranks(group)[args[1]]
        ends = (self.rank, peer) if method == "send" else (peer, self.rank)
        key = ("send", communicator, ends, self._number(method, communicator, ends))
        if method == "send":
            self.channel.send(Said(key, None if tensor.is_meta else tensor.detach().clone()))
            return Done([tensor])

        def fill() -> None:
            (sent,) = self._ask(key, [peer])
            _fill(tensor, sent)

        return Done([tensor], fill)

    def _broadcast(self, group: dist.ProcessGroup, communicator: str, args: tuple[Any, ...]) -> "Done":
        ranks = dist.get_process_group_ranks(group)
        source = ranks[args[1].rootRank]
        key = ("broadcast", communicator, self._number("broadcast", communicator))
        if any(t.is_meta for t in args[0]):
            return Done(args[0])
        if source == self.rank:
            self.channel.send(Said(key, [t.detach().clone() for t in args[0]]))
        else:
            (sent,) = self._ask(key, [source], ranks)
            for tensor, value in zip(args[0], sent, strict=True):
                _fill(tensor, value)
        return Done(args[0])

    def _gather_facts(self, group: dist.ProcessGroup, communicator: str, args: tuple[Any, ...]) -> "Done":
        (every,), (own,) = args[0], args[1]
        key = ("all_gather", communicator, self._number("all_gather", communicator))
        self.channel.send(Said(key, own.detach().clone()))
        for tensor, value in zip(every, self._ask(key, dist.get_process_group_ranks(group)), strict=True):
            _fill(tensor, value)
        return Done(every)

    def _reduce_facts(self, group: dist.ProcessGroup, communicator: str, args: tuple[Any, ...]) -> "Done":
        (own,), op = args[0], str(args[1].reduceOp)
        key = ("all_reduce", communicator, self._number("all_reduce", communicator))
        self.channel.send(Said(key, own.detach().clone()))

        def fill() -> None:
            every = self._ask(key, dist.get_process_group_ranks(group))
            same = [each for each in every if each.shape == own.shape and each.dtype == own.dtype]
            whole = torch.stack(same or [own.detach()])
            largest, smallest = (op.endswith(word) for word in ("MAX", "MIN"))
            own.copy_(whole.amax(0) if largest else whole.amin(0) if smallest else whole.sum(0))

        return Done(args[0], fill)


def _moves(tensor: Tensor) -> bool:
    """Whether it carries numbers, rather than facts."""
    return tensor.is_meta or tensor.is_floating_point() or tensor.is_complex()


def _fill(tensor: Tensor, value: Tensor | None) -> None:
    if value is not None and not tensor.is_meta and value.numel() == tensor.numel() and value.dtype == tensor.dtype:
        tensor.copy_(value.view(tensor.shape))  # else its size differs, which the logs of both show
    elif not tensor.is_meta:
        tensor.zero_()


class Done:
    """What is waited for: done already, or done when somebody waits for it."""

    def __init__(self, tensors: Sequence[Tensor], fill: Any = None):
        self._tensors, self._fill = tensors, fill

    def wait(self, timeout: Any = None) -> bool:
        fill, self._fill = self._fill, None
        if fill is not None:
            fill()
        return True

    def is_completed(self) -> bool:
        return self._fill is None

    def get_future(self) -> Any:
        self.wait()
        future = torch.futures.Future()
        future.set_result(list(self._tensors))
        return future


class Alike:
    """Collectives among ranks that are all like this one, by their kinds; the arguments are those of torch's groups."""

    def __init__(self, group: dist.ProcessGroup):
        self.rank, self.size = group.rank(), group.size()

    @torch.no_grad()
    def all_reduce(self, args: tuple[Any, ...]) -> None:
        if "SUM" in str(args[1].reduceOp):
            for tensor in args[0]:
                tensor.mul_(self.size)

    reduce = all_reduce

    @torch.no_grad()
    def all_gather(self, args: tuple[Any, ...]) -> None:
        for every, own in zip(*map(_listed, args[:2]), strict=True):
            if isinstance(every, Tensor):
                every.view(self.size, -1).copy_(own.reshape(1, -1).expand(self.size, -1))
            else:
                for each in every:
                    each.copy_(own)

    def gather(self, args: tuple[Any, ...]) -> None:
        if args[0]:
            self.all_gather(args)

    @torch.no_grad()
    def reduce_scatter(self, args: tuple[Any, ...]) -> None:
        for own, every in zip(*map(_listed, args[:2]), strict=True):
            part = every.reshape(self.size, -1)[self.rank] if isinstance(every, Tensor) else every[self.rank]
            own.view(-1).copy_(part.reshape(-1)).mul_(self.size)

    @torch.no_grad()
    def scatter(self, args: tuple[Any, ...]) -> None:
        for own, every in zip(args[0], args[1] or [[]] * len(args[0]), strict=True):
            own.copy_(every[self.rank]) if every else own.zero_()

    @torch.no_grad()
    def all_to_all(self, args: tuple[Any, ...]) -> None:
        for taken, given in zip(*map(_listed, args[:2]), strict=True):
            taken.copy_(given) if taken.shape == given.shape else taken.zero_()

    def barrier(self, args: tuple[Any, ...]) -> None:
        """Nobody is late."""


def _listed(argument: Any) -> list[Any]:
    return [argument] if isinstance(argument, Tensor) else list(argument)
