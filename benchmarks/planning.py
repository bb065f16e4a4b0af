"""How long does it take to find what ``tensor=n`` splits of a large model?

    python benchmarks/planning.py --degree 2,8

A Llama of 32 layers, 2,048 wide, with 8 heads of keys and values for 32 of queries: 1.6 billion parameters in fp32, in
host memory. Goal: under 5 s at two ways, with less memory beside the model than the model takes.
"""

import argparse
import os
import resource
import sys
import time
import warnings
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.zoo import transformers
from meshfit.axes.tensor.plan import plan_tensor

GOAL = 5.0


def llama() -> nn.Module:
    hf = transformers()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    config = hf.LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=32,
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
                buffer.copy_(1.0 / 10_000 ** (torch.arange(0, 64, 2) / 64))
    return model


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--degree", default="2,8")
    parser.add_argument("--rows", action="store_true", help="share out what lies between regions too")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    model, tokens = llama(), torch.randint(0, 32000, (2, 8), generator=torch.Generator().manual_seed(1))
    before, good = peak(), True
    for degree in map(int, options.degree.split(",")):
        began, worked = time.perf_counter(), time.process_time()
        plan = plan_tensor(model, lambda twin: twin(input_ids=tokens, labels=tokens).loss, degree, by_rows=options.rows)
        took, busy = time.perf_counter() - began, time.process_time() - worked
        good &= took < GOAL or degree > 2
        print(f"tensor={degree}: {took:.1f} s ({busy:.1f} s of CPU), {peak() - before:.1f} GiB beside the model")
        print("\n".join(f"  {line}" for line in plan.explain()[:5]))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
