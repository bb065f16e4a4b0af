"""Hugging Face's ``Trainer`` over meshfit: the same arguments, and a plan.

    from meshfit.hf import Trainer

    trainer = Trainer(model, args, train_dataset=train, eval_dataset=valid, data_collator=collator,
                      compute_metrics=compute_metrics, plan="shard=4")
    trainer.train()

``args`` is transformers' ``TrainingArguments``. Fields that decide what is trained are taken over; those that only
concern how the original Trainer runs are left; any other that is set is refused by name, with what to write instead.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from meshfit.errors import JobError
from meshfit.evaluate import evaluate, predict, settle
from meshfit.fit import fit
from meshfit.hf.outputs import WholeSet, arrays, ignored, padded, predictions_of
from meshfit.job import Job
from meshfit.launch.world import from_environment
from meshfit.observe.track import TRACKERS, Track
from meshfit.plan import Plan, completed
from meshfit.result import Result
from meshfit.step import Step

TAKEN = """
    output_dir per_device_train_batch_size per_device_eval_batch_size num_train_epochs max_steps learning_rate
    lr_scheduler_type lr_scheduler_kwargs warmup_steps warmup_ratio optim optim_args weight_decay adam_beta1
    adam_beta2 adam_epsilon gradient_accumulation_steps max_grad_norm bf16 fp16 gradient_checkpointing
    torch_compile logging_steps logging_strategy eval_strategy eval_steps save_strategy save_steps
    save_total_limit load_best_model_at_end metric_for_best_model greater_is_better seed use_cpu
    dataloader_num_workers remove_unused_columns label_names train_sampling_strategy length_column_name
    report_to run_name project disable_tqdm resume_from_checkpoint
""".split()  # noqa: SIM905

LEFT = """
    average_tokens_across_devices gradient_checkpointing_kwargs torch_compile_backend torch_compile_mode
    use_cache torch_empty_cache_steps tf32 logging_first_step log_on_each_node logging_nan_inf_filter
    logging_dir include_num_input_tokens_seen log_level log_level_replica prediction_loss_only
    eval_do_concat_batches eval_use_gather_object eval_accumulation_steps save_only_model save_on_each_node
    hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision trackio_space_id
    trackio_bucket_id trackio_static_space_id restore_callback_states_from_checkpoint accelerator_config
    dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor
    dataloader_multiprocessing_context dataloader_in_order ddp_find_unused_parameters ddp_bucket_cap_mb
    ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout debug skip_memory_metrics do_train do_eval
    do_predict local_rank full_determinism enable_jit_checkpoint
""".split()  # noqa: SIM905
"""How the original runs, not what it trains."""

INSTEAD = {
    "fsdp": 'Trainer(..., plan="fsdp") shards over all devices',
    "fsdp_config": 'Trainer(..., plan="fsdp recompute=full offload=optimizer"), say',
    "deepspeed": 'Trainer(..., plan="zero=3") shards as ZeRO 3 does',
    "parallelism_config": 'Trainer(..., plan="fsdp tp=2 cp=2"), say',
    "label_smoothing_factor": "compute_loss_func= with F.cross_entropy(..., label_smoothing=)",
    "auto_find_batch_size": "a smaller per_device_train_batch_size, with gradient_accumulation_steps",
    "data_seed": "seed is of the order of samples, too",
    "dataloader_drop_last": "leave the last samples out of train_dataset: the last batch may be smaller",
    "push_to_hub": "trainer.save_model(folder) writes what push_to_hub takes",
    "bf16_full_eval": "bf16 is of evaluations, too",
    "fp16_full_eval": "fp16 is of evaluations, too",
    "eval_delay": "eval_steps",
    "eval_on_start": "trainer.evaluate() before trainer.train()",
    "batch_eval_metrics": "compute_metrics on the whole data set",
    "include_for_metrics": "compute_metrics with predictions and labels",
    "use_liger_kernel": 'Trainer(..., plan="... compile=block")',
}


class Trainer:
    """The arguments are those of transformers' Trainer; ``plan`` and ``devices`` those of ``meshfit.fit``. Entries of
    ``callbacks`` are functions of a ``meshfit.Step``, or an ``EarlyStoppingCallback``."""

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[[], nn.Module] | None = None,
        compute_loss_func: Callable[..., Any] | None = None,
        compute_metrics: Callable[[Any], Mapping[str, Any]] | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[..., Any] | None = None,
        *,
        plan: Plan | str = "auto",
        devices: str | int = "auto",
    ):
        import transformers

        self.args = args if args is not None else transformers.TrainingArguments("trainer_output")
        _refuse(self.args)
        if (model is None) == (model_init is None):
            raise JobError("Trainer takes a model, or model_init=, a function that builds one")
        if isinstance(eval_dataset, Mapping):
            raise JobError("eval_dataset= holds several data sets", "call trainer.evaluate(each) for each of them")
        if compute_metrics is not None and self.args.label_names not in (None, ["labels"]):
            raise JobError(f"label_names={self.args.label_names} with compute_metrics=", "labels must be named labels")
        if optimizers[1] is not None:
            raise JobError("optimizers= holds a scheduler", "TrainingArguments(lr_scheduler_type=...) builds one")
        if model_init is not None:
            torch.manual_seed(self.args.seed)
        self.model: nn.Module = model_init() if model_init is not None else model
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.processing_class = processing_class
        self.log_history: list[dict[str, float]] = []
        self.result: Result | None = None
        self._collate = self._collator(data_collator)
        self._loss = None if compute_loss_func is None else _loss_of(compute_loss_func)
        self._metrics = {}
        if compute_metrics is not None:
            self._metrics = {"eval": WholeSet(compute_metrics, preprocess_logits_for_metrics, ignored(self.model))}
        self._callbacks, self._patience = [], None
        for callback in callbacks or []:
            if isinstance(callback, transformers.EarlyStoppingCallback):
                self._patience = callback.early_stopping_patience
                if callback.early_stopping_threshold:
                    raise JobError(
                        "EarlyStoppingCallback(early_stopping_threshold=...) is not taken over", "leave it out"
                    )
            elif isinstance(callback, transformers.TrainerCallback) or not callable(callback):
                name = type(callback).__name__
                raise JobError(f"callbacks= holds a {name}", "give a function of a meshfit.Step, or Track(...)")
            else:
                self._callbacks.append(callback)
        self._optimizer = optimizers[0] or partial(_optimizer, args=self.args, chosen=optimizer_cls_and_kwargs)
        self._plan, self._devices = self._planned(plan), "cpu" if self.args.use_cpu else devices

    def train(self, resume_from_checkpoint: bool | str | None = None) -> Any:
        """transformers' ``TrainOutput``: (global_step, training_loss, metrics)."""
        from transformers.trainer_utils import TrainOutput

        if self.train_dataset is None:
            raise JobError("Trainer has no train_dataset=")
        args, each = self.args, self._steps_of_epoch()
        watched = _Log(self.log_history, self._every("logging", args.logging_steps) or each, each)
        evaluates = args.eval_strategy != "no"
        if evaluates and self.eval_dataset is None:
            raise JobError(f"eval_strategy={str(args.eval_strategy)!r} needs eval_dataset=")
        batch = args.per_device_train_batch_size * args.gradient_accumulation_steps
        resume = resume_from_checkpoint if resume_from_checkpoint is not None else args.resume_from_checkpoint
        shown = None if args.disable_tqdm is None else not args.disable_tqdm
        self.result = result = fit(
            self.model,
            self.train_dataset,
            **{**self._common(batch), **({} if evaluates else {"metrics": {}})},
            optimizer=self._optimizer,
            scheduler=partial(_scheduler, args=args),
            epochs=args.num_train_epochs if args.max_steps <= 0 else None,
            steps=args.max_steps if args.max_steps > 0 else None,
            clip=args.max_grad_norm or None,
            valid=self.eval_dataset if evaluates else None,
            valid_every=self._every("eval", args.eval_steps or args.logging_steps) if evaluates else None,
            best=self._best() if args.load_best_model_at_end else None,
            patience=self._patience,
            shuffle=args.train_sampling_strategy != "sequential",
            length=self._length() if args.train_sampling_strategy == "group_by_length" else None,
            workers=args.dataloader_num_workers or None,
            out=args.output_dir,
            checkpoint=self._saves(),
            keep=args.save_total_limit or 2,
            resume=resume or False,
            callbacks=[watched, *self._callbacks, *self._trackers()],
            progress=shown,
        )
        steps, losses = watched.step, watched.losses
        metrics = {"train_runtime": result.seconds, "train_loss": losses / max(watched.count, 1)}
        self.log_history.append({**metrics, "step": steps})
        return TrainOutput(steps, metrics["train_loss"], metrics)

    def evaluate(self, eval_dataset: Any = None, metric_key_prefix: str = "eval") -> dict[str, float]:
        data = eval_dataset if eval_dataset is not None else self.eval_dataset
        if data is None:
            raise JobError("Trainer has no eval_dataset=")
        found = evaluate(self.model, data, **self._common(self.args.per_device_eval_batch_size))
        told = _prefixed(found, metric_key_prefix)
        self.log_history.append(told)
        return told

    def predict(self, test_dataset: Any, metric_key_prefix: str = "test") -> Any:
        """transformers' ``PredictionOutput``: (predictions, label_ids, metrics)."""
        from transformers.trainer_utils import PredictionOutput

        asked = self._common(self.args.per_device_eval_batch_size)
        labels = [self._collate([sample]).get("labels") for sample in test_dataset]
        found = predict(self.model, test_dataset, **{k: v for k, v in asked.items() if k not in ("loss", "metrics")})
        metrics, given = {}, None
        if labels and labels[0] is not None:
            given = padded([np.asarray(label)[0] for label in labels])
            metrics = _prefixed(evaluate(self.model, test_dataset, **asked), metric_key_prefix)
        return PredictionOutput(arrays(predictions_of(found, ignored(self.model))), given, metrics)

    def save_model(self, output_dir: str | None = None) -> None:
        """What ``from_pretrained`` opens."""
        folder = Path(output_dir or str(self.args.output_dir))
        if hasattr(self.model, "save_pretrained"):
            self.model.save_pretrained(folder)  # type: ignore[operator]
        elif self.result is not None:
            self.result.save(folder)
        if hasattr(self.processing_class, "save_pretrained"):
            self.processing_class.save_pretrained(folder)

    @property
    def state(self) -> Any:
        """transformers' ``TrainerState``: the log so far."""
        from transformers import TrainerState

        steps = max((int(each.get("step", 0)) for each in self.log_history), default=0)
        return TrainerState(global_step=steps, log_history=self.log_history)

    def is_world_process_zero(self) -> bool:
        world = from_environment()
        return world is None or world.rank == 0

    def log_metrics(self, split: str, metrics: dict[str, float]) -> None:
        trainer_pt_utils().log_metrics(self, split, metrics)

    def save_metrics(self, split: str, metrics: dict[str, float], combined: bool = True) -> None:
        trainer_pt_utils().save_metrics(self, split, metrics, combined)

    def save_state(self) -> None:
        trainer_pt_utils().save_state(self)

    # What fit is asked

    def _common(self, each: int) -> dict[str, Any]:
        return {
            "loss": self._loss,
            "metrics": self._metrics,
            "batch_size": f"{each}/device",
            "collate": self._collate,
            "seed": self.args.seed,
            "plan": self._plan,
            "devices": self._devices,
        }

    def _planned(self, plan: Plan | str) -> Plan | str:
        """With what the arguments say of it, where the plan does not."""
        args, words = self.args, dict[str, Any]()
        if args.bf16 or args.fp16:
            words["precision"] = "bf16" if args.bf16 else "fp16"
        if args.gradient_checkpointing:
            words["recompute"] = "full"
        if args.gradient_accumulation_steps > 1:
            words["microbatches"] = args.gradient_accumulation_steps
        return completed(plan, words)

    def _collator(self, given: Callable[[list[Any]], Any] | None) -> Callable[[list[Any]], Any]:
        from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase, default_data_collator

        if given is None:
            tokenizes = isinstance(self.processing_class, PreTrainedTokenizerBase)
            given = DataCollatorWithPadding(self.processing_class) if tokenizes else default_data_collator
        if not self.args.remove_unused_columns:
            return given
        base = getattr(self.model, "get_base_model", lambda: self.model)()  # type: ignore[operator]
        taken = inspect.signature(base.forward).parameters
        if any(each.kind is each.VAR_KEYWORD for each in taken.values()) and "input_ids" not in taken:
            return given
        return partial(_collated, collate=given, kept={*taken, "label", "label_ids", *(self.args.label_names or ())})

    def _every(self, what: str, steps: float) -> int | None:
        """Steps between two; None: at the end of each epoch."""
        if getattr(self.args, f"{what}_strategy") == "epoch":
            return None
        if steps < 1 or steps != int(steps):
            raise JobError(f"{what}_steps={steps} is a share of the steps", "write their number")
        return int(steps)

    def _saves(self) -> int | None:
        strategy = self.args.save_strategy
        if strategy == "no":
            return None
        if strategy == "best":
            raise JobError("save_strategy='best' is not taken over", "load_best_model_at_end=True keeps the best")
        return self._every("save", self.args.save_steps) or self._steps_of_epoch()

    def _steps_of_epoch(self) -> int:
        asked = self._common(self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps)
        settled = settle(Job(model=self.model, data=self.train_dataset, **{**asked, "metrics": {}}))
        assert isinstance(settled.batch_size, int)
        return max(1, math.ceil(len(self.train_dataset) / settled.batch_size))

    def _best(self) -> str:
        args = self.args
        name = (args.metric_for_best_model or "loss").removeprefix("eval_")
        greater = args.greater_is_better if args.greater_is_better is not None else not name.endswith("loss")
        name = name if name == "loss" else f"eval/{name}"
        return name if greater else f"-{name}"

    def _length(self) -> Any:
        first = self.train_dataset[0]
        name = self.args.length_column_name
        return name if name in first else lambda sample: len(sample["input_ids"])

    def _trackers(self) -> list[Track]:
        asked = self.args.report_to if isinstance(self.args.report_to, list) else [self.args.report_to]
        names = [name for name in asked if name not in ("none", "tensorboard", "all")]  # out= writes TensorBoard's
        for name in names:
            if name not in TRACKERS:
                raise JobError(f"report_to={name!r} is not taken over", "callbacks=[Track(an object of its library)]")
        return [Track(name, project=self.args.project, name=self.args.run_name) for name in names]


def trainer_pt_utils() -> Any:
    from transformers import trainer_pt_utils

    return trainer_pt_utils


def _refuse(args: Any) -> None:
    """What is set and would not be done."""
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        if field.name in TAKEN or field.name in LEFT or not value or value == field.default:
            continue
        instead = INSTEAD.get(field.name, "leave it out, or use meshfit.fit, which may have it by another name")
        raise JobError(f"TrainingArguments({field.name}={value!r}) is not taken over", instead)


def _optimizer(model: nn.Module, *, args: Any, chosen: tuple[type, dict[str, Any]] | None) -> torch.optim.Optimizer:
    """As the original builds it: without weight decay for biases and norms."""
    from transformers import Trainer as Original

    kind, options = chosen or Original.get_optimizer_cls_and_kwargs(args, model)  # type: ignore[misc]
    decayed = set(Original.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for name, p in named if name in decayed], "weight_decay": args.weight_decay},
        {"params": [p for name, p in named if name not in decayed], "weight_decay": 0.0},
    ]
    return kind([group for group in groups if group["params"]], **{k: v for k, v in options.items() if k != "fused"})


def _scheduler(optimizer: Any, total: int, *, args: Any) -> Any:
    from transformers import get_scheduler

    return get_scheduler(
        args.lr_scheduler_type,
        optimizer=optimizer,
        num_warmup_steps=args.get_warmup_steps(total),
        num_training_steps=total,
        scheduler_specific_kwargs=args.lr_scheduler_kwargs or None,
    )


def _collated(samples: list[Any], *, collate: Callable[[list[Any]], Any], kept: set[str]) -> Any:
    return collate([{k: v for k, v in sample.items() if k in kept} for sample in samples])


def _loss_of(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda outputs, labels: function(outputs, labels)


def _prefixed(found: Mapping[str, float], prefix: str) -> dict[str, float]:
    return {f"{prefix}_{name.removeprefix('eval/')}": value for name, value in found.items()}


class _Log:
    """The log history of the original: mean losses every so many steps, and evaluations."""

    def __init__(self, history: list[dict[str, float]], every: int, epoch: int):
        """``epoch``: steps of one."""
        self._history, self._every, self._epoch = history, every, epoch
        self.losses, self.count, self.step = 0.0, 0, 0
        self._since: list[float] = []

    def __call__(self, step: Step) -> None:
        self.losses, self.count, self.step = self.losses + step.loss, self.count + 1, step.step
        self._since.append(step.loss)
        place = {"epoch": step.step / self._epoch, "step": step.step}
        if step.step % self._every == 0:
            mean = sum(self._since) / len(self._since)
            told = {"loss": mean, "grad_norm": step.grad_norm, "learning_rate": step.lr}
            self._history.append({**told, **place})
            self._since.clear()
        if step.valid:
            self._history.append({**_prefixed(step.valid, "eval"), **place})
