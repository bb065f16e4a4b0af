"""A rank's part of a model whose modules are spread over ranks: stages of a pipeline, branches."""

from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshfit.axes.axis import Applied
from meshfit.comm.objects import all_gather_object

Named = dict[str, dict[str, Tensor]]
"""Tensors that go with parameters and buffers: by the name of that, then by one of their own."""


class Partition(Applied):
    """``model`` holds this rank's parameters and buffers, under their names in the whole model; ``skeleton`` has all
    names and shapes, on meta; ``before`` is the model it was taken from."""

    spreads = True

    def __init__(self, model: nn.Module, skeleton: nn.Module, before: nn.Module):
        self.model, self.skeleton, self.before = model, skeleton, before

    @property
    @abstractmethod
    def tied(self) -> dict[str, tuple[int, ...]]:
        """Parameters whose gradient is a sum over several ranks, and those ranks: in the same order on every rank."""

    @property
    @abstractmethod
    def holders(self) -> dict[str, tuple[int, ...]]:
        """The ranks that hold each parameter and buffer, in the same order on every rank."""

    @property
    def owners(self) -> dict[str, int]:
        """For every parameter and buffer of the model, the rank of the axis whose copy counts."""
        return {name: ranks[0] for name, ranks in self.holders.items()}

    @cached_property
    def _held(self) -> dict[Tensor, int]:
        """How many ranks hold each parameter of this rank."""
        holders = self.holders
        return {p: len(holders.get(name, (0,))) for name, p in self.model.named_parameters()}

    def weight(self, parameter: Tensor) -> float:
        return 1 / self._held.get(parameter, 1)

    def give_back(self, whole: Mapping[str, Tensor]) -> None:
        """Restore the weights and buffers of other ranks: ``whole`` has all of them by name."""
        for name, tensor in (*self.before.named_parameters(), *self.before.named_buffers()):
            if tensor.shape != whole[name].shape:
                tensor.data = whole[name].to(tensor.device)

    def collect(self, mine: Named, *, keep: bool) -> Named:
        """``mine`` of all ranks, on the CPU, each from its owner. All ranks call it together; those that do not
        ``keep`` them hold one tensor at a time."""
        assert self.group is not None
        owners, rank = self.owners, dist.get_rank(self.group)
        own = {name: many for name, many in mine.items() if owners.get(name) == rank}
        kinds = {name: {key: (tuple(t.shape), t.dtype) for key, t in many.items()} for name, many in own.items()}
        every = all_gather_object(kinds, self.group)
        nccl = "nccl" in dist.get_backend(self.group)
        device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
        found: Named = {}
        for name, owner in owners.items():
            for key, (shape, dtype) in every[owner].get(name, {}).items():
                tensor = own[name][key].detach() if rank == owner else torch.empty(shape, dtype=dtype, device=device)
                tensor = tensor.to(device).contiguous()
                dist.broadcast(tensor, group=self.group, group_src=owner)
                if keep:
                    found.setdefault(name, {})[key] = tensor.cpu().clone()
        return found
