"""Every private or version-dependent piece of torch that meshfit leans on, in one place; tests/test_compat.py
checks each. Supported: torch 2.11 to 2.13."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

FUSED_OPTIMIZERS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Take ``group["fused"] = True`` after construction, and then ``found_inf`` and ``grad_scale`` as attributes."""

all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""``all_gather_into_tensor`` until torch 2.12."""

reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""``reduce_scatter_tensor`` until torch 2.12."""


def become_world(group: dist.ProcessGroup, *outside: dist.ProcessGroup) -> None:
    """From now on this process's world is ``group``: ranks count within it, and what names no group is of it. Groups
    that reach out of it, ``outside``, can still be used for collectives; a process knows its own rank there."""
    from torch.distributed import distributed_c10d as c10d

    own, size = group.rank(), group.size()
    for other in outside:
        c10d._world.pg_group_ranks[other] = {own: other.rank()}
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    c10d._update_default_pg(group)


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """How long a collective of ``group`` may wait."""
    for kind in ("cpu", "cuda"):
        try:
            options: Any = group._get_backend(torch.device(kind)).options
        except RuntimeError:  # it has none for that kind
            continue
        return options._timeout
    return None


def told(group: dist.ProcessGroup, number: int) -> list[int]:
    """What each rank of ``group`` says. Straight to its backend for CPUs: no device waits, and no meter counts it."""
    mine = torch.tensor([number])
    every = [torch.empty_like(mine) for _ in range(group.size())]
    backend: Any = group._get_backend(torch.device("cpu"))
    backend.allgather([every], [mine]).wait()
    return [int(each) for each in every]


def in_backward() -> bool:
    """Whether autograd is running backward in this thread: what it calls is computed again."""
    return torch._C._current_graph_task_id() != -1


def will_run(node: Any) -> bool:
    """Within a backward: whether it will come to ``node``, or was asked for its gradient."""
    return torch._C._will_engine_execute_node(node)


@contextmanager
def watched_functions(watch: Callable[..., Any]) -> Iterator[None]:
    """Every ``autograd.Function`` that is applied within runs as ``watch(function, apply, args, kwargs)``.

    Below ``Function.apply``, which calls this: a method that was bound before (``f = MyFunction.apply`` at the top of a
    file) comes by here too."""
    level: Any = torch.autograd.function._SingleLevelFunction
    before = level.__dict__.get("apply")

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        real: Any = getattr(super(level, cls), "apply") if before is None else before.__get__(None, cls)  # noqa: B009
        if not issubclass(cls, torch.autograd.Function):  # one that functorch made for a level of its own
            return real(*args, **kwargs)
        return watch(cls, real, args, kwargs)

    level.apply = classmethod(apply)
    try:
        yield
    finally:
        if before is None:
            del level.apply
        else:
            level.apply = before
