"""Handwritten digits with Accelerate: accelerate launch examples/ports/accelerate_digits.py"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
train, valid = TensorDataset(x[:1500], y[:1500]), TensorDataset(x[1500:], y[1500:])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

accelerator = Accelerator(cpu=True)
train_loader, valid_loader = DataLoader(train, batch_size=50), DataLoader(valid, batch_size=99)
model, optimizer, train_loader, valid_loader = accelerator.prepare(model, optimizer, train_loader, valid_loader)
for _ in range(2):
    model.train()
    for inputs, targets in train_loader:
        loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
    total, right, count = 0.0, 0, 0
    for inputs, targets in valid_loader:
        with torch.no_grad():
            outputs = model(inputs)
        outputs, targets = accelerator.gather_for_metrics((outputs, targets))
        total += F.cross_entropy(outputs, targets, reduction="sum").item()
        right += (outputs.argmax(1) == targets).sum().item()
        count += len(targets)
accelerator.print(f"loss {loss.item():.6f} valid {total / count:.6f} accuracy {right / count:.6f}")
