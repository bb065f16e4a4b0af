"""A pair of weights that are cut together, as a value: see pairs.py."""

from dataclasses import dataclass

from meshfit.anatomy.shares import Ranges


@dataclass(frozen=True, slots=True)
class ParameterShard:
    """How one parameter or buffer is cut."""

    parameter: str
    dim: int
    ranges: tuple[Ranges, ...]
    """For each device, the indices of ``dim`` that it holds; several hold the same if there are too few to go round."""

    limit: int
    """The largest degree by which it could be cut here, were it alone: heads, groups, channels."""

    def index(self, rank: int) -> tuple[int, ...]:
        return tuple(i for start, stop in self.ranges[rank] for i in range(start, stop))


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Parameters that are cut together, with one sum over devices for each call of a row."""

    module: str
    """Path of the lowest module that holds them all; "" for the model."""

    kind: str
    """ "attention", "mlp", "conv", "experts"; "" for anything else."""

    columns: tuple[ParameterShard, ...]
    rows: tuple[ParameterShard, ...]
    """A bias of a row stays whole, and is added once, after the sum."""

    others: tuple[ParameterShard, ...]
    """Cut along: biases of columns, norms by channel, per-head tables; buffers too."""

    partial: tuple[str, ...]
    """Parameters read inside that stay whole: each device has part of their gradient, to be summed."""

    entries: tuple[str, ...]
    """Weights whose whole output is read inside, beside the inputs of the columns: gradients of these outputs are to
    be summed too. They stay whole (keys and values of multi-query attention), or are rows of this very pair."""

    draws: bool
    """Random numbers are met inside: each device draws those of its share."""

    summed: int
    """Elements that the rows return, for the traced batch: what is summed over devices."""

    degree: int
    limit: int
    """The largest; every divisor of it is possible."""

    bytes: int

    @property
    def shards(self) -> tuple[ParameterShard, ...]:
        return self.columns + self.rows + self.others

    @property
    def narrowest(self) -> ParameterShard:
        """The shard that limits the degree."""
        return min(self.columns + self.others, key=lambda shard: shard.limit)
