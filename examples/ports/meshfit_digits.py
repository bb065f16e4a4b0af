"""The same with meshfit: python examples/ports/meshfit_digits.py"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import meshfit

digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
train, valid = TensorDataset(x[:1500], y[:1500]), TensorDataset(x[1500:], y[1500:])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

result = meshfit.fit(
    model,
    train,
    loss=F.cross_entropy,
    optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
    batch_size=50,
    shuffle=False,
    epochs=2,
    clip=1.0,
    valid=valid,
    metrics={"accuracy": lambda outputs, targets: (outputs.argmax(1) == targets).float().mean()},
    plan="data=2",
)
last = result.history[-1]
print(f"loss {last.loss:.6f} valid {last.valid['loss']:.6f} accuracy {last.valid['accuracy']:.6f}")
