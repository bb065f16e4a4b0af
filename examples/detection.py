"""Detection: find and read the digits in a picture, one to five of them, of any size.

    python examples/detection.py --plan tensor=2

Each sample has its own number of boxes, so ``collate=`` says what a batch is: pictures in one tensor, boxes in a list.
Writes runs/detection.png: pictures with what was found.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from sklearn.datasets import load_digits
from torch import Tensor, nn

import meshfit

SIZE, CELL = 48, 4


def pictures(count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """A picture with its boxes: rows of x, y (the middle), width and height in pixels, digit."""
    draw = torch.Generator().manual_seed(seed)
    digits, labels = load_digits(return_X_y=True)
    digits, samples = torch.tensor(digits, dtype=torch.float32).view(-1, 1, 8, 8) / 16, []
    for _ in range(count):
        image, boxes = 0.1 * torch.randn(1, SIZE, SIZE, generator=draw), []
        for _ in range(int(torch.randint(1, 6, (), generator=draw))):
            which, size = (
                int(torch.randint(len(digits), (), generator=draw)),
                int(torch.randint(8, 17, (), generator=draw)),
            )
            y, x = torch.randint(0, SIZE - size, (2,), generator=draw).tolist()
            if any(abs(x + size / 2 - b[0]) < 12 and abs(y + size / 2 - b[1]) < 12 for b in boxes):
                continue  # it would cover another one
            image[:, y : y + size, x : x + size] += F.interpolate(digits[which : which + 1], size=size)[0]
            boxes.append([x + size / 2, y + size / 2, size, size, float(labels[which])])
        samples.append((image, torch.tensor(boxes)))
    return samples


def collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, list[Tensor]]:
    return torch.stack([image for image, _ in samples]), [boxes for _, boxes in samples]


def network(width: int = 24) -> nn.Module:
    """For each cell of 4 x 4 pixels: is a digit's middle here, where exactly, how large, which digit?"""

    def block(channels: int, out: int, stride: int = 1) -> list[nn.Module]:
        return [nn.Conv2d(channels, out, 3, stride, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]

    layers = [
        *block(1, width, 2),
        *block(width, 2 * width, 2),
        *block(2 * width, 2 * width),
        *block(2 * width, 4 * width),
    ]
    return nn.Sequential(*layers, *block(4 * width, 4 * width), nn.Conv2d(4 * width, 1 + 4 + 10, 1))


def loss(outputs: Tensor, targets: list[Tensor]) -> tuple[Tensor, int]:
    """A sum, and the boxes that it is over: divided by those of the whole batch, on all devices."""
    boxes = torch.cat(targets)
    picture = torch.repeat_interleave(torch.tensor([len(each) for each in targets], device=boxes.device))
    column, row = (boxes[:, :2] / CELL).long().T
    there = torch.zeros_like(outputs[:, 0]).index_put((picture, row, column), torch.ones_like(boxes[:, 0]))
    found = outputs[picture, :, row, column]
    place = torch.cat([boxes[:, :2] / CELL - (boxes[:, :2] / CELL).floor(), (boxes[:, 2:4] / 12).log()], 1)
    return (
        F.binary_cross_entropy_with_logits(outputs[:, 0], there, weight=1 + 3 * there, reduction="sum")
        + 4 * F.smooth_l1_loss(found[:, 1:5], place, reduction="sum")
        + F.cross_entropy(found[:, 5:], boxes[:, 4].long(), reduction="sum")
    ), len(boxes)


def boxes_of(output: Tensor) -> Tensor:
    """Boxes in one picture: cells that are surer than their neighbours."""
    sure = output[0].sigmoid()
    row, column = ((sure > 0.5) & (sure == F.max_pool2d(sure[None], 3, 1, 1)[0])).nonzero().T
    x, y, width, height = output[1:5, row, column]
    digit = output[5:, row, column].argmax(0)
    return torch.stack([(column + x) * CELL, (row + y) * CELL, 12 * width.exp(), 12 * height.exp(), digit], 1)


def overlaps(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union of every box of ``a`` with every one of ``b``."""
    low = torch.maximum((a[:, :2] - a[:, 2:4] / 2)[:, None], b[:, :2] - b[:, 2:4] / 2)
    high = torch.minimum((a[:, :2] + a[:, 2:4] / 2)[:, None], b[:, :2] + b[:, 2:4] / 2)
    both = (high - low).clamp(min=0).prod(-1)
    return both / (a[:, 2:4].prod(1)[:, None] + b[:, 2:4].prod(1) - both)


def f1(outputs: Tensor, targets: list[Tensor]) -> tuple[float, int]:
    """Boxes that are right (digit, and more than half of the area) among those said and those there."""
    right = said = 0
    for found, true in zip(map(boxes_of, outputs), targets, strict=True):
        right += int(((overlaps(found, true) > 0.5) & (found[:, 4:] == true[:, 4])).any(0).sum())
        said += len(found) + len(true)
    return 2.0 * right, said


def train(plan: str = "data=2", devices: str = "cpu", **more) -> meshfit.Result:
    return meshfit.fit(
        network,
        pictures(2000, seed=0),
        collate=collate,
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
        scheduler=lambda optimizer, steps: torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps),
        batch_size=32,
        epochs=8,
        valid=pictures(300, seed=1),
        metrics={"f1": f1},
        plan=plan,
        devices=devices,
        **more,
    )


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--plan", default="data=2")
    arguments.add_argument("--devices", default="cpu")
    result = train(**vars(arguments.parse_args()))
    print("F1 by epoch:", *(f"{step.valid['f1']:.2f}" for step in result.history if step.valid))
    drawn = Image.new("RGB", (4 * 192, 192))
    images, _ = collate(pictures(4, seed=2))
    model = result.model.cpu().eval()
    for i, (image, output) in enumerate(zip(images, model(images), strict=True)):
        drawn.paste(Image.fromarray((image[0].clamp(0, 1) * 255).byte().numpy()).resize((192, 192)), (192 * i, 0))
        for x, y, width, height, digit in (boxes_of(output.detach()) * torch.tensor([4, 4, 4, 4, 1])).tolist():
            left, top = 192 * i + x - width / 2, y - height / 2
            ImageDraw.Draw(drawn).rectangle((left, top, left + width, top + height), outline="orange")
            ImageDraw.Draw(drawn).text((left + 2, top), f"{digit:.0f}", fill="orange")
    Path("runs").mkdir(exist_ok=True)
    drawn.save("runs/detection.png")
