"""Workers of unequal speed with a model server: what waiting for the slowest costs, and what not waiting costs.

    python benchmarks/async_server.py                       # on 5 or more cores
    python benchmarks/async_server.py --epochs 30 --seeds 3 --data train.parquet

Three workers, one of them 3 times slower: it computes each gradient three times. First each kind of worker is timed
alone with its server; their speeds added up are what three could do if none ever waited. Then, in the same run,
synchronous (a batch shared by all), and apart with staleness 2, 8 and unbounded: throughput while all workers are at
work, as a ratio to that sum, and test accuracy after equal samples.

AdamW: with momentum 0.9 plain SGD diverges on this model when gradients come some four updates late.

Digits (scikit-learn's) by default; with ``--data`` CIFAR-10 in a parquet file, every fifth image kept for the test.
"""

import argparse
import math
import os
import statistics
import sys
import tempfile
import time
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.fleet import Fleet, as_tensors, merged
from benchmarks.served import Training

WORKERS, SLOW, BATCH = 3, 3, 96
MODES: dict[str, float] = {"synchronous": 0, "staleness=2": 2, "staleness=8": 8, "staleness=inf": math.inf}


@cache
def data(path: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs and targets to train on, and to test on."""
    if not path:
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
        x, y = torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(y)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
        x, y = x[order], y[order]
    else:
        import io

        import numpy as np
        import pyarrow.parquet as parquet
        from PIL import Image

        table = parquet.read_table(path).slice(0, 20_000).to_pydict()
        column = next(iter(table))
        images = [np.asarray(Image.open(io.BytesIO(image["bytes"]))) for image in table[column]]
        x = torch.tensor(np.stack(images)).permute(0, 3, 1, 2).float() / 255
        y = torch.tensor(table[[*table][1]])
    test = torch.arange(len(x)) % 5 == 0
    return x[~test], y[~test], x[test], y[test]


def net(path: str, width: int) -> nn.Module:
    side, channels = (8, 1) if not path else (32, 3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(width, width, 3, padding=1, stride=2 if path else 1),
            nn.GELU(),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(width * (side // (4 if path else 2)) ** 2, 10),
        )


def training(path: str, width: int, lr: float, seed: int, damp: bool) -> Training:
    x, y, _, _ = data(path)
    return Training(
        build=partial(net, path, width),
        data=(x, y),
        loss=F.cross_entropy,
        optimizer=lambda p: torch.optim.AdamW(p, lr=lr),
        batch_size=BATCH,
        shuffle=True,
        seed=seed,
        late="damp" if damp else "none",
    )


def speed(make: Any, slow: int, seconds: float) -> float:
    """Samples a second of one worker alone with a server."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Fleet(make, Path(folder), workers=1, staleness=math.inf, batch_size=BATCH) as fleet,
    ):
        fleet.work(0, slow=slow, batch_size=BATCH // WORKERS)
        fleet.until(lambda: len(fleet.steps(0)) >= 5)
        start = time.monotonic()
        time.sleep(seconds)
        times = [when for _, _, when in fleet.steps(0) if when >= start]
        return (len(times) - 1) * (BATCH // WORKERS) / (times[-1] - times[0])


def train(make: Any, staleness: float, samples: int) -> tuple[float, dict[str, Any], dict[int, int]]:
    """Samples a second while all were at work; the weights; how late gradients were."""
    each = BATCH if staleness == 0 else BATCH // WORKERS
    with tempfile.TemporaryDirectory() as folder:
        terms = {"workers": WORKERS, "staleness": staleness, "batch_size": BATCH, "total": samples // each}
        with Fleet(make, Path(folder), **terms) as fleet:
            for id in range(WORKERS):
                size = None if staleness == 0 else BATCH // WORKERS
                fleet.work(id, slow=SLOW if id == 0 else 1, batch_size=size)
            end = next(fleet.workers[id].end(1200) for id in range(WORKERS))
            late = fleet.servers[0].end()["staleness"]
            steps = list(merged(fleet))
            all_begun = max(next(when for id, _, _, when in steps if id == worker) for worker in range(WORKERS))
            done = min(max(when for id, _, _, when in steps if id == worker) for worker in range(WORKERS))
    inside = [(id, when) for id, _, _, when in steps if all_begun <= when <= done]
    count = sum(id == 0 for id, _ in inside) if staleness == 0 else len(inside)
    return (count - 1) * each / (done - all_begun), end["weights"], late


def accuracy(path: str, width: int, weights: dict[str, Any]) -> float:
    model = net(path, width).eval()
    model.load_state_dict(as_tensors(weights))
    _, _, x, y = data(path)
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--epochs", type=float, default=30)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="for which each worker is timed alone")
    parser.add_argument("--damp", action="store_true", help="a late gradient steps by 1/(1+staleness)")
    parser.add_argument("--data", default="", help="CIFAR-10 as parquet")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    cores = len(os.sched_getaffinity(0))
    if cores < WORKERS + 2:
        print(f"{cores} cores: {WORKERS} workers and a server share them, so throughput says little", file=sys.stderr)

    samples = int(len(data(asked.data)[0]) * asked.epochs)
    makes = [partial(training, asked.data, asked.width, asked.lr, seed, asked.damp) for seed in range(asked.seeds)]
    fast, slow = speed(makes[0], 1, asked.seconds), speed(makes[0], SLOW, asked.seconds)
    total = (WORKERS - 1) * fast + slow
    print(
        f"alone: {fast:.0f} samples/s, the slow one {slow:.0f}; {WORKERS} that never wait: {total:.0f}; {cores} cores"
    )
    table = Table(
        title=f"{WORKERS} workers, one {fast / slow:.1f} times slower; {samples} samples, {asked.seeds} seeds"
    )
    for column in (
        "",
        "samples/s",
        "of the sum",
        "of synchronous",
        "test accuracy",
        "against synchronous",
        "staleness",
    ):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    rates, accuracies = {}, {}
    for name, staleness in MODES.items():
        runs = [train(make, staleness, samples) for make in makes]
        rates[name] = statistics.median(rate for rate, _, _ in runs)
        accuracies[name] = statistics.mean(accuracy(asked.data, asked.width, weights) for _, weights, _ in runs)
        late = {k: sum(run[2].get(k, 0) for run in runs) for run in runs for k in run[2]}
        mean = sum(k * n for k, n in late.items()) / sum(late.values())
        table.add_row(
            name,
            f"{rates[name]:.0f}",
            f"{rates[name] / total:.2f}",
            f"{rates[name] / rates['synchronous']:.2f}",
            f"{accuracies[name]:.2%}",
            f"{100 * (accuracies[name] - accuracies['synchronous']):+.2f} points",
            f"mean {mean:.1f}, most {max(late)}",
        )
    console = Console()
    console.width = max(console.width, 120)
    console.print(table)
    near = all(accuracies[name] > accuracies["synchronous"] - 0.01 for name in ("staleness=2", "staleness=8"))
    return int(not (near and rates["staleness=inf"] >= 0.9 * total))


if __name__ == "__main__":
    sys.exit(main())
