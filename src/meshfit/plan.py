"""How a training is spread over devices, as one value.

A plan is words and degrees. Its text form is the same in Python, on the command line, in the checkpoint and in the
report:

    data=4                          four copies of the model, gradients all-reduced
    data=4 microbatches=2           each share of the batch in two passes
    data=2 precision=bf16           bfloat16 arithmetic, weights kept in fp32
    shard=8                         eight devices, each keeps 1/8 of weights, gradients and optimizer state
    shard=8 zero=1                  ... of the optimizer state alone
    data=2 shard=4 recompute=full   two copies, each over four devices; blocks are computed again in backward
    recompute=full+loss             ... and logits are never there at once
    offload=optimizer               optimizer state in host memory
    data=2 tensor=4                 two copies, each with its operations over four devices
    context=4                       each sequence over four devices
    data=2 expert=4                 two copies, each with the experts of its mixtures over four devices
    data=2 branch=2                 two copies, each with its towers, heads or arms over two devices
    pipeline=4 microbatches=16      layers over four devices, sixteen microbatches on their way through them
    server=1 data=3                 three workers; a process on the host owns weights and optimizer, and steps for all
    server=1 data=2 tensor=2        ... workers of two devices each
    server=1 data=3 staleness=4     ... asynchronously; no worker is more than 4 of its steps ahead
    data=4 exchange=local every=8   each device takes local steps; every 8 steps weights are averaged
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any, Self

from meshfit.errors import PlanError, did_you_mean
from meshfit.plan_words import meant, words_of

DEGREES = ("pipeline", "data", "shard", "expert", "context", "branch", "tensor")
"""From outer to inner: see axes/mesh.py."""
HOW = {
    "shard": ("zero",),
    "tensor": ("sequence",),
    "context": ("attention",),
    "pipeline": ("schedule", "chunks", "cut"),
    "server": ("staleness", "late", "lost", "compress"),
}
"""Words that say how an axis works: they go with it."""

SCHEDULES = ("sequential", "gpipe", "1f1b", "interleaved", "zbv", "dualpipev")

WORDS = {
    "sequence": ("auto", "whole", "split"),
    "attention": ("auto", "gather", "ulysses"),
    "schedule": SCHEDULES,
    "precision": ("fp32", "bf16", "bf16-compute", "fp16", "bf16-true", "fp8"),
    "states": ("fp32", "bf16"),
    "recompute": ("none", "selective", "full", "loss", "selective+loss", "full+loss"),
    "offload": ("none", "optimizer", "parameters", "activations", "optimizer+activations", "parameters+activations"),
    "compile": ("auto", "none", "whole", "block"),
    "batchnorm": ("global", "local"),
    "buffers": ("exact", "local"),
    "exchange": ("allreduce", "local", "diloco"),
    "compress": ("none", "fp16", "bf16", "int8"),
    "late": ("none", "damp", "shorten"),
    "lost": ("redo", "average"),
}

NEEDS = {
    **{"sequence": "tensor", "attention": "context", "zero": "shard"},
    **dict.fromkeys(("schedule", "chunks", "cut"), "pipeline"),
    **{"late": "staleness", **dict.fromkeys(("staleness", "compress", "lost"), "server")},
    **dict.fromkeys(("every", "overlap"), "exchange"),
}
"""Words that say how another one works, and go with it alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Degrees along the axes of the mesh, and how each device computes."""

    server: int = 0
    """Processes on the host that own weights and optimizer, and step for all devices; 0: no servers."""

    data: int = 1
    """Copies of the model; each takes its share of every batch, gradients are summed over them."""

    shard: int = 1
    """Devices over which one copy is sharded; each takes its share of every batch too."""

    zero: int = 3
    """What is sharded (ZeRO stage): 1 the optimizer state, 2 gradients too, 3 weights too."""

    tensor: int = 1
    """Devices that share each operation: each holds some channels of most weights. They see the same samples."""

    sequence: str = "auto"
    """Sequence parallelism between such operations (norms, dropout, residual sums): "split", each device computes its
    share of the tokens; "whole", every device all of them; "auto" splits on GPUs: it costs no time and saves memory."""

    branch: int = 1
    """Devices that compute independent branches of the model at the same time. They see the same samples."""

    context: int = 1
    """Devices over which each sequence is split: each holds some positions of most activations. They see the same
    samples."""

    attention: str = "auto"
    """How those devices attend: "gather", each its own queries to the keys and values of all; "ulysses", each some
    heads on all positions, exchanged by all-to-all; "auto" by which less is communicated."""

    expert: int = 1
    """Devices over which the experts of a mixture are spread; each takes its share of every batch too."""

    pipeline: int = 1
    """Devices over which the layers are spread, one stage after another. They see the same samples."""

    schedule: str = "1f1b"
    """The order in which those devices work on microbatches: see schedule/orders.py."""

    chunks: int = 0
    """Stages on each of them; 0: the usual number of the schedule."""

    cut: str = ""
    """The first modules of the stages after the first, "layers.4,layers.8"; empty: stages of even cost."""

    microbatches: int = 1
    """Passes in which a device works through its share of a batch."""

    precision: str = "fp32"
    """Arithmetic of forward and backward: fp32; bf16, fp8 in linear layers, or fp16 with loss scaling, by autocast;
    "bf16-compute" bf16 throughout. Weights stay as built, but under "bf16-true" they are held in bf16, and rounded
    stochastically after each step."""

    states: str = "fp32"
    """Of the optimizer: "fp32", as it keeps them; "bf16", rounded stochastically."""

    recompute: str = "none"
    """What backward recomputes instead of keeping it: "full" every block, "selective" what is cheap; "loss" (beside
    either by "+"): logits and their cross entropy are computed some tokens at a time, and never kept."""

    offload: str = "none"
    """What lives in host memory: the "optimizer" state, or the "parameters" too; beside either by "+", or alone, the
    "activations" from forward to backward."""

    compile: str = "auto"
    """torch.compile over model and loss together ("whole"), over each block ("block"), "none", or "auto" where it
    saves time."""

    batchnorm: str = "global"
    """BatchNorm statistics over the whole batch ("global") or over each device's share ("local")."""

    buffers: str = "exact"
    """Other buffers that a forward writes: updated as one device would, from the whole batch, or the plan is refused
    ("exact"); or by every microbatch on every device ("local")."""

    staleness: float = 0
    """Steps that a worker of servers may be ahead of the slowest, "inf": any number; 0: all step together."""

    late: str = "none"
    """What a server does about late gradients: "damp" the learning rate, or "shorten" momentum."""

    lost: str = "redo"
    """What to do with a step in which a worker of servers dies: "redo" it, its batch shared by the remaining workers,
    or "average" over what those have sent."""

    compress: str = "none"
    """Compression of gradients sent to a server: "fp16", "bf16", "int8"; the error is added to the next ones."""

    exchange: str = "allreduce"
    """Gradients summed in every step ("allreduce"), or weights averaged every few steps ("local"), by an outer
    optimizer ("diloco")."""

    every: int = 1
    """Steps from one averaging to the next."""

    overlap: int = 0
    """Steps taken while an averaging is under way."""

    def __post_init__(self) -> None:
        for key in (*DEGREES, "microbatches", "every"):
            if not isinstance(degree := getattr(self, key), int) or degree < 1:
                raise PlanError(f"{key}={degree} is not a degree", f"{key} counts from 1: {key}=2, say")
        for key, words in WORDS.items():
            if (word := _in_order(getattr(self, key), words)) not in words:
                raise PlanError(f"{key}={word} is not known", did_you_mean(str(word), words))
            object.__setattr__(self, key, word)
        for key, right, hint in (
            ("zero", self.zero in (1, 2, 3), "1, 2 or 3: how much is cut over the shard axis"),
            ("chunks", isinstance(self.chunks, int) and self.chunks >= 0, "chunks=2, say"),
            ("server", self.server >= 0, "server=1, say"),
            ("staleness", self.staleness >= 0, "staleness=4, say"),
        ):
            if not right:
                raise PlanError(f"{key}={getattr(self, key)} is not possible", hint)
        example = {"staleness": "server=1 staleness=4", "exchange": "exchange=local", "server": "server=1"}
        for key, other in NEEDS.items():
            if getattr(self, key) == USUAL[key] or getattr(self, other) != USUAL[other]:
                continue
            lacks = {"pipeline": "pipeline=1 is one stage", "shard": "shard=1 cuts nothing"}
            lacks |= {axis: f"{axis}=1 splits nothing" for axis in ("tensor", "context")}
            raise PlanError(
                f"{key}={getattr(self, key)} says how {other}= works, but {lacks.get(other, 'the plan has none')}",
                f"{example.get(other, f'{other}=2')}, say",
            )
        if self.server or self.exchange != "allreduce":
            self._check_exchange()

    def _check_exchange(self) -> None:
        if self.server and self.exchange != "allreduce":
            raise PlanError(
                f"server={self.server} and exchange={self.exchange} exclude each other",
                "a server steps for all devices, local steps are each device's own: keep one of them",
            )
        if self.lost != "redo" and self.worker_size > 1:
            raise PlanError(f"lost={self.lost} is for workers of one device", "those of several redo such a step")
        if self.lost != "redo" and self.staleness:
            raise PlanError(
                f"lost={self.lost} is for steps that workers take together",
                f"with staleness={self.staleness:g} they are asynchronous: another worker takes a lost batch",
            )
        if not 0 <= self.overlap < self.every + (self.every == 1):
            raise PlanError(
                f"overlap={self.overlap} is not below every={self.every}",
                "an averaging must end before the next begins",
            )
        inside = [f"{axis}={getattr(self, axis)}" for axis in DEGREES if axis != "data" and getattr(self, axis) > 1]
        with_it = [] if self.server else inside  # a worker of servers may be several ranks
        if self.offloads("parameters") or (self.server and self.offloads("optimizer")):
            with_it.append(f"offload={self.offload}")
        if self.precision in ("fp16", "bf16-true"):
            with_it.append(f"precision={self.precision}")
        if self.states != "fp32":
            with_it.append(f"states={self.states}")
        if not with_it:
            return
        own, why = f"exchange={self.exchange}", "its ranks hold the whole model, and step in bf16 or fp32"
        works = f"data={self.devices} {own}"
        if self.server:
            own = f"server={self.server}"
            why = "servers keep the optimizer on the host already, and step in bf16 or fp32"
            works = str(replace(self, offload="none", precision="fp32", states="fp32"))
        raise PlanError(f"{own} does not go with {with_it[0]}", why, f"{works} works")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the text form. Unknown words and unreadable numbers are a ``PlanError``."""
        if not isinstance(text, str):
            one = text if isinstance(text, int) and text > 0 else 4
            words = " ".join(f"{key}={value}" for key, value in text.items()) if isinstance(text, dict) else ""
            raise PlanError(f"plan={text!r} is not a plan", f'a plan is a text: plan="{words or f"data={one}"}"')
        if (joined := re.sub(r"\s*=\s*", "=", text)) != text:
            raise PlanError(f"the plan {text!r} has a space beside =", f"write {joined}")
        known = list(USUAL)
        given: dict[str, float | str] = {}
        for word, own in words_of(text):
            key, equals, value = own.partition("=")
            if "," in word and key != "cut":
                spaced = " ".join(part for part in word.split(",") if part)
                raise PlanError(f"{word!r} in the plan holds a comma", f"write spaces between words: {spaced}")
            if key not in known:
                raise PlanError(f"the plan has no key {key!r}", meant(key, value, known, DEGREES))
            if not equals or not value:
                raise PlanError(
                    f"{word!r} in the plan has no value",
                    f"write {key}={2 if key in DEGREES else USUAL[key]}, say",
                )
            if key in given:
                raise PlanError(f"the plan names {key} twice", f"{key}={given[key]} and {word}")
            given[key] = value
            if key == "staleness" and value == "inf":
                given[key] = math.inf
            elif isinstance(USUAL[key], int):
                if not value.isdecimal():
                    raise PlanError(f"{word} is not a number", f"{key} counts from 1: {key}=2, say")
                given[key] = int(value)
        return cls(**given)  # type: ignore[arg-type]

    def __str__(self) -> str:
        words = [word for word, usual in USUAL.items() if getattr(self, word) != usual]
        if not any(word in DEGREES for word in words):
            words.insert(0, "data")
        return " ".join(f"{word}={getattr(self, word)}" for word in words)

    @property
    def devices(self) -> int:
        """Devices that the plan takes: the product of its degrees."""
        return math.prod(getattr(self, axis) for axis in DEGREES)

    @property
    def shares(self) -> int:
        """Parts of each batch, one for each rank that reads data."""
        return self.data * self.shard * self.expert

    @property
    def places(self) -> list[dict[str, int]]:
        """By rank, its index along each axis."""
        every = product(*(range(getattr(self, axis)) for axis in DEGREES))
        return [dict(zip(DEGREES, place, strict=True)) for place in every]

    def share_at(self, place: Mapping[str, int]) -> int:
        """Which part of each batch the rank at ``place`` takes."""
        return (place["data"] * self.shard + place["shard"]) * self.expert + place["expert"]

    @property
    def worker(self) -> "Plan":
        """The plan of one worker of servers."""
        return replace(self, server=0, data=1, staleness=0, late="none", compress="none", lost="redo")

    def without(self, *axes: str, **words: Any) -> Self:
        """The plan whose devices along ``axes`` hold copies of the model instead, with ``words`` changed too."""
        off = {word: USUAL[word] for axis in axes for word in (axis, *HOW.get(axis, ()))}
        copies = self.data * math.prod(getattr(self, axis) for axis in axes if axis in DEGREES)
        return replace(self, **({"data": copies} | off | words))

    @property
    def worker_size(self) -> int:
        """Ranks of one worker of servers; 1 where there are none."""
        return self.devices // self.data if self.server else 1

    @property
    def cuts(self) -> bool:
        """Whether parameters are gathered before they are used."""
        return self.shard > 1 or self.offloads("parameters")

    def offloads(self, what: str) -> bool:
        """Whether ``what`` lives in host memory: "optimizer", "parameters" or "activations"."""
        return what in self.offload.split("+")

    @property
    def rounds(self) -> bool:
        """Whether weights or optimizer states are held in a lower precision than they are stepped in."""
        return self.precision == "bf16-true" or self.states != "fp32"

    @property
    def recomputed_blocks(self) -> str:
        """What is computed again of every block: "none", "selective" or "full"."""
        return {"loss": "none"}.get(self.recompute, self.recompute.removesuffix("+loss"))

    @property
    def head_loss(self) -> bool:
        """Whether logits and their loss are computed some tokens at a time."""
        return self.recompute.endswith("loss")

    @property
    def partitions_modules(self) -> bool:
        """Whether a rank holds only some of the modules."""
        return self.pipeline > 1 or self.branch > 1

    @property
    def joins_batchnorms(self) -> bool:
        """Whether BatchNorms communicate with other ranks in the middle of a forward."""
        joined = self.shares // self.data if self.staleness else self.shares
        return joined > 1 and self.batchnorm == "global" and self.exchange == "allreduce"

    @property
    def in_step(self) -> bool:
        """Whether all devices take every step together: then it is the step of one device."""
        return self.exchange == "allreduce" and not self.staleness


USUAL: dict[str, Any] = {field.name: field.default for field in fields(Plan)}


def completed(plan: "Plan | str", words: Mapping[str, Any]) -> "Plan | str":
    """``plan`` with these words, where it does not say them itself."""
    if isinstance(plan, Plan):
        return replace(plan, **{k: v for k, v in words.items() if getattr(plan, k) == USUAL[k]})
    return " ".join([plan, *(f"{k}={v}" for k, v in words.items() if f"{k}=" not in plan)])


def _in_order(word: str, words: tuple[str, ...]) -> str:
    """ "loss+full" is "full+loss"."""
    parts = sorted(str(word).split("+"))
    return next((each for each in words if sorted(each.split("+")) == parts), word)
