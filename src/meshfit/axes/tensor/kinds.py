"""Which modules of a model are of one kind, and which of them are blocks that it repeats."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from meshfit.torch_private.modules import own_modules, own_parameters

LAYERS_OF_A_BLOCK = 2
"""A module with fewer weights than this in it is no block: nothing in it could be a pair."""


def kinds_of(model: nn.Module) -> dict[str, int]:
    """A number for each module, equal for those of one class, with parameters of the same shapes and attributes of the
    same values, inside and out."""
    numbers: dict[tuple, int] = {}
    known: dict[int, int] = {}

    def kind(module: nn.Module) -> int:
        if id(module) not in known:
            plain = [(k, v) for k, v in vars(module).items() if is_constant(v) and not is_number(k)]
            shapes = [
                (n, tuple(p.shape), p.dtype, p.requires_grad)
                for n, p in own_parameters(module).items()
                if p is not None
            ]
            inside = [(name, kind(child)) for name, child in own_modules(module).items() if child is not None]
            key = type(module), tuple(sorted(plain, key=lambda item: item[0])), tuple(shapes), tuple(inside)
            known[id(module)] = numbers.setdefault(key, len(numbers))
        return known[id(module)]

    return {path: kind(module) for path, module in model.named_modules()}


def is_number(attribute: str) -> bool:
    """Whether an attribute says which of its kind a module is."""
    return any(word in attribute for word in ("idx", "index", "layer_id", "training"))


def blocks_of(model: nn.Module, alike: Mapping[str, Any], times: Mapping[str, int]) -> dict[Any, list[str]]:
    """Modules that a model repeats: for each kind, two or more that are called once and share no weights with others.
    The outermost of those that lie in each other. ``alike`` says which are of a kind."""
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in own_parameters(module).values():
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    groups: dict[Any, list[str]] = {}
    for path, module in model.named_modules():
        weights = [p for p in module.parameters() if p.dim() > 1]
        single = all(owners[id(p)] == 1 for p in module.parameters())
        if path and times.get(path) == 1 and len(weights) >= LAYERS_OF_A_BLOCK and single:
            groups.setdefault(alike[path], []).append(path)
    found: dict[Any, list[str]] = {}
    taken: set[str] = set()
    for path in (path for path, _ in model.named_modules()):
        group = groups.get(alike.get(path), [])
        if len(group) < 2 or path not in group or any(outer in taken for outer in _around(path)):
            continue
        free = [other for other in group if not any(outer in taken for outer in _around(other))]
        if len(free) > 1 and path not in taken:
            found.setdefault(alike[path], []).extend(other for other in free if other not in taken)
            taken.update(free)
    return found


def _around(path: str) -> Iterator[str]:
    while "." in path:
        path = path.rpartition(".")[0]
        yield path


def is_constant(value: object) -> bool:
    """Whether it is a number, a word or several: what two modules must have alike to do the same."""
    return isinstance(value, (int, float, str)) or (isinstance(value, tuple) and all(map(is_constant, value)))
