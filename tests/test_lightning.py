"""Modules of Lightning over meshfit, beside Lightning's own Trainer on one device."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import meshfit.lightning
from meshfit.errors import JobError, MeshfitError
from tests.few import more

L = pytest.importorskip("lightning")
torchmetrics = pytest.importorskip("torchmetrics")


class Classifier(L.LightningModule):
    """As people write one: hyperparameters, logs of both steps, a schedule by epochs."""

    def __init__(self, lr: float = 0.1, schedule: str = "epoch"):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))

    def shared(self, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        out = self(x)
        return F.cross_entropy(out, y), (out.argmax(1) == y).float().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, accuracy = self.shared(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict({"train_acc": accuracy}, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss, accuracy = self.shared(batch)
        self.log("val_loss", loss, prog_bar=True)
        self.log("val_acc", accuracy)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr * 0.1)
        if self.hparams.schedule == "plain":
            return optimizer
        if self.hparams.schedule == "lists":
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]
        if self.hparams.schedule == "plateau":
            follows = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1, threshold=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": follows, "monitor": "val_loss"}}
        if self.hparams.schedule == "step":
            total = self.trainer.estimated_stepping_batches
            cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=total)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
        return {"optimizer": optimizer, "lr_scheduler": cosine}


class Measured(Classifier):
    """With torchmetrics objects in its validation alone."""

    def __init__(self) -> None:
        super().__init__(schedule="plain")
        kinds = {"f1": torchmetrics.F1Score, "acc": torchmetrics.Accuracy}
        self.scores = torchmetrics.MetricCollection(
            {name: kind(task="multiclass", num_classes=4, average="macro") for name, kind in kinds.items()},
            prefix="val_",
        )

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out = self(x)
        self.scores(out, y)
        self.log_dict(self.scores)
        return F.cross_entropy(out, y)


class Template(L.LightningModule):
    """With torchmetrics objects and hooks, as a widely used template has them."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net
        self.train_loss, self.val_loss = torchmetrics.MeanMetric(), torchmetrics.MeanMetric()
        self.train_acc = torchmetrics.Accuracy(task="multiclass", num_classes=4)
        self.val_acc = torchmetrics.Accuracy(task="multiclass", num_classes=4)
        self.val_f1 = torchmetrics.F1Score(task="multiclass", num_classes=4, average="macro")
        self.val_acc_best = torchmetrics.MaxMetric()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def on_train_start(self) -> None:
        self.val_loss.reset()
        self.val_acc.reset()
        self.val_acc_best.reset()

    def model_step(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        x, y = batch
        logits = self.forward(x)
        return F.cross_entropy(logits, y), torch.argmax(logits, dim=1), y

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, preds, targets = self.model_step(batch)
        self.train_loss(loss)
        self.train_acc(preds, targets)
        self.log("train/loss", self.train_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("train/acc", self.train_acc, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def on_train_epoch_end(self) -> None:
        pass

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss, preds, targets = self.model_step(batch)
        self.val_loss(loss)
        self.val_acc(preds, targets)
        self.val_f1.update(preds, targets)
        self.log("val/loss", self.val_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("val/acc", self.val_acc, on_step=False, on_epoch=True, prog_bar=True)
        self.log("val/f1", self.val_f1, on_step=False, on_epoch=True)

    def on_validation_epoch_end(self) -> None:
        self.val_acc_best(self.val_acc.compute())
        self.log("val/acc_best", self.val_acc_best.compute(), sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.trainer.model.parameters(), lr=0.3, momentum=0.9)


class Numbers(L.LightningDataModule):
    def __init__(self, samples: int = 48, batch_size: int = 16):
        super().__init__()
        self.samples, self.batch_size = samples, batch_size

    def setup(self, stage: str) -> None:
        draw = torch.Generator().manual_seed(1)
        x = torch.randn(self.samples + 24, 12, generator=draw)
        y = (x[:, :4] + 0.3 * torch.randn(len(x), 4, generator=draw)).argmax(1)
        self.train, self.valid = TensorDataset(x[:-24], y[:-24]), TensorDataset(x[-24:], y[-24:])

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, batch_size=self.batch_size)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.valid, batch_size=12)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


def built(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "measured":
        return Measured()
    return Template(net()) if kind == "template" else Classifier(schedule=kind)


def original(module: Any, data: Any, folder: Path, **asked: Any) -> dict[str, float]:
    trainer = L.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        **asked,
    )
    trainer.fit(module, datamodule=data)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def same_weights(one: nn.Module, other: nn.Module) -> None:
    for (name, want), (_, got) in zip(one.state_dict().items(), other.state_dict().items(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6, msg=lambda said, name=name: f"{name}: {said}")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "asked"),
    [
        ("epoch", {"max_epochs": 3}),
        ("lists", {"max_epochs": 2, "gradient_clip_val": 0.1}),
        ("plateau", {"max_epochs": 3}),
        ("step", {"max_epochs": 2, "accumulate_grad_batches": 3}),
        ("plain", {"max_steps": 3}),
        ("template", {"max_epochs": 3}),
        ("measured", {"max_epochs": 1}),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_it_trains_as_lightning_does(kind: str, asked: dict[str, Any], tmp_path: Path) -> None:
    theirs, mine = built(kind), built(kind)
    want = original(theirs, Numbers(), tmp_path, **asked)
    result = meshfit.lightning.fit(mine, Numbers(), accelerator="cpu", enable_progress_bar=False, **asked)
    same_weights(theirs, mine)
    got = mine.trainer.callback_metrics
    for name, value in want.items():
        name = {"train_acc": "train_acc_epoch", "train/acc": "train/acc_epoch", "train/loss": "train/loss_epoch"}.get(
            name, name
        )
        if name in ("train_loss", "train_loss_step"):
            continue  # at the end of an epoch Lightning's are its mean
        assert got[name] == pytest.approx(value, rel=1e-4), name
    assert result.history[-1].valid is not None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("epoch", "data=2"),
        more("epoch", "shard=2"),
        ("epoch", "tensor=2"),
        more("epoch", "pipeline=2"),
        ("measured", "pipeline=2"),
        more("epoch", "server=1 data=2"),
        more("template", "data=2"),
        ("template", "shard=2"),
        more("template", "tensor=2"),
        ("template", "pipeline=2"),
    ],
)
def test_plans(kind: str, plan: str) -> None:
    refused = {
        "pipeline=2": "train_acc is logged by the batch, and pipeline=2 .*runs a recording",
        "tensor=2": "never calls the model itself",
    }
    if kind == "template" and plan in refused:
        with pytest.raises(MeshfitError, match=refused[plan]):
            meshfit.lightning.fit(built(kind), Numbers(44), max_epochs=2, plan=plan, accelerator="cpu")
        return
    alone, spread = built(kind), built(kind)
    for module, how in ((alone, "data=1"), (spread, plan)):
        meshfit.lightning.fit(module, Numbers(44), max_epochs=2, plan=how, accelerator="cpu")
    same_weights(alone, spread)
    assert spread.trainer.callback_metrics == pytest.approx(alone.trainer.callback_metrics, rel=1e-4)


def trained(module: Any, **asked: Any) -> Any:
    return meshfit.lightning.fit(module, Numbers(), accelerator="cpu", **{"max_epochs": 1, **asked})


def test_it_goes_on_where_it_was_cut(tmp_path: Path) -> None:
    whole, begun, again = built("epoch"), built("epoch"), built("epoch")
    trained(whole, max_epochs=3)
    trained(begun, max_epochs=1, out=tmp_path, checkpoint=3)
    result = trained(again, max_epochs=3, out=tmp_path, resume=True)
    assert result.history[0].step == 4
    same_weights(whole, again)


class Facts(Classifier):
    """Reads what it can of its trainer, and has hooks of one device."""

    def __init__(self) -> None:
        super().__init__(schedule="plain")
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append((self.current_epoch, self.global_step, batch_idx, self.trainer.max_epochs))
        return self.shared(batch)[0]

    def on_train_epoch_start(self) -> None:
        self.seen.append(f"epoch {self.current_epoch} begins")

    def on_train_epoch_end(self) -> None:
        self.seen.append(f"epoch {self.current_epoch} ends")
        self.log("seen", len(self.seen))

    def on_train_end(self) -> None:
        self.seen.append(f"all {self.global_step}")


@pytest.mark.filterwarnings("ignore")
def test_what_a_module_reads_of_its_trainer_is_true(tmp_path: Path) -> None:
    theirs, mine = Facts(), Facts()
    original(theirs, Numbers(), tmp_path, max_epochs=2)
    trained(mine, max_epochs=2)
    assert mine.seen == theirs.seen[-len(mine.seen) :]
    assert [each for each in mine.seen if isinstance(each, str)][-1] == "all 6"
    with pytest.raises(JobError, match="defines on_train_epoch_start, and data=2 trains in other processes"):
        trained(Facts(), plan="data=2")


class Reading(Classifier):
    def __init__(self, read: str):
        super().__init__(schedule="plain")
        self.read = read

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        getattr(self.trainer, self.read)
        return self.shared(batch)[0]


@pytest.mark.parametrize(
    ("read", "plan", "says"),
    [
        ("world_size", "data=1", "uses self.trainer.world_size, .*\n  a batch is that of all devices"),
        ("logger", "data=1", "self.trainer.logger, .*\n  self.log"),
        ("fit_loop", "data=1", "self.trainer.fit_loop, which meshfit does not give"),
        ("global_step", "pipeline=2", "training_step reads global_step"),
    ],
)
def test_what_cannot_be_true_is_refused_by_name(read: str, plan: str, says: str) -> None:
    with pytest.raises(MeshfitError, match=says):
        trained(Reading(read), plan=plan)


def with_hook(name: str) -> Any:
    return type("Hooked", (Classifier,), {name: lambda self, *given: print(given)})()


def test_hooks_and_arguments_that_are_not_run_are_refused() -> None:
    with pytest.raises(JobError, match=r"Hooked defines on_train_batch_end, which is not run\n .*ema="):
        trained(with_hook("on_train_batch_end"))
    with pytest.raises(JobError, match="Hooked defines optimizer_step"):
        trained(with_hook("optimizer_step"))
    with pytest.raises(JobError, match="strategy='ddp' is not taken over\n  plan="):
        trained(Classifier(), strategy="ddp")
    with pytest.raises(JobError, match=r"max_epoch=3 is not taken over\n .*max_epochs"):
        trained(Classifier(), max_epoch=3)
    with pytest.raises(JobError, match="holds a ModelCheckpoint, which is not run\n  best="):
        trained(Classifier(), callbacks=[L.pytorch.callbacks.ModelCheckpoint()])
    by_hand = Classifier()
    by_hand.automatic_optimization = False
    with pytest.raises(JobError, match=r"optimizes by hand .*\n  meshfit.fit\(module, data, step="):
        trained(by_hand)
    with pytest.raises(JobError, match="not a LightningModule"):
        trained(nn.Linear(1, 1))
    assert not meshfit.lightning.defines(with_hook("forward"), "on_train_start")


def test_early_stopping_stops_where_lightning_does(tmp_path: Path) -> None:
    stops = lambda: L.pytorch.callbacks.EarlyStopping("val_loss", patience=0, min_delta=0.5, verbose=False)
    result = trained(built("plain"), max_epochs=9, callbacks=[stops()])
    assert len(result.history) == 2 * 3  # the second evaluation is no better by half


class F1OfTheBatch(Classifier):
    def __init__(self) -> None:
        super().__init__(schedule="plain")
        self.f1 = torchmetrics.F1Score(task="multiclass", num_classes=4, average="macro")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out = self(x)
        self.f1(out, y)
        self.log("f1", self.f1)
        return F.cross_entropy(out, y)


def test_a_metric_of_a_batch_that_is_no_mean_is_refused() -> None:
    with pytest.raises(JobError, match=r"self.f1 .*is logged by the batch, and is no mean over samples"):
        trained(F1OfTheBatch(), plan="data=2")


class Keeping(Classifier):
    def __init__(self) -> None:
        super().__init__(schedule="plain")
        self.kept: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.kept.append(self.shared(batch)[0])
        return self.kept[-1]

    def on_validation_epoch_end(self) -> None:
        self.log("val_loss", torch.stack(self.kept).mean())


def test_what_a_validation_step_keeps_for_the_end_of_the_epoch_is_refused() -> None:
    with pytest.raises(JobError, match=r"validation_step keeps something in self.kept"):
        trained(Keeping())


class Centred(Classifier):
    def __init__(self) -> None:
        super().__init__(schedule="plain")
        self.centre = torch.zeros(4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self(batch[0])
        self.centre = 0.9 * self.centre + 0.1 * out.detach().mean(0)
        return F.cross_entropy(out - self.centre, batch[1])


def test_a_tensor_that_each_device_would_keep_for_itself_is_refused() -> None:
    trained(Centred())
    with pytest.raises(JobError, match=r"keeps a tensor in self.centre, .*\n  self.register_buffer\('centre'"):
        trained(Centred(), plan="data=2")


def test_modules_of_the_older_package() -> None:
    older = pytest.importorskip("pytorch_lightning")
    kind = type("Older", (older.LightningModule,), dict(vars(Classifier)))
    kind.__init__ = lambda self: (older.LightningModule.__init__(self), setattr(self, "net", net()))[0]  # type: ignore[misc]
    kind.forward = lambda self, x: self.net(x)
    kind.configure_optimizers = lambda self: torch.optim.SGD(self.parameters(), lr=0.1)
    module = kind()
    trained(module)
    assert set(module.trainer.callback_metrics) >= {"train_loss", "val_loss", "val_acc"}
