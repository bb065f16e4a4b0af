"""Models with parts that do not need each other, for ``branch=``: cases like those of zoo.py, for plans that name them.

Towers, Inception blocks, two decoders on one encoder, an ensemble; and what makes them hard: weights that towers share,
a weight of the trunk that a branch uses too, losses within the branches, BatchNorm, sums in place.
"""

import copyreg

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo import (
    CLASSES,
    LENGTH,
    VOCABULARY,
    Case,
    _with_torchvision,
    double_images,
    images,
    points,
    random,
    seeded,
    text,
    tokens,
    torchvision,
    transformers,
)


@seeded
def clip() -> nn.Module:
    hf = transformers()
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    words = {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "eos_token_id": VOCABULARY - 1}
    config = hf.CLIPConfig(
        text_config={**size, **words, "bos_token_id": 0, "pad_token_id": 0},
        vision_config={**size, "image_size": 32, "patch_size": 8},
        projection_dim=16,
    )
    return hf.CLIPModel(config)


@seeded
def googlenet() -> nn.Module:
    models = torchvision().models
    copyreg.pickle(models.GoogLeNet, _with_torchvision)
    return models.GoogLeNet(num_classes=CLASSES, aux_logits=False, init_weights=False, dropout=0.0).double()


class Decoder(nn.Module):
    """Back to the size of the image, past what the encoder kept."""

    def __init__(self, channels: int, norm: type[nn.Module]):
        super().__init__()
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.mix = nn.Sequential(nn.Conv2d(32, 16, 3, padding=1), norm(16), nn.ReLU(inplace=True))
        self.out = nn.Conv2d(16, channels, 1)

    def forward(self, deep: Tensor, skip: Tensor) -> Tensor:
        return self.out(self.mix(torch.cat([self.up(deep), skip], 1)))


class TwoDecoders(nn.Module):
    """A U-Net with a decoder for classes and one for depth."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
        self.second = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(inplace=True))
        self.classes, self.depth = Decoder(CLASSES, nn.BatchNorm2d), Decoder(1, lambda n: nn.GroupNorm(4, n))  # type: ignore

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        skip = self.first(x)
        deep = self.second(F.max_pool2d(skip, 2))
        return {"classes": self.classes(deep, skip), "depth": self.depth(deep, skip)}


class Ensemble(nn.Module):
    """Three networks of different depths, summed in place."""

    def __init__(self):
        super().__init__()
        self.members = nn.ModuleList(
            nn.Sequential(
                nn.Linear(8, 64), *(nn.Sequential(nn.Tanh(), nn.Linear(64, 64)) for _ in range(d)), nn.Linear(64, 4)
            )
            for d in (4, 2, 2)
        )

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.members
        total = first(x)
        for member in others:
            total += member(x)
        return total / len(self.members)


class Siamese(nn.Module):
    """One tower for both inputs; then a deeper one for each."""

    def __init__(self):
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64))
        self.own = nn.ModuleList(nn.Sequential(nn.GELU(), nn.Linear(64, 64)) for _ in range(2))
        self.head = nn.Linear(64, CLASSES)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        left, right = self.own[0](self.tower(left)), self.own[1](self.tower(right))
        return self.head((left - right).abs())


class TiedHeads(nn.Module):
    """Tokens forwards and backwards from one body, each by layers of its own; both heads are the embedding."""

    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, 32)
        self.body = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32))
        self.heads = nn.ModuleList(
            nn.Sequential(*[nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(3)])
            for _ in range(2)
        )

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        hidden = self.body(self.token(ids))
        return tuple(head(hidden) @ self.token.weight.t() for head in self.heads)


# Data and losses


def captioned(n: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Texts with an end, images, and how much they should agree."""
    batch = text(n)
    ids = batch["input_ids"].clone()
    ids[:, -1] = VOCABULARY - 1
    return (ids, images(n)[0], batch["attention_mask"]), torch.rand(n, generator=random())


def captions(n: int) -> dict[str, Tensor]:
    (ids, pixels, mask), _ = captioned(n)
    return {"input_ids": ids, "pixel_values": pixels, "attention_mask": mask}


def agreement(outputs, wanted: Tensor) -> Tensor:
    return F.mse_loss((outputs.image_embeds * outputs.text_embeds).sum(-1), wanted)


def maps(n: int) -> tuple[Tensor, Tensor]:
    """Images, and for each pixel a class."""
    pixels = images(n, 16)[0].double()
    return pixels, pixels.mean(1).mul(2).long().clamp(0, CLASSES - 1)


def both_maps(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    depth = F.mse_loss(outputs["depth"][:, 0], targets.to(outputs["depth"].dtype))
    return F.cross_entropy(outputs["classes"], targets) + depth


def pairs(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    x = torch.randn(n, 2, 16, generator=random())
    return (x[:, 0].contiguous(), x[:, 1].contiguous()), (x[:, 0, :CLASSES] - x[:, 1, :CLASSES]).abs().argmax(1)


def both_ways(n: int) -> tuple[Tensor, Tensor]:
    ids = tokens(n)
    return ids, ids.clone()


def next_and_last(outputs: tuple[Tensor, Tensor], ids: Tensor) -> Tensor:
    ahead, back = (logits.transpose(1, 2) for logits in outputs)
    return F.cross_entropy(ahead[:, :, :-1], ids[:, 1:]) + F.cross_entropy(back[:, :, 1:], ids[:, :-1])


CASES = (
    Case(name="clip", build=clip, data=captioned, loss=agreement),
    Case(name="googlenet", build=googlenet, data=double_images, loss=F.cross_entropy, dtype=torch.float64),
    Case(
        name="two-decoders",
        build=lambda: seeded(TwoDecoders)().double(),
        data=maps,
        loss=both_maps,
        dtype=torch.float64,
    ),
    Case(name="ensemble", build=seeded(Ensemble), data=points, loss=F.cross_entropy),
    Case(name="siamese", build=seeded(Siamese), data=pairs, loss=F.cross_entropy),
    Case(name="tied-heads", build=seeded(TiedHeads), data=both_ways, loss=next_and_last),
)

BRANCHES: dict[str, Case] = {case.name: case for case in CASES}
