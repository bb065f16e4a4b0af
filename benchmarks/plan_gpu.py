"""How far is the planner from trainings on one GPU whose models it has never measured?

    python benchmarks/plan_gpu.py                    # ten configurations on the GPU of this machine; about four minutes
    python benchmarks/plan_gpu.py --device H200      # predict for that profile, without what this GPU was measured at
    python benchmarks/plan_gpu.py --only "1.3B"      # configurations whose line has this in it
    python benchmarks/plan_gpu.py --foretell H200    # run nothing

Predicted from the model's trace on meta tensors and the device's profile: no step of the model is run for it. Measured
by ``fit`` in a process of its own: the median of the last steps, and the most that torch's allocator held. Exits with 0
if the medians of the errors are at most 10 % (time) and 4 % (memory), 1 if not, 4 if there is no GPU.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshfit
from benchmarks.models import GPT, GptShape, Llama, LlamaShape
from meshfit import Cluster, Plan
from meshfit.loss.objective import Objective
from meshfit.planner.predict import TracedPredictor

WARM_UP, STEPS = 5, 15
TIME_GOAL, MEMORY_GOAL = 0.10, 0.04

SHAPES = {
    "124M": GptShape(layers=12, width=768, heads=12),
    "350M": GptShape(layers=24, width=1024, heads=16),
    "1.3B": GptShape(layers=24, width=2048, heads=16, length=2048),
}
LLAMA = LlamaShape(layers=18, width=1280, heads=20, key_heads=4, inner=3456, vocabulary=32000, length=2048)


def llama() -> nn.Module:
    return Llama(LLAMA)


def vit() -> nn.Module:
    """Of Hugging Face, ViT-L/16."""
    from transformers import ViTConfig, ViTForImageClassification

    large = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    return ViTForImageClassification(ViTConfig(**large, num_labels=1000))  # pyright: ignore[reportCallIssue]


@dataclass(frozen=True)
class Configuration:
    model: str
    batch: int
    plan: str

    @property
    def name(self) -> str:
        return f"{self.model}, batch {self.batch}, {self.plan}"

    def build(self) -> nn.Module:
        made: dict[str, Callable[[], nn.Module]] = {"llama": llama, "vit": vit}
        return made[self.model]() if self.model in made else GPT(SHAPES[self.model])

    def samples(self, count: int) -> tuple[Tensor, Tensor]:
        if self.model == "vit":
            return torch.randn(count, 3, 224, 224), torch.randint(1000, (count,))
        length, classes = (
            (LLAMA.length, LLAMA.vocabulary) if self.model == "llama" else (SHAPES[self.model].length, 50304)
        )
        ids = torch.randint(classes, (count, length + 1))
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


CONFIGURATIONS = (
    Configuration("124M", 16, "precision=bf16 compile=none"),
    Configuration("124M", 8, "precision=fp32 compile=none"),
    Configuration("124M", 32, "precision=bf16 recompute=full compile=none"),
    Configuration("124M", 32, "precision=bf16 compile=whole"),
    Configuration("350M", 16, "precision=bf16 compile=none"),
    Configuration("350M", 32, "precision=bf16 recompute=full compile=none"),
    Configuration("1.3B", 4, "precision=bf16 compile=none"),
    Configuration("1.3B", 16, "precision=bf16 recompute=full compile=none"),
    Configuration("llama", 8, "precision=bf16 compile=none"),
    Configuration("vit", 64, "precision=bf16 compile=none"),
)


def loss_of(outputs: Any, targets: Tensor) -> Tensor:
    logits = outputs.logits if hasattr(outputs, "logits") else outputs
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def predicted(one: Configuration, cluster: Cluster) -> tuple[float, float]:
    """Seconds of a step, bytes at the most."""
    with torch.device("meta"):
        model, batch = one.build(), one.samples(2)
    optimizer = make_optimizer(model.parameters())
    found = TracedPredictor(model, Objective(loss_of), batch, optimizer, cluster)(Plan.parse(one.plan), one.batch)
    return found.seconds, found.memory.allocated


def measured(one: Configuration) -> tuple[float, float]:
    """In this process."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = one.build()
    times: list[float] = []
    meshfit.fit(
        model,
        one.samples(2 * one.batch),
        loss=loss_of,
        optimizer=make_optimizer,
        batch_size=one.batch,
        steps=WARM_UP + STEPS,
        plan=one.plan,
        devices="cuda:0",
        progress=False,
        callbacks=lambda step: times.append(step.seconds),
    )
    each = [later - earlier for earlier, later in zip(times[WARM_UP - 1 : -1], times[WARM_UP:], strict=True)]
    return median(each), float(torch.cuda.max_memory_allocated())


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--only", default="", help="configurations whose line has this in it")
    parser.add_argument("--device", help="a profile's name, instead of the GPU of this machine as it was calibrated")
    parser.add_argument("--foretell", metavar="PROFILE", help="run nothing")
    parser.add_argument("--json", type=Path, help="write what was measured there")
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(measured(CONFIGURATIONS[options.one])))
        return 0
    if not options.foretell and not torch.cuda.is_available():
        print("there is no GPU: nothing was run")
        return 4
    name = options.foretell or options.device
    cluster = Cluster.of(name) if name else Cluster.detect(1)
    print(f"{cluster}\n{'':58}{'predicted':>22}{'measured':>22}{'errors':>14}")
    found: list[dict[str, Any]] = []
    for at, one in enumerate(CONFIGURATIONS):
        if options.only not in one.name:
            continue
        seconds, size = predicted(one, cluster)
        line = f"{one.name:58}{1e3 * seconds:>9.1f} ms{size / 2**30:>7.2f} GiB"
        if options.foretell:
            print(line, flush=True)
            continue
        ran = subprocess.run([sys.executable, __file__, "--one", str(at)], stdout=-1, text=True, check=False)
        if ran.returncode:
            print(f"{line}   FAILED")
            return 1
        took, held = json.loads(ran.stdout.splitlines()[-1])
        found.append({"name": one.name, "predicted": [seconds, size], "measured": [took, held]})
        errors = seconds / took - 1, size / held - 1
        print(f"{line}{1e3 * took:>9.1f} ms{held / 2**30:>7.2f} GiB{errors[0]:>+7.0%}{errors[1]:>+7.1%}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    if not found:
        return 0
    time, memory = (median(abs(f["predicted"][i] / f["measured"][i] - 1) for f in found) for i in (0, 1))
    print(f"median error: time {time:.1%} (goal {TIME_GOAL:.0%}), memory {memory:.1%} (goal {MEMORY_GOAL:.0%})")
    return 0 if time <= TIME_GOAL and memory <= MEMORY_GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
