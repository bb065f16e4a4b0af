"""Two towers: pictures of three digits and their names in words, brought together by a loss over the whole batch.

    python examples/contrastive.py --plan data=2

Every picture of a batch is compared with every text of it, on all devices: meshfit sees that this loss is no mean over
samples, and takes it over the gathered outputs.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import meshfit


def pairs(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pictures of 8 x 24, what is in them, and numbers of the samples (as targets)."""
    images, labels = load_digits(return_X_y=True)
    known = slice(0, 1400) if seed == 0 else slice(1400, None)  # those of validation are by other hands
    images, labels = torch.tensor(images[known], dtype=torch.float32).view(-1, 8, 8) / 16, torch.tensor(labels[known])
    which = torch.randint(len(images), (count, 3), generator=torch.Generator().manual_seed(seed))
    return images[which].permute(0, 2, 1, 3).reshape(count, 1, 8, 24), labels[which], torch.arange(count)


class Towers(nn.Module):
    def __init__(self, width: int = 64):
        super().__init__()
        self.picture = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, 2, padding=1), nn.ReLU(),
            nn.Flatten(), nn.Linear(32 * 4 * 12, 128), nn.ReLU(), nn.Linear(128, width),
        )  # fmt: skip
        self.words, self.places = nn.Embedding(10, width), nn.Parameter(0.1 * torch.randn(3, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.text = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, picture: Tensor, digits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        seen = F.normalize(self.picture(picture), dim=-1)
        read = F.normalize(self.text(self.words(digits) + self.places).mean(1), dim=-1)
        return seen, read, self.scale.exp()


def loss(outputs: tuple[Tensor, Tensor, Tensor], targets: Tensor) -> Tensor:
    """CLIP's: each picture has to find its text among all of the batch, each text its picture."""
    seen, read, scale = outputs
    alike, own = scale * seen @ read.T, torch.arange(len(seen), device=seen.device)
    return (F.cross_entropy(alike, own) + F.cross_entropy(alike.T, own)) / 2


def train(plan: str = "data=2", devices: str = "cpu", **more) -> meshfit.Result:
    return meshfit.fit(
        Towers,
        pairs(6000, seed=0),
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=2e-3),
        scheduler=lambda optimizer, steps: torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps),
        batch_size=128,
        epochs=6,
        valid=pairs(512, seed=1),
        plan=plan,
        devices=devices,
        **more,
    )


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--plan", default="data=2")
    arguments.add_argument("--devices", default="cpu")
    result = train(**vars(arguments.parse_args()))
    print("loss on unseen pairs by epoch:", *(f"{step.valid['loss']:.2f}" for step in result.history if step.valid))
    pictures, digits, _ = pairs(512, seed=1)
    every = torch.cartesian_prod(*(torch.arange(10),) * 3)  # the texts of 000 to 999
    model = result.model.cpu()
    seen, read = model(pictures, digits)[0], model(pictures[:1], every)[1]
    found = every[(seen @ read.T).argmax(1)]
    print(
        f"of 1000 texts the right one is found for {(found == digits).all(1).float().mean():.1%} of 512 unseen pictures"
    )
