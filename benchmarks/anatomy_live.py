"""Does a forward on meta tensors foretell the bytes that a real one keeps for backward?

    PYTHONPATH=src python benchmarks/anatomy_live.py --device cuda     # a minute on one H200
    PYTHONPATH=src python benchmarks/anatomy_live.py --device cpu      # the same models, small

For each model, in full precision and under bf16 autocast:

    meta    the meter on meta tensors, where nothing is computed or held. Not under autocast, which torch
            ignores on meta tensors
    fake    the meter on fake tensors of the device
    real    what a real forward holds once its outputs are gone and their graph is not: on cuda by torch's
            allocator, on the CPU by following every storage

Autocast does not halve what is kept. The first use of a weight makes a copy of it in bf16, which the product saves
for backward; what a norm, a sum or a softmax keeps stays in full precision; and an activation used by both kinds is
kept twice. All of that is counted as it is.
"""

import argparse
import gc
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu_single import TINY
from benchmarks.models import GPT, GptShape
from meshfit.anatomy.cost import Meter
from meshfit.anatomy.flops import tensors

GOALS = {"cuda": 0.05, "cpu": 0.03}


class LiveBytes(TorchDispatchMode):
    """What a real forward holds: memory that it took and has not given back.

    with LiveBytes() as live:
        outputs = model(x)
    graph = [output.view_as(output).grad_fn for output in outputs]
    del outputs
    live.bytes

    Follows every storage that an operation makes by a weak reference, whoever holds it. With the outputs
    gone, and the graph not, what lives is what backward needs. (The view is for outputs of an
    ``autograd.Function``: holding its node from Python does not keep what it saved.)
    """

    def __init__(self) -> None:
        super().__init__()
        self._old: dict[int, StorageWeakRef] = {}
        self._new: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        for storage in _storages((args, kwargs)):
            if storage._cdata not in self._new:
                self._old.setdefault(storage._cdata, StorageWeakRef(storage))
        out = func(*args, **(kwargs or {}))
        for storage in _storages(out):
            if storage._cdata not in self._old:
                self._new[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return out

    @property
    def bytes(self) -> int:
        return sum(size for storage, size in self._new.values() if not storage.expired())


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [tensor.untyped_storage() for tensor in tensors(tree) if tensor.layout is torch.strided]


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]


class ConvNet(nn.Module):
    """A residual network as image libraries have them: bottlenecks, BatchNorm, activations in place."""

    def __init__(self, width: int, depths: tuple[int, ...]):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        blocks, before = [], width
        for level, depth in enumerate(depths):
            for index in range(depth):
                blocks.append(Bottleneck(before, width << level, stride=2 if level and not index else 1))
                before = 4 * (width << level)
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(before, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Bottleneck(nn.Module):
    def __init__(self, before: int, width: int, stride: int):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, 4 * width, 1, bias=False),
            nn.BatchNorm2d(4 * width),
        )
        self.past = nn.Identity()
        if stride > 1 or before != 4 * width:
            self.past = nn.Sequential(nn.Conv2d(before, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.body(x) + self.past(x))


class ViT(nn.Module):
    """torch's own encoder, with dropout."""

    def __init__(self, width: int, layers: int, heads: int, pixels: int):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, stride=16)
        self.places = nn.Parameter(torch.zeros(1, (pixels // 16) ** 2, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.patches(x).flatten(2).transpose(1, 2) + self.places).mean(1))


class Llama(nn.Module):
    """transformers' Llama, its logits alone."""

    def __init__(self, **sizes: int):
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        self.model = LlamaForCausalLM(LlamaConfig(**{**sizes, "use_cache": False, "attn_implementation": "sdpa"}))

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids).logits


def cases(device: str) -> list[Case]:
    def ids(vocabulary: int, *shape: int) -> Callable[[], Tensor]:
        return lambda: torch.randint(vocabulary, shape)

    if device == "cuda":
        llama = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}
        return [
            Case("GPT 124M, 8x1024", lambda: GPT(GptShape()), ids(50304, 8, 1024)),
            Case(
                "Llama 111M, 8x1024",
                lambda: Llama(vocab_size=32000, num_key_value_heads=4, max_position_embeddings=1024, **llama),
                ids(32000, 8, 1024),
            ),
            Case("ResNet-50, 64x224", lambda: ConvNet(64, (3, 4, 6, 3)), lambda: torch.randn(64, 3, 224, 224)),
            Case("ViT 86M, 64x224", lambda: ViT(768, 12, 12, 224), lambda: torch.randn(64, 3, 224, 224)),
        ]
    llama = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    return [
        Case("GPT, 4x32", lambda: GPT(TINY), ids(256, 4, 32)),
        Case(
            "Llama, 4x32",
            lambda: Llama(vocab_size=256, num_key_value_heads=2, max_position_embeddings=32, **llama),
            ids(256, 4, 32),
        ),
        Case("ResNet, 4x64", lambda: ConvNet(8, (1, 2)), lambda: torch.randn(4, 3, 64, 64)),
        Case("ViT, 4x64", lambda: ViT(64, 2, 4, 64), lambda: torch.randn(4, 3, 64, 64)),
    ]


@contextmanager
def unpacked() -> Iterator[None]:
    """transformers looks at the values of positions for sequences packed into one; there are none here."""
    if "transformers" not in sys.modules:
        yield
        return
    from transformers import masking_utils

    original = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda positions: None  # pyright: ignore
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = original


def metered(model: nn.Module, x: Tensor, target: str, precision: AbstractContextManager) -> int:
    known = [*model.parameters(), *model.buffers(), x]
    with unpacked(), Meter(known, target=target) as meter, precision:
        meter.reach([model(x)])
    return meter.total.kept


def on_meta(case: Case, device: str) -> int:
    with torch.device("meta"):
        model, x = case.build().train(), case.inputs()
    return metered(model, x, device, nullcontext())


def on_fake(case: Case, device: str, precision: AbstractContextManager) -> int:
    """Built on meta tensors and moved: a model cannot be built on fake ones everywhere."""
    with torch.device("meta"):
        model, x = case.build().train(), case.inputs()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = lambda t: mode.fake_tensor_converter.from_meta_and_device(mode, t, torch.device(device))
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = nn.Parameter(fake(parameter.detach()))
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = fake(buffer)
        return metered(model, fake(x), device, precision)


def on_device(case: Case, device: str, precision: Callable[[], AbstractContextManager]) -> int:
    model, x = case.build().train().to(device), case.inputs().to(device)
    with precision():
        model(x)  # libraries take their workspaces, models fill their caches
    gc.collect()
    if device == "cpu":
        with LiveBytes() as live, precision():
            out = model(x)
        graph = out.view_as(out).grad_fn
        del out
        gc.collect()
        return live.bytes if graph is not None else 0
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with precision():
        out = model(x)
    graph = out.view_as(out).grad_fn
    del out
    gc.collect()
    return torch.cuda.memory_allocated() - before if graph is not None else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=list(GOALS), default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    goal, worst = GOALS[device], 0.0
    precisions = {"fp32": nullcontext, "bf16": lambda: torch.autocast(device, torch.bfloat16)}
    print(f"torch {torch.__version__}, {device}: MiB kept for backward, and the error of what was foretold")
    print(f"{'model':<20} {'':4} {'real':>10} {'meta':>10} {'':>7} {'fake':>10} {'':>7}")
    for case in cases(device):
        if case.name.startswith("Llama") and importlib.util.find_spec("transformers") is None:
            print(f"{case.name:<20} needs transformers")
            continue
        for word, precision in precisions.items():
            real = on_device(case, device, precision)
            foretold = [on_meta(case, device) if word == "fp32" else None, on_fake(case, device, precision())]
            worst = max([worst, *(abs(bytes / real - 1) for bytes in foretold if bytes)])
            shown = (f"{b / 2**20:10.2f} {b / real - 1:+7.2%}" if b else f"{'':10} {'':7}" for b in foretold)
            print(f"{case.name:<20} {word} {real / 2**20:10.2f}", *shown, flush=True)
    print(f"worst {worst:.2%}, goal {goal:.0%}: {'PASS' if worst <= goal else 'FAIL'}")


if __name__ == "__main__":
    main()
