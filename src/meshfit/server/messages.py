"""What the words of a worker's messages must be: looked at before anything is done with them, so that one who sends
others is refused alone, and the run goes on."""

import math
from collections.abc import Callable
from typing import Any

from meshfit.server.wire import Message, WireError

Right = Callable[[Any], bool]
ABSENT = object()


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _number(value: Any) -> bool:
    """NaN and infinity too: a loss may be."""
    return isinstance(value, int | float) and (isinstance(value, float) or abs(value) < 2**63)


def _count(value: Any) -> bool:
    return _number(value) and math.isfinite(value) and value >= 0


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _flag(value: Any) -> bool:
    return value is ABSENT or isinstance(value, bool) or value in (0.0, 1.0)


def _workers(value: Any) -> bool:
    return isinstance(value, list) and all(map(_whole, value))


def _bits(value: Any) -> bool:
    return isinstance(value, str) and bool(value) and set(value) <= set("0123456789abcdef")


WORDS: dict[str, dict[str, Right]] = {
    "hello": {"layout": lambda value: isinstance(value, list), "version": _whole, "incarnation": _text},
    "join": {"job": lambda value: value is ABSENT or isinstance(value, dict)},
    "push": {
        "loss": _number,
        "count": _number,
        "stop": _number,
        "broken": _number,
        "samples": _count,
        "ticket": lambda value: value is None or _whole(value),
        "members": _workers,
        "round": _text,
        "reached": _bits,
    },
    "meet": {"round": _text, "number": _whole, "said": _text},
    "agree": {"summed": _workers},
    "step": {"loss": _number, "correction": _number, "norm": _number, "pull": lambda value: isinstance(value, bool)},
    "drop": {"stop": _flag},
    "pull": {"averaged": _flag},
}


def check(message: Message) -> None:
    """``WireError`` unless the message has the words of its kind."""
    for word, right in WORDS.get(message.kind, {}).items():
        value = message.words.get(word, ABSENT)
        if not right(value):
            said = "is missing" if value is ABSENT else f"is {str(value)[:40]!r}"
            raise WireError(f"a {message.kind!r} that makes no sense", f"{word!r} {said}")
