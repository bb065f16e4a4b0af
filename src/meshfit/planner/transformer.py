"""The work of a step of a decoder: layers are counted, not traced.

Products, attention, and passes over memory of norms, residuals, activations and casts as Megatron's fused kernels make
them; collectives of each axis.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil

from meshfit.anatomy.operations import FusedAttention, MatrixProduct, Operation, Streaming
from meshfit.planner.collectives import CollectiveCall
from meshfit.planner.decoder import (
    Decoder,
    Degrees,
    active_parameters,
    layers_of,
    most_parameters,
    plain_layers,
    stage_parameters,
)
from meshfit.planner.software import Software
from meshfit.planner.step import StageWork, StepWork


@dataclass
class _Layer:
    """What one layer takes, collected."""

    forward: list[Operation]
    backward: list[Operation]
    calls: list[CollectiveCall]
    core: list[Operation]
    """Attention's scores, softmax and values: what recompute=attention runs again."""


def step_work(model: Decoder, d: Degrees, software: Software) -> StepWork:
    """The work of a step of ``model`` spread by ``d``."""
    counts = layers_of(model.layers, d.pipeline * d.chunks)
    stages, first = [], 0
    made: dict[tuple[int, int, bool, bool], StageWork] = {}
    one = replace(d, batch=d.microbatch, data=1, pipeline=1, chunks=1, zero=0, shard=0, schedule="1f1b")
    for stage, count in enumerate(counts):
        plain = count if model.experts is None else plain_layers(model, first, count)
        key = (plain, count - plain, stage == 0, stage == len(counts) - 1)
        if key not in made:
            made[key] = _stage(model, d, one, software, key)
        stages.append(made[key])
        first += count
    tokens, most = d.batch * d.length, most_parameters(model, d, counts)
    return StepWork(
        stages=tuple(stages),
        microbatches=d.microbatches,
        schedule=d.schedule,
        ranks=d.pipeline,
        sent=2.0 * d.tokens * model.hidden / d.tensor,  # each tensor rank its part, as Megatron and DeepSpeed send
        stride=d.tensor * d.context * d.data,
        calls=tuple(_step_calls(d, software, *most)),
        update=_update(d, software, *most),
        tokens=tokens,
        samples=d.batch,
        model_flops=6.0 * tokens * active_parameters(model),
    )


def _stage(model: Decoder, d: Degrees, one: Degrees, software: Software, key: tuple[int, int, bool, bool]) -> StageWork:
    """``one``: what ``d`` leaves a device, whatever there are beside it."""
    plain, mixed, _, _ = key
    calls: list[CollectiveCall] = []
    for sparse, count in ((False, plain), (True, mixed)):
        if count:
            calls += _layer_calls(model, one, software, sparse, count)
    if d.zero == 3:
        whole, experts = stage_parameters(model, d, key)
        calls += _gathered(d, whole, *d.cut_over)
        if not d.shard:
            calls += _gathered(d, experts, d.data * d.context * d.tensor // d.expert, d.expert)
    elif d.zero == 2 and d.shard:
        calls += _gathered(d, stage_parameters(model, d, key)[0], *d.cut_over)[2:]
    return StageWork(*_operations(model, one, software, key), 0.45, tuple(calls))


@lru_cache(maxsize=4096)
def _layer_calls(
    model: Decoder, d: Degrees, software: Software, sparse: bool, count: int
) -> tuple[CollectiveCall, ...]:
    """Of so many layers. Many plans have them in common."""
    layer = _layer(model, d, software, sparse)
    return tuple(replace(call, count=call.count * count) for call in (*layer.calls, *_again(layer, d)[1]))


@lru_cache(maxsize=4096)
def _operations(
    model: Decoder, d: Degrees, software: Software, key: tuple[int, int, bool, bool]
) -> tuple[tuple[Operation, ...], tuple[Operation, ...], tuple[Operation, ...]]:
    """Of a stage's microbatch: forward, backward, computed again. Many plans have it in common."""
    plain, mixed, first, last = key
    forward: list[Operation] = []
    backward: list[Operation] = []
    again: list[Operation] = []
    for sparse, count in ((False, plain), (True, mixed)):
        if count:
            layer = _layer(model, d, software, sparse)
            forward += layer.forward * count
            backward += layer.backward * count
            again += _again(layer, d)[0] * count
    held = model.hidden * 2.0 * d.tokens
    if first:
        forward.append(Streaming(2 * held, 2))
        backward.append(Streaming(4 * held, 2))
    if last:
        heads = 1 + model.predicted
        head = _Layer([], [], [], [])
        _linear(head, d, software, model.hidden, ceil(model.vocab / d.tensor), precision=_half(d))
        forward += head.forward * heads
        backward += head.backward * heads
        logits = d.tokens * model.vocab / d.tensor * heads
        forward.append(Streaming(0.6 * d.logit_bytes * logits, 6))
        backward.append(Streaming(0.4 * d.logit_bytes * logits, 4))
        further = _layer(model, d, software, model.experts is not None)
        forward += further.forward * model.predicted
        backward += further.backward * model.predicted
    return tuple(forward), tuple(backward), tuple(again)


def _again(layer: _Layer, d: Degrees) -> tuple[list[Operation], list[CollectiveCall]]:
    """Of a layer's forward, what backward computes and says again."""
    said = [c for c in layer.calls if c.phase == "forward" and c.axis in ("tensor", "expert")]
    repeat = lambda calls: [replace(call, phase="backward") for call in calls]
    if d.recompute == "full":
        return layer.forward, repeat(said)
    if d.recompute == "attention":
        return layer.core, []
    if d.recompute == "half":
        return layer.forward[::2], repeat(said[::2])
    if d.recompute == "cheap":
        return [op for op in layer.forward if isinstance(op, Streaming)], []
    if d.recompute == "operations":
        products: list[Operation] = [op for op in layer.forward if isinstance(op, MatrixProduct)]
        return [*products[::2], *(op for op in layer.forward if isinstance(op, Streaming))], repeat(said)
    return [], []


def _half(d: Degrees) -> str:
    return "fp16" if d.precision == "fp16" else "bf16"


def _linear(
    layer: _Layer,
    d: Degrees,
    software: Software,
    inner: int,
    outer: int,
    *,
    rows: float = 0,
    batch: int = 1,
    precision="",
) -> None:
    """Forward, and both products of backward; below 16 bits, what casts read and write."""
    precision, m = precision or d.precision, max(1, round(rows or d.tokens))
    layer.forward.append(MatrixProduct(m, outer, inner, batch, precision))
    layer.backward.append(MatrixProduct(m, inner, outer, batch, precision))
    apart = software.summed_bytes
    adds = software.fp32_gradients and not apart
    layer.backward.append(MatrixProduct(outer, inner, m, batch, precision, accumulate=adds))
    if apart:
        layer.backward.append(Streaming(apart * outer * inner * batch, 2))
    if precision in ("fp8", "fp4"):
        layer.forward.append(Streaming(4.0 * m * inner * batch, 1))
        layer.backward.append(Streaming(4.0 * m * outer * batch, 1))


@lru_cache(maxsize=4096)
def _layer(model: Decoder, d: Degrees, software: Software, sparse: bool) -> _Layer:
    layer = _Layer([], [], [], [])
    _attention(layer, model, d, software)
    if sparse:
        _experts(layer, model, d, software)
    else:
        ffn = model.ffn // d.tensor
        _linear(layer, d, software, model.hidden, ffn * (2 if model.gated else 1))
        _linear(layer, d, software, ffn, model.hidden)
        _activation(layer, model, software, d.tokens * ffn)
    _norms(layer, model, d, software)
    _tensor_calls(layer, model, d, software)
    return layer


def _attention(layer: _Layer, model: Decoder, d: Degrees, software: Software) -> None:
    t, h, heads = d.tensor, model.hidden, max(1, model.heads // d.tensor)
    width, value, batch = model.width, model.width, d.microbatch
    if (x := model.latent) is not None:
        _linear(layer, d, software, h, x.query_rank + x.rank + x.rotated)
        _linear(layer, d, software, x.query_rank, heads * (x.plain + x.rotated))
        _linear(layer, d, software, x.rank, heads * (x.plain + x.value))
        _linear(layer, d, software, heads * x.value, h)
        width, value = x.plain + x.rotated, x.value
    else:
        keys = max(model.width, model.keys // t)
        _linear(layer, d, software, h, model.queries // t + 2 * keys)
        _linear(layer, d, software, model.queries // t, h)
    local = d.length // d.context
    if d.attention == "unfused":
        _unfused(layer, d, batch * heads, width, model.dropout, software)
    else:
        count, length = (heads // d.context, d.length) if d.ulysses else (heads, local)
        for backward, into in ((False, layer.forward), (True, layer.backward)):
            core = FusedAttention(batch, max(1, count), length, d.length, width, value, True, d.attention, backward)
            into.append(core)
            if not backward:
                layer.core.append(core)
    moved = 2.0 * d.tokens * heads * (2 * width + value)
    passes = (4.0 if model.rotary else 2.0) * software.fused
    layer.forward.append(Streaming(passes * moved, 4))
    layer.backward.append(Streaming(passes * moved, 4))
    if d.context > 1:
        _context_calls(layer, model, d)


def _unfused(layer: _Layer, d: Degrees, batch: int, width: int, dropout: bool, software: Software) -> None:
    """Scores, softmax with its mask in one kernel, dropout, values."""
    s, precision = d.length, _half(d)
    elements = float(batch) * s * s
    scores = MatrixProduct(s, s, width, batch, precision)
    values = MatrixProduct(s, width, s, batch, precision)
    softmax = Streaming((9.0 if dropout else 4.0) * elements, 2 if dropout else 1)
    layer.core += [scores, softmax, values]
    layer.forward += [scores, softmax, values]
    layer.backward += [scores, values, values, values]
    layer.backward.append(Streaming((11.0 if dropout else 6.0) * elements, 2 if dropout else 1))


def _activation(layer: _Layer, model: Decoder, software: Software, elements: float) -> None:
    ahead, back = (3.0, 5.0) if model.gated else (2.0, 3.0 + (1.0 if model.bias else 0.0))
    layer.forward.append(Streaming(2.0 * elements * ahead * software.fused, 1))
    layer.backward.append(Streaming(2.0 * elements * back * software.fused, 2 if model.bias else 1))


def _norms(layer: _Layer, model: Decoder, d: Degrees, software: Software) -> None:
    """Two norms, two residuals (with dropout and bias): passes over an activation in 16 bits."""
    one = 2.0 * d.tokens * model.hidden / (d.tensor if d.sequence else 1) * software.fused
    ahead, back = (11.0, 17.0) if model.dropout else (10.0, 12.0)
    extra = 2.0 if model.bias else 0.0
    layer.forward.append(Streaming(ahead * one, 4))
    layer.backward.append(Streaming((back + extra) * one, 8 if model.bias else 6))


def _experts(layer: _Layer, model: Decoder, d: Degrees, software: Software) -> None:
    x = model.experts
    assert x is not None
    local = max(1, x.count // d.expert)
    split = d.tensor if d.expert < d.tensor else 1
    routed = d.tokens * x.chosen / (d.tensor if d.expert >= d.tensor and d.tensor > 1 else 1)
    rows = max(1.0, routed / local)
    _linear(layer, d, software, model.hidden, 2 * x.ffn // split, rows=rows, batch=local)
    _linear(layer, d, software, x.ffn // split, model.hidden, rows=rows, batch=local)
    _activation(layer, model, software, routed * x.ffn / split)
    if x.shared:
        _linear(layer, d, software, model.hidden, 2 * x.shared // d.tensor)
        _linear(layer, d, software, x.shared // d.tensor, model.hidden)
        _activation(layer, model, software, d.tokens * x.shared / d.tensor)
    moved = 2.0 * routed * model.hidden
    layer.forward += [MatrixProduct(round(d.tokens), x.count, model.hidden), Streaming(6 * moved, 12)]
    layer.backward += [MatrixProduct(round(d.tokens), model.hidden, x.count), Streaming(6 * moved, 12)]
    if d.expert > 1:
        for phase in ("forward", "backward"):
            made = CollectiveCall("all_to_all", moved, d.expert, 1, 2, "expert", phase=phase, copies=x.chosen)
            layer.calls.append(made)


def _tensor_calls(layer: _Layer, model: Decoder, d: Degrees, software: Software) -> None:
    if d.tensor == 1:
        return
    size, hidden = 2.0 * d.tokens * model.hidden, software.hides_tensor or d.fuses_products
    call = lambda name, count, phase, beside: CollectiveCall(
        name, size, d.tensor, 1, count, "tensor", phase=phase, hidden=beside
    )
    if not d.sequence:
        layer.calls += [call("all_reduce", 2, phase, False) for phase in ("forward", "backward")]
        return
    for phase in ("forward", "backward"):
        for name in ("all_gather", "reduce_scatter"):
            layer.calls += [call(name, 1, phase, hidden), call(name, 1, phase, software.hides_tensor)]
    layer.calls.append(call("all_gather", 2, "backward", True))  # inputs, for the gradients of weights


def _context_calls(layer: _Layer, model: Decoder, d: Degrees) -> None:
    keys = 2.0 * 2 * d.tokens * max(model.width, model.keys // d.tensor)
    for phase, times in (("forward", 1), ("backward", 2)):
        if d.ulysses:
            whole = 2.0 * d.tokens * (2 * model.queries + 2 * model.keys) / d.tensor
            made = CollectiveCall("all_to_all", whole, d.context, d.tensor, 1, "context", phase=phase)
        else:
            whole = keys * d.context * times
            made = CollectiveCall("all_gather", whole, d.context, d.tensor, 1, "context", phase=phase, hidden=True)
        layer.calls.append(made)


def _gathered(d: Degrees, count: float, degree: int, stride: int) -> list[CollectiveCall]:
    """Weights, twice, and gradients of a microbatch of fully sharded parameters."""
    if degree <= 1 or not count:
        return []
    call = lambda name, size, phase: CollectiveCall(
        name, size * count, degree, stride, 1, "shard", phase=phase, hidden=True
    )
    back = [call("all_gather", 2.0, "backward"), call("reduce_scatter", float(d.reduce_bytes), "backward")]
    return [call("all_gather", 2.0, "forward"), *back]


def _step_calls(d: Degrees, software: Software, whole: float, experts: float) -> list[CollectiveCall]:
    """Gradients to their sum, weights back; fully sharded ones are each microbatch's."""
    (degree, stride), size = d.cut_over, float(d.reduce_bytes)

    def call(name: str, moved: float, degree: int, stride: int, phase: str = "backward") -> list[CollectiveCall]:
        if degree == 1 or not moved:
            return []
        return [CollectiveCall(name, moved, degree, stride, 1, "data", phase=phase, hidden=software.hides_gradients)]

    def summed(count: float, degree: int, stride: int) -> list[CollectiveCall]:
        if d.zero == 3:
            return []
        if not d.zero:
            return call("all_reduce", size * count, degree, stride)
        scattered = [] if d.shard and d.zero == 2 else call("reduce_scatter", size * count, degree, stride)
        return [*scattered, *call("all_gather", 2.0 * count, degree, stride, "forward")]

    if not d.shard:
        return summed(whole, degree, stride) + summed(experts, max(1, degree * d.tensor // d.expert), d.expert)
    found = summed(whole, degree, stride) if degree > 1 else []
    found += call(
        "all_reduce", size * whole / degree, d.copies, degree * stride if d.context * d.expert == 1 else d.tensor
    )
    return found + call("all_reduce", size * experts, max(1, d.data * d.context // d.expert), d.tensor * d.expert)


def _update(d: Degrees, software: Software, whole: float, experts: float) -> tuple[Operation, ...]:
    group, _ = d.cut_over
    own = whole / (group if d.zero else 1)
    own += experts / (max(1, group * d.tensor // d.expert) if d.zero and not d.shard else 1)
    clipped = 8.0 * (whole + experts) / (group if d.zero >= 2 else 1)
    return (Streaming(software.passes * own + clipped, 20),)
