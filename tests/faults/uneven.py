"""Samples over two ranks, in batches of 16, of which the last has nine, or one: which samples were seen. Exit code 0:
each once an epoch, and once in each evaluation."""

import sys
from collections import Counter

import torch
from torch import nn

import meshfit

COUNTS = (1001, 1009)


class Ids(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight + x[:, 0]


def seen(n: int) -> tuple[bool, str]:
    """The loss is the mean of the numbers of the samples in a batch."""
    ids = torch.arange(n, dtype=torch.float64).unsqueeze(1)
    result = meshfit.fit(
        Ids().double(),
        (ids, ids[:, 0]),
        loss=lambda outputs, targets: outputs.mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.0),
        batch_size=16,
        epochs=2,
        valid=(ids, ids[:, 0]),
        plan="data=2",
        devices="cpu",
        progress=False,
    )
    sums: Counter[int] = Counter()
    before = 0
    for step in result.history:
        sums[step.epoch] += round(step.loss * (step.samples - before))
        before = step.samples
    valid = [round(step.valid["loss"] * n) for step in result.history if step.valid]
    want = n * (n - 1) // 2
    good = before == 2 * n and list(sums.values()) == valid == [want, want]
    return good, f"{before} samples in 2 epochs, sums of their numbers {list(sums.values())}, in evaluations {valid}"


def main() -> int:
    every = [seen(n) for n in COUNTS]
    print("; ".join(words for _, words in every))
    return 0 if all(good for good, _ in every) else 1


if __name__ == "__main__":
    sys.exit(main())
