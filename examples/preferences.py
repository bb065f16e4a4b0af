"""Preference tuning (DPO): a model that writes numbers in American or British English learns to prefer British.

    python examples/preferences.py --plan shard=2

"105=one hundred five." and "105=one hundred and five.": the first training learns both, half and half. The second sees
pairs of which the British one was chosen, beside a frozen copy of the first model.
"""

import argparse
import copy
import random

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import meshfit

WORDS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety""".split()  # noqa: SIM905
LETTERS = "_.=-0123456789 abcdefghijklmnopqrstuvwxyz"  # 0 is padding, 1 the end
LENGTH = 48


def words(n: int, link: str) -> str:
    if n >= 100:
        return f"{WORDS[n // 100]} hundred" + (f"{link}{words(n % 100, link)}" if n % 100 else "")
    return WORDS[n] if n < 20 else WORDS[18 + n // 10] + (f"-{WORDS[n % 10]}" if n % 10 else "")


def encode(n: int, british: bool) -> list[int]:
    text = f"{n}={words(n, ' and ' if british else ' ')}."
    return [LETTERS.index(letter) for letter in text.ljust(LENGTH, "_")]


NUMBERS = random.Random(0).sample([n for n in range(101, 1000) if n % 100], 891)
SEEN, UNSEEN = NUMBERS[:700], NUMBERS[700:]


def pairs(numbers: list[int]) -> tuple[Tensor, Tensor]:
    """What was chosen, and what was not."""
    return tuple(torch.tensor([encode(n, british) for n in numbers]) for british in (True, False))


def network() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=len(LETTERS), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=LENGTH, bos_token_id=None, eos_token_id=1, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def likelihood(model: nn.Module, tokens: Tensor) -> Tensor:
    """Of each text, the sum of the log-likelihoods of its tokens."""
    logits, next_ones = model(tokens).logits[:, :-1], tokens[:, 1:]
    each = logits.log_softmax(-1).gather(-1, next_ones[..., None])[..., 0]
    return (each * (next_ones != 0)).sum(1)


class Preference(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.policy, self.reference = copy.deepcopy(model), copy.deepcopy(model).requires_grad_(False)

    def forward(self, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Tensor]:
        """How much more the policy prefers what was chosen than the reference does; how likely that is to it."""
        likely = likelihood(self.policy, chosen)
        before = likelihood(self.reference, chosen) - likelihood(self.reference, rejected)
        return likely - likelihood(self.policy, rejected) - before, likely


def step(model: nn.Module, batch: tuple[Tensor, Tensor], beta: float = 0.3) -> tuple[Tensor, dict[str, Tensor]]:
    """DPO's loss, and a little of the usual one: what was chosen is to become likelier, not only the other less."""
    more, likely = model(*batch)
    loss = F.softplus(-beta * more).mean() - 0.02 * likely.mean()
    return loss, {"margin": more.mean(), "right": (more > 0).float().mean()}


def pretrain(**how) -> meshfit.Result:
    both = torch.cat(pairs(SEEN))
    data = {"input_ids": both, "labels": both.masked_fill(both == 0, -100)}
    adamw = lambda params: torch.optim.AdamW(params, lr=3e-3)
    cycle = lambda optimizer, steps: torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    return meshfit.fit(network, data, optimizer=adamw, scheduler=cycle, batch_size=64, clip=1.0, epochs=15, **how)


def train(plan: str = "data=2", devices: str = "cpu", model: nn.Module | None = None, **more) -> meshfit.Result:
    torch.manual_seed(0)
    return meshfit.fit(
        Preference(model or network()),
        pairs(SEEN),
        step=step,
        optimizer=lambda params: torch.optim.AdamW([p for p in params if p.requires_grad], lr=1e-4),
        batch_size=32,
        epochs=1,
        valid_every=5,
        valid=pairs(UNSEEN),
        plan=plan,
        devices=devices,
        **more,
    )


def british(model: nn.Module) -> tuple[float, float]:
    """Of numbers that it has not seen: how many it writes the British way, and how many in either way."""
    torch.manual_seed(0)
    written = []
    for n in UNSEEN:
        start = torch.tensor([[LETTERS.index(letter) for letter in f"{n}="]])
        tokens = model.generate(start, max_new_tokens=40, do_sample=True, temperature=0.5)[0].tolist()
        written.append((tokens + [0] * LENGTH)[:LENGTH])
    ways = [[line == encode(n, way) for n, line in zip(UNSEEN, written, strict=True)] for way in (True, False)]
    return sum(ways[0]) / len(UNSEEN), (sum(ways[0]) + sum(ways[1])) / len(UNSEEN)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--plan", default="data=2")
    arguments.add_argument("--devices", default="cpu")
    asked = vars(arguments.parse_args())
    first = pretrain(**asked)
    result = train(**asked, model=first.model)
    print(
        "preferred as chosen, unseen pairs, every 5 steps:",
        *(f"{s.valid['right']:.1%}" for s in result.history if s.valid),
    )
    for name, model in (("before", first.model), ("after", result.model.policy)):
        print("{}: {:.0%} written the British way, {:.0%} right in either".format(name, *british(model.cpu().eval())))
