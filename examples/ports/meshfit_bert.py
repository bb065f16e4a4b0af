"""The same model with meshfit.fit: python examples/ports/meshfit_bert.py"""

import numpy as np
import torch
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

import meshfit

random = np.random.default_rng(0)
rows = [random.integers(4, 60, random.integers(4, 16)).tolist() for _ in range(288)]
samples = [
    {"input_ids": ids, "attention_mask": [1] * len(ids), "label": sum(id > 31 for id in ids) * 2 > len(ids)}
    for ids in rows
]


def collate(samples):
    longest = max(len(each["input_ids"]) for each in samples)
    padded = {
        k: [each[k] + [0] * (longest - len(each[k])) for each in samples] for k in ("input_ids", "attention_mask")
    }
    return {
        **{k: torch.tensor(v) for k, v in padded.items()},
        "labels": torch.tensor([int(each["label"]) for each in samples]),
    }


torch.manual_seed(0)
sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
model = BertForSequenceClassification(
    BertConfig(vocab_size=60, **sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
)

result = meshfit.fit(
    model,
    samples[:240],
    optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3, weight_decay=0.0),
    scheduler=lambda optimizer, steps: get_linear_schedule_with_warmup(optimizer, 5, steps),
    collate=collate,
    batch_size=24,
    shuffle=False,
    epochs=3,
    clip=1.0,
    valid=samples[240:],
    metrics={"accuracy": lambda outputs, labels: (outputs.logits.argmax(1) == labels).float().mean()},
    plan="data=2",
)
last = result.history[-1]
print(f"loss {last.loss:.6f} valid {last.valid['loss']:.6f} accuracy {last.valid['accuracy']:.6f}")
