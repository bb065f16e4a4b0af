"""The words in a plan's text: earlier versions' and other libraries' are read as well as meshfit's own."""

import re
from collections.abc import Sequence
from typing import Any

from meshfit.errors import did_you_mean

RENAMED = {"rows=cut": "sequence=split", "rows=whole": "sequence=whole", "rows=auto": "sequence=auto"}
"""Words of earlier versions, and their replacements."""

READ = {
    "dp": "data",
    "ddp": "data",
    "fsdp": "shard",
    "fsdp2": "shard",
    "tp": "tensor",
    "pp": "pipeline",
    "cp": "context",
    "ep": "expert",
}
"""Degrees in the words of other libraries, which are read as well."""

OPEN = ("data", "shard")
"""Degrees that may be left open: then they take the devices that the others leave."""

ELSEWHERE = {
    "data=2": ("dataparallel", "dataparallelism", "replicate", "replicas"),
    "shard=2": ("deepspeed", "sharding", "dpshard"),
    "zero=1": ("zero1",),
    "zero=2": ("zero2",),
    "zero=3": ("zero3",),
    "data=2 shard=4": ("hsdp",),
    "tensor=2": ("tensorparallel", "modelparallel", "mp"),
    "pipeline=2": ("pipe", "pipelineparallel", "stages"),
    "context=2": ("sp", "contextparallel", "sequenceparallel", "ulysses", "ring"),
    "expert=2": ("moe", "experts", "expertparallel"),
    "microbatches=4": (
        "accumulate",
        "accumulation",
        "gradaccum",
        "gradientaccumulation",
        "accumulategradbatches",
        "ga",
    ),
    "recompute=full": ("checkpointing", "gradientcheckpointing", "activationcheckpointing", "remat"),
    "precision=bf16": ("amp", "autocast", "bf16", "mixedprecision", "dtype"),
    "precision=bf16-compute": ("mixedprecisionpolicy", "paramdtype", "bf16compute"),
    "precision=fp16": ("fp16",),
    "precision=fp8": ("fp8", "float8"),
    "precision=bf16-true": ("bf16true", "purebf16", "stochasticrounding", "bf16stochasticround"),
    "offload=optimizer": ("cpuoffload",),
}
"""Words of other libraries that say something else here, or more than one thing: in lower case, without separators."""


def words_of(text: str) -> list[tuple[str, str]]:
    """The words of a plan's text, each as written and in meshfit's own."""
    words = []
    for word in re.sub(r",\s*(?=\w+=)", " ", text).split():
        key, equals, value = word.partition("=")
        own = READ.get(key.lower(), key) + equals + value
        words.append((word, RENAMED.get(word, own)))
    return words


def translated(text: str, plan: Any) -> list[str]:
    """A note for each word in a plan's text that is another library's, or an earlier version's."""
    notes = []
    for word, own in words_of(text):
        if word in RENAMED:
            notes.append(f"plan: {word} is now written {own}")
        elif own in OPEN:
            notes.append(f"plan: {word} takes the devices that are left: {own}={getattr(plan, own)}")
        elif own != word:
            notes.append(f"plan: {word} is {own} here")
    return notes


def meant(key: str, value: str, known: list[str], degrees: Sequence[str]) -> str:
    plain = "".join(letter for letter in key.lower() if letter.isalnum())
    if plain in known:  # in capitals
        return f"write {plain}={value}"
    for here, names in ELSEWHERE.items():
        if plain in names:
            word, _, usual = here.partition("=")
            own = value.isdecimal() and usual.isdecimal() and word != "zero"
            return f"in meshfit that is {word}={value if own else usual}"
    if (near := did_you_mean(key, known)).startswith("did"):
        return near
    return f"its degrees are {', '.join(degrees)}, its other words in help(meshfit.Plan): data=2 shard=2, say"
