"""Sentences classified by a small BERT, with Hugging Face's Trainer: python examples/ports/hf_bert.py"""

import numpy as np
import torch
import transformers
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

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


def compute_metrics(predicted):
    return {"accuracy": (predicted.predictions.argmax(-1) == predicted.label_ids).mean()}


torch.manual_seed(0)
sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
model = BertForSequenceClassification(
    BertConfig(vocab_size=60, **sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
)
args = TrainingArguments(
    "runs/bert",
    per_device_train_batch_size=24,
    num_train_epochs=3,
    learning_rate=3e-3,
    warmup_steps=5,
    eval_strategy="epoch",
    save_strategy="no",
    logging_steps=1,
    report_to="none",
    train_sampling_strategy="sequential",
    use_cpu=True,
    disable_tqdm=True,
)
given = {"train_dataset": samples[:240], "eval_dataset": samples[240:], "data_collator": collate}
trainer = transformers.Trainer(model, args, **given, compute_metrics=compute_metrics)
trainer.train()
losses, found = [each["loss"] for each in trainer.state.log_history if "loss" in each], trainer.evaluate()
print(f"loss {losses[-1]:.6f} valid {found['eval_loss']:.6f} accuracy {found['eval_accuracy']:.6f}")
