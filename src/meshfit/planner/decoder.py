"""A decoder-only transformer by its sizes, and how a step of it is spread.

For models that nobody here has the code of: a table of a paper, or a Hugging Face config.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

from meshfit.schedule.actions import V_SHAPED, stages_of


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Attention whose keys and values pass through a narrow vector (DeepSeek's MLA)."""

    query_rank: int = 1536
    rank: int = 512
    plain: int = 128
    rotated: int = 64
    value: int = 128


@dataclass(frozen=True, kw_only=True)
class Experts:
    count: int
    chosen: int
    """Experts that each token goes to."""
    ffn: int
    shared: int = 0
    """Width of what every token passes beside."""
    dense_layers: int = 0
    """First layers that have a plain feed-forward part."""


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """A decoder-only transformer."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    kv_heads: int = 0
    head_width: int = 0
    gated: bool = False
    """Three matrices in the feed-forward part instead of two."""

    bias: bool = True
    dropout: bool = True
    rotary: bool = False
    tied: bool = True
    latent: Latent | None = None
    experts: Experts | None = None
    predicted: int = 0
    """Further layers with a head of their own that predict later tokens (MTP)."""

    @cached_property
    def width(self) -> int:
        return self.head_width or self.hidden // self.heads

    @cached_property
    def queries(self) -> int:
        return self.heads * self.width

    @cached_property
    def keys(self) -> int:
        return (self.kv_heads or self.heads) * self.width

    @cached_property
    def attention_parameters(self) -> int:
        h = self.hidden
        if (x := self.latent) is not None:
            into = h * x.query_rank + x.query_rank * self.heads * (x.plain + x.rotated)
            return (
                into + h * (x.rank + x.rotated) + x.rank * self.heads * (x.plain + x.value) + self.heads * x.value * h
            )
        return h * (self.queries + 2 * self.keys) + self.queries * h

    @cached_property
    def dense_parameters(self) -> int:
        """Of a layer with a plain feed-forward part."""
        return self.attention_parameters + (3 if self.gated else 2) * self.hidden * self.ffn + 2 * self.hidden

    @cached_property
    def expert_parameters(self) -> int:
        """Of all experts of one layer."""
        return 0 if self.experts is None else 3 * self.hidden * self.experts.ffn * self.experts.count

    @cached_property
    def shared_parameters(self) -> int:
        """Of a layer with experts, but for these."""
        x = self.experts
        return 0 if x is None else self.attention_parameters + self.hidden * (3 * x.shared + x.count + 2)

    @cached_property
    def embedding(self) -> int:
        return self.vocab * self.hidden


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """How a step of a decoder is spread, and what its numbers are."""

    length: int
    batch: int
    """Sequences a step, over all devices."""
    microbatch: int
    """Sequences a device takes at once."""
    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1
    context: int = 1
    expert: int = 1
    zero: int = 0
    """0: whole on each; 1: optimizer state cut; 2: gradients too; 3: weights too."""
    shard: int = 0
    """Of the devices along ``data``, those that one copy is cut over, as ``shard=`` does: experts that are spread stay
    whole, gradients are summed over the others. 0: all of them, and those along ``context``, as Megatron does."""
    sequence: bool = False
    """Activations between tensor-parallel operations are cut along the sequence."""
    schedule: str = "1f1b"
    precision: str = "bf16"
    recompute: str = "none"
    """none, attention (its core), cheap (all but products and attention), operations (all but half of the products and
    attention), half (every other layer), full."""
    head_loss: bool = False
    """Logits and their loss some tokens at a time, with their gradients at once."""
    attention: str = "flash2"
    """flash1, flash2, cudnn, or unfused: scores are written."""
    ulysses: bool = False
    """Context parallelism by exchanging heads, not by passing keys on."""
    reduce_bytes: int = 4
    """Of a gradient on its way to be summed."""
    logit_bytes: float = 36.0
    """That the loss reads and writes for one logit, forward and backward."""
    fuses_products: bool = False
    """Collectives of tensor parallelism are cut into pieces beside the pieces of their products (async tensor
    parallelism): half of them hide."""

    @property
    def microbatches(self) -> int:
        return max(1, round(self.batch / (self.data * self.microbatch)))

    @property
    def tokens(self) -> float:
        """That a device sees in one microbatch."""
        return self.microbatch * self.length / self.context

    @property
    def cut_over(self) -> tuple[int, int]:
        """Devices that one copy of the state is cut over, and ranks from one to the next."""
        if self.shard:
            return self.shard, self.tensor * self.context * self.expert
        return self.data * self.context, self.tensor

    @property
    def copies(self) -> int:
        """Devices that then sum the gradients of the same part."""
        return self.data * self.context // self.cut_over[0]

    def own_stages(self, rank: int) -> tuple[int, ...]:
        """Stages that a rank of the pipeline holds."""
        word = self.schedule if self.schedule in V_SHAPED else "interleaved"
        return stages_of(word, self.pipeline, self.chunks, rank)


@lru_cache(maxsize=1024)
def layers_of(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage: even, or with embedding and head counted as layers, or as even as it goes."""
    for first, last in ((0, 0), (1, 1), (0, 1)):
        if (layers + first + last) % stages == 0:
            each = (layers + first + last) // stages
            counts = [each] * stages
            counts[0] -= first
            counts[-1] -= last
            return tuple(counts)
    return tuple(layers * (i + 1) // stages - layers * i // stages for i in range(stages))


StageKind = tuple[int, int, bool, bool]
"""Of a stage: its layers with a plain feed-forward part, those with experts, and whether it is the first and last."""


def stage_kinds(model: Decoder, counts: Sequence[int]) -> list[StageKind]:
    """Of stages with so many layers each."""
    dense = sum(counts) if model.experts is None else model.experts.dense_layers
    plain = [max(0, min(end, dense) - end + count) for end, count in zip(accumulate(counts), counts, strict=True)]
    last = len(counts) - 1
    return [(n, counts[stage] - n, stage == 0, stage == last) for stage, n in enumerate(plain)]


def active_parameters(model: Decoder) -> float:
    """Parameters that a token passes, the head with them."""
    x = model.experts
    if x is None:
        return model.layers * model.dense_parameters + model.embedding
    each = model.shared_parameters + 3 * model.hidden * x.ffn * x.chosen
    return x.dense_layers * model.dense_parameters + (model.layers - x.dense_layers) * each + model.embedding


def stage_parameters(model: Decoder, d: Degrees, kind: StageKind) -> tuple[float, float]:
    """That a device of such a stage computes with: those summed over data and context, and those of experts."""
    plain, mixed, first, last = kind
    whole = (plain * model.dense_parameters + mixed * model.shared_parameters) / d.tensor
    experts = mixed * model.expert_parameters / d.expert / (d.tensor if d.expert < d.tensor else 1)
    ends = first + (last and not (first and model.tied))
    return whole + ends * model.embedding / d.tensor, experts


def parameters_of(model: Decoder, d: Degrees, counts: Sequence[int], rank: int) -> tuple[float, float]:
    """Of all stages of a pipeline's rank."""
    kinds = stage_kinds(model, counts)
    parts = [stage_parameters(model, d, kinds[stage]) for stage in d.own_stages(rank)]
    return sum(whole for whole, _ in parts), sum(experts for _, experts in parts)


def most_parameters(model: Decoder, d: Degrees, counts: Sequence[int]) -> tuple[float, float]:
    """Of the rank of the pipeline that has most."""
    return max((parameters_of(model, d, counts, rank) for rank in (0, d.pipeline - 1)), key=sum)
