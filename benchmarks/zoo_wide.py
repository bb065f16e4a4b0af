"""A wider zoo: models of eighteen more libraries, and architectures of transformers that the first zoo lacks.

Chosen for their structure: reversible layers, one layer called many times, tied encoders and decoders, adaptive depth,
 vector quantisation, complex weights, CTC, spectral and weight norm, graphs, flows, solvers,
recurrences, hybrids of attention and state spaces, and the newest language models.

    make wide                                       # installs the libraries, beside those of `make test`
    python benchmarks/parity.py --zoo wide

Each case says beforehand which axes apply to it (``axes``): by its architecture, not by what was seen to work.
"""

import copyreg
import functools
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo import (
    CLASSES,
    LENGTH,
    OFF_THE_PATH,
    VOCABULARY,
    Case,
    images,
    labels_kept,
    labels_kept_shifted,
    points,
    questions,
    quiet,
    random,
    seeded,
    torchvision,
    transformers,
    unpadded_text,
)

REPLICATED = frozenset({"data", "shard", "server"})
"""Axes that leave a forward as it is: for every model whose samples do not need each other."""

LAYERED = REPLICATED | {"tensor", "pipeline"}
"""... that has layers one after another, of matrices."""

ATTENTIVE = LAYERED | {"context"}
"""... along a sequence that attention alone mixes."""


@dataclass(frozen=True, kw_only=True)
class WideCase(Case):
    """A case that says which axes apply to it."""

    axes: frozenset[str] = LAYERED
    structure: str = ""
    """What it is in the zoo for."""


# Libraries


def off_the_path(name: str) -> ModuleType:
    """A library that needs torchvision, from beside it: see ``OFF_THE_PATH``."""
    torchvision()
    path = list(sys.path)
    sys.path.append(OFF_THE_PATH)
    try:
        with quiet():
            return importlib.import_module(name)
    finally:
        sys.path[:] = path


# Data


def double(data: Callable[[int], Any]) -> Callable[[int], Any]:
    """The same in double precision, where floating."""

    def doubled(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(doubled, value))
        return value.double() if value.is_floating_point() else value

    return lambda n: doubled(data(n))


def series(n: int, length: int = LENGTH, channels: int = 4) -> tuple[Tensor, Tensor]:
    """Sines with a phase and a speed of their own, and what follows them."""
    phase, speed = torch.rand(2, n, 1, channels, generator=random())
    at = torch.arange(length + 1).view(1, -1, 1)
    waves = torch.sin(6.3 * phase + (0.2 + speed) * at)
    return waves[:, :-1].contiguous(), waves[:, 1:].contiguous()


def waves(n: int) -> dict[str, Tensor]:
    """Sound of 800 samples and a transcript of up to five letters, padded."""
    sound = torch.randn(n, 800, generator=random()) * 0.1
    labels = torch.randint(1, 12, (n, 5), generator=random())
    return {
        "input_values": sound,
        "labels": labels.masked_fill(torch.arange(5) >= 2 + torch.arange(n).view(-1, 1) % 4, -100),
    }


def graphs(n: int, nodes: int = 6) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Undirected graphs as adjacency matrices, node features, and whether they have many edges."""
    upper = (torch.rand(n, nodes, nodes, generator=random()) < 0.4).float().triu(1)
    edges = upper + upper.transpose(1, 2)
    edges[:, 0, 1] = edges[:, 1, 0] = 1.0
    x = torch.randn(n, nodes, 8, generator=random())
    return (x, edges), (edges.sum((1, 2)).long() // 2) % CLASSES


def positions(n: int) -> tuple[Tensor, Tensor]:
    """Five points in space, and how far they spread."""
    x = torch.randn(n, 5, 3, generator=random())
    return x, x.var((1, 2)).view(n, 1)


def fields(n: int) -> tuple[Tensor, Tensor]:
    """Smooth fields on a grid of 16 x 16, and the same, diffused."""
    noise = torch.randn(n, 1, 16, 16, generator=random())
    smooth = F.avg_pool2d(noise, 3, 1, 1)
    return smooth, F.avg_pool2d(smooth, 3, 1, 1)


def volumes(n: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 1, 16, 16, 16, generator=random())
    return x, (F.avg_pool3d(x, 3, 1, 1) > 0).float()


def sounds(n: int) -> dict[str, Tensor]:
    """Spectrograms and their transcripts."""
    features = torch.randn(n, 8, 2 * LENGTH, generator=random())
    return {"input_features": features, "labels": questions(n)["labels"]}


def copies(n: int) -> tuple[Tensor, Tensor]:
    x, _ = points(n)
    return x, x.clone()


# Losses


def per_token(out: Any, targets: Tensor) -> Tensor:
    logits = out.logits if hasattr(out, "logits") else out[0] if isinstance(out, tuple) else out
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def per_class(out: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(out.logits if hasattr(out, "logits") else out, targets)


def first_of(out: Any, targets: Tensor) -> Tensor:
    return F.mse_loss(out[0] if isinstance(out, tuple) else out, targets)


def likelihood(out: Tensor, _: Tensor) -> Tensor:
    return -out.mean()


# transformers: language models

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 4 * LENGTH,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def causal(config: str, **more: Any) -> Callable[[], nn.Module]:
    """A causal language model of transformers, by the name of its configuration."""
    return seeded(functools.partial(_causal, config, more))


def _causal(config: str, more: dict[str, Any]) -> nn.Module:
    hf = transformers()
    return hf.AutoModelForCausalLM.from_config(getattr(hf, config)(**(SMALL | more)))


def language(name: str, config: str, *, axes: frozenset[str] = ATTENTIVE, structure: str = "", **more: Any) -> WideCase:
    return WideCase(
        name=name,
        build=causal(config, **more),
        data=unpadded_text,
        weight_of=labels_kept_shifted,
        axes=axes,
        structure=structure,
    )


@seeded
def albert() -> nn.Module:
    hf = transformers()
    return hf.AlbertForMaskedLM(
        hf.AlbertConfig(
            vocab_size=VOCABULARY,
            embedding_size=16,
            hidden_size=32,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=48,
            max_position_embeddings=LENGTH,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


@seeded
def bart() -> nn.Module:
    hf = transformers()
    return hf.BartForConditionalGeneration(
        hf.BartConfig(
            vocab_size=VOCABULARY,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            max_position_embeddings=2 * LENGTH,
            dropout=0.0,
            attention_dropout=0.0,
            activation_dropout=0.0,
            use_cache=False,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=2,
        )
    )


@seeded
def whisper() -> nn.Module:
    hf = transformers()
    return hf.WhisperForConditionalGeneration(
        hf.WhisperConfig(
            vocab_size=VOCABULARY,
            num_mel_bins=8,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            max_source_positions=LENGTH,
            max_target_positions=LENGTH,
            dropout=0.0,
            use_cache=False,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        )
    )


@seeded
def wav2vec2() -> nn.Module:
    hf = transformers()
    return hf.Wav2Vec2ForCTC(
        hf.Wav2Vec2Config(
            vocab_size=12,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=48,
            conv_dim=(16, 16, 16),
            conv_stride=(5, 4, 2),
            conv_kernel=(10, 3, 3),
            num_conv_pos_embeddings=8,
            num_conv_pos_embedding_groups=2,
            num_feat_extract_layers=3,
            feat_extract_norm="layer",
            hidden_dropout=0.0,
            attention_dropout=0.0,
            activation_dropout=0.0,
            feat_proj_dropout=0.0,
            final_dropout=0.0,
            layerdrop=0.0,
            mask_time_prob=0.0,
            apply_spec_augment=False,
            ctc_loss_reduction="sum",
            ctc_zero_infinity=True,
        )
    )


@seeded
def reformer() -> nn.Module:
    hf = transformers()
    return hf.ReformerModelWithLMHead(
        hf.ReformerConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_attention_heads=4,
            attention_head_size=8,
            feed_forward_size=48,
            attn_layers=["local", "local"],
            local_attn_chunk_length=8,
            axial_pos_embds=True,
            axial_pos_shape=(4, 4),
            axial_pos_embds_dim=(16, 16),
            max_position_embeddings=LENGTH,
            is_decoder=True,
            use_cache=False,
            hidden_dropout_prob=0.0,
            local_attention_probs_dropout_prob=0.0,
            hash_seed=1,
        )
    )


@seeded
def deberta() -> nn.Module:
    hf = transformers()
    return hf.DebertaV2ForSequenceClassification(
        hf.DebertaV2Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=48,
            max_position_embeddings=LENGTH,
            relative_attention=True,
            pos_att_type=["p2c", "c2p"],
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=CLASSES,
        )
    )


@seeded
def fnet() -> nn.Module:
    hf = transformers()
    return hf.FNetForSequenceClassification(
        hf.FNetConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=2,
            intermediate_size=48,
            max_position_embeddings=LENGTH,
            hidden_dropout_prob=0.0,
            num_labels=CLASSES,
        )
    )


@seeded
def funnel() -> nn.Module:
    hf = transformers()
    return hf.FunnelForSequenceClassification(
        hf.FunnelConfig(
            vocab_size=VOCABULARY,
            block_sizes=[1, 1],
            d_model=32,
            n_head=4,
            d_head=8,
            d_inner=48,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            activation_dropout=0.0,
            num_labels=CLASSES,
        )
    )


@seeded
def switch() -> nn.Module:
    """A mixture in encoder and decoder; the router's own losses are means over tokens of a batch, and off."""
    hf = transformers()
    return hf.SwitchTransformersForConditionalGeneration(
        hf.SwitchTransformersConfig(
            vocab_size=VOCABULARY,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_decoder_layers=2,
            num_heads=4,
            num_experts=4,
            expert_capacity=256,
            num_sparse_encoder_layers=1,
            num_sparse_decoder_layers=1,
            dropout_rate=0.0,
            router_jitter_noise=0.0,
            router_z_loss_coef=0.0,
            router_aux_loss_coef=0.0,
            use_cache=False,
            decoder_start_token_id=0,
            pad_token_id=0,
        )
    )


@seeded
def patchtst() -> nn.Module:
    hf = transformers()
    return Picked(
        hf.PatchTSTForPrediction(
            hf.PatchTSTConfig(
                num_input_channels=4,
                context_length=LENGTH,
                prediction_length=4,
                patch_length=4,
                patch_stride=4,
                d_model=32,
                num_attention_heads=4,
                num_hidden_layers=2,
                ffn_dim=48,
                norm_type="layernorm",
                dropout=0.0,
                ff_dropout=0.0,
                attention_dropout=0.0,
                positional_dropout=0.0,
                path_dropout=0.0,
                head_dropout=0.0,
                loss="mse",
            )
        ),
        "prediction_outputs",
    )


class Picked(nn.Module):
    """One field of what a model returns."""

    def __init__(self, model: nn.Module, field: str):
        super().__init__()
        self.model, self.field = model, field

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self.model(x), self.field)


@seeded
def segformer() -> nn.Module:
    hf = transformers()
    return hf.SegformerForImageClassification(
        hf.SegformerConfig(
            num_encoder_blocks=2,
            depths=[1, 1],
            sr_ratios=[2, 1],
            hidden_sizes=[16, 32],
            patch_sizes=[3, 3],
            strides=[2, 2],
            num_attention_heads=[2, 4],
            mlp_ratios=[2, 2],
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            classifier_dropout_prob=0.0,
            drop_path_rate=0.0,
            num_labels=CLASSES,
        )
    )


@seeded
def dinov2() -> nn.Module:
    hf = transformers()
    return hf.Dinov2ForImageClassification(
        hf.Dinov2Config(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            mlp_ratio=2,
            image_size=32,
            patch_size=8,
            num_labels=CLASSES,
        )
    )


@seeded
def encodec() -> nn.Module:
    """Convolutions under weight norm with an LSTM between them: a codec without its quantiser."""
    hf = transformers()
    codec = hf.EncodecModel(
        hf.EncodecConfig(
            hidden_size=16,
            num_filters=4,
            num_lstm_layers=1,
            upsampling_ratios=[4, 2],
            codebook_size=16,
            codebook_dim=16,
        )
    )
    return nn.Sequential(codec.encoder, codec.decoder)


def sound_copies(n: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 1, 64, generator=random()) * 0.3
    return x, x.clone()


def short_series(n: int) -> tuple[Tensor, Tensor]:
    x, _ = series(n, LENGTH + 4)
    return x[:, :LENGTH].contiguous(), x[:, LENGTH:].contiguous()


def plain_tokens(n: int) -> tuple[Tensor, Tensor]:
    ids = unpadded_text(n)["input_ids"]
    return ids, ids.clone()


def classed_tokens(n: int) -> tuple[Tensor, Tensor]:
    ids = unpadded_text(n)["input_ids"]
    return ids, ids[:, 0] % CLASSES


# Other libraries


@seeded
def mixer() -> nn.Module:
    kind = off_the_path("timm.models.mlp_mixer").MlpMixer
    return _told(kind(num_classes=CLASSES, img_size=32, patch_size=8, num_blocks=2, embed_dim=32))


@seeded
def nfnet() -> nn.Module:
    """Convolutions whose weights are standardised in every forward."""
    return _timm("test_nfnet", drop_rate=0.0)


@seeded
def efficientnet() -> nn.Module:
    return _timm("test_efficientnet", drop_path_rate=0.0, drop_rate=0.0).double()


def _timm(name: str, **more: Any) -> nn.Module:
    return _told(off_the_path("timm").create_model(name, num_classes=CLASSES, **more))


def _told(model: nn.Module) -> nn.Module:
    """``model``, whose pickle says where its library lies."""
    copyreg.pickle(type(model), _with_timm)
    return model


def _with_timm(model: nn.Module) -> tuple:
    return _blank_timm, (type(model).__module__, type(model).__qualname__), model.__dict__


def _blank_timm(module: str, name: str) -> nn.Module:
    kind = getattr(off_the_path(module), name)
    return kind.__new__(kind)


class DenseGraphNet(nn.Module):
    """PyTorch Geometric's layers for padded graphs."""

    def __init__(self):
        super().__init__()
        from torch_geometric.nn import DenseGCNConv, DenseSAGEConv

        self.first, self.second = DenseGCNConv(8, 32), DenseSAGEConv(32, 32)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = self.first(x, edges).relu()
        return self.head(self.second(x, edges).relu().mean(1))


class GraphNet(nn.Module):
    """PyTorch Geometric's layers over the disjoint union of a batch's graphs: as many edges as the data has."""

    def __init__(self, kind: str):
        super().__init__()
        from torch_geometric import nn as layers

        if kind == "gat":
            self.first, self.second = layers.GATv2Conv(8, 8, heads=4), layers.GATv2Conv(32, 32)
        elif kind == "gin":
            grow = lambda i: nn.Sequential(nn.Linear(i, 32), nn.ReLU(), nn.Linear(32, 32))
            self.first, self.second = layers.GINConv(grow(8), train_eps=True), layers.GINConv(grow(32))
        else:
            self.first, self.second = layers.TransformerConv(8, 8, heads=4), layers.TransformerConv(32, 32)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        n, nodes = x.shape[:2]
        sample, source, target = edges.nonzero(as_tuple=True)
        index = torch.stack((sample * nodes + source, sample * nodes + target))
        flat = self.first(x.flatten(0, 1), index).relu()
        flat = self.second(flat, index).relu()
        return self.head(flat.view(n, nodes, -1).mean(1))


class Potential(nn.Module):
    """An E(3)-equivariant network of e3nn: tensor products of spherical harmonics of all pairs of points."""

    def __init__(self):
        super().__init__()
        from e3nn import o3

        self.harmonics = o3.Irreps.spherical_harmonics(2)
        self.product = o3.FullyConnectedTensorProduct(self.harmonics, self.harmonics, "8x0e + 4x1o")
        self.linear, self.head = o3.Linear("8x0e + 4x1o", "8x0e"), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        from e3nn import o3

        pairs = (x.unsqueeze(1) - x.unsqueeze(2)).flatten(1, 2)
        away = pairs.norm(dim=-1) > 1e-6
        y = o3.spherical_harmonics(self.harmonics, pairs + 1e-3, normalize=True)
        return self.head((self.linear(self.product(y, y)) * away.unsqueeze(-1)).mean(1))


class Solver(nn.Module):
    """A differential equation of torchdiffeq between two linear layers."""

    def __init__(self, method: str, adjoint: bool):
        super().__init__()
        self.method, self.adjoint = method, adjoint
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, CLASSES)
        self.flow = Flow()

    def forward(self, x: Tensor) -> Tensor:
        import torchdiffeq

        solve = torchdiffeq.odeint_adjoint if self.adjoint else torchdiffeq.odeint
        at = torch.tensor([0.0, 1.0], dtype=x.dtype)
        options = {"step_size": 0.25} if self.method == "rk4" else None
        return self.leave(solve(self.flow, self.enter(x), at, method=self.method, options=options)[-1])


class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        return self.net(x) * (1 - t)


class Likelihood(nn.Module):
    """The log likelihood of a flow of nflows or normflows."""

    def __init__(self, flow: nn.Module):
        super().__init__()
        self.flow = flow

    def forward(self, x: Tensor) -> Tensor:
        return self.flow.log_prob(x)  # type: ignore[operator]


@seeded
def autoregressive_flow() -> nn.Module:
    from nflows.flows import MaskedAutoregressiveFlow

    return Likelihood(MaskedAutoregressiveFlow(8, 32, num_layers=2, num_blocks_per_layer=1))


@seeded
def spline_flow() -> nn.Module:
    import normflows

    steps: list[nn.Module] = []
    for _ in range(2):
        steps += [normflows.flows.CoupledRationalQuadraticSpline(8, 1, 32), normflows.flows.LULinearPermute(8)]
    return Likelihood(normflows.NormalizingFlow(normflows.distributions.DiagGaussian(8, trainable=True), steps))


class Quantised(nn.Module):
    """An autoencoder around a quantiser of vector-quantize-pytorch."""

    def __init__(self, quantiser: nn.Module):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 16), nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
        self.quantiser = quantiser

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        found = self.quantiser(self.encoder(x).unsqueeze(1))
        return self.decoder(found[0].squeeze(1)), *found[2:3]


def quantised(kind: str) -> Callable[[], nn.Module]:
    return seeded(functools.partial(_quantised, kind))


def _quantised(kind: str) -> nn.Module:
    import vector_quantize_pytorch as library

    if kind == "ema":
        return Quantised(library.VectorQuantize(dim=16, codebook_size=12, decay=0.9, commitment_weight=0.25))
    if kind == "learnt":
        return Quantised(library.VectorQuantize(dim=16, codebook_size=12, learnable_codebook=True, ema_update=False))
    if kind == "residual-fsq":
        return Quantised(library.ResidualFSQ(dim=16, levels=[5, 3, 3], num_quantizers=2))
    return Quantised(library.LFQ(dim=16, codebook_size=16, entropy_loss_weight=0.0))


def committed(out: tuple[Tensor, ...], targets: Tensor) -> Tensor:
    return F.mse_loss(out[0], targets) + sum(extra.mean() for extra in out[1:] if extra.is_floating_point())


@seeded
def x_transformer() -> nn.Module:
    """With memory tokens, rotary positions, gated feed-forward and talking heads."""
    import x_transformers as library

    return library.TransformerWrapper(
        num_tokens=VOCABULARY,
        max_seq_len=LENGTH,
        num_memory_tokens=2,
        attn_layers=library.Decoder(
            dim=32, depth=2, heads=4, attn_dim_head=8, rotary_pos_emb=True, ff_glu=True, attn_pre_talking_heads=True
        ),
    )


@seeded
def x_transformer_shared() -> nn.Module:
    """One layer's weights run four times, with scaled residuals."""
    import x_transformers as library

    return library.TransformerWrapper(
        num_tokens=VOCABULARY,
        max_seq_len=LENGTH,
        attn_layers=library.Decoder(
            dim=32,
            depth=1,
            heads=4,
            attn_dim_head=8,
            weight_tie_layers=False,
            layers_execute_order=(0, 1, 0, 1),
            alibi_pos_bias=True,
        ),
    )


@seeded
def reversible() -> nn.Module:
    """Reversible blocks: activations are computed again from outputs, in a Function of their own."""
    import reformer_pytorch as library

    return library.ReformerLM(
        num_tokens=VOCABULARY,
        dim=32,
        depth=2,
        heads=4,
        max_seq_len=LENGTH,
        bucket_size=8,
        n_hashes=1,
        causal=True,
        use_full_attn=True,
        lsh_dropout=0.0,
        ff_dropout=0.0,
        post_attn_dropout=0.0,
        layer_dropout=0.0,
    )


@seeded
def performer() -> nn.Module:
    """Attention by random features, which are a buffer."""
    import performer_pytorch as library

    return library.PerformerLM(
        num_tokens=VOCABULARY,
        max_seq_len=LENGTH,
        dim=32,
        depth=2,
        heads=4,
        dim_head=8,
        causal=False,
        nb_features=16,
        feature_redraw_interval=None,
        auto_check_redraw=False,
    )


@seeded
def linformer() -> nn.Module:
    """Keys and values projected along the sequence."""
    import linformer as library

    return library.LinformerLM(num_tokens=VOCABULARY, dim=32, seq_len=LENGTH, depth=2, heads=4, k=8)


@seeded
def perceiver() -> nn.Module:
    """Latents that attend to an image again and again, with shared weights."""
    import perceiver_pytorch as library

    return library.Perceiver(
        num_freq_bands=2,
        depth=3,
        max_freq=10.0,
        input_channels=3,
        num_latents=8,
        latent_dim=32,
        cross_dim_head=8,
        latent_heads=4,
        latent_dim_head=8,
        num_classes=CLASSES,
        weight_tie_layers=True,
        self_per_cross_attn=1,
    )


def channels_last_images(n: int) -> tuple[Tensor, Tensor]:
    x, targets = images(n, 8)
    return x.permute(0, 2, 3, 1).contiguous(), targets


@seeded
def gated_mlp() -> nn.Module:
    import g_mlp_pytorch as library

    return library.gMLP(num_tokens=VOCABULARY, dim=32, depth=2, seq_len=LENGTH, causal=True)


@seeded
def conformer() -> nn.Module:
    """Attention beside convolutions and BatchNorm, along a sequence."""
    import conformer as library

    return nn.Sequential(
        nn.Linear(4, 32), library.Conformer(dim=32, depth=1, dim_head=8, heads=4), nn.Linear(32, 4)
    ).double()


class MambaLM(nn.Module):
    """mambapy's state-space blocks, by a parallel scan in a Function of their own."""

    def __init__(self):
        super().__init__()
        from mambapy.mamba import Mamba, MambaConfig

        self.token = nn.Embedding(VOCABULARY, 32)
        self.body = Mamba(MambaConfig(d_model=32, n_layers=2, d_state=8))
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.token(ids)))


@seeded
def tabnet() -> nn.Module:
    """Attentive steps over the columns of a table, with a shared block and BatchNorm over virtual batches."""
    from pytorch_tabnet.tab_network import TabNet

    group = torch.eye(8, dtype=torch.float64)
    return First(
        TabNet(8, CLASSES, n_d=8, n_a=8, n_steps=2, virtual_batch_size=64, group_attention_matrix=group)
    ).double()


class First(nn.Module):
    """The first of what a model returns."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)[0]


@seeded
def medical_unet() -> nn.Module:
    from monai.networks.nets import UNet

    return UNet(
        spatial_dims=3, in_channels=1, out_channels=1, channels=(8, 16, 32), strides=(2, 2), num_res_units=1
    ).double()


@seeded
def medical_transformer() -> nn.Module:
    from monai.networks.nets import UNETR

    return UNETR(
        in_channels=1,
        out_channels=1,
        img_size=16,
        feature_size=4,
        hidden_size=24,
        mlp_dim=32,
        num_heads=4,
        norm_name="instance",
    ).double()


class FourierOperator(nn.Module):
    """Blocks of a Fourier neural operator: their weights are complex."""

    def __init__(self):
        super().__init__()
        from neuralop.layers.fno_block import FNOBlocks

        self.lift, self.project = nn.Conv2d(1, 12, 1), nn.Conv2d(12, 1, 1)
        self.blocks = FNOBlocks(12, 12, n_modes=(6, 6), n_layers=2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        for i in range(2):
            x = self.blocks(x, i)
        return self.project(x)


class Critic(nn.Module):
    """Convolutions under spectral norm, whose power iteration is a buffer that every forward writes."""

    def __init__(self):
        super().__init__()
        norm = torch.nn.utils.parametrizations.spectral_norm
        self.body = nn.Sequential(
            norm(nn.Conv2d(3, 16, 4, 2, 1)), nn.LeakyReLU(0.2), norm(nn.Conv2d(16, 32, 4, 2, 1)), nn.LeakyReLU(0.2)
        )
        self.head = norm(nn.Linear(32, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


class Halting(nn.Module):
    """Adaptive depth: one block runs until the samples at hand are content, each weighted by when it was."""

    def __init__(self):
        super().__init__()
        self.enter, self.block = nn.Linear(8, 32), nn.Sequential(nn.Linear(32, 32), nn.Tanh())
        self.halt, self.head = nn.Linear(32, 1), nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden, left, out = self.enter(x), torch.ones(len(x), 1, dtype=x.dtype), 0.0
        for step in range(8):
            hidden = hidden + self.block(hidden)
            stop = torch.sigmoid(self.halt(hidden)) if step < 7 else torch.ones_like(left)
            stop = torch.where(left > 0.1, stop, torch.ones_like(stop))
            out, left = out + left * stop * hidden, left * (1 - stop)
            if not (left > 0).any():
                break
        return self.head(out)


class RecurrentMixture(nn.Module):
    """A GRU cell over time whose output goes to one of four experts, chosen by a gate."""

    def __init__(self):
        super().__init__()
        self.cell, self.gate = nn.GRUCell(4, 32), nn.Linear(32, 4)
        self.experts = nn.ModuleList(nn.Linear(32, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        state, outputs = x.new_zeros(len(x), 32), []
        for value in x.unbind(1):
            state = self.cell(value, state)
            gate = self.gate(state).softmax(-1)
            outputs.append(sum(gate[:, i : i + 1] * expert(state) for i, expert in enumerate(self.experts)))
        return torch.stack(outputs, 1)


MOE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
RECURRENT = LAYERED
"""Attention and a recurrence: ``context`` does not apply."""

WIDE = (
    language(
        "gemma3", "Gemma3TextConfig", head_dim=8, sliding_window=8, structure="sliding windows beside full attention"
    ),
    language("gemma2", "Gemma2Config", head_dim=8, sliding_window=8, structure="capped logits, windows"),
    language("qwen3", "Qwen3Config", head_dim=8, structure="norms of queries and keys"),
    language("smollm3", "SmolLM3Config", structure="layers without positions"),
    language("olmo3", "Olmo3Config", structure="norms after blocks, windows", sliding_window=8),
    language("phi3", "Phi3Config", structure="queries, keys and values in one matrix"),
    language("gpt-neox", "GPTNeoXConfig", structure="attention and MLP side by side"),
    language(
        "opt",
        "OPTConfig",
        structure="positions by a subclass of nn.Embedding",
        ffn_dim=48,
        word_embed_proj_dim=16,
        dropout=0.0,
    ),
    language("bloom", "BloomConfig", structure="biases by distance", n_layer=2, n_head=4),
    language("falcon", "FalconConfig", structure="one key for all queries", multi_query=True, alibi=False),
    language("cohere2", "Cohere2Config", structure="parallel blocks, windows, scaled logits", sliding_window=8),
    language("glm4", "Glm4Config", structure="four norms a block, half-rotary", head_dim=8),
    language("nanochat", "NanoChatConfig", structure="norms without weights, squared ReLU"),
    language("diffllama", "DiffLlamaConfig", structure="the difference of two attentions"),
    language("bitnet", "BitNetConfig", structure="norms inside attention and MLP"),
    language(
        "minicpm3",
        "MiniCPM3Config",
        num_key_value_heads=4,
        structure="latent attention",
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
    ),
    language(
        "deepseek2",
        "DeepseekV2Config",
        structure="latent attention, shared experts",
        q_lora_rank=None,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        n_routed_experts=4,
        n_shared_experts=1,
        first_k_dense_replace=1,
        topk_group=1,
        n_group=1,
        num_key_value_heads=4,
        **MOE,
    ),
    language("qwen3-moe", "Qwen3MoeConfig", structure="experts in every block", head_dim=8, num_experts=4, **MOE),
    language(
        "llama4",
        "Llama4TextConfig",
        structure="chunked attention, a shared expert",
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=1,
        attention_chunk_size=8,
        intermediate_size_mlp=48,
    ),
    language(
        "qwen3-next",
        "Qwen3NextConfig",
        axes=RECURRENT,
        structure="gated delta rule beside attention",
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        shared_expert_intermediate_size=24,
        layer_types=["linear_attention", "full_attention"],
        **MOE,
    ),
    language(
        "mamba2",
        "Mamba2Config",
        axes=RECURRENT,
        structure="state spaces with heads",
        num_heads=8,
        head_dim=8,
        state_size=8,
        n_groups=2,
        chunk_size=8,
        expand=2,
    ),
    language(
        "falcon-h1",
        "FalconH1Config",
        axes=RECURRENT,
        structure="attention and state space in one block",
        head_dim=8,
        mamba_d_ssm=32,
        mamba_n_heads=4,
        mamba_d_head=8,
        mamba_d_state=8,
        mamba_chunk_size=8,
    ),
    language(
        "zamba2",
        "Zamba2Config",
        axes=RECURRENT,
        structure="one attention block shared by many layers",
        num_hidden_layers=3,
        layers_block_type=["mamba", "hybrid", "hybrid"],
        hybrid_layer_ids=[1, 2],
        mamba_d_state=8,
        mamba_headdim=8,
        n_mamba_heads=8,
        mamba_ngroups=1,
        chunk_size=8,
        num_key_value_heads=4,
        adapter_rank=4,
        num_mem_blocks=1,
    ),
    language(
        "recurrent-gemma",
        "RecurrentGemmaConfig",
        axes=RECURRENT,
        structure="a linear recurrence beside local attention",
        num_hidden_layers=3,
        lru_width=32,
        attention_window_size=8,
    ),
    language(
        "lfm2",
        "Lfm2Config",
        axes=RECURRENT,
        structure="short convolutions beside attention",
        layer_types=["conv", "full_attention"],
    ),
    language(
        "jetmoe",
        "JetMoeConfig",
        structure="a mixture of attention heads",
        num_local_experts=4,
        kv_channels=8,
        num_key_value_heads=2,
        num_attention_heads=4,
        **{"num_experts_per_tok": 2},
    ),
    WideCase(
        name="albert",
        build=albert,
        data=plain_tokens,
        loss=per_token,
        axes=ATTENTIVE,
        structure="one layer, called four times",
    ),
    WideCase(
        name="bart",
        build=bart,
        data=questions,
        weight_of=labels_kept,
        axes=LAYERED,
        structure="tied encoder and decoder, positions by a subclass of nn.Embedding",
    ),
    WideCase(
        name="whisper",
        build=whisper,
        data=sounds,
        weight_of=labels_kept,
        axes=LAYERED,
        structure="convolutions, then encoder and decoder",
    ),
    WideCase(
        name="wav2vec2-ctc",
        build=wav2vec2,
        data=waves,
        weight_of=lambda batch: 1.0,
        axes=LAYERED,
        structure="CTC, weight norm, grouped convolutions",
    ),
    WideCase(
        name="reformer",
        build=reformer,
        data=unpadded_text,
        weight_of=labels_kept_shifted,
        axes=REPLICATED,
        structure="reversible layers",
    ),
    WideCase(
        name="deberta",
        build=deberta,
        data=classed_tokens,
        loss=per_class,
        axes=LAYERED,
        structure="attention to relative positions",
    ),
    WideCase(
        name="fnet",
        build=fnet,
        data=classed_tokens,
        loss=per_class,
        axes=LAYERED,
        structure="Fourier transforms along the sequence",
    ),
    WideCase(
        name="funnel",
        build=funnel,
        data=classed_tokens,
        loss=per_class,
        axes=LAYERED,
        structure="a sequence that shrinks",
    ),
    WideCase(
        name="switch",
        build=switch,
        data=questions,
        weight_of=labels_kept,
        axes=LAYERED,
        structure="a mixture in encoder and decoder",
    ),
    WideCase(
        name="patchtst",
        build=patchtst,
        data=short_series,
        loss=F.mse_loss,
        axes=LAYERED,
        structure="patches of a time series, scaled by their own mean",
    ),
    WideCase(
        name="segformer",
        build=segformer,
        data=images,
        loss=per_class,
        axes=LAYERED,
        structure="attention over reduced keys",
    ),
    WideCase(
        name="dinov2",
        build=dinov2,
        data=images,
        loss=per_class,
        axes=ATTENTIVE,
        structure="scaled residuals, class token",
    ),
    WideCase(
        name="encodec",
        build=encodec,
        data=sound_copies,
        loss=F.mse_loss,
        axes=LAYERED,
        structure="weight norm, an LSTM between convolutions",
    ),
    WideCase(
        name="timm-mixer",
        build=mixer,
        data=images,
        loss=F.cross_entropy,
        axes=LAYERED,
        structure="MLPs along positions",
    ),
    WideCase(
        name="timm-nfnet",
        build=nfnet,
        data=images,
        loss=F.cross_entropy,
        axes=LAYERED,
        structure="weights standardised in every forward",
    ),
    WideCase(
        name="timm-efficientnet",
        build=efficientnet,
        data=double(lambda n: images(n, 36)),
        loss=F.cross_entropy,
        axes=LAYERED,
        dtype=torch.float64,
        structure="BatchNorm in deep inverted bottlenecks",
    ),
    WideCase(
        name="pyg-dense",
        build=seeded(DenseGraphNet),
        data=graphs,
        loss=F.cross_entropy,
        axes=LAYERED,
        structure="graphs as matrices",
    ),
    WideCase(
        name="pyg-gat",
        build=seeded(functools.partial(GraphNet, "gat")),
        data=graphs,
        loss=F.cross_entropy,
        axes=REPLICATED,
        structure="attention along edges, as many as the data has",
    ),
    WideCase(
        name="pyg-gin",
        build=seeded(functools.partial(GraphNet, "gin")),
        data=graphs,
        loss=F.cross_entropy,
        axes=REPLICATED,
        structure="sums along edges",
    ),
    WideCase(
        name="e3nn",
        build=seeded(Potential),
        data=positions,
        loss=F.mse_loss,
        axes=REPLICATED,
        structure="generated code, equivariant products",
    ),
    WideCase(
        name="ode-adjoint",
        build=seeded(functools.partial(Solver, "rk4", True)),
        data=points,
        loss=F.cross_entropy,
        axes=REPLICATED,
        structure="gradients by a solver that runs back",
    ),
    WideCase(
        name="ode-adaptive",
        build=lambda: seeded(functools.partial(Solver, "dopri5", False))().double(),
        data=double(points),
        loss=F.cross_entropy,
        dtype=torch.float64,
        axes=frozenset(),
        structure="steps chosen by the batch's own error: samples depend on each other",
    ),
    WideCase(
        name="maf",
        build=autoregressive_flow,
        data=copies,
        loss=likelihood,
        axes=REPLICATED | {"pipeline"},
        structure="masked weights, a likelihood",
    ),
    WideCase(
        name="spline-flow",
        build=spline_flow,
        data=copies,
        loss=likelihood,
        axes=REPLICATED,
        structure="searches among knots, LU weights",
    ),
    WideCase(
        name="vq-ema",
        build=quantised("ema"),
        data=copies,
        loss=committed,
        axes=REPLICATED,
        structure="a codebook moved by averages of the batch",
    ),
    WideCase(
        name="vq-learnt",
        build=quantised("learnt"),
        data=copies,
        loss=committed,
        axes=REPLICATED,
        structure="a codebook with gradients",
    ),
    WideCase(
        name="residual-fsq",
        build=quantised("residual-fsq"),
        data=copies,
        loss=committed,
        axes=REPLICATED | {"pipeline"},
        structure="quantised without a codebook, in rounds",
    ),
    WideCase(
        name="x-transformer",
        build=x_transformer,
        data=plain_tokens,
        loss=per_token,
        axes=LAYERED,
        structure="memory tokens, talking heads",
    ),
    WideCase(
        name="x-transformer-shared",
        build=x_transformer_shared,
        data=plain_tokens,
        loss=per_token,
        axes=LAYERED,
        structure="layers run in an order of their own, twice",
    ),
    WideCase(
        name="reversible",
        build=reversible,
        data=plain_tokens,
        loss=per_token,
        axes=REPLICATED,
        structure="reversible blocks in a Function of their own",
    ),
    WideCase(
        name="performer",
        build=performer,
        data=plain_tokens,
        loss=per_token,
        axes=LAYERED,
        structure="attention by random features",
    ),
    WideCase(
        name="linformer",
        build=linformer,
        data=plain_tokens,
        loss=per_token,
        axes=LAYERED,
        structure="keys projected along the sequence",
    ),
    WideCase(
        name="perceiver",
        build=perceiver,
        data=channels_last_images,
        loss=F.cross_entropy,
        axes=LAYERED,
        structure="layers shared over depth, latents",
    ),
    WideCase(
        name="gmlp",
        build=gated_mlp,
        data=plain_tokens,
        loss=per_token,
        axes=LAYERED,
        structure="gates along the sequence",
    ),
    WideCase(
        name="conformer",
        build=conformer,
        data=double(series),
        loss=F.mse_loss,
        dtype=torch.float64,
        axes=LAYERED,
        structure="BatchNorm along a sequence",
    ),
    WideCase(
        name="mambapy",
        build=seeded(MambaLM),
        data=plain_tokens,
        loss=per_token,
        axes=REPLICATED | {"pipeline"},
        structure="a parallel scan, as a Function bound at import",
    ),
    WideCase(
        name="tabnet",
        build=tabnet,
        data=double(points),
        loss=F.cross_entropy,
        dtype=torch.float64,
        axes=REPLICATED,
        structure="BatchNorm over parts of a batch, sparsemax",
    ),
    WideCase(
        name="monai-unet",
        build=medical_unet,
        data=double(volumes),
        loss=F.mse_loss,
        dtype=torch.float64,
        axes=LAYERED,
        structure="skip connections in three dimensions, instance norm",
    ),
    WideCase(
        name="monai-unetr",
        build=medical_transformer,
        data=double(volumes),
        loss=F.mse_loss,
        dtype=torch.float64,
        axes=LAYERED,
        structure="a transformer with skips into convolutions",
    ),
    WideCase(
        name="fourier-operator",
        build=seeded(FourierOperator),
        data=fields,
        loss=F.mse_loss,
        axes=REPLICATED | {"pipeline"},
        structure="complex weights",
    ),
    WideCase(
        name="critic",
        build=seeded(Critic),
        data=images,
        loss=F.cross_entropy,
        axes=REPLICATED,
        structure="spectral norm",
    ),
    WideCase(
        name="halting",
        build=seeded(Halting),
        data=points,
        loss=F.cross_entropy,
        axes=REPLICATED,
        structure="adaptive depth",
    ),
    WideCase(
        name="recurrent-mixture",
        build=seeded(RecurrentMixture),
        data=series,
        loss=F.mse_loss,
        axes=REPLICATED | {"pipeline"},
        structure="a cell called at every position, experts",
    ),
)
"""The one without an axis may be refused everywhere: its samples depend on each other."""
