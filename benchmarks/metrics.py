"""Is a metric the same number under every plan?

    python benchmarks/metrics.py

Loss, F1 and AUROC (torchmetrics) of one evaluation, in a training under each of eight plans, beside a plain loop on one
device. In fp64 the counts that the metrics keep must be the same numbers, and the predictions that AUROC keeps the
same up to fp64's rounding; in fp32 the values must agree to 1e-6. Exits with 1 if one does not.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAUROC, MulticlassF1Score

import meshfit

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.zoo import CLASSES, LENGTH, VOCABULARY, seeded, tokens

PLANS = (
    "data=2",
    "data=3",
    "shard=2",
    "tensor=2",
    "pipeline=2 microbatches=2",
    "context=2",
    "server=1 data=2",
    "data=2 tensor=2",
)
SAMPLES, BATCH = 50, 8
"""The last batch has two samples: of three ranks one has none."""


class Opened:
    """A metric that gives its state beside its value."""

    def compute(self) -> dict[str, Any]:
        state = {name: getattr(self, name) for name in self._reductions}  # type: ignore[attr-defined]
        joined = {name: torch.cat(value) if isinstance(value, list) else value for name, value in state.items()}
        return {"value": super().compute(), **joined}  # type: ignore[misc]


class F1(Opened, MulticlassF1Score): ...  # type: ignore[misc]


class AUROC(Opened, MulticlassAUROC): ...  # type: ignore[misc]


class Encoder(nn.Module):
    """A small transformer that tells the class of a sequence."""

    def __init__(self):
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, 32), nn.Parameter(torch.randn(LENGTH, 32) * 0.1)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.token(ids) + self.position).mean(1))


def data() -> tuple[Tensor, Tensor]:
    ids = tokens(SAMPLES)
    return ids, (ids[:, 0] ** 2 // 7) % CLASSES


def metrics() -> dict[str, Any]:
    return {
        "f1": F1(num_classes=CLASSES, average="macro"),
        "auroc, binned": AUROC(num_classes=CLASSES, thresholds=20),
        "auroc": AUROC(num_classes=CLASSES),
    }


def build(dtype: torch.dtype) -> nn.Module:
    return seeded(Encoder)().to(dtype)


def alone(dtype: torch.dtype) -> dict[str, Any]:
    model, (x, y), found = build(dtype).eval(), data(), metrics()
    with torch.no_grad():
        outputs = [model(part) for part in x.split(BATCH)]
    for metric in found.values():
        for part, target in zip(outputs, y.split(BATCH), strict=True):
            metric.update(part, target)
    return {
        "loss": F.cross_entropy(torch.cat(outputs), y),
        **{name: metric.compute() for name, metric in found.items()},
    }


def under(plan: str, dtype: torch.dtype) -> dict[str, float]:
    model = build(dtype)
    result = meshfit.fit(
        model,
        data(),
        valid=data(),
        loss=F.cross_entropy,
        metrics=metrics(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.0),
        batch_size=BATCH,
        steps=1,
        plan=plan,
        devices="cpu",
        progress=False,
    )
    return result.metrics


def flat(name: str, value: Any) -> dict[str, float]:
    if isinstance(value, dict):
        return {k: v for key, each in value.items() for k, v in flat(f"{name}/{key}", each).items()}
    if value.dim():
        return {k: v for i, each in enumerate(value) for k, v in flat(f"{name}/{i}", each).items()}
    return {name: float(value)}


def main() -> int:
    kept = True
    table = Table(
        "plan", "fp64: loss, values", "counts", "predictions", "fp32: loss, values", title="largest difference"
    )
    for plan in PLANS:
        row = [plan]
        for dtype in (torch.float64, torch.float32):
            want = {k: v for name, value in alone(dtype).items() for k, v in flat(name, value).items()}
            got = under(plan, dtype)
            assert got.keys() == want.keys(), sorted(got.keys() ^ want.keys())
            off = {key: abs(got[key] - want[key]) for key in want}
            values = max(d for key, d in off.items() if key == "loss" or key.endswith("/value"))
            row.append(f"{values:.0e}")
            kept &= values <= (1e-12 if dtype == torch.float64 else 1e-6)
            if dtype == torch.float64:
                predictions = max(d for key, d in off.items() if key.startswith("auroc/preds"))
                counts = max(d for k, d in off.items() if not k.startswith("auroc/preds") and k.count("/") > 1)
                row += ["equal" if counts == 0 else f"{counts:g}", f"{predictions:.0e}"]
                kept &= counts == 0 and predictions <= 1e-12
        table.add_row(*row)
    Console(width=120).print(table)
    print("every metric is the same under every plan" if kept else "FAIL")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
