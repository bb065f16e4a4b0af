"""How long does it take to find what ``tensor=n`` or ``context=n`` splits of a large model, and to find it again?

    python benchmarks/planning.py --degree 2,8
    python benchmarks/planning.py --layers 80 --width 1024 --length 1024
    python benchmarks/planning.py --axis context --degree 8 --length 1024

A Llama, 2,048 wide, of 32 layers with 8 heads of keys and values for 32 of queries: 1.6 billion parameters in fp32, in
host memory. Each degree is planned twice, the second time from the cache. Goals: under 5 s at two ways for 32 layers,
under 20 s for 80, under 2 s the second time, with less memory beside the model than the model takes. No goal was set
for context, whose plan is proven on whole steps of a model with two of its blocks.
"""

import argparse
import os
import resource
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.zoo import transformers
from meshfit.axes.context.axis import plan_context
from meshfit.axes.tensor.cache import planned
from meshfit.launch.folders import CACHE

GOALS = {32: 5.0, 80: 20.0}
AGAIN = 2.0


def llama(layers: int, width: int) -> nn.Module:
    hf = transformers()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    config = hf.LlamaConfig(
        vocab_size=32000,
        hidden_size=width,
        intermediate_size=11 * width // 4,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    with torch.device("meta"):
        model = hf.LlamaForCausalLM(config)
    model.to_empty(device="cpu")
    noise = 0.02 * torch.randn(100_003, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(noise.repeat(p.numel() // len(noise) + 1)[: p.numel()].view_as(p) if p.dim() > 1 else p.fill_(1.0))
        for name, buffer in model.named_buffers():
            if name.endswith("inv_freq"):
                buffer.copy_(1.0 / 10_000 ** (torch.arange(len(buffer)) / len(buffer)))
    return model


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--axis", choices=["tensor", "context"], default="tensor")
    parser.add_argument("--degree", default="2,8")
    parser.add_argument("--rows", action="store_true", help="share out what lies between regions too")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--length", type=int, default=8, help="tokens of a sample")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    model = llama(options.layers, options.width)
    tokens = torch.randint(0, 32000, (2, options.length), generator=torch.Generator().manual_seed(1))
    loss = lambda twin, ids: twin(input_ids=ids, labels=ids).loss
    before, good = peak(), True
    with tempfile.TemporaryDirectory() as folder:
        os.environ[CACHE] = folder
        for degree in map(int, options.degree.split(",")):
            for goal in (GOALS.get(options.layers, 20.0), AGAIN):
                began, worked = time.perf_counter(), time.process_time()
                if options.axis == "tensor":
                    plan = planned(model, loss, tokens, degree, by_rows=options.rows)
                else:
                    plan = plan_context(model, loss, tokens, degree)
                took, busy = time.perf_counter() - began, time.process_time() - worked
                good &= took < goal or degree > 2 or options.axis == "context"
                print(
                    f"{options.axis}={degree}: {took:.1f} s ({busy:.1f} s of CPU),"
                    f" {peak() - before:.1f} GiB beside the model"
                )
            print("\n".join(f"  {line}" for line in plan.explain()[:5]))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
