"""Does the planner foretell what compiled code keeps for backward?

    python benchmarks/compiled_memory.py
    python benchmarks/compiled_memory.py --only gpt

Compiles models by inductor on this CPU, runs one forward, and counts the storages that backward then holds, beyond
weights and the batch: of model and loss as one, and of blocks compiled one by one. Foretold is what the planner says,
from fake tensors (``axes/compile/saved.py``); beside it stands what it says of eager mode. Exits with 1 if one is
off by more than 4 %.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.models import GPT, GptShape, Llama, LlamaShape, token_loss
from meshfit import Cluster, Plan
from meshfit.anatomy.trace import Trace
from meshfit.axes.compile.axis import compilable
from meshfit.axes.shard.units import traced
from meshfit.planner.predict import TracedPredictor
from meshfit.torch_private.tensors import storage_id
from meshfit.units import size

LIMIT = 0.04
SAMPLES, LENGTH, VOCABULARY = 16, 64, 1000
Objective = Callable[[nn.Module, Any], Tensor]


def perceptron() -> nn.Module:
    block = lambda: nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64))
    return nn.Sequential(*(block() for _ in range(3)), nn.Linear(64, 10))


def convolutions() -> nn.Module:
    layer = lambda a, b: (nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU())
    return nn.Sequential(*layer(1, 16), *layer(16, 32), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 64, 10))


def tokens(samples: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(VOCABULARY, (samples, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def of_outputs(loss: Callable[[Tensor, Tensor], Tensor]) -> Objective:
    return lambda model, batch: loss(model(batch[0]), batch[1])


SMALL = {"layers": 2, "width": 128, "heads": 4, "vocabulary": VOCABULARY, "length": LENGTH}
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any], Objective]] = {
    "perceptron": (
        perceptron,
        lambda n: (torch.randn(n, 64), torch.randint(10, (n,))),
        of_outputs(F.cross_entropy),
    ),
    "convolutions": (
        convolutions,
        lambda n: (torch.randn(n, 1, 16, 16), torch.randint(10, (n,))),
        of_outputs(F.cross_entropy),
    ),
    "gpt": (lambda: GPT(GptShape(**SMALL)), tokens, of_outputs(token_loss)),
    "gpt, dropout": (lambda: GPT(GptShape(**SMALL), dropout=0.1), tokens, of_outputs(token_loss)),
    "llama": (
        lambda: Llama(LlamaShape(**SMALL, key_heads=2, inner=320)),
        tokens,
        of_outputs(token_loss),
    ),
}


def held_by_backward(model: nn.Module, objective: Objective, batch: Any, precision: str) -> int:
    """Bytes of all storages that backward of one forward holds, beyond weights and the batch."""
    seen: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        seen[storage_id(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = run(model, objective, batch, precision)
    for node in nodes(loss):
        for tensor in getattr(node, "_tensors_no_vc_check", ()):
            note(tensor)
    there = {storage_id(tensor) for tensor in (*model.parameters(), *model.buffers(), *batch)}
    return sum(size for key, size in seen.items() if key not in there)


def run(model: nn.Module, objective: Objective, batch: Any, precision: str) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else nullcontext():
        return objective(model, batch)


def nodes(loss: Tensor) -> set[Any]:
    found, waiting = set(), [loss.grad_fn]
    while waiting:
        if (node := waiting.pop()) is not None and node not in found:
            found.add(node)
            waiting += [following for following, _ in node.next_functions]
    return found


def measured(
    name: str, samples: int, precision: str, blocks: Sequence[str], compiled: Callable[..., Any] = torch.compile
) -> int:
    build, data, objective = CASES[name]
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, batch = build(), data(samples)
    for path in blocks:
        block = model.get_submodule(path)
        block.forward = compiled(block.forward)
    return held_by_backward(model, objective if blocks else compiled(objective), batch, precision)


def foretold(name: str, samples: int, plan: str) -> float:
    build, data, objective = CASES[name]
    model = build().to("meta")
    optimizer = torch.optim.AdamW(model.parameters())
    cluster = Cluster.detect(1, "cpu")
    predicted = TracedPredictor(model, objective, data(4), optimizer, cluster, device="cpu")(Plan.parse(plan), samples)
    return sum(predicted.kinds["steady"].get(kind, 0.0) for kind in ("activations", "rounded"))


def blocks_of(name: str) -> tuple[str, ...]:
    """Those that compile=block compiles."""
    build, data, objective = CASES[name]
    trace = traced(build(), objective, data(4), device="cpu")
    assert isinstance(trace, Trace)
    norms = [path for path, kind in trace.kinds.items() if "BatchNorm" in kind]
    return compilable(trace, norms)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", default="")
    only, wrong = options.parse_args().only, 0
    os.environ["MESHFIT_CACHE"] = "0"
    print(f"{'model':16}{'plan':32}{'eager':>10}{'foretold':>12}{'measured':>12}{'error':>8}")
    for name, precision, word in product(CASES, ("fp32", "bf16"), ("whole", "block")):
        blocks = blocks_of(name) if word == "block" else ()
        if only not in name or (word == "block" and not blocks):
            continue
        plan = f"precision={precision} compile={word}"
        told, eager = foretold(name, SAMPLES, plan), foretold(name, SAMPLES, f"precision={precision} compile=none")
        held = measured(name, SAMPLES, precision, blocks)
        wrong += abs(told / held - 1) > LIMIT
        print(
            f"{name:16}{plan:32}{size(eager):>10}{size(told):>12}{size(held):>12}{told / held - 1:>+8.1%}", flush=True
        )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
