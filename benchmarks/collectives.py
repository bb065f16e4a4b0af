"""What ranks say to each other, counted as it happens."""

from collections import Counter

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

OPERATORS = {
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
    "send": "send",
}


class Collectives(TorchDispatchMode):
    """Counts calls, and bytes of the larger side; of an all_to_all those that are sent."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.moved: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d" and func._opname != "recv_":
            name = OPERATORS[func._opname]
            self.calls[name] += 1
            sides = [sum(t.nbytes for t in tree_leaves(arg) if isinstance(t, Tensor)) for arg in args]
            self.moved[name] += sides[1] if name == "all_to_all" else max(sides)
        return func(*args, **(kwargs or {}))
