"""The same module with meshfit: python examples/ports/lightning_meshfit.py"""

import lightning as L
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Accuracy

import meshfit.lightning

digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
train, valid = TensorDataset(x[:1500], y[:1500]), TensorDataset(x[1500:], y[1500:])


class Digits(L.LightningModule):
    def __init__(self, lr=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.accuracy = Accuracy(task="multiclass", num_classes=10)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        outputs = self(x)
        self.accuracy(outputs, y)
        self.log("val_loss", F.cross_entropy(outputs, y))
        self.log("accuracy", self.accuracy)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


torch.manual_seed(0)
module, loaders = Digits(), (DataLoader(train, batch_size=50), DataLoader(valid, batch_size=99))
meshfit.lightning.fit(module, *loaders, max_epochs=2, gradient_clip_val=1.0, accelerator="cpu", plan="data=2")
print(" ".join(f"{name} {module.trainer.callback_metrics[name]:.6f}" for name in ("loss", "val_loss", "accuracy")))
