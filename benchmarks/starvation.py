"""Does a GPU wait for data? A ResNet on CIFAR-shaped images with crop, flip and normalise, at full GPU speed.

    python benchmarks/starvation.py                       # images at random; --data FOLDER takes cifar10-train.parquet
    python benchmarks/starvation.py --tiny --device cpu   # in small, to check the script

Steps are timed in turns: with their batch on the device already; with batches from meshfit's loader, or from a
DataLoader of 4 and 16 workers that transforms sample by sample, or whose ``__getitems__`` runs the same vectorised
transforms. The share of the step that each adds is the device's wait for data.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import meshfit
from meshfit.data.draw import Key, SampleRandom
from meshfit.data.loader import Loader
from meshfit.data.reading import Readers
from meshfit.data.transform import CIFAR10, crop, flip, normalise
from meshfit.launch import heap


class Block(nn.Module):
    def __init__(self, wide: int, out: int, stride: int):
        super().__init__()
        self.one, self.two = nn.Conv2d(wide, out, 3, stride, 1, bias=False), nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.first, self.second = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
        self.side = nn.Conv2d(wide, out, 1, stride, bias=False) if stride > 1 or wide != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(self.two(F.relu(self.first(self.one(x))))) + self.side(x))


def resnet18(width: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    for i in range(4):
        wide, out = width * 2 ** max(i - 1, 0), width * 2**i
        layers += [Block(wide, out, 1 if i == 0 else 2), Block(out, out, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width * 8, 10))


class Samples(Dataset):
    """What people write: crop, flip and normalise one image at a time."""

    def __init__(self, images: Tensor, labels: Tensor):
        self.images, self.labels = images, labels
        self.mean, self.std = (torch.tensor(v).view(3, 1, 1) for v in CIFAR10)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> Any:
        image = F.pad(self.images[i], (4, 4, 4, 4))
        top, left = torch.randint(0, 9, (2,)).tolist()
        image = image[:, top : top + 32, left : left + 32]
        if torch.rand(()) < 0.5:
            image = image.flip(2)
        return (image / 255 - self.mean) / self.std, self.labels[i]


class Whole(Samples):
    """The same by whole batches."""

    def __getitems__(self, ids: list[int]) -> Any:
        at = np.asarray(ids)
        batch = (torch.from_numpy(self.images.numpy()[at]), torch.from_numpy(self.labels.numpy()[at]))
        for place, function in enumerate((crop(32, padding=4), flip(), normalise(*CIFAR10))):
            batch = function(batch, SampleRandom(at, Key(0, 0, place)))
        return batch


def itself(batch: Any) -> Any:
    return batch


def endless(make: Any) -> Iterator[Any]:
    epoch = 0
    while True:
        yield from make(epoch)
        epoch += 1


def main() -> None:
    asked = argparse.ArgumentParser(description="The device's wait for data.")
    asked.add_argument("--data", type=Path)
    asked.add_argument("--device", default="cuda")
    asked.add_argument("--tiny", action="store_true")
    asked.add_argument("--steps", type=int, default=40, help="in a turn")
    asked.add_argument("--turns", type=int, default=5)
    asked.add_argument("--batch", type=int, default=1024)
    asked.add_argument(
        "--readers", default="auto", help='who reads for meshfit, each in turn: "auto; 2 threads; processes"'
    )
    asked.add_argument("--mine", action="store_true", help="meshfit alone")
    args = asked.parse_args()
    warnings.filterwarnings("ignore")
    heap.keep()  # as in fit
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device(args.device)
    if args.tiny:
        args.steps, args.batch, args.turns = 3, 32, 2
    if args.data is not None:
        held = meshfit.data.parquet(args.data / "cifar10-train.parquet", columns=("image", "label"))
        parts = [held.fetch(ids) for ids in np.array_split(np.arange(len(held)), 20)]
        images, labels = (torch.cat(side) for side in zip(*parts, strict=True))
    else:
        images = torch.randint(0, 256, (2000 if args.tiny else 50_000, 3, 32, 32), dtype=torch.uint8)
        labels = torch.randint(0, 10, (len(images),))

    model = resnet18(8 if args.tiny else 64).to(device)
    model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=device.type == "cuda")

    def step(x: Tensor, y: Tensor) -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = F.cross_entropy(model(x.to(memory_format=torch.channels_last)), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def timed(batches: Iterator[Any], steps: int) -> float:
        for _ in range(4):
            step(*next(batches))
        wait()
        start = time.perf_counter()
        for _ in range(steps):
            step(*next(batches))
        wait()
        return (time.perf_counter() - start) / steps

    def ours(transforms: Any, asked: str) -> Iterator[Any]:
        who = Readers.of(None if asked == "auto" else asked)
        how: dict[str, Any] = {"workers": who.workers, "kind": who.kind}
        loader = Loader(source=transforms, batch_size=args.batch, rank=0, ranks=1, device=device, **how)
        print(f"  {loader.reading}")
        whole = lambda epoch: (b.microbatches[0].content for b in loader.epoch(epoch) if b.size == args.batch)
        return endless(whole)

    def others(data: Dataset, workers: int, batched: bool) -> Iterator[Any]:
        how: dict[str, Any] = {"collate_fn": itself} if batched else {}
        made = DataLoader(
            data,
            args.batch,
            shuffle=True,
            num_workers=workers,
            pin_memory=device.type == "cuda",
            drop_last=True,
            persistent_workers=True,
            **how,
        )
        move = lambda batch: tuple(t.to(device, non_blocking=True) for t in batch)
        return endless(lambda epoch: map(move, made))

    memory = meshfit.data.memory((images, labels))
    fixed = torch.randn(args.batch, 3, 32, 32, device=device), torch.randint(0, 10, (args.batch,), device=device)
    paths = {
        "meshfit": memory.map(crop(32, padding=4), flip()).on_device(normalise(*CIFAR10)),
        "meshfit, all on the device": memory.on_device(crop(32, padding=4), flip(), normalise(*CIFAR10)),
        "meshfit, all on the host": memory.map(crop(32, padding=4), flip(), normalise(*CIFAR10)),
    }
    readers = [word.strip() for word in args.readers.split(";")]
    cases = {
        (name if len(readers) == 1 else f"{name}, {word}"): partial(ours, path, word)
        for name, path in paths.items()
        for word in readers
    }
    theirs = {
        "DataLoader, 4 workers, sample by sample": lambda: others(Samples(images, labels), 4, False),
        "DataLoader, 16 workers, sample by sample": lambda: others(Samples(images, labels), 16, False),
        "DataLoader, 4 workers, vectorised": lambda: others(Whole(images, labels), 4, True),
        "DataLoader, 16 workers, vectorised": lambda: others(Whole(images, labels), 16, True),
    }
    still = endless(lambda epoch: [fixed])
    timed(still, 10)
    print(f"steps of {args.batch} images, {args.turns} turns of {args.steps}; the wait is over its own turns' steps")
    print(f"{'':42s}   with its data   batch on the device   wait, and in each turn")
    for name, make in (cases if args.mine else cases | theirs).items():
        batches = make()
        timed(batches, 8)
        turns = [(timed(still, args.steps), timed(batches, args.steps)) for _ in range(args.turns)]
        shares = [1 - alone / took for alone, took in turns]
        alone, took = (statistics.median(side) * 1e3 for side in zip(*turns, strict=True))
        each = " ".join(f"{share:.1%}" for share in shares)
        wait_share = statistics.median(shares)
        print(f"{name:42s} {took:13.2f} ms {alone:18.2f} ms   {wait_share:6.1%}   {each}", flush=True)
        del batches


if __name__ == "__main__":
    main()
