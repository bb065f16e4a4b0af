"""Segmentation: which pixels of a noisy picture belong to which digit, by a small U-Net.

    python examples/segmentation.py --plan pipeline=2

Writes runs/segmentation.png: pictures, the truth, and what the network says.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor, nn

import meshfit


def pictures(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Pictures of 24 x 24 with three digits and noise; for each pixel 0, or 1 + the digit that covers it."""
    draw = torch.Generator().manual_seed(seed)
    digits, labels = load_digits(return_X_y=True)
    digits = torch.tensor(digits, dtype=torch.float32).view(-1, 8, 8) / 16
    images, classes = torch.zeros(count, 1, 24, 24), torch.zeros(count, 24, 24, dtype=torch.long)
    for image, pixels in zip(images, classes, strict=True):
        for which in torch.randint(len(digits), (3,), generator=draw).tolist():
            y, x = torch.randint(0, 16, (2,), generator=draw).tolist()
            image[0, y : y + 8, x : x + 8] = digits[which]
            pixels[y : y + 8, x : x + 8] = (digits[which] > 0.2) * (1 + int(labels[which]))
    return images + 0.2 * torch.randn(images.shape, generator=draw), classes


def convolutions(channels: int, out: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU(),
        nn.Conv2d(out, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU(),
    )  # fmt: skip


class UNet(nn.Module):
    def __init__(self, width: int = 16, classes: int = 11):
        super().__init__()
        self.fine, self.middle = convolutions(1, width), convolutions(width, 2 * width)
        self.coarse = convolutions(2 * width, 4 * width)
        self.up_middle, self.up_fine = convolutions(6 * width, 2 * width), convolutions(3 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, image: Tensor) -> Tensor:
        fine = self.fine(image)
        middle = self.middle(F.max_pool2d(fine, 2))
        coarse = self.coarse(F.max_pool2d(middle, 2))
        middle = self.up_middle(torch.cat([F.interpolate(coarse, scale_factor=2), middle], 1))
        return self.head(self.up_fine(torch.cat([F.interpolate(middle, scale_factor=2), fine], 1)))


def overlap(outputs: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Of the pixels that are of a digit, or that the network says are, the share on which both agree."""
    said = outputs.argmax(1)
    return ((said == classes) & (classes > 0)).sum(), ((said > 0) | (classes > 0)).sum()


def train(plan: str = "data=2", devices: str = "cpu", **more) -> meshfit.Result:
    return meshfit.fit(
        UNet,
        pictures(3000, seed=0),
        loss=F.cross_entropy,
        optimizer=lambda params: torch.optim.AdamW(params, lr=5e-3),
        scheduler=lambda optimizer, steps: torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=steps),
        batch_size=32,
        epochs=6,
        valid=pictures(200, seed=1),
        metrics={"overlap": overlap},
        plan=plan,
        devices=devices,
        **more,
    )


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--plan", default="data=2")
    arguments.add_argument("--devices", default="cpu")
    result = train(**vars(arguments.parse_args()))
    print("overlap by epoch:", *(f"{step.valid['overlap']:.1%}" for step in result.history if step.valid))
    model, (images, classes) = result.model.cpu().eval(), pictures(8, seed=2)
    colours = torch.rand(11, 3, generator=torch.Generator().manual_seed(3)) * (torch.arange(11) > 0)[:, None]
    seen = images.clamp(0, 1).permute(0, 2, 3, 1).expand(-1, -1, -1, 3)
    rows = torch.stack([seen, colours[classes], colours[model(images).argmax(1)]])
    tiled = F.pad(rows, (0, 0, 1, 1, 1, 1), value=0.3).permute(0, 2, 1, 3, 4).reshape(78, 208, 3)
    Path("runs").mkdir(exist_ok=True)
    Image.fromarray((tiled * 255).byte().numpy()).resize((832, 312), Image.Resampling.NEAREST).save(
        "runs/segmentation.png"
    )
