"""Diffusion: digits out of noise, by a U-Net of diffusers that is told which digit to draw.

    python examples/diffusion.py --plan shard=2

Noise and time come with the data: drawn anew for each sample and epoch, and the same under every plan. Writes
runs/diffusion.png, a column for each digit.
"""

import argparse
from pathlib import Path

import diffusers
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.svm import SVC
from torch import Tensor

import meshfit

TIMES = 200
SCHEDULE = diffusers.DDIMScheduler(TIMES, beta_schedule="squaredcos_cap_v2", clip_sample=True)


class Noisy(torch.utils.data.Dataset):
    """((a digit in noise, how much, which digit), the noise): what is drawn follows seed, epoch and sample."""

    def __init__(self) -> None:
        images, labels = load_digits(return_X_y=True)
        self.images, self.labels = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> tuple[tuple[Tensor, Tensor, int], Tensor]:
        noise, time = torch.randn(1, 8, 8), torch.randint(TIMES, (1,))
        noisy = SCHEDULE.add_noise(self.images[i : i + 1], noise[None], time)[0]
        return (noisy, time[0], int(self.labels[i])), noise


class Denoiser(torch.nn.Module):
    """The noise that is in a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.unet = diffusers.UNet2DModel(
            sample_size=8, in_channels=1, out_channels=1, block_out_channels=(32, 64), layers_per_block=1,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            norm_num_groups=8, attention_head_dim=16, num_class_embeds=10,
        )  # fmt: skip

    def forward(self, noisy: Tensor, time: Tensor, digit: Tensor) -> Tensor:
        return self.unet(noisy, time, class_labels=digit).sample


def train(plan: str = "data=2", devices: str = "cpu", **more) -> meshfit.Result:
    return meshfit.fit(
        Denoiser,
        Noisy(),
        loss=F.mse_loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=2e-3),
        scheduler=lambda optimizer, steps: torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps),
        clip=1.0,
        batch_size=64,
        epochs=20,
        plan=plan,
        devices=devices,
        **more,
    )


@torch.no_grad()
def drawn(model: torch.nn.Module, digits: Tensor) -> Tensor:
    """A picture of each digit, out of noise."""
    images = torch.randn(len(digits), 1, 8, 8, generator=torch.Generator().manual_seed(0))
    SCHEDULE.set_timesteps(25)
    for time in SCHEDULE.timesteps:
        images = SCHEDULE.step(model(images, time.expand(len(digits)), digits), time, images).prev_sample
    return images[:, 0].clamp(-1, 1)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--plan", default="data=2")
    arguments.add_argument("--devices", default="cpu")
    result = train(**vars(arguments.parse_args()))
    losses = torch.tensor([step.loss for step in result.history])
    print(f"error in the noise: {losses[:20].mean():.3f} in the first 20 steps, {losses[-20:].mean():.3f} in the last")
    digits = torch.arange(10).repeat(16)
    images = drawn(result.model.cpu().eval(), digits)
    judge = SVC().fit(*load_digits(return_X_y=True))  # has seen real digits alone
    right = (judge.predict((images.flatten(1) + 1) * 8) == digits.numpy()).mean()
    print(f"a classifier of real digits takes {right:.0%} of those drawn for what was asked (10% by chance)")
    framed = F.pad(images[:80].view(8, 10, 8, 8), (2, 2, 2, 2), value=-1)
    tiled = ((framed.permute(0, 2, 1, 3).reshape(96, 120) + 1) * 127.5).byte().numpy()
    Path("runs").mkdir(exist_ok=True)
    Image.fromarray(tiled).resize((480, 384), Image.Resampling.NEAREST).save("runs/diffusion.png")
