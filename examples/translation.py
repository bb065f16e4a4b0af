"""Translation: English numbers to German ones ("three hundred twenty-one": "dreihunderteinundzwanzig"), by a T5.

python examples/translation.py --plan tensor=2
"""

import argparse
import random

import torch
import transformers

import meshfit

ENGLISH = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety"""
GERMAN = """null eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn
siebzehn achtzehn neunzehn zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig"""
LETTERS = "_.abcdefghijklmnopqrstuvwxyzüöß"  # 0 is padding and the decoder's start, 1 the end
WORDS = ["_", ".", *ENGLISH.split(), "hundred", "thousand"]


def english(n: int) -> str:
    if n >= 1000:
        return f"{english(n // 1000)} thousand" + (f" {english(n % 1000)}" if n % 1000 else "")
    if n >= 100:
        return f"{english(n // 100)} hundred" + (f" {english(n % 100)}" if n % 100 else "")
    words = ENGLISH.split()
    return words[n] if n < 20 else words[18 + n // 10] + (f"-{words[n % 10]}" if n % 10 else "")


def german(n: int, last: bool = True) -> str:
    if n >= 1000:
        return f"{german(n // 1000, False)}tausend" + (german(n % 1000) if n % 1000 else "")
    if n >= 100:
        return f"{german(n // 100, False)}hundert" + (german(n % 100, last) if n % 100 else "")
    words = GERMAN.split()
    if n < 20:
        return "ein" if n == 1 and not last else words[n]
    return (f"{german(n % 10, False)}und" if n % 10 else "") + words[18 + n // 10]


def read(text: str) -> list[int]:
    """English by words."""
    return [WORDS.index(word) for word in text.replace("-", " ").split()] + [1]


def spell(text: str) -> list[int]:
    """German by letters: its numbers are one word, however long."""
    return [LETTERS.index(letter) for letter in text] + [1]


def sample(n: int) -> dict[str, list[int]]:
    """Texts of any length: batches are padded, labels with -100."""
    words = read(english(n))
    return {"input_ids": words, "attention_mask": [1] * len(words), "labels": spell(german(n))}


def network() -> torch.nn.Module:
    config = transformers.T5Config(
        vocab_size=max(len(LETTERS), len(WORDS)), d_model=64, d_kv=16, num_heads=4, d_ff=256, num_layers=2,
        dropout_rate=0.0, decoder_start_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def letters_right(outputs, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    counted = labels != -100
    return ((outputs.logits.argmax(-1) == labels) & counted).sum(), counted.sum()


def train(plan: str = "data=2", devices: str = "cpu", **more) -> meshfit.Result:
    numbers = random.Random(0).sample(range(10_000), 4400)
    return meshfit.fit(
        network,
        [sample(n) for n in numbers[:4000]],
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
        scheduler=lambda optimizer, steps: torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps),
        clip=1.0,
        batch_size=32,
        length="input_ids",
        epochs=6,
        valid=[sample(n) for n in numbers[4000:]],
        metrics={"letters": letters_right},
        plan=plan,
        devices=devices,
        **more,
    )


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--plan", default="data=2")
    arguments.add_argument("--devices", default="cpu")
    result = train(**vars(arguments.parse_args()))
    print("letters right by epoch:", *(f"{step.valid['letters']:.1%}" for step in result.history if step.valid))
    unseen = random.Random(0).sample(range(10_000), 4400)[4000:]
    model, right = result.model.cpu().eval(), 0
    for n in unseen[:100]:
        said = model.generate(torch.tensor([read(english(n))]), max_new_tokens=60)[0].tolist()
        text = "".join(LETTERS[letter] for letter in said if letter > 1)
        right += text == german(n)
        print(f"{english(n)}: {text}\n" if n in unseen[:3] else "", end="")
    print(f"{right} of 100 unseen numbers translated without a fault")
