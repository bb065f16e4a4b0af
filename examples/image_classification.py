"""Image classification: JPEGs in a Parquet file, decoded, cropped at random and normalised on their way to a CNN.

python examples/image_classification.py --plan shard=2
python examples/image_classification.py --data cifar10-train.parquet   # yours: columns image (bytes) and label
"""

import argparse
import io
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn

import meshfit
from meshfit.data import transform


def jpeg(digit: np.ndarray) -> bytes:
    """A digit of 8 x 8 as a colour JPEG of 32 x 32."""
    file = io.BytesIO()
    picture = Image.fromarray((digit * 255 / 16).astype(np.uint8))
    picture.resize((32, 32), Image.Resampling.BICUBIC).convert("RGB").save(file, "JPEG", quality=90)
    return file.getvalue()


def write_digits(path: Path) -> Path:
    images, labels = load_digits(return_X_y=True)
    files = [jpeg(image.reshape(8, 8)) for image in images]
    pq.write_table(pa.table({"image": files, "label": labels}), path)
    return path


def network(classes: int = 10) -> nn.Module:
    def block(channels: int, out: int) -> list[nn.Module]:
        return [nn.Conv2d(channels, out, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]

    return nn.Sequential(*block(3, 32), *block(32, 64), *block(64, 128), nn.Flatten(), nn.Linear(128 * 16, classes))


def accuracy(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(1) == labels).float()


def train(plan: str = "data=2", devices: str = "cpu", data: Path | None = None, **more) -> meshfit.Result:
    with tempfile.TemporaryDirectory() as folder:
        path = data or write_digits(Path(folder) / "digits.parquet")
        images, valid = meshfit.data.parquet(path, columns=("image", "label")).split(0.8)
        scaled = transform.normalise(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
        return meshfit.fit(
            network,
            images.map(transform.crop(32, padding=4)).on_device(scaled),
            loss=F.cross_entropy,
            optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
            scheduler=lambda optimizer, steps: torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps),
            batch_size=64,
            epochs=10,
            valid=valid.on_device(scaled),
            metrics={"accuracy": accuracy},
            plan=plan,
            devices=devices,
            **more,
        )


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--plan", default="data=2")
    arguments.add_argument("--devices", default="cpu")
    arguments.add_argument("--data", type=Path)
    result = train(**vars(arguments.parse_args()))
    print("accuracy by epoch:", *(f"{step.valid['accuracy']:.1%}" for step in result.history if step.valid))
