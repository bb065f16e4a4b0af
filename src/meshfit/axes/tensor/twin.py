"""Copies of a model to look into, which cost little: weights are shared where they are not changed.

Which modules are alike, and which of them are blocks that a model repeats.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshfit.anatomy.record_atoms import copied
from meshfit.torch_private import map_tensors_in_place, own_modules, own_parameters

LAYERS_OF_A_BLOCK = 2
"""A module with fewer weights than this in it is no block: nothing in it could be a pair."""


class Uncopied(Exception):
    """A model of which there can be no copy: why not."""


def study(model: nn.Module) -> nn.Module:
    """A copy on the CPU that has its own attributes and buffers, and shares the memory of the weights. Those that are
    all alike are copied and get some noise: zeros would hide what follows. Those that a forward writes are copied."""
    random = torch.Generator().manual_seed(0)
    memo: dict[int, Any] = {}
    written = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding) and m.max_norm is not None}
    for parameter in model.parameters():
        weight = parameter.detach().cpu()
        if _is_flat(weight):
            weight = weight + 0.1 * torch.randn(weight.shape, generator=random).to(weight.dtype)
        elif id(parameter) in written:
            weight = weight.clone()
        # a parameter of its own: autograd remembers the shape of one that was used, and this one will be cut
        memo[id(parameter)] = nn.Parameter(weight, requires_grad=parameter.requires_grad)
    try:
        twin = copied(model, memo).cpu().train()
    except Exception as error:
        raise Uncopied(f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}") from error
    for module in twin.modules():
        if getattr(module, "inplace", None) is True:
            module.inplace = False  # type: ignore[assignment]
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", None):
            config.use_cache = False  # type: ignore[union-attr]
    return twin


def _is_flat(weight: Tensor) -> bool:
    if not weight.is_floating_point() or not weight.numel():
        return False
    first = weight.flatten()[:8]
    return bool((first == first[0]).all()) and bool((weight == first[0]).all())


def converted(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy in another precision; what is complex stays so."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        weight = to_precision(parameter.detach(), dtype).clone()
        memo[id(parameter)] = nn.Parameter(weight, requires_grad=parameter.requires_grad)
    return map_tensors_in_place(copied(module, memo), lambda t: to_precision(t, dtype))


def to_precision(x: Tensor, dtype: torch.dtype) -> Tensor:
    if x.is_complex():
        return x.to(torch.complex128 if dtype == torch.float64 else torch.complex64)
    return x.to(dtype) if x.is_floating_point() else x


def sharing(module: nn.Module) -> nn.Module:
    """A copy with parameters of its own that lie in the same memory."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in module.parameters()}
    return copied(module, memo)


def replaced(model: nn.Module, others: Mapping[str, nn.Module]) -> nn.Module:
    """A copy with the same parameters, and other modules at the paths ``others``."""
    memo: dict[int, Any] = {id(p): p for p in model.parameters()}
    memo |= {id(model.get_submodule(path)): module for path, module in others.items()}
    return copied(model, memo)


def kinds_of(model: nn.Module) -> dict[str, int]:
    """A number for each module, equal for those of one class, with parameters of the same shapes and attributes of the
    same values, inside and out."""
    numbers: dict[tuple, int] = {}
    known: dict[int, int] = {}

    def kind(module: nn.Module) -> int:
        if id(module) not in known:
            plain = [(k, v) for k, v in vars(module).items() if _is_plain(v) and not is_number(k)]
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


def _is_plain(value: object) -> bool:
    """Whether it is a number, a word or several: what two modules must have alike to do the same."""
    return isinstance(value, (int, float, str)) or (isinstance(value, tuple) and all(map(_is_plain, value)))
