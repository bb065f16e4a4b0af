"""What a worker may ask of a server, and the words that each such message must have: checked before anything is done
with them, so that one who sends others is refused alone, and the run goes on.

    hello     who it is, how its payload is laid out, its shared memory        welcome
    where     which batch is next, and who shares it                           reply
    meet      what it says to the others in the middle of a batch              reply, or again
    push      its gradient, and the scalars of the step                        reply, or again
    agree     sum over these workers alone: another server has lost the rest   reply, or again
    step      take the step; the factor and the norm, now that all is known    weights
    drop      do not
    pull      the weights, or the averaged ones                                weights
    state     all that it keeps, as a snapshot in its folder                   reply
    wait      at the end: until those before it are gone                       reply
    leave
    progress  nothing: it gets on, in an evaluation, a save, a long step

Before that, over an address that was opened to other hosts, one that is no worker yet may ask to ``join``: it gets
its number, or why not.
"""

import math
from collections.abc import Callable
from typing import Any

from meshfit.server.wire import Message, WireError

ABSENT = object()

whole = lambda value: type(value) is int and 0 <= value < 2**63
number = lambda value: isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63)  # a loss may be NaN
count = lambda value: number(value) and math.isfinite(value) and value >= 0
text = lambda value: isinstance(value, str)
flag = lambda value: value in (ABSENT, False, True)
workers = lambda value: isinstance(value, list) and all(map(whole, value))
bits = lambda value: text(value) and bool(value) and set(value) <= set("0123456789abcdef")

WORDS: dict[str, dict[str, Callable[[Any], bool]]] = {
    "hello": {"layout": lambda value: isinstance(value, list), "version": whole, "incarnation": text},
    "join": {"job": lambda value: value is ABSENT or isinstance(value, dict)},
    "push": {"loss": number, "count": number, "stop": number, "broken": number, "samples": count}
    | {"values": lambda value: isinstance(value, list) and all(map(number, value))}
    | {"ticket": lambda value: value is None or whole(value), "members": workers, "round": text, "reached": bits}
    | {"epoch": whole, "last": flag},
    "meet": {"round": text, "number": whole, "said": text},
    "agree": {"summed": workers},
    "step": {"loss": number, "correction": number, "norm": number, "pull": lambda value: isinstance(value, bool)},
    "drop": {"stop": flag},
    "pull": {"averaged": flag},
}


def check(message: Message, worker: int | None = None) -> None:
    """``WireError`` unless the message has the words of its kind, and is of ``worker``, once that is known."""
    if worker is not None and message.worker != worker:
        raise WireError(f"worker {worker} speaks as worker {message.worker}")
    if worker is not None and message.payload and message.kind != "push":
        raise WireError(f"a {message.kind!r} with a payload that was not due")
    for word, right in WORDS.get(message.kind, {}).items():
        value = message.words.get(word, ABSENT)
        if not right(value):
            said = "is missing" if value is ABSENT else f"is {str(value)[:40]!r}"
            raise WireError(f"a {message.kind!r} that makes no sense", f"{word!r} {said}")
