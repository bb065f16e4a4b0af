"""What operators make of meta tensors, remembered: sizes, strides and dtypes of the results by those of the arguments.

torch finds many of these in Python, in 0.1 to 0.7 ms an operator. A recording runs a forward two or three times, and
most models repeat their blocks: nearly all of it has been found before.

Remembered are results in memory of their own, of operators of torch that draw no numbers, of plain arguments. All else
(views, writes in place, subclasses, complex numbers) runs each time.
"""

from typing import Any

import torch
from torch import Tensor, nn

from meshfit.anatomy.flops import tensors
from meshfit.torch_private.operators import TorchDispatchMode, schema_of
from meshfit.torch_private.tensors import storage_id

MOST = 20_000
"""Results that are remembered: some 1 KiB each."""

PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)

_results: dict[Any, Any] = {}
_functional: dict[Any, bool] = {}


class Remembered(TorchDispatchMode):
    """Within it, what an operator makes of meta tensors is found once. To be entered before other modes: it is then
    the last to be asked."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if (key := _key_of(func, args, kwargs)) is None:
            return func(*args, **kwargs)
        if (made := _results.get(key)) is not None:
            return _fresh(made)
        result = func(*args, **kwargs)
        if (made := _described(result, {storage_id(t) for t in tensors((args, kwargs))})) is not None:
            if len(_results) >= MOST:
                _results.clear()
            _results[key] = made
        return result


def _is_functional(func: Any) -> bool:
    """Whether an operator's schema says that it makes tensors, and does nothing else."""
    schema = schema_of(func)
    apart = {torch.Tag.nondeterministic_seeded, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
    says = [*schema.arguments, *schema.returns]
    return func.namespace == "aten" and not apart & set(func.tags) and not any(each.alias_info for each in says)


def _key_of(func: Any, args: Any, kwargs: Any) -> Any:
    """All that the result depends on; None where that is not known."""
    functional = _functional.get(func)
    if functional is None:
        functional = _functional[func] = _is_functional(func)
    if not functional:
        return None
    found: list[Any] = [func, torch.get_default_dtype()]
    return tuple(found) if _add((args, kwargs), found) and len(found) > 2 else None


def _add(thing: Any, found: list[Any]) -> bool:
    """Append what an argument is; False: it is none of those that are known."""
    kind = type(thing)
    if kind is Tensor or kind is nn.Parameter:
        found += (thing.shape, thing.stride(), thing.dtype, thing.requires_grad)
        return thing.is_meta and thing.layout is torch.strided and not thing.is_complex() and not thing.is_neg()
    if kind in (tuple, list):
        found += (kind, len(thing))
        return all(_add(item, found) for item in thing)
    if kind is dict:
        found += thing
        return all(_add(item, found) for item in thing.values())
    found += (kind, thing)  # 1, 1.0 and True are equal, and not the same
    return kind in PLAIN


def _described(result: Any, given: set[int]) -> Any:
    """A result, for ``_fresh``; None where it shares memory with an argument, or is not plain."""
    every = tensors(result)
    memory = [storage_id(tensor) for tensor in every]
    own = len({*memory}) == len(memory) and given.isdisjoint(memory)
    if not own or not every or not all(type(tensor) is Tensor and tensor.is_meta for tensor in every):
        return None
    made = _describe(result)
    same = lambda a, b: a.untyped_storage().nbytes() == b.untyped_storage().nbytes()
    return made if all(map(same, every, tensors(_fresh(made)))) else None


def _describe(result: Any) -> Any:
    if isinstance(result, Tensor):
        return (result.shape, result.stride(), result.dtype)
    if isinstance(result, tuple | list):
        return [type(result), *map(_describe, result)]
    return {"plain": result}


def _fresh(made: Any) -> Any:
    if type(made) is tuple:
        shape, stride, dtype = made
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return made[0](map(_fresh, made[1:])) if type(made) is list else made["plain"]
