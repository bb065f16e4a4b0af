"""Does meshfit see what is inside a model, for models nobody here wrote?

    python benchmarks/anatomy.py
    python benchmarks/anatomy.py --models gpt2,googlenet
    python benchmarks/anatomy.py --large                  # a 70B and a 405B Llama shape: seconds and memory

One row a model: traced on meta tensors, on real ones, or refused; how far the recorded program is from the model when
it is run again (0 is bit-identical: outputs, gradients, buffers); flops against torch's own counter; activation bytes
kept for backward, predicted on meta against what a real forward holds; the best split into 2 and 4 stages: how much
longer than the mean the largest takes.
"""

import argparse
import copy
import resource
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import zoo
from benchmarks.anatomy_live import LiveBytes
from meshfit.anatomy.cost import Meter
from meshfit.anatomy.cuts import stages
from meshfit.anatomy.flops import FORMULAS
from meshfit.anatomy.record import record
from meshfit.anatomy.replay import replay
from meshfit.data import tree
from meshfit.errors import MeshfitError
from meshfit.loss.objective import call, split

KEPT_GOAL = 0.03


@dataclass(frozen=True)
class Model:
    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Any]


class UNet(nn.Module):
    """Skips from every level of the way down to the same level of the way up."""

    def __init__(self, width: int = 8, levels: int = 3) -> None:
        super().__init__()
        sizes = [width * 2**level for level in range(levels)]
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in zip([3, *sizes], sizes, strict=False))
        self.up = nn.ModuleList(nn.Conv2d(3 * a, a, 3, padding=1) for a in reversed(sizes[:-1]))
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for i, conv in enumerate(self.down):
            x = torch.relu(conv(x if i == 0 else nn.functional.max_pool2d(x, 2)))
            kept.append(x)
        for conv in self.up:
            kept.pop()
            x = torch.relu(conv(torch.cat([nn.functional.interpolate(x, scale_factor=2), kept[-1]], 1)))
        return self.head(x)


class TwoTowers(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        tower = lambda: nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4)))
        self.left, self.right = tower(), tower()

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.left(left) @ self.right(right).T


class Experts(nn.Module):
    """Routing that depends on the data: tokens go where the router sends them."""

    def __init__(self, width: int = 16, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, width)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return out


def transformer(make: Callable[[Any], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return make(zoo.transformers())

    return build


SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
IDS = lambda: {"input_ids": torch.randint(0, 96, (4, 16), generator=torch.Generator().manual_seed(0))}
IMAGES = lambda size=32: torch.randn(4, 3, size, size, generator=torch.Generator().manual_seed(0))


def own(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return build()

    return seeded


def distilbert(hf: Any) -> nn.Module:
    return hf.DistilBertModel(
        hf.DistilBertConfig(vocab_size=96, dim=32, n_layers=2, n_heads=2, hidden_dim=64, dropout=0)
    )


def opt(hf: Any) -> nn.Module:
    return hf.OPTForCausalLM(
        hf.OPTConfig(
            vocab_size=96, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=2,
            word_embed_proj_dim=32, max_position_embeddings=64, dropout=0.0,
        )
    )  # fmt: skip


def swin(hf: Any) -> nn.Module:
    return hf.SwinModel(
        hf.SwinConfig(image_size=32, patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=4)
    )


def whisper(hf: Any) -> nn.Module:
    return hf.WhisperModel(
        hf.WhisperConfig(
            vocab_size=96, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, max_source_positions=20,
            num_mel_bins=8, pad_token_id=0, bos_token_id=0, eos_token_id=0, decoder_start_token_id=0, dropout=0.0,
        )
    )  # fmt: skip


def gemma(hf: Any) -> nn.Module:
    return hf.GemmaForCausalLM(hf.GemmaConfig(vocab_size=96, num_key_value_heads=1, head_dim=16, **SMALL))


MORE = (
    Model("distilbert", transformer(distilbert), IDS),
    Model("opt", transformer(opt), IDS),
    Model("gemma", transformer(gemma), IDS),
    Model("swin", transformer(swin), IMAGES),
    Model(
        "whisper",
        transformer(whisper),
        lambda: {"input_features": torch.randn(4, 8, 40), "decoder_input_ids": IDS()["input_ids"]},
    ),
    Model("unet-skips", own(UNet), IMAGES),
    Model("two-towers", own(TwoTowers), lambda: (torch.randn(8, 32), torch.randn(8, 32))),
    Model("experts", own(Experts), lambda: torch.randn(24, 16)),
)


def models() -> list[Model]:
    """The zoo, with what each model is called on, and more."""
    held = []
    for case in zoo.CASES:
        if case.name in ("token-sum", "masked-lambda"):  # the same model as another
            continue
        batch = case.data(4)
        inputs = batch if case.loss is None else split(batch)[0]
        held.append(Model(case.name, case.build, lambda inputs=inputs: inputs))
    return [*held, *MORE]


@dataclass
class Row:
    name: str
    how: str = ""
    apart: float | None = None
    flops: str = ""
    kept: float | None = None
    cuts: str = ""
    seconds: float = 0.0


def look(model: Model) -> Row:
    row = Row(model.name)
    module, inputs = model.build().train(), model.inputs()
    began = time.perf_counter()
    try:
        recording = record(module, inputs, meter=lambda known: Meter(known, target="cpu"))
    except MeshfitError as error:
        row.how = f"refused: {error}"
        return row
    row.seconds = time.perf_counter() - began
    trace = recording.trace
    row.how = "real" if any("real" in note for note in trace.notes) else "meta"
    row.apart = difference(lambda m, x: call(m, x), lambda m, x: replay(recording, m, x), module, inputs)
    cost = trace.cost
    forward, backward = counted(module, inputs)
    row.flops = (
        "equal"
        if (cost.flops, cost.flops_backward) == (forward, backward)
        else (f"{cost.flops / max(forward, 1):.4f} / {cost.flops_backward / max(backward, 1):.4f}")
    )
    held = live(module, inputs)
    row.kept = cost.kept / held - 1 if held else 0.0
    parts = []
    for k in (2, 4):
        try:
            parts.append(f"{stages(trace, k).imbalance:.0%}")
        except MeshfitError:
            parts.append("none")
    row.cuts = ", ".join(parts)
    return row


def difference(one: Callable, two: Callable, module: nn.Module, inputs: Any) -> float:
    """The largest difference between two ways to run a model: outputs, gradients, buffers."""
    results = []
    for way in (one, two):
        apart = copy.deepcopy(module)
        torch.manual_seed(1)
        outputs = [t for t in tree.tensors(way(apart, tree.map_tensors(torch.clone, inputs))) if t.is_floating_point()]
        sum(
            (t * torch.arange(t.numel(), dtype=t.dtype).view(t.shape).cos()).sum() for t in outputs if t.requires_grad
        ).backward()
        results.append([*outputs, *(p.grad for p in apart.parameters() if p.grad is not None), *apart.buffers()])
    if len(results[0]) != len(results[1]):
        return float("inf")
    return max(
        (float((a.double() - b.double()).abs().max()) for a, b in zip(*results, strict=True) if a.numel()), default=0.0
    )


def counted(module: nn.Module, inputs: Any) -> tuple[int, int]:
    """Flops of forward and backward by torch's own counter, told of what it lacks: the CPU's fused attention, LSTM."""
    module = copy.deepcopy(module)
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
        outputs = [t for t in tree.tensors(call(module, inputs)) if t.requires_grad]
        forward = counter.get_total_flops()
        torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
    return forward, counter.get_total_flops() - forward


def live(module: nn.Module, inputs: Any) -> int:
    """Bytes that a real forward holds for its backward."""
    module = copy.deepcopy(module)
    with LiveBytes() as held:
        outputs = call(module, inputs)
    graph = [t.grad_fn for t in tree.tensors(outputs)]
    del outputs
    size = held.bytes
    del graph
    return size


def large(console: Console) -> None:
    """A model that fits nowhere near here: traced on meta tensors."""
    hf = zoo.transformers()
    for name, layers, width, ffn, heads in (("70B", 80, 8192, 28672, 64), ("405B", 126, 16384, 53248, 128)):
        config = hf.LlamaConfig(
            vocab_size=128256, hidden_size=width, intermediate_size=ffn, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=8, use_cache=False,
        )  # fmt: skip
        with torch.device("meta"):
            model = hf.LlamaForCausalLM(config)
            ids = torch.zeros(2, 4096, dtype=torch.int64)
        began = time.perf_counter()
        trace = record(model, {"input_ids": ids}, meter=Meter).trace
        seconds = time.perf_counter() - began
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        weights = sum(p.numel() for p in model.parameters())
        console.print(
            f"{name}: {weights / 1e9:.0f} B weights, {len(trace.events)} events,"
            f" {trace.cost.flops / 1e12:,.0f} TFLOP forward, {trace.cost.kept / 2**30:,.0f} GiB kept;"
            f" {seconds:.1f} s, {peak:.2f} GiB at most in this process"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", help="names, with commas between")
    parser.add_argument("--large", action="store_true", help="trace a 70B and a 405B shape instead")
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    console = Console(width=110)
    if asked.large:
        large(console)
        return 0
    wanted = set(asked.models.split(",")) if asked.models else None
    rows = [look(model) for model in models() if wanted is None or model.name in wanted]
    table = Table(
        "model", "traced", "replay", "flops, of torch's", "kept, predicted / held", "imbalance, 2 and 4 stages", "s"
    )
    for row in rows:
        kept = "" if row.kept is None else f"{row.kept:+.1%}"
        apart = "" if row.apart is None else ("0" if row.apart == 0 else f"{row.apart:.0e}")
        table.add_row(row.name, row.how, apart, row.flops, kept, row.cuts, f"{row.seconds:.1f}")
    console.print(table)
    traced = [row for row in rows if row.apart is not None]
    exact = sum(row.apart == 0 for row in traced)
    close = sum(abs(row.kept or 0.0) <= KEPT_GOAL for row in traced)
    equal = sum(row.flops == "equal" for row in traced)
    console.print(
        f"{len(traced)} of {len(rows)} traced; {exact} replayed bit-identically; flops equal to torch's counter in"
        f" {equal}; kept activations within {KEPT_GOAL:.0%} in {close}"
    )
    return 0 if exact == len(traced) else 1


if __name__ == "__main__":
    sys.exit(main())
