"""The data of a LightningModule: DataLoaders, a LightningDataModule, or the module's own."""

import math
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from meshfit.data.torch_loader import taken
from meshfit.errors import JobError
from meshfit.lightning.attached import base_of, defines


@dataclass(frozen=True)
class Loaders:
    train: DataLoader
    """Its batches are those of an optimizer step."""
    valid: DataLoader | None
    steps_of_epoch: int | None
    batches_of_epoch: int | None
    accumulate: int
    hooked: tuple[Any, ...]
    """Whose hooks are called: the data module, and the module."""

    @classmethod
    def of(cls, module: Any, train: Any, valid: Any, datamodule: Any, accumulate: int) -> "Loaders":
        if getattr(base_of(train), "__name__", "") == "LightningDataModule":
            train, datamodule = None, train
        hooked = tuple(each for each in (datamodule, module) if each is not None)
        if datamodule is not None:
            for hook in ("on_before_batch_transfer", "on_after_batch_transfer", "transfer_batch_to_device"):
                if defines(datamodule, hook):
                    raise JobError(
                        f"{type(datamodule).__name__} defines {hook}, which is not run", "let the module have it"
                    )
        for each in hooked:
            each.prepare_data()
        for each in hooked:
            each.setup("fit")
        module.configure_model()
        for each in hooked:
            train = each.train_dataloader() if train is None and defines(each, "train_dataloader") else train
            valid = each.val_dataloader() if valid is None and defines(each, "val_dataloader") else valid
        if train is None:
            raise JobError("there is no data to train on", "give a DataLoader, or a LightningDataModule")
        train, valid = _one(train, "train_dataloaders"), None if valid is None else _one(valid, "val_dataloaders")
        count = None if isinstance(train.dataset, IterableDataset) else len(train)
        steps = None if count is None else math.ceil(count / accumulate)
        return cls(_joined(train, accumulate), valid, steps, count, accumulate, hooked)

    def teardown(self) -> None:
        for each in self.hooked:
            each.teardown("fit")


def _one(given: Any, name: str) -> DataLoader:
    if isinstance(given, list | tuple) and len(given) == 1:
        (given,) = given
    if isinstance(given, list | tuple | dict):
        raise JobError(f"{name} holds {len(given)} loaders", "give one; torch.utils.data.ConcatDataset joins data sets")
    if not isinstance(given, DataLoader):
        raise JobError(f"{name} is a {type(given).__name__}, not a DataLoader", "meshfit.fit takes other data")
    return given


def _joined(loader: DataLoader, accumulate: int) -> DataLoader:
    """With the batches of ``accumulate`` as one: meshfit cuts it into microbatches."""
    if accumulate == 1:
        return loader
    said = taken(loader, "train_dataloaders")
    if said.batching is not None:
        raise JobError(
            "accumulate_grad_batches, and a sampler of the loader's own", "larger batches, and plan= with microbatches"
        )
    if said.drop_last and len(loader) % accumulate:
        raise JobError(
            f"drop_last leaves {len(loader)} batches an epoch, no multiple of accumulate_grad_batches={accumulate}",
            "leave the last samples out of the data set",
        )
    return DataLoader(
        loader.dataset,
        batch_size=said.batch_size * accumulate,
        shuffle=said.shuffle if not isinstance(loader.dataset, IterableDataset) else None,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        drop_last=said.drop_last,
    )


def valid_every(loaders: Loaders, interval: int | float | None, epochs: int | None) -> int | None:
    """Steps between evaluations; None: at the end of each epoch."""
    each = loaders.batches_of_epoch
    if interval is None or interval == 1.0:
        if epochs in (None, 1):
            return None
        if loaders.steps_of_epoch is None:
            raise JobError("check_val_every_n_epoch, of data without a length", "val_check_interval= in batches")
        return epochs * loaders.steps_of_epoch
    if isinstance(interval, float) and each is None:
        raise JobError(f"val_check_interval={interval} of data without a length", "give it as a number of batches")
    batches = int(interval * each) if isinstance(interval, float) and each is not None else int(interval)
    whole = epochs is None or (each is not None and each % batches == 0 and epochs == 1)
    if batches < 1 or batches % loaders.accumulate or not whole:
        raise JobError(
            f"val_check_interval={interval} is {batches} batches of an epoch's {each}",
            "let them divide the epoch, or check_val_every_n_epoch=None counts them over epochs",
        )
    return batches // loaders.accumulate
