"""Lightning's modules over meshfit: a LightningModule as it is, and a plan.

    import meshfit.lightning

    meshfit.lightning.fit(module, datamodule, max_epochs=3, plan="shard=4")
    # was: L.Trainer(max_epochs=3).fit(module, datamodule)

Arguments of Lightning's Trainer that decide what is trained are taken over; those that only concern how it runs are
left; any other is refused by name, with what to write instead. So it is with hooks, and with what a module reads of its
trainer: a hook that would not be run as Lightning runs it is an error, before anything starts.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from meshfit.arguments import verb
from meshfit.errors import JobError, did_you_mean
from meshfit.evaluate import settle
from meshfit.fit import fit as fit_model
from meshfit.job import Job
from meshfit.lightning.attached import AttachedTrainer, ModuleStep, TrainerFacts, defines, is_module
from meshfit.lightning.configured import configured, optimizer_of, scheduler_of
from meshfit.lightning.data import Loaders, valid_every
from meshfit.lightning.metric_calls import EpochMetrics, MetricCalls, is_metric, shell_of
from meshfit.lightning.watching import BETWEEN, Watching
from meshfit.plan import Plan, completed
from meshfit.result import Result

LEFT = """
    num_sanity_val_steps log_every_n_steps enable_model_summary deterministic benchmark use_distributed_sampler
    inference_mode barebones
""".split()  # noqa: SIM905
"""How Lightning's Trainer runs, not what it trains."""

INSTEAD = {
    "strategy": 'plan="fsdp" shards over all devices, plan="ddp" copies; plan="tp=2", say',
    "num_nodes": "torchrun or srun starts the ranks; plan= takes all of them",
    "logger": "callbacks=[meshfit.observe.track.Track(...)] hands numbers to a tracker; out= writes TensorBoard's",
    "enable_checkpointing": "checkpoint=500, out=folder; resume=True goes on from there",
    "ckpt_path": "resume=True, or resume=path of a checkpoint of meshfit's; weights=path for weights alone",
    "gradient_clip_algorithm": "gradient_clip_val clips by the norm",
    "sync_batchnorm": "BatchNorm is over all devices as it is; plan='... batchnorm=local' is the other way",
    "limit_train_batches": "give a smaller data set: torch.utils.data.Subset",
    "limit_val_batches": "give a smaller data set: torch.utils.data.Subset",
    "overfit_batches": "give a smaller data set: torch.utils.data.Subset",
    "fast_dev_run": "max_steps=1",
    "max_time": "callbacks=[a function of a meshfit.Step that returns 'stop']: step.seconds is there",
    "min_epochs": "max_epochs",
    "min_steps": "max_steps",
    "reload_dataloaders_every_n_epochs": "give a function that returns the data: meshfit.fit(data=...)",
    "profiler": "out=folder: the report there has the times",
    "detect_anomaly": "torch.autograd.set_detect_anomaly(True)",
    "plugins": "plan= says how the training is spread, and in which precision",
    "model_registry": "result.save(folder)",
}

HOOKS = {
    "on_train_batch_start": "a function in callbacks= is given each meshfit.Step; training_step sees the batch",
    "on_train_batch_end": "a function in callbacks= is given each meshfit.Step; ema=0.999 averages the weights",
    "on_validation_batch_start": "validation_step sees the batch",
    "on_validation_batch_end": "validation_step sees the batch, and self.log is averaged over all",
    "on_validation_start": "on_validation_epoch_end runs; metrics are reset for each evaluation",
    "on_validation_end": "on_validation_epoch_end runs, or a function in callbacks=, where step.valid is there",
    "on_validation_epoch_start": "metrics are reset for each evaluation",
    "on_validation_model_eval": "evaluations run in eval mode",
    "on_validation_model_train": "modules are put back as they were",
    "on_validation_model_zero_grad": "leave it out",
    "on_before_zero_grad": "leave it out: gradients are summed over devices before they are used",
    "on_before_backward": "change the loss in training_step",
    "on_after_backward": "grad_norm is in each meshfit.Step; clip= clips",
    "on_before_optimizer_step": "grad_norm is in each meshfit.Step; clip= clips",
    "optimizer_step": "a schedule in configure_optimizers: torch.optim.lr_scheduler.LambdaLR for a warmup, say",
    "optimizer_zero_grad": "leave it out",
    "lr_scheduler_step": "a scheduler with step(), state_dict() and load_state_dict()",
    "backward": "return the loss that is to be differentiated",
    "configure_gradient_clipping": "gradient_clip_val=",
    "configure_sharded_model": "configure_model",
    "configure_callbacks": "callbacks=",
    "transfer_batch_to_device": "tensors are moved; give a collate_fn that makes tensors",
    "on_exception": "leave it out",
}
"""Hooks that would not be run as they are meant, with what to write instead."""

PRECISIONS = {"32": "", "32-true": "", "bf16": "bf16", "bf16-mixed": "bf16", "16": "fp16", "16-mixed": "fp16"}


@verb
def fit(
    module: Any,
    train_dataloaders: Any = None,
    val_dataloaders: Any = None,
    datamodule: Any = None,
    *,
    plan: Plan | str = "auto",
    devices: str | int = "auto",
    max_epochs: int | None = None,
    max_steps: int = -1,
    gradient_clip_val: float | None = None,
    accumulate_grad_batches: int = 1,
    precision: str | int | None = None,
    val_check_interval: int | float | None = None,
    check_val_every_n_epoch: int | None = 1,
    callbacks: Any = (),
    accelerator: str = "auto",
    default_root_dir: Any = None,
    enable_progress_bar: bool | None = None,
    seed: int = 0,
    out: Any = None,
    checkpoint: int | str | None = None,
    resume: Any = False,
    weights: Any = None,
    partial: bool = False,
    best: str | None = None,
    patience: int | None = None,
    ema: float | None = None,
    on_nan: Any = "stop",
    workers: int | str | None = None,
    timeout: float = 600.0,
    **others: Any,
) -> Result:
    """Train a LightningModule on DataLoaders, or on a LightningDataModule, over the devices of ``plan``.

    The first arguments are those of Lightning's Trainer and of its ``fit``; ``plan`` and ``devices``, and those from
    ``seed`` on, are ``meshfit.fit``'s. Entries of ``callbacks`` are functions of a ``meshfit.Step``, or an
    ``EarlyStopping``. The module ends with the trained weights; ``module.trainer.callback_metrics`` has what it logged
    last.
    """
    _refuse_arguments(others)
    _refuse_hooks(module, checkpoint is not None or bool(resume))
    if max_epochs is None and max_steps < 1:
        raise JobError("neither max_epochs= nor max_steps= was given", "max_epochs=5, say")
    folder = out if out is not None else default_root_dir
    loaders = Loaders.of(module, train_dataloaders, val_dataloaders, datamodule, accumulate_grad_batches)
    words = {"precision": _precision(precision), "microbatches": accumulate_grad_batches}
    plan = completed(plan, {word: value for word, value in words.items() if value not in ("", 1)})
    devices = "cpu" if accelerator == "cpu" and devices in ("auto", 1, "1") else devices
    job = settle(Job(model=module, data=loaders.train, plan=plan, devices=devices))
    assert isinstance(job.plan, Plan)
    each, ends = loaders.steps_of_epoch, []
    if max_epochs is not None and each is not None:
        ends.append(max_epochs * each)
    if max_steps > 0:
        ends.append(max_steps)
    attached = AttachedTrainer(
        TrainerFacts(
            max_epochs=max_epochs,
            max_steps=max_steps,
            estimated_stepping_batches=min(ends) if ends else None,
            num_training_batches=loaders.batches_of_epoch,
            accumulate_grad_batches=accumulate_grad_batches,
            default_root_dir=None if folder is None else str(folder),
            steps_of_epoch=each,
            recorded=str(job.plan) if job.plan.partitions_modules else "",
            cut=job.plan.shares > 1 or job.plan.microbatches > 1,
        )
    )
    alone = job.plan.devices == 1 and not job.plan.server
    for hook in BETWEEN:
        if not alone and defines(module, hook):
            raise JobError(
                f"{type(module).__name__} defines {hook}, and {job.plan} trains in other processes",
                "the module here is not the one that trains; a function in callbacks= is given each meshfit.Step,"
                " whose .last says that an epoch ends",
            )
    with _attached(module, attached, loaders):
        said = configured(module)
        evaluates = loaders.valid is not None and defines(module, "validation_step")
        kept = _epoch_metrics(module) if evaluates else None
        evaluated = ModuleStep(
            "validation_step",
            outputs=kept is not None,
            keeps_nothing=defines(module, "on_validation_epoch_end"),
        )
        watching = Watching(module, attached, callbacks, alone=alone)
        watching.begin()
        result = fit_model(
            module,
            loaders.train,
            step=ModuleStep("training_step"),
            optimizer=optimizer_of,
            scheduler=scheduler_of if said.schedules else None,
            epochs=max_epochs,
            steps=max_steps if max_steps > 0 else None,
            clip=gradient_clip_val,
            valid=loaders.valid if evaluates else None,
            valid_every=valid_every(loaders, val_check_interval, check_val_every_n_epoch) if evaluates else None,
            valid_step=evaluated if evaluates else None,
            metrics={} if kept is None else {"": kept},
            plan=plan,
            devices=devices,
            out=folder,
            progress=enable_progress_bar,
            callbacks=watching.callbacks,
            each_step=watching.each_step,
            seed=seed,
            checkpoint=checkpoint,
            resume=resume,
            weights=weights,
            partial=partial,
            best=best,
            patience=patience,
            ema=ema,
            on_nan=on_nan,
            workers=workers,
            timeout=timeout,
        )
    watching.end(result)
    return result


def _refuse_arguments(others: dict[str, Any]) -> None:
    for name, value in others.items():
        unset = ("auto",) if name == "strategy" else (None, False, "auto")
        if name in LEFT or (name in INSTEAD and value in unset):
            continue
        known = [*fit.__wrapped__.__kwdefaults__]  # type: ignore[attr-defined]
        raise JobError(f"{name}={value!r} is not taken over", INSTEAD.get(name) or did_you_mean(name, known))


def _refuse_hooks(module: Any, saves: bool) -> None:
    if not is_module(module):
        raise JobError(f"module is a {type(module).__name__}, not a LightningModule", "meshfit.fit takes any nn.Module")
    name = type(module).__name__
    for hook, instead in HOOKS.items():
        if defines(module, hook):
            raise JobError(f"{name} defines {hook}, which is not run", instead)
    if not module.automatic_optimization:
        raise JobError(
            f"{name} optimizes by hand (automatic_optimization=False)",
            'meshfit.fit(module, data, step={"critic": f, "generator": g}, optimizer={"critic": ..., ...}): by phases',
            "each function of (model, batch) returns one loss: what was given to manual_backward",
        )
    for hook in ("on_save_checkpoint", "on_load_checkpoint"):
        if saves and defines(module, hook):
            raise JobError(f"{name} defines {hook}, which is not run", "meshfit's checkpoints hold weights and states")
    if not defines(module, "training_step"):
        raise JobError(f"{name} has no training_step")


def _precision(asked: str | int | None) -> str:
    if asked is None:
        return ""
    if str(asked) not in PRECISIONS:
        raise JobError(f"precision={asked!r} is not taken over", did_you_mean(str(asked), [*PRECISIONS]))
    return PRECISIONS[str(asked)]


@contextmanager
def _attached(module: Any, trainer: AttachedTrainer, loaders: Loaders) -> Iterator[None]:
    """The module with a trainer, its torchmetrics objects put aside; afterwards as it was, but trained."""
    modules = [each for each in module.modules() if is_module(each)]
    metrics = {path: each for path, each in module.named_modules() if is_metric(each)}
    outermost = [path for path in metrics if path.rpartition(".")[0] not in metrics]
    places = [(module.get_submodule(path.rpartition(".")[0]), path) for path in outermost]
    for each in modules:
        each.__dict__["log"], each.__dict__["log_dict"] = trainer.log, trainer.log_dict
        each.__dict__["_trainer"] = trainer
    trainer.outside(0, 0, module)
    try:
        for hook in ("on_fit_start", "on_train_start"):
            with trainer.calling(module, hook) as call:
                getattr(module, hook)()
            trainer.held.update(call.values)
        for parent, path in places:
            setattr(parent, path.rpartition(".")[2], MetricCalls(path, metrics[path], trainer))
        yield
    finally:
        for parent, path in places:
            setattr(parent, path.rpartition(".")[2], metrics[path])
        for each in modules:
            del each.__dict__["log"], each.__dict__["log_dict"]
        loaders.teardown()


def _epoch_metrics(module: nn.Module) -> EpochMetrics | None:
    """What needs all outputs of an evaluation, in one place."""
    found = {path: copy.deepcopy(each.metric) for path, each in module.named_modules() if isinstance(each, MetricCalls)}
    hook = defines(module, "on_validation_epoch_end")
    if not found and not hook:
        return None
    shell = shell_of(module) if hook else None
    if shell is not None:
        for path in found:
            parent = shell.get_submodule(path.rpartition(".")[0])
            name = path.rpartition(".")[2]
            found[path] = getattr(parent, name).metric
            setattr(parent, name, found[path])
    return EpochMetrics(found, shell)
