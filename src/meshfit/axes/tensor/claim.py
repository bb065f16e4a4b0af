"""Pairs and layers as regions: claims about what could be cut, for ``plan`` to check.

Where a pair's weights are those of layers that are called, the region is entered at its columns and left at its rows.
Weights that no layer holds are met at the border of the lowest module around them.
"""

from collections.abc import Iterator
from itertools import takewhile

import torch
from torch import nn

from meshfit.anatomy.pair import Pair
from meshfit.anatomy.pairs import LAYERS, Pairs
from meshfit.axes.prove import Refused
from meshfit.axes.tensor.region import Cut, Leave, Patch, Raw, Region, even_ranges, joined
from meshfit.axes.tensor.watch import Observed
from meshfit.axes.tensors import shared_names
from meshfit.torch_private.modules import Convolution, RunningNorm

NORMS = (RunningNorm, nn.GroupNorm)


class Claims:
    """What was seen of a model, and what follows for its pairs and layers."""

    def __init__(self, model: nn.Module, seen: Observed, degree: int):
        self.modules, self.seen, self.degree = dict(model.named_modules()), seen, degree
        self.tied = shared_names(model)

    def of_pair(self, pair: Pair) -> Region:
        """Raises ``Refused`` where there is no place to put what the pair needs."""
        seen, home = self.seen, self.seen.nearest(pair.module)
        rest = len(home) + 1 if home else 0
        cuts = tuple(Cut(s.parameter[rest:], s.dim, s.ranges) for s in pair.shards)
        enters: dict[str, None] = {}
        leaves: dict[str, Leave] = {}
        for shard in pair.columns:
            enters[self._place(shard.parameter)[rest:]] = None
        for shard in pair.rows:
            path = self._place(shard.parameter)
            leaves[path[rest:]] = Leave(path[rest:], *self._bias(shard.parameter, rest))
        raw: dict[str, tuple[list[str], list[str]]] = {}
        for role, shards in enumerate((pair.columns, pair.rows)):
            for name in (shard.parameter for shard in shards):
                path = self._place(name)
                if not (name == joined(path, "weight") and is_layer(self.modules[path])) and not self._is_heads(path):
                    raw.setdefault(path[rest:], ([], []))[role].append(name[rest:])
        sources = []
        for name in pair.entries:
            path, _, own = name.rpartition(".")
            if own != "weight" or not seen.called(path):
                raise Refused(f"the output of {name} is read whole, out of reach")
            sources.append(path[rest:])
        holders = {joined(home, c.name).rpartition(".")[0] for c in cuts}
        if any(home not in seen.within[path] for path in holders if seen.called(path)):
            raise Refused("parts of it are called from elsewhere too")
        patches = [p for path in sorted(holders) for p in self._sizes(path, rest, cuts)]
        heads = [path for path in holders | {h.rpartition(".")[0] for h in holders} if self._is_heads(path)]
        return Region(
            module=home,
            kind=pair.kind,
            cuts=cuts,
            enters=tuple(enters),
            leaves=tuple(leaves.values()),
            raw=tuple(Raw(path, tuple(columns), tuple(rows)) for path, (columns, rows) in raw.items()),
            sources=tuple(sources),
            partial=tuple(name[rest:] for name in pair.partial),
            patches=tuple(patches),
            heads=tuple(path[rest:] for path in sorted(heads)),
        )

    def of_layers(self, split: Pairs) -> list[Region]:
        """Layers that may be cut by output channels, with the output gathered: those of pairs too, should these be
        refused."""
        candidates = {*split.gathered, *(shard.parameter for pair in split.pairs for shard in pair.shards)}
        return [
            self._layer(path, module)
            for path, module in self.modules.items()
            if joined(path, "weight") in candidates and self._can_be_gathered(path, module)
        ]

    def _can_be_gathered(self, path: str, module: nn.Module) -> bool:
        if not is_layer(module) or not self.seen.called(path):
            return False
        if joined(path, "weight") in self.tied or joined(path, "bias") in self.tied:
            return False
        # groups; a norm over the whole width; gradients that are no plain tensors
        odd = getattr(module, "groups", 1) > 1 or any(getattr(module, name, None) for name in ("max_norm", "sparse"))
        return not odd and _weight(module).shape[_output_dim(module)] % self.degree == 0

    def _layer(self, path: str, module: nn.Module) -> Region:
        dim = _output_dim(module)
        ranges = even_ranges(_weight(module).shape[dim], self.degree)
        cuts = [Cut("weight", dim, ranges)]
        if getattr(module, "bias", None) is not None:
            cuts.append(Cut("bias", 0, ranges))
        return Region(
            module=path,
            kind="gather",
            cuts=tuple(cuts),
            enters=("",),
            gathers=(("", _channel(module)),),
            patches=tuple(self._sizes(path, len(path) + 1 if path else 0, tuple(cuts))),
        )

    def _is_heads(self, path: str) -> bool:
        module = self.modules[path]
        return isinstance(module, nn.MultiheadAttention) and module.bias_k is None and not module.add_zero_attn

    def _place(self, name: str) -> str:
        """The module at whose border a weight is met: its layer, or the lowest around it that is called."""
        return self.seen.nearest(name.rpartition(".")[0])

    def _bias(self, weight: str, rest: int) -> tuple[str, int]:
        path, _, own = weight.rpartition(".")
        layer = self.modules[path]
        if own != "weight" or not is_layer(layer) or getattr(layer, "bias", None) is None:
            return "", -1
        return f"{path}.bias"[rest:], _channel(layer)

    def _sizes(self, path: str, rest: int, cuts: tuple[Cut, ...]) -> Iterator[Patch]:
        """Numbers that torch's own layers keep of their channels."""
        module, degree = self.modules[path], self.degree
        cut = next((c for c in cuts if c.name == joined(path[rest:], "weight")), None)
        dim = None if cut is None else cut.dim
        part = degree if cut is None else cut.size // cut.own
        names: list[str] = []
        if isinstance(module, Convolution):
            if module.groups > 1:
                names = ["in_channels", "out_channels", "groups"]
            elif dim is not None:
                names = ["out_channels" if (dim == 0) != module.transposed else "in_channels"]
        elif isinstance(module, nn.Linear) and dim is not None:
            names = ["out_features" if dim == 0 else "in_features"]
        elif isinstance(module, nn.Embedding) and dim == 1:
            names = ["embedding_dim"]
        elif isinstance(module, NORMS):
            names = ["num_channels", "num_groups"] if isinstance(module, nn.GroupNorm) else ["num_features"]
        elif type(module).__name__ == "Conv1D" and dim is not None:
            names = ["nf" if dim == 1 else "nx"]
        for name in names:
            value = getattr(module, name, None)
            if isinstance(value, int):
                yield Patch(path[rest:], name, max(value // part, 1))


def is_layer(module: nn.Module) -> bool:
    return isinstance(module, LAYERS) or type(module).__name__ == "Conv1D"


def _weight(layer: nn.Module) -> torch.Tensor:
    return layer.weight  # type: ignore[return-value]


def _output_dim(layer: nn.Module) -> int:
    """The dim of a layer's weight that holds its output channels."""
    second = isinstance(layer, nn.Embedding) or type(layer).__name__ == "Conv1D" or getattr(layer, "transposed", False)
    return int(second)


def _channel(layer: nn.Module) -> int:
    """The dim of a layer's output that holds its channels, counted from the last."""
    return 1 - _weight(layer).dim() if isinstance(layer, Convolution) else -1


def around(paths: list[str]) -> str:
    """The lowest module that holds all of ``paths``."""
    alike = takewhile(lambda words: len(set(words)) == 1, zip(*(path.split(".") for path in paths), strict=False))
    return ".".join(words[0] for words in alike)


def merged(home: str, claims: list[Region]) -> Region:
    """Several claims as one, on the module ``home`` around them."""
    rest = len(home) + 1 if home else 0
    within = [each.renamed(home, lambda name, at=each.module: joined(at, name)[rest:]) for each in claims]
    lists = ("cuts", "enters", "leaves", "raw", "sources", "partial", "patches", "heads")
    return Region(
        module=home, kind=claims[0].kind, **{name: tuple(x for r in within for x in getattr(r, name)) for name in lists}
    )
