"""A GAN: a generator of digits and a critic of them, two phases of a step, each with its own optimizer.

    python examples/gan.py --plan shard=2

Writes runs/gan.png, a column for each digit.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.svm import SVC
from torch import Tensor, nn
from torch.optim import Adam

import meshfit

NOISE = 16


class Digits(torch.utils.data.Dataset):
    """A real digit, which it is, and noise for a made one: drawn anew each epoch, the same under every plan."""

    def __init__(self) -> None:
        images, labels = load_digits(return_X_y=True)
        self.images, self.labels = torch.tensor(images, dtype=torch.float32) / 8 - 1, torch.tensor(labels)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.images[i], F.one_hot(self.labels[i], 10).float(), torch.randn(NOISE)


class GAN(nn.Module):
    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(NOISE + 10, width), nn.LayerNorm(width), nn.ReLU(),
            nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, 64), nn.Tanh(),
        )  # fmt: skip
        self.critic = nn.Sequential(
            nn.Linear(64 + 10, width),
            nn.LeakyReLU(0.2),
            nn.Linear(width, width),
            nn.LeakyReLU(0.2),
            nn.Linear(width, 1),
        )

    def draw(self, digit: Tensor, noise: Tensor) -> Tensor:
        return self.generator(torch.cat([noise, digit], 1))

    def judge(self, image: Tensor, digit: Tensor) -> Tensor:
        """How real it is."""
        return self.critic(torch.cat([image, digit], 1))


def critic(model: GAN, batch: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    image, digit, noise = batch
    real, made = model.judge(image, digit), model.judge(model.draw(digit, noise), digit)
    right = ((real > 0).float().mean() + (made < 0).float().mean()) / 2
    return F.softplus(-real).mean() + F.softplus(made).mean(), {"right": right}


def generator(model: GAN, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    _, digit, noise = batch
    return F.softplus(-model.judge(model.draw(digit, noise), digit)).mean()


def train(plan: str = "data=2", devices: str = "cpu", **more) -> meshfit.Result:
    return meshfit.fit(
        GAN,
        Digits(),
        step={"critic": critic, "generator": generator},
        optimizer={
            "critic": lambda model: Adam(model.critic.parameters(), lr=1e-3, betas=(0.5, 0.99)),
            "generator": lambda model: Adam(model.generator.parameters(), lr=1e-3, betas=(0.5, 0.99)),
        },
        batch_size=64,
        epochs=80,
        ema=0.99,  # the average of the weights draws better than the last of them
        plan=plan,
        devices=devices,
        **more,
    )


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--plan", default="data=2")
    arguments.add_argument("--devices", default="cpu")
    result = train(**vars(arguments.parse_args()))
    print("the critic is right in", *(f"{step.values['critic/right']:.0%}" for step in list(result.history)[::280]))
    digits = torch.arange(10).repeat(16)
    noise = torch.randn(len(digits), NOISE, generator=torch.Generator().manual_seed(0))
    images = result.model.cpu().draw(F.one_hot(digits, 10).float(), noise).detach()
    judge = SVC().fit(*load_digits(return_X_y=True))  # has seen real digits alone
    right = (judge.predict((images + 1) * 8) == digits.numpy()).mean()
    print(f"a classifier of real digits takes {right:.0%} of those drawn for what was asked (10% by chance)")
    framed = F.pad(images[:80].view(8, 10, 8, 8), (2, 2, 2, 2), value=-1)
    tiled = ((framed.permute(0, 2, 1, 3).reshape(96, 120) + 1) * 127.5).byte().numpy()
    Path("runs").mkdir(exist_ok=True)
    Image.fromarray(tiled).resize((480, 384), Image.Resampling.NEAREST).save("runs/gan.png")
