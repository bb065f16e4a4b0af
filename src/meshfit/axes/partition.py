"""A rank's part of a model whose modules are spread over ranks: stages of a pipeline, branches."""

from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property

from torch import Tensor, nn

from meshfit.axes.axis import Applied


class Partition(Applied):
    """``model`` holds this rank's parameters and buffers, under their names in the whole model; ``skeleton`` has all
    names and shapes, on meta; ``before`` is the model it was taken from."""

    spreads = True

    def __init__(self, model: nn.Module, skeleton: nn.Module, before: nn.Module):
        self.model, self.skeleton, self.before = model, skeleton, before

    @property
    @abstractmethod
    def owners(self) -> dict[str, int]:
        """For every parameter and buffer of the model, the rank of the axis whose copy counts."""

    @property
    @abstractmethod
    def tied(self) -> dict[str, tuple[int, ...]]:
        """Parameters whose gradient is a sum over several ranks, and those ranks: in the same order on every rank."""

    @property
    @abstractmethod
    def holders(self) -> dict[str, tuple[int, ...]]:
        """The ranks that hold each parameter and buffer, in the same order on every rank."""

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
