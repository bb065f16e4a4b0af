"""Ranks of process groups without the other ranks: torch's ``fake`` backend, for tensors without values too."""

from typing import Any

import torch.distributed as dist

NAMES = {"cpu": "gloo_fake", "meta": "gloo_nccl_fake"}
"""Of backends, by the device that ranks work on: what is in the host's memory is sent from there, what is on meta as if
that were a GPU."""


def connect(rank: int, size: int, device: str = "cpu") -> None:
    """This process is ``rank`` of ``size``; nobody else is there, and what it issues does nothing."""
    from torch._C._distributed_c10d import FakeProcessGroup
    from torch.testing._internal.distributed.fake_pg import FakeStore

    create: Any = FakeProcessGroup._create_internal

    def make(common: Any, own: Any) -> Any:
        return create(common.group_rank, common.group_size, own)

    name = NAMES[device]
    if name not in dist.Backend.backend_list:
        dist.Backend.register_backend(name, make, extended_api=True, devices=["cpu", "cuda", "meta"])
    dist.init_process_group(name, rank=rank, world_size=size, store=FakeStore())
