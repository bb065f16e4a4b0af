"""A language model: documents of any length, packed into rows of 256 characters with no padding between them.

    python examples/language_model.py --plan context=2
    python examples/language_model.py --data book.txt     # yours: paragraphs are the documents

Without --data it reads the Python manual that ships with Python (what ``help("LAMBDA")`` shows).
"""

import argparse
import re
from pathlib import Path

import torch
import transformers

import meshfit

ROW = 256


def documents(path: Path | None) -> list[dict]:
    """Paragraphs as characters: those of code 0 to 127, all others as 127."""
    if path is None:
        from pydoc_data.topics import topics

        text = "\n\n".join(topics.values())
    else:
        text = path.read_text()
    paragraphs = [part for part in re.split(r"\n\s*\n", text) if len(part) > 20]
    return [{"input_ids": [min(ord(letter), 127) for letter in part]} for part in paragraphs]


def network() -> torch.nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=96, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=ROW, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def train(plan: str = "data=2", devices: str = "cpu", data: Path | None = None, **more) -> meshfit.Result:
    texts = documents(data)
    return meshfit.fit(
        network,
        texts[: len(texts) * 9 // 10],
        pack=ROW,
        optimizer=lambda params: torch.optim.AdamW(params, lr=4e-3),
        scheduler=lambda optimizer, steps: torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps),
        clip=1.0,
        batch_size=8,
        epochs=2,
        valid=texts[len(texts) * 9 // 10 :],
        valid_every=50,
        plan=plan,
        devices=devices,
        **more,
    )


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--plan", default="data=2")
    arguments.add_argument("--devices", default="cpu")
    arguments.add_argument("--data", type=Path)
    result = train(**vars(arguments.parse_args()))
    bits = [f"{step.valid['loss'] / 0.6931:.2f}" for step in result.history if step.valid]
    print("bits a character on unseen paragraphs:", *bits, "(7 at the start, about 4.7 by the letters' frequencies)")
    start = torch.tensor([[ord(letter) for letter in "The statement"]])
    torch.manual_seed(0)
    written = result.model.cpu().generate(start, max_new_tokens=120, do_sample=True, top_k=5)
    print("".join(map(chr, written[0].tolist())))
