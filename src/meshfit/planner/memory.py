"""Bytes on the device that has most, by kind and phase, of a decoder under given degrees.

    weights        16 bits, or 32 where the optimizer steps them in place
    gradients      as they are summed over microbatches
    optimizer      two moments and, beside weights in 16 bits, weights in 32
    activations    what backward needs of the microbatches under way, layer by layer
    logits         of the last stage: in 16 and in 32 bits, and their gradient
    passing        gradients of activations on their way through one layer; what is gathered for it

Megatron's buffers are counted as it allocates them; beside the tensors, a process holds its context, libraries and
the buffers of collectives (``CONTEXT``), and the allocator what it cannot hand out (``SLACK``): what ``nvidia-smi``
shows is more than what torch has allocated.
"""

from functools import lru_cache

from meshfit.planner.decoder import Decoder, Degrees, layers_of, parameters_of
from meshfit.planner.prediction import StepMemory
from meshfit.planner.software import Software
from meshfit.schedule.actions import V_SHAPED

PASSING = 0.3
"""Gradients of activations on their way through a layer, over what the layer keeps: those of its widest products."""

HEAD_CHUNK = 4
"""Logits that are there at once where their loss is computed some tokens at a time, over elements of the head's input:
a chunk has as many, a few times over, and its input's gradient is there from the loss on."""


def step_memory(model: Decoder, d: Degrees, software: Software) -> StepMemory:
    """Of the rank of the pipeline that holds most."""
    return max((rank_memory(model, d, software, rank) for rank in range(d.pipeline)), key=lambda m: m.allocated)


def rank_memory(model: Decoder, d: Degrees, software: Software, rank: int) -> StepMemory:
    counts = layers_of(model.layers, d.pipeline * d.chunks)
    whole, experts = parameters_of(model, d, counts, rank)
    group, _ = d.cut_over
    apart = max(1, group * d.tensor // d.expert) if experts and not (d.shard and d.expert > 1) else 1

    def cut(each: int, level: int) -> float:
        shards = d.zero >= level
        return each * (whole / (group if shards else 1) + experts / (apart if shards else 1))

    weight, gradient = 2 if software.master else 4, software.gradient_bytes
    own = d.own_stages(rank)
    last = len(counts) - 1 in own
    logits = d.tokens * model.vocab / d.tensor if last else 0.0
    if d.head_loss:
        logits = min(logits, HEAD_CHUNK * d.tokens * model.hidden)
    made = layer_activations(model, d)
    per_layer = kept(model, d, made)
    layers = sum(counts[stage] for stage in own)
    passing = PASSING * made
    if d.recompute != "none":
        passing += made - per_layer  # a layer's, computed again while backward goes through it
    if software.spare_gradients:
        passing += 2.0 * (model.dense_parameters if model.experts is None else model.attention_parameters) / d.tensor
    if d.zero == 3:
        passing += 2 * 2.0 * (whole + experts) / max(1, layers)
    held = {
        "weights": cut(weight, 3),
        "gradients": cut(gradient, 2),
        "optimizer": cut(12 if software.master else 8, 1),
        "activations": per_layer * layers * in_flight(d, rank) + 2.0 * d.tokens * model.hidden / _split(d),
        "logits": logits * (4.0 if software.fused_loss else 14.0),
        "passing": passing,
    }
    return StepMemory(held, rank)


def in_flight(d: Degrees, rank: int) -> float:
    """Microbatches whose activations a rank keeps at its most, in whole models of its layers."""
    p, m, v = d.pipeline, d.microbatches, d.chunks
    if p == 1:
        return 1.0
    if d.schedule in V_SHAPED:
        return float(min(m, p))
    if v > 1:
        return min(m * v, (p - rank - 1) * 2 + (v - 1) * p + 1) / v
    first = {"zb2p": 2 * p - 1, "zb1p": p}.get(d.schedule)
    return float(min(m, first if first is not None else p - rank))


def _split(d: Degrees) -> int:
    return d.tensor if d.sequence else 1


def kept(model: Decoder, d: Degrees, whole: float) -> float:
    """Bytes that backward needs of one layer for one microbatch, of ``whole`` that its operations save."""
    entrance = 2.0 * d.tokens * model.hidden / _split(d)
    if d.recompute == "full":
        return entrance
    if d.recompute == "half":
        return (whole + entrance) / 2
    if d.recompute == "attention":
        return whole - scores(model, d)
    if d.recompute == "cheap":
        return min(whole, d.tokens * _results(model, d, whole / d.tokens))
    if d.recompute == "operations":
        return 0.45 * whole
    return whole


def _results(model: Decoder, d: Degrees, saved: float) -> float:
    """Bytes a token that a layer's products and attention make, and the layer's input; all that is ``saved`` but norms
    where there are latents or experts."""
    if model.latent is not None or model.experts is not None:
        return saved - 4.0 * model.hidden / _split(d)
    attention = 2.0 * (2 * model.queries / d.tensor + 2 * max(model.width, model.keys / d.tensor))
    return attention + 6.0 * model.hidden / _split(d) + 2.0 * (2 if model.gated else 1) * model.ffn / d.tensor


def scores(model: Decoder, d: Degrees) -> float:
    """Of attention that writes its scores: softmax, and with dropout its mask and result."""
    if d.attention != "unfused":
        return 0.0
    heads = max(1, model.heads // d.tensor)
    return (5.0 if model.dropout else 2.0) * d.microbatch * heads * d.length * d.length / d.context


@lru_cache(maxsize=64)
def layer_activations(model: Decoder, d: Degrees) -> float:
    """Bytes that one layer's operations save, nothing computed again: 16 bits each, masks one byte."""
    t, h, split = d.tensor, model.hidden, _split(d)
    norms = 8.0 * h / split  # inputs and results of two norms
    if t > 1 and d.sequence:
        norms = 8.0 * h / t
    masks = 2.0 * h / split if model.dropout else 0.0
    heads = max(1, model.heads // t)
    if (x := model.latent) is not None:
        wide = heads * (2 * (x.plain + x.rotated) + 2 * x.value)
        attention = 2.0 * (wide + heads * (x.plain + x.value)) + 4.0 * (x.query_rank + x.rank + x.rotated)
    else:
        queries, keys = model.queries / t, max(model.width, model.keys / t)
        attention = 2.0 * (2 * queries + 2 * keys)
        if model.rotary:
            attention += 2.0 * (queries + keys)
    attention += 4.0 * heads  # the logarithm of each row's sum
    if (x := model.experts) is None:
        ffn = 2.0 * (3 if model.gated else 2) * model.ffn / t
    else:
        chosen = x.chosen / (t if d.expert >= t else 1)
        ffn = 2.0 * chosen * (2 * h + 3 * x.ffn) + 6.0 * x.shared / t + 8.0 * x.count
    return d.tokens * (norms + masks + attention + ffn) + scores(model, d)
