"""Text classification: which library does a docstring come from? Texts of any length, padded batch by batch.

python examples/text_classification.py --plan tensor=2
"""

import argparse
import ast
import collections
import importlib.util
import random
import re
import warnings
from pathlib import Path

import torch
import transformers

import meshfit

LIBRARIES = ("numpy", "torch", "sklearn", "transformers")
WORDS, LONGEST = 4000, 64


def docstrings(library: str, most: int = 900) -> list[list[str]]:
    """The words of docstrings in its source, without its own name."""
    folder, found = Path(importlib.util.find_spec(library).origin).parent, []
    files = [path for path in sorted(folder.rglob("*.py")) if path.stat().st_size < 60_000]
    random.Random(0).shuffle(files)
    for file in files:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(file.read_bytes())
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and (text := ast.get_docstring(node)):
                words = re.findall(r"[a-z]+|[^a-z\s]", text.lower().replace(library, ""))
                found += [words[:LONGEST]] if len(words) >= 8 else []
        if len(found) >= most:
            break
    return found[:most]


def samples() -> tuple[list[dict], list[dict]]:
    """For training and for validation: tokens of any length, and the library."""
    texts = [(words, label) for label, library in enumerate(LIBRARIES) for words in docstrings(library)]
    random.Random(1).shuffle(texts)
    train, valid = texts[: len(texts) * 4 // 5], texts[len(texts) * 4 // 5 :]
    counted = collections.Counter(word for words, _ in train for word in words)
    ids = {word: 2 + i for i, (word, _) in enumerate(counted.most_common(WORDS - 2))}  # 0 is padding, 1 unknown
    encoded = [
        {
            "input_ids": (tokens := [ids.get(word, 1) for word in words]),
            "attention_mask": [1] * len(tokens),
            "labels": label,
        }
        for words, label in train + valid
    ]
    return encoded[: len(train)], encoded[len(train) :]


def network() -> torch.nn.Module:
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=LONGEST, num_labels=len(LIBRARIES), hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def accuracy(outputs, labels: torch.Tensor) -> torch.Tensor:
    return (outputs.logits.argmax(1) == labels).float()


def train(plan: str = "data=2", devices: str = "cpu", **more) -> meshfit.Result:
    texts, valid = samples()
    return meshfit.fit(
        network,
        texts,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        batch_size=32,
        length="input_ids",  # a batch is of texts of similar lengths: less padding
        epochs=6,
        valid=valid,
        metrics={"accuracy": accuracy},
        best="accuracy",
        plan=plan,
        devices=devices,
        **more,
    )


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--plan", default="data=2")
    arguments.add_argument("--devices", default="cpu")
    result = train(**vars(arguments.parse_args()))
    print("accuracy by epoch:", *(f"{step.valid['accuracy']:.1%}" for step in result.history if step.valid))
    print(f"best, kept: {result.best['accuracy']:.1%}; by chance {1 / len(LIBRARIES):.0%}")
