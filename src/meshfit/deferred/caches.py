"""What ``functools.lru_cache`` has kept while a function ran on meta: tensors without values, which a later call would
be given."""

import functools
import sys
from collections.abc import Iterator
from gc import get_referents
from typing import Any

from torch import Tensor

_Cached = type(functools.lru_cache(lambda: None))


def forget_meta_tensors() -> None:
    """Empty the caches of imported modules that hold a tensor on meta."""
    for cached in _caches():
        if _holds_meta(cached):
            cached.cache_clear()


def _caches() -> Iterator[Any]:
    for name, module in list(sys.modules.items()):
        for value in list(getattr(module, "__dict__", {}).values()):
            if type(value) is _Cached:
                yield value
            elif issubclass(type(value), type) and getattr(value, "__module__", "") == name:
                yield from (method for method in list(vars(value).values()) if type(method) is _Cached)


def _holds_meta(cached: Any) -> bool:
    around, seen = [cached], {id(vars(cached))}
    while around:
        for each in get_referents(around.pop()):
            if isinstance(each, Tensor) and each.is_meta:
                return True
            if type(each) in (dict, list, tuple) and id(each) not in seen:
                seen.add(id(each))
                around.append(each)
    return False
