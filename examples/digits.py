"""A small convolutional network on scikit-learn's handwritten digits, over four CPU ranks.

python examples/digits.py
meshfit verify examples/digits.py --plan data=3
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import meshfit

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
shuffled = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
train, valid = shuffled[:1437], shuffled[1437:]


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(64 * 4 * 4, 10),
    )  # fmt: skip


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(1) == targets).float()


result = meshfit.fit(
    network,
    (images[train], labels[train]),
    loss=F.cross_entropy,
    optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
    scheduler=lambda optimizer, steps: torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=steps),
    batch_size=64,
    epochs=12,
    valid=(images[valid], labels[valid]),
    metrics={"accuracy": accuracy},
    best="accuracy",
    plan="data=4",
    devices="cpu",
    out="runs/digits",
    progress=True,
)

print(
    f"""
  accuracy {result.best["accuracy"]:.1%} on {len(valid)} digits it has not seen

  open   {result.folder.resolve() / "report.html"}
         in a browser: losses, who worked when, what held it back

  next:  meshfit verify examples/digits.py --plan data=3     do three ranks train like one?
         meshfit train examples/digits.py --plan data=2      the same script, another plan
         docs/strategies/README.md                           what the plans do, in pictures
"""
)
