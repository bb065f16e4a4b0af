"""How even are the stages of a pipeline, beside the best that any cut could do?

    python benchmarks/cutting.py

Models at their usual sizes, recorded on meta tensors as ``pipeline=n`` records them, cut into 2, 4 and 8 stages. The
best cut is searched for apart from meshfit's own: the smallest largest stage, over all places where a cut is legal.
Among cuts that are nearly as even meshfit takes the one that sends least; how much that costs is what this shows.
Imbalance is the largest stage over the mean, less one.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.zoo import diffusers, torchvision, transformers
from meshfit.anatomy.cuts import cuts, work
from meshfit.anatomy.trace import Trace
from meshfit.axes.pipeline.stages import Pipeline
from meshfit.errors import PlanError
from meshfit.loss.objective import Objective

GOAL = 0.05


def resnet50() -> tuple[nn.Module, Any, Objective]:
    model = torchvision().models.resnet50()
    return model, (torch.zeros(4, 3, 224, 224), torch.zeros(4, dtype=torch.long)), Objective(F.cross_entropy)


def unet() -> tuple[nn.Module, Any, Objective]:
    model = diffusers().UNet2DModel(sample_size=64, block_out_channels=(128, 256, 256, 512))
    images = torch.zeros(2, 3, 64, 64)
    return model, ((images, torch.zeros(2)), images), Objective(lambda out, y: F.mse_loss(out.sample, y))


def gpt() -> tuple[nn.Module, Any, Objective]:
    hf = transformers()
    tokens = torch.zeros(2, 256, dtype=torch.long)
    model = hf.GPT2LMHeadModel(hf.GPT2Config(use_cache=False))
    return model, {"input_ids": tokens, "labels": tokens}, Objective(None)


def t5() -> tuple[nn.Module, Any, Objective]:
    hf = transformers()
    tokens = torch.zeros(2, 128, dtype=torch.long)
    model = hf.T5ForConditionalGeneration(hf.T5Config(use_cache=False, decoder_start_token_id=0, num_layers=6))
    return model, {"input_ids": tokens, "labels": tokens}, Objective(None)


MODELS: dict[str, Callable[[], tuple[nn.Module, Any, Objective]]] = {
    "ResNet-50": resnet50,
    "U-Net": unet,
    "GPT-2 small": gpt,
    "T5 small": t5,
}


def best(trace: Trace, k: int) -> float:
    """The largest stage of the most even cut."""
    total, sums = 0.0, [0.0]
    for event in trace.events:
        total += work(event)
        sums.append(total)
    at = [0.0, *(sums[cut.after + 1] for cut in cuts(trace)), total]
    largest = at[:]  # of the first stages, up to each place: now one
    for _ in range(k - 1):
        largest = [min((max(largest[i], at[j] - at[i]) for i in range(j)), default=0.0) for j in range(len(at))]
    return largest[-1]


def main() -> int:
    table = Table("model", "stages", "imbalance", "best possible", "largest stage over the best's", "sent a microbatch")
    good = True
    for name, make in MODELS.items():
        with torch.device("meta"):
            model, batch, objective = make()
        for k in (2, 4, 8):
            pipeline = Pipeline(degree=k, microbatches=4 * k)
            try:
                trace = pipeline.find(model.train(), objective, batch, device="cuda").trace
                assert trace is not None
                found = pipeline.cut_of(trace)
            except PlanError as error:
                table.add_row(name, str(k), "refused", "", error.headline, "")
                continue
            mean = sum(found.costs) / k
            least = best(trace, k)
            ratio = max(found.costs) / least
            good &= ratio <= 1 + GOAL
            sent = sum(cut.bytes for cut in found.cuts)
            table.add_row(
                name,
                str(k),
                f"{max(found.costs) / mean - 1:.1%}",
                f"{least / mean - 1:.1%}",
                f"{ratio:.3f}",
                f"{sent / 2**20:.1f} MiB",
            )
    console = Console()
    console.width = max(console.width, 110)
    console.print(table)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
