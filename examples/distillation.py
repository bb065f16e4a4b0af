"""Distillation: a small student learns from a large frozen teacher, on pictures of which it has hardly a label.

python examples/distillation.py --plan shard=2
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import meshfit

LABELLED = 40
images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels)
SEEN, UNSEEN = (images[:1400], labels[:1400]), (images[1400:], labels[1400:])


def teacher() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def student() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


class Pair(nn.Module):
    """Both, so that the teacher goes where the student goes; it is frozen, and no optimizer has its weights."""

    def __init__(self, teacher: nn.Module):
        super().__init__()
        self.student, self.teacher = student(), teacher.requires_grad_(False)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        return self.student(image), self.teacher(image)


def loss(outputs: tuple[Tensor, Tensor], labels: Tensor, temperature: float = 3.0) -> Tensor:
    """The student's distribution to the teacher's, both softened. The labels are not looked at."""
    said, taught = (each / temperature for each in outputs)
    return F.kl_div(said.log_softmax(1), taught.softmax(1), reduction="batchmean") * temperature**2


def accuracy(outputs: Tensor | tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    said = outputs[0] if isinstance(outputs, tuple) else outputs
    return (said.argmax(1) == labels).float()


def adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for p in params if p.requires_grad], lr=3e-3)


def train(plan: str = "data=2", devices: str = "cpu", taught: nn.Module | None = None, **more) -> meshfit.Result:
    torch.manual_seed(0)
    return meshfit.fit(
        Pair(taught or teacher()),
        SEEN,
        loss=loss,
        optimizer=adam,
        batch_size=64,
        epochs=20,
        valid=UNSEEN,
        metrics={"accuracy": accuracy},
        plan=plan,
        devices=devices,
        **more,
    )


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--plan", default="data=2")
    arguments.add_argument("--devices", default="cpu")
    asked = vars(arguments.parse_args())
    how = {"loss": F.cross_entropy, "optimizer": adam, "valid": UNSEEN, "metrics": {"accuracy": accuracy}, **asked}
    large = meshfit.fit(teacher, SEEN, epochs=6, batch_size=64, **how)
    alone = meshfit.fit(student, tuple(x[:LABELLED] for x in SEEN), steps=300, batch_size=LABELLED, **how)
    result = train(**asked, taught=large.model)
    count = lambda model: f"{sum(p.numel() for p in model.parameters()):,} weights"
    print(f"teacher, {count(large.model)}, all labels: {large.metrics['accuracy']:.1%}")
    print(f"student, {count(alone.model)}, {LABELLED} labels and no teacher: {alone.metrics['accuracy']:.1%}")
    print(
        "student by the teacher, no labels:", *(f"{s.valid['accuracy']:.1%}" for s in list(result.history) if s.valid)
    )
