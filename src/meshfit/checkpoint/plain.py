"""Settings and counters as JSON, with what JSON lacks: tuples, keys that are no strings, NaN, bytes, small tensors.

Written as {"=tuple": [...]} and the like. Only values come back, never code.
"""

import base64
import math
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshfit.errors import CheckpointError

LARGEST = 1 << 16
"""Elements of a tensor that is written as text."""


def encode(value: Any, where: str = "") -> Any:
    """``value`` for JSON; ``where`` names it if it cannot be."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"=float": repr(float(value))}
    if isinstance(value, dict):
        if type(value) in (dict, OrderedDict, defaultdict) and all(
            isinstance(k, str) and not k.startswith("=") for k in value
        ):
            return {key: encode(item, f"{where}.{key}") for key, item in value.items()}
        pairs = [[encode(key, where), encode(item, f"{where}.{key}")] for key, item in value.items()]
        return {"=counter" if isinstance(value, Counter) else "=pairs": pairs}
    if isinstance(value, list):
        return [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
    for kind in (tuple, set, deque):
        if isinstance(value, kind):
            return {f"={kind.__name__}": [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, bytes):
        return {"=bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {"=dtype": str(value).removeprefix("torch.")}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {"=array": [str(value.dtype), list(value.shape), base64.b64encode(value.tobytes()).decode()]}
    if isinstance(value, Tensor) and value.numel() <= LARGEST and value.layout is torch.strided:
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        kind = str(value.dtype).removeprefix("torch.")
        return {"=tensor": [kind, list(value.shape), base64.b64encode(raw).decode()]}
    raise CheckpointError(
        f"{where or 'a value'} cannot be saved: it is a {type(value).__name__}",
        "checkpoints hold numbers, text, tensors, and lists, tuples and dicts of them: nothing that runs when loaded",
    )


def decode(value: Any) -> Any:
    """What ``encode`` made JSON of."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((kind, held),) = value.items()
        if kind in _DECODERS:
            return _DECODERS[kind](held)
    return {key: decode(item) for key, item in value.items()}


def _pairs(held: Any) -> dict[Any, Any]:
    return {decode(key): decode(item) for key, item in held}


def _tensor(held: Any) -> Tensor:
    kind, shape, raw = held
    content = np.frombuffer(bytearray(base64.b64decode(raw)), np.uint8)
    return torch.from_numpy(content).view(dtype_named(kind)).reshape(shape)


def _array(held: Any) -> np.ndarray:
    kind, shape, raw = held
    return np.frombuffer(bytearray(base64.b64decode(raw)), np.dtype(kind)).reshape(shape)


_DECODERS = {
    "=float": float,
    "=pairs": _pairs,
    "=counter": lambda held: Counter(_pairs(held)),
    "=tuple": lambda held: tuple(decode(held)),
    "=set": lambda held: set(decode(held)),
    "=deque": lambda held: deque(decode(held)),
    "=bytes": base64.b64decode,
    "=dtype": lambda held: dtype_named(held),
    "=array": _array,
    "=tensor": _tensor,
}


def dtype_named(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"there is no dtype {name!r}", "the checkpoint is of a newer torch, or damaged")
    return found
