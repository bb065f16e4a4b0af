"""Process groups: collectives over several tensors at once, noted as they are called; worlds, stores and timeouts."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceCoalescedOptions, ReduceScatterOptions

from meshfit.patches import replaced

all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""``all_gather_into_tensor`` until torch 2.12."""

reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""``reduce_scatter_tensor`` until torch 2.12."""


COLLECTIVES = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "reduce": ("reduce", 0),
    "broadcast": ("broadcast", 0),
    "allgather": ("all_gather", 1),
    "allgather_coalesced": ("all_gather", 1),
    "all_gather_single": ("all_gather", 1),
    "_allgather_base": ("all_gather", 1),
    "allgather_into_tensor_coalesced": ("all_gather", 1),
    "all_gather_single_coalesced": ("all_gather", 1),
    "gather": ("gather", 1),
    "scatter": ("scatter", 0),
    "reduce_scatter": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 1),
    "all_to_all_single": ("all_to_all", 1),
    "alltoall_base": ("all_to_all", 1),
    "alltoall": ("all_to_all", 1),
    "barrier": ("barrier", -1),
    "send": ("send", 0),
    "recv": ("recv", 0),
}
"""Methods of process groups: what each does, and which argument is what this rank gives."""


def all_gather_rows(
    wholes: list[Tensor], parts: list[Tensor], group: dist.ProcessGroup, *, async_op: bool = False
) -> list[dist.Work]:
    """Every rank's part of several rows, of any dtypes, in one call. What to wait for, if ``async_op``."""
    rows = [row.view(torch.uint8) for row in wholes], [row.view(torch.uint8) for row in parts]
    return _issued(all_gather_single, "allgather_into_tensor_coalesced", AllgatherOptions(), rows, group, async_op)


def reduce_scatter_rows(
    parts: list[Tensor], rows: list[Tensor], group: dist.ProcessGroup, *, async_op: bool = False
) -> list[dist.Work]:
    """This rank's part of the sum of several rows, of one dtype; likewise."""
    several, options = "reduce_scatter_tensor_coalesced", ReduceScatterOptions()
    return _issued(reduce_scatter_single, several, options, (parts, rows), group, async_op)


def all_reduce_rows(rows: list[Tensor], group: dist.ProcessGroup, *, async_op: bool = False) -> list[dist.Work]:
    """The sums of several rows, of one dtype; likewise."""
    return _issued(dist.all_reduce, "allreduce_coalesced", AllreduceCoalescedOptions(), (rows,), group, async_op)


def _issued(
    single: Callable[..., dist.Work | None],
    several: str,
    options: Any,
    rows: tuple[list[Tensor], ...],
    group: dist.ProcessGroup,
    async_op: bool,
) -> list[dist.Work]:
    """The method ``several`` of the group, where it takes more than one row, else ``single`` of each. Not gloo with
    tensors of GPUs: torch 2.11 then ends the process. As torch's own functions: handles, or on GPUs what comes next in
    this stream waits."""
    first = rows[-1][0]
    if len(rows[-1]) > 1 and (first.is_cpu or group._get_backend(first.device).name() != "gloo"):
        options.asyncOp = async_op
        issued = [getattr(group, several)(*rows, options)]
    else:
        issued = [single(*each, group=group, async_op=async_op) for each in zip(*rows, strict=True)]
    works = [work for work in issued if work is not None]
    if async_op:
        return works
    for work in works:
        work.wait()
    return []


def become_world(group: dist.ProcessGroup, *outside: dist.ProcessGroup) -> None:
    """From now on this process's world is ``group``: ranks count within it, and what names no group is of it. Groups
    that reach out of it, ``outside``, can still be used for collectives; a process knows its own rank there."""
    from torch.distributed import distributed_c10d as c10d

    own, size = group.rank(), group.size()
    for other in outside:
        c10d._world.pg_group_ranks[other] = {own: other.rank()}
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    c10d._update_default_pg(group)


def store_of(group: dist.ProcessGroup) -> dist.Store | None:
    """The store in which the ranks of a group found each other, under a prefix of its own."""
    from torch.distributed import distributed_c10d as c10d

    found = c10d._world.pg_map.get(group)
    return None if found is None else found[1]


def number_among_equals(group: dist.ProcessGroup) -> int:
    """Of the groups of just these ranks that this process has made, which one it is: the same in all of them, which
    make them in one order."""
    from torch.distributed import distributed_c10d as c10d

    ranks = dist.get_process_group_ranks(group)
    equal = [other for other in c10d._world.pg_map if dist.get_process_group_ranks(other) == ranks]
    return equal.index(group)


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """How long a collective of ``group`` may wait."""
    for kind in ("cpu", "cuda"):
        try:
            options: Any = group._get_backend(torch.device(kind)).options
        except RuntimeError:  # it has none for that kind
            continue
        return None if options is None else options._timeout  # torch's fake ranks have none
    return None


def gather_number(group: dist.ProcessGroup, number: int) -> Callable[[], list[int]]:
    """What waits for the numbers of all ranks of ``group``. Straight to its backend for CPUs: no device waits, and no
    meter counts it."""
    mine = torch.tensor([number])
    every = [torch.empty_like(mine) for _ in range(group.size())]
    backend: Any = group._get_backend(torch.device("cpu"))
    work = backend.allgather([every], [mine])

    def wait() -> list[int]:
        work.wait()
        return [int(each) for each in every]

    return wait


@contextmanager
def noted(note: Callable[[str, str, str, str], None]) -> Iterator[None]:
    """Within it ``note(group, ranks, op, tensor)`` is called before each collective of this process, whoever calls it
    from Python: of gloo, of NCCL, or of another backend."""
    members: dict[str, str] = {}

    def noting(op: str, given: int, before: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            name = group.group_name
            ranks = members.get(name)
            if ranks is None:
                ranks = members[name] = _listed(dist.get_process_group_ranks(group)) if dist.is_initialized() else ""
            note(name, ranks, op, _described(op, args, given))
            return before(group, *args, **kwargs)

        return call

    with replaced_methods(lambda method: partial(noting, *COLLECTIVES[method])):
        yield


@contextmanager
def replaced_methods(make: Callable[[str], Callable[[Callable[..., Any]], Callable[..., Any]]]) -> Iterator[None]:
    """Within it ``make(method)(before)`` is called in place of each of the ``COLLECTIVES``, in all threads."""
    with ExitStack() as stack:
        for method in COLLECTIVES:
            if (real := vars(dist.ProcessGroup).get(method)) is not None:
                stack.enter_context(replaced(dist.ProcessGroup, method, make(method), everywhere=True, real=real))
        yield


def _described(op: str, args: tuple[Any, ...], given: int) -> str:
    """The tensor that a rank gives: float32 [8, 4]; of several, the first, and how many."""
    tensors = args[given] if 0 <= given < len(args) else None
    count = 1
    while isinstance(tensors, list | tuple):
        count *= max(1, len(tensors))
        tensors = tensors[0] if tensors else None
    if not isinstance(tensors, Tensor):
        return "nothing"
    more = f" and {count - 1} more" if count > 1 else ""
    peer = f" {'to' if op == 'send' else 'from'} {args[1]}" if op in ("send", "recv") and len(args) > 1 else ""
    return _text(tensors.dtype, tensors.shape) + more + peer


@lru_cache(4096)
def _text(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype)[6:]} {[*shape]}"


def _listed(ranks: list[int]) -> str:
    """0-3; 0, 4."""
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks))
