"""Whether a manifest says what can be: checked when it is read, before anything is done with it. Its SHA-256 tells
that nobody changed it by accident; one that was written wrongly, or signed again, has the right SHA-256."""

from collections.abc import Iterator
from math import prod
from typing import Any

from meshfit.checkpoint.plain import dtype_named
from meshfit.errors import CheckpointError

LARGEST_BLOCK = 1 << 32
NUMBERS = ("step", "samples", "world", "batch_size")
STATE = {"optimizer": dict, "groups": list, "values": dict, "data": dict}


def whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def wrong(body: dict[str, Any]) -> str | None:
    """What cannot be, in words: the first of it."""
    return next(_wrong(body), None)


def _wrong(body: dict[str, Any]) -> Iterator[str]:
    block = body.get("block")
    if not whole(block) or not 0 < block <= LARGEST_BLOCK:  # type: ignore[operator]
        yield f"block is {block!r}"
        return
    for name in NUMBERS:
        if not whole(body.get(name)):
            yield f"{name} is {str(body.get(name))[:40]!r}"
    if not isinstance(body.get("plan"), str):
        yield f"plan is {str(body.get('plan'))[:40]!r}"
    for name in ("files", "tensors", "state"):
        if not isinstance(body.get(name), dict):
            yield f"{name} is no object"
            return
    yield from _wrong_state(body["state"])
    for name, about in body["files"].items():
        yield from _wrong_file(name, about, body["block"])
    for key, about in body["tensors"].items():
        yield from _wrong_tensor(key, about, body["files"])


def _wrong_state(state: dict[str, Any]) -> Iterator[str]:
    for name, kind in STATE.items():
        if not isinstance(state.get(name), kind):
            yield f"state.{name} is no {'object' if kind is dict else 'list'}"
    if isinstance(state.get("optimizer"), dict) and not isinstance(state["optimizer"].get("kind"), str):
        yield "state.optimizer has no kind"
    held = state.get("scheduler")
    if held is not None and not (isinstance(held, dict) and isinstance(held.get("kind"), str) and "state" in held):
        yield "state.scheduler is neither null nor an object with a kind and a state"
    if "best" not in state:
        yield "state.best is missing"


def _wrong_file(name: str, about: Any, block: int) -> Iterator[str]:
    if not isinstance(about, dict) or not whole(about.get("size")):
        yield f"{name} has no size"
        return
    for kind, of in (("sha256", str), ("crc32", int)):
        found = about.get(kind)
        if found is None and kind == "crc32":
            continue
        blocks = -(-about["size"] // block)
        if not isinstance(found, list) or len(found) != blocks or not all(isinstance(each, of) for each in found):
            yield f"{name} has {blocks} blocks, and not as many {kind}"


def _wrong_tensor(key: str, about: Any, files: dict[str, Any]) -> Iterator[str]:
    if not isinstance(about, dict) or not isinstance(about.get("dtype"), str):
        yield f"{key} has no dtype"
        return
    try:
        size = dtype_named(about["dtype"]).itemsize
    except CheckpointError as error:
        yield f"{key}: {error.headline}"
        return
    shape, parts = about.get("shape"), about.get("parts")
    if not isinstance(shape, list) or not all(map(whole, shape)) or not isinstance(parts, list):
        yield f"{key} has no shape, or no parts"
        return
    for part in parts:
        if not isinstance(part, list) or len(part) != 3 or not isinstance(part[0], str) or not whole(part[1]):
            yield f"a part of {key} is no file, offset and box"
            return
        file, offset, box = part
        if not isinstance(box, list) or len(box) != len(shape) or not all(map(_range, box, shape)):
            yield f"a part of {key} is no box of {shape}"
        elif not isinstance(files.get(file), dict) or not whole(files[file].get("size")):
            yield f"{key} is in {file}, which is none of the files"
        elif offset + prod(b - a for a, b in box) * size > files[file]["size"]:
            yield f"a part of {key} ends after the end of {file}"


def _range(ends: Any, size: int) -> bool:
    return isinstance(ends, list) and len(ends) == 2 and all(map(whole, ends)) and ends[0] <= ends[1] <= size
