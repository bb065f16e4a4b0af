"""Texts of real lengths, padded, in buckets, by tokens, packed: real tokens a second; and packed rows under ten plans.

    python benchmarks/packing.py                            # tokens/s, then equality under the plans
    python benchmarks/packing.py --plans ""                 # tokens/s alone
    python benchmarks/packing.py --data tinyshakespeare.txt # a text of your own

The text, else the reference that Python ships as ``help("topics")``, is cut at empty lines; a token is a byte. All four
train two epochs over the same pieces with the same model, about as many tokens a step (``--batch`` pieces); the second
is timed. Padding does not count as tokens. Equality: losses of each step and weights after the last, against one
device. Exits with 1 if packing makes less than twice the tokens a second of padding, or a plan is not equal.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import transformers as hf
from rich import print

import meshfit

PLANS = [
    "data=2",
    "data=3",
    "shard=2",
    "shard=2 zero=2",
    "tensor=2",
    "pipeline=2 microbatches=2",
    "context=2",
    "data=2 microbatches=2",
    "data=2 tensor=2",
    "data=2 recompute=full",
]


GOAL = 2


class Pieces(torch.utils.data.Dataset):
    """Those of a text, as Hugging Face's tokenizers give them."""

    def __init__(self, text: str, count: int, longest: int):
        texts = [piece.encode()[:longest] for piece in text.split("\n\n") if piece.strip()]
        self.texts = texts[:: max(1, len(texts) // count)][:count]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, i: int) -> dict[str, list[int]]:
        tokens = list(self.texts[i])
        return {"input_ids": tokens, "attention_mask": [1] * len(tokens), "labels": tokens}


def model_of(width: int, layers: int, longest: int) -> hf.LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
    heads = {"num_attention_heads": width // 32, "num_key_value_heads": width // 32}
    config: dict[str, Any] = {"vocab_size": 256, "max_position_embeddings": longest, **sizes, **heads}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**config, use_cache=False))


def fitted(data: Any, given: argparse.Namespace, **how: Any) -> meshfit.Result:
    asked: dict[str, Any] = {"optimizer": lambda p: torch.optim.AdamW(p, lr=1e-3), "progress": False, "seed": 1}
    model = model_of(given.width, given.layers, max(given.longest, given.row))
    return meshfit.fit(model, data, **asked, **how)


def speeds(data: Pieces, given: argparse.Namespace) -> float:
    """Prints tokens a second; how many times those of padding packing makes."""
    tokens = sum(map(len, data.texts))
    lengths = torch.tensor([float(len(text)) for text in data.texts])
    mean, longest = float(lengths.mean()), float(lengths.max())
    print(f"{len(data)} pieces, {tokens:,} tokens: {mean:.0f} in the mean, {longest:.0f} the longest")
    each = given.batch * mean
    ways: dict[str, dict[str, Any]] = {
        "padded": {"batch_size": given.batch},
        "buckets, length=": {"batch_size": given.batch, "length": "input_ids"},
        "tokens, batch_tokens=": {"batch_tokens": round(max(each, longest)), "length": "input_ids"},
        "packed, pack=": {"pack": given.row, "batch_size": max(1, round(each / given.row))},
    }
    found: list[float] = []
    for name, how in ways.items():
        best = 0.0
        for _ in range(given.rounds):
            result = fitted(
                data, given, plan=f"data=1 precision={given.precision}", devices=given.device, epochs=2, **how
            )
            first_epoch, second = ([step.seconds for step in result.history if step.epoch == i][-1] for i in (0, 1))
            best = max(best, tokens / (second - first_epoch))
        found.append(best)
        print(f"  {name:<24} {best:>10,.0f} tokens/s  {best / found[0]:.2f}")
    return found[-1] / found[0]


def equality(data: Pieces, given: argparse.Namespace, plans: Sequence[str]) -> bool:
    alike = True
    how: dict[str, Any] = {"pack": given.row, "batch_size": 6, "steps": 3, "devices": "cpu"}
    want = fitted(data, given, plan="data=1", **how)
    weights = want.model.state_dict()
    for plan in plans:
        try:
            got = fitted(data, given, plan=plan, **how)
        except meshfit.MeshfitError as error:
            print(f"  {plan:<28} refused: {str(error).splitlines()[0]}")
            alike = False
            continue
        pairs = zip(got.history, want.history, strict=True)
        off = max(abs(a.loss - b.loss) / abs(b.loss) for a, b in pairs)
        apart = max(float((t - weights[n]).norm() / weights[n].norm()) for n, t in got.model.state_dict().items())
        equal = off < 1e-5 and apart < 1e-4
        alike &= equal
        print(f"  {plan:<28} {'equal' if equal else 'DIFFERENT'}: losses to {off:.0e}, weights to {apart:.0e}")
    return alike


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, help="a text; else Python's reference")
    parser.add_argument("--count", type=int, default=192, help="pieces")
    parser.add_argument("--longest", type=int, default=2048, help="longer ones are cut")
    parser.add_argument("--row", type=int, default=512)
    parser.add_argument("--batch", type=int, default=32, help="pieces")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--plans", default=",".join(PLANS))
    given = parser.parse_args()
    torch.set_num_threads(1)
    text = given.data.read_text() if given.data else "\n\n".join(topics.values())
    data = Pieces(text, given.count, given.longest)
    times = speeds(data, given)
    print(f"packed over padded: {times:.1f} times, goal: at least {GOAL}")
    alike = not given.plans or equality(data, given, given.plans.split(","))
    return int(times < GOAL or not alike)


if __name__ == "__main__":
    sys.exit(main())
