"""LoRA: a vision transformer that knows upright digits learns those that lie on their side, by 4 % of its weights.

    python examples/lora.py --plan tensor=2

The first training writes a checkpoint; the second reads it (``weights=``: each rank its own part), trains the adapters
alone and saves them alone, as ``peft`` opens them.
"""

import argparse
import os
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here is asked of a network

import peft
import torch
import transformers
from sklearn.datasets import load_digits
from torch import Tensor, nn

import meshfit


def digits(turns: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """For training and for validation: digits, turned by so many quarters."""
    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8).rot90(turns, (2, 3)) / 8 - 1
    samples = {"pixel_values": pixels, "labels": torch.tensor(labels)}
    return {key: x[:1400] for key, x in samples.items()}, {key: x[1400:] for key, x in samples.items()}


def base() -> nn.Module:
    config = transformers.ViTConfig(
        image_size=8, patch_size=2, num_channels=1, num_labels=10, hidden_size=128, num_hidden_layers=2,
        num_attention_heads=4, intermediate_size=256, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def with_adapters() -> nn.Module:
    targets = ["q_proj", "v_proj", "fc1", "fc2"]
    return peft.get_peft_model(base(), peft.LoraConfig(r=4, lora_alpha=16, target_modules=targets))


def accuracy(outputs, labels: Tensor) -> Tensor:
    return (outputs.logits.argmax(1) == labels).float()


def pretrain(folder: Path, plan: str = "data=2", devices: str = "cpu", **more) -> meshfit.Result:
    """A checkpoint as from_pretrained opens it."""
    train, valid = digits(turns=0)
    adamw = lambda params: torch.optim.AdamW(params, lr=2e-3)
    how = {"valid": valid, "metrics": {"accuracy": accuracy}, "batch_size": 64, "plan": plan, "devices": devices}
    result = meshfit.fit(base, train, optimizer=adamw, **{"epochs": 10, **how, **more})
    result.save(folder)
    return result


def train(plan: str = "data=2", devices: str = "cpu", checkpoint: Path | None = None, **more) -> meshfit.Result:
    with tempfile.TemporaryDirectory() as folder:
        if checkpoint is None:
            pretrain(checkpoint := Path(folder) / "base", steps=2)
        train, valid = digits(turns=1)
        return meshfit.fit(
            with_adapters,
            train,
            weights=checkpoint,
            optimizer=lambda params: torch.optim.AdamW([p for p in params if p.requires_grad], lr=5e-3),
            batch_size=64,
            epochs=10,
            valid=valid,
            metrics={"accuracy": accuracy},
            plan=plan,
            devices=devices,
            **more,
        )


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--plan", default="data=2")
    arguments.add_argument("--devices", default="cpu")
    asked = vars(arguments.parse_args())
    with tempfile.TemporaryDirectory() as folder:
        first = pretrain(Path(folder) / "base", **asked)
        aside = meshfit.evaluate(first.model, digits(turns=1)[1], metrics={"accuracy": accuracy})["accuracy"]
        print(f"pretrained: {first.metrics['accuracy']:.1%} of upright digits, {aside:.1%} of those on their side")
        result = train(checkpoint=Path(folder) / "base", **asked)
        print("adapters, by epoch:", *(f"{step.valid['accuracy']:.1%}" for step in result.history if step.valid))
        trained = sum(p.numel() for p in result.model.parameters() if p.requires_grad)
        print(
            f"{trained:,} of {sum(p.numel() for p in result.model.parameters()):,} weights were trained; saved alone:"
        )
        print(*(f"{file.name}, {file.stat().st_size:,} bytes" for file in result.save(Path(folder) / "lora")), sep="\n")
