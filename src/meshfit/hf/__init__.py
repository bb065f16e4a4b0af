"""Hugging Face's ``Trainer`` over meshfit: the same arguments, and a plan.

    from meshfit.hf import Trainer

    trainer = Trainer(model, args, train_dataset=train, eval_dataset=valid, data_collator=collator,
                      compute_metrics=compute_metrics, plan="shard=4")
    trainer.train()

``args`` is transformers' ``TrainingArguments``. Fields that decide what is trained are taken over; those that only
concern how the original Trainer runs are left; any other that is set is refused by name, with what to write instead. So
it is with the methods that a subclass defines (overridden.py) and with ``TrainerCallback`` objects (watching.py).
"""

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
from meshfit.hf.fields import refuse_fields
from meshfit.hf.outputs import WholeSet, arrays, ignored, padded, predictions_of
from meshfit.hf.overridden import refuse_overrides, steps_of
from meshfit.hf.watching import TrainerCallbacks, TrainerLog, check_callbacks, prefixed
from meshfit.job import Job, plan_of
from meshfit.launch.world import from_environment
from meshfit.observe.track import TRACKERS, Track
from meshfit.plan import Plan, completed
from meshfit.result import Result


class Trainer:
    """The arguments are those of transformers' Trainer; ``plan`` and ``devices`` those of ``meshfit.fit``. Entries of
    ``callbacks`` are functions of a ``meshfit.Step``, or ``TrainerCallback`` objects. A subclass may define
    ``compute_loss``."""

    kept_here = """
        model train_dataset eval_dataset log_history result _collate _metrics _callbacks _watching _optimizer _scheduler
    """.split()  # noqa: SIM905
    """What a copy that computes losses elsewhere does without."""

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
        refuse_fields(self.args)
        refuse_overrides(self, Trainer)
        if (model is None) == (model_init is None):
            raise JobError("Trainer takes a model, or model_init=, a function that builds one")
        if isinstance(eval_dataset, Mapping):
            raise JobError("eval_dataset= holds several data sets", "call trainer.evaluate(each) for each of them")
        if compute_metrics is not None and self.args.label_names not in (None, ["labels"]):
            raise JobError(f"label_names={self.args.label_names} with compute_metrics=", "labels must be named labels")
        if optimizers[1] is not None and not callable(optimizers[1]):
            raise JobError(
                f"optimizers= holds a {type(optimizers[1]).__name__}, which follows an optimizer of this process",
                "TrainingArguments(lr_scheduler_type=...) builds one; or give a function that makes it:",
                f"optimizers=(optimizer, lambda optimizer: {type(optimizers[1]).__name__}(optimizer, ...))",
            )
        if model_init is not None:
            torch.manual_seed(self.args.seed)
        self.model: nn.Module = model_init() if model_init is not None else model
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.processing_class = processing_class
        self.log_history: list[dict[str, float]] = []
        self.result: Result | None = None
        self._max_steps = max(0, self.args.max_steps)
        self._collate = self._collator(data_collator)
        self._loss = compute_loss_func
        self._metrics = {}
        if compute_metrics is not None:
            self._metrics = {"eval": WholeSet(compute_metrics, preprocess_logits_for_metrics, ignored(self.model))}
        self._callbacks, self._watching, self._patience = [], list[Any](), None
        for callback in callbacks or []:
            callback = callback() if isinstance(callback, type) else callback
            if isinstance(callback, transformers.EarlyStoppingCallback):
                self._patience = callback.early_stopping_patience
                if callback.early_stopping_threshold:
                    raise JobError(
                        "EarlyStoppingCallback(early_stopping_threshold=...) is not taken over", "leave it out"
                    )
            elif isinstance(callback, transformers.ProgressCallback | transformers.PrinterCallback):
                continue  # meshfit shows the same
            elif isinstance(callback, transformers.TrainerCallback):
                self._watching.append(callback)
            elif callable(callback):
                self._callbacks.append(callback)
            else:
                raise JobError(f"callbacks= holds a {type(callback).__name__}", "a function of a meshfit.Step, say")
        check_callbacks(self._watching)
        self._optimizer = optimizers[0] or partial(_optimizer, args=self.args, chosen=optimizer_cls_and_kwargs)
        self._scheduler = optimizers[1] or partial(_scheduler, args=self.args)
        self._plan, self._devices = self._planned(plan), "cpu" if self.args.use_cpu else devices

    def train(self, resume_from_checkpoint: bool | str | None = None) -> Any:
        """transformers' ``TrainOutput``: (global_step, training_loss, metrics)."""
        from transformers.trainer_utils import TrainOutput

        if self.train_dataset is None:
            raise JobError("Trainer has no train_dataset=")
        args, each = self.args, self._steps_of_epoch()
        self._max_steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * each)
        log = TrainerLog(self.log_history, self._every("logging", args.logging_steps) or each, each)
        evaluates = args.eval_strategy != "no"
        if evaluates and self.eval_dataset is None:
            raise JobError(f"eval_strategy={str(args.eval_strategy)!r} needs eval_dataset=")
        batch = args.per_device_train_batch_size * args.gradient_accumulation_steps
        resume = resume_from_checkpoint if resume_from_checkpoint is not None else args.resume_from_checkpoint
        shown = None if args.disable_tqdm is None else not args.disable_tqdm
        common = self._common(batch)
        if self._own_loss:
            step, valid_step = steps_of(self)
            common |= {"step": step, "valid_step": valid_step if evaluates else None}
        watching = TrainerCallbacks(
            self._watching, args, log, lambda: self.state, processing_class=self.processing_class
        )
        if self._watching:
            plan = plan_of(self._settled())
            watching.begin(self.model if plan.devices == 1 and not plan.server else None)
        self.result = result = fit(
            self.model,
            self.train_dataset,
            **{**common, **({} if evaluates else {"metrics": {}})},
            optimizer=self._optimizer,
            scheduler=self._scheduler,
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
            callbacks=[*([] if self._watching else [log]), *self._callbacks, *self._trackers()],
            each_step=[watching] if self._watching else [],
            progress=shown,
        )
        metrics = log.metrics(result.seconds)
        self.log_history.append({**metrics, "step": log.step})
        watching.end()
        return TrainOutput(log.step, metrics["train_loss"], metrics)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """A subclass may define it: it is what ranks run, on their share of a batch. ``num_items_in_batch`` stays None:
        a mean is weighted by what it is a mean over."""
        labels = inputs.pop("labels") if self._loss is not None else None
        outputs = model(**inputs)
        if self._loss is not None:
            loss = self._loss(outputs, labels)
        else:
            loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs[0]
        return (loss, outputs) if return_outputs else loss

    def evaluate(self, eval_dataset: Any = None, metric_key_prefix: str = "eval") -> dict[str, float]:
        data = eval_dataset if eval_dataset is not None else self.eval_dataset
        if data is None:
            raise JobError("Trainer has no eval_dataset=")
        asked = self._common(self.args.per_device_eval_batch_size)
        found = evaluate(self.model, data, **asked, step=steps_of(self)[1] if self._own_loss else None)
        told = prefixed(found, metric_key_prefix)
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
            step = steps_of(self)[1] if self._own_loss else None
            metrics = prefixed(evaluate(self.model, test_dataset, **asked, step=step), metric_key_prefix)
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

        last = max(self.log_history, key=lambda each: each.get("step", 0), default={})
        best, name = None, self._best().lstrip("-").replace("eval/", "eval_")
        measured = [each[key] for each in self.log_history for key in (name, f"eval_{name}") if key in each]
        if self.args.load_best_model_at_end and measured:
            best = (min if self._best().startswith("-") else max)(measured)
        return TrainerState(
            global_step=int(last.get("step", 0)),
            epoch=last.get("epoch", 0.0),
            max_steps=self._max_steps,
            num_train_epochs=math.ceil(self.args.num_train_epochs),
            log_history=self.log_history,
            best_metric=best,
        )

    def is_world_process_zero(self) -> bool:
        world = from_environment()
        return world is None or world.rank == 0

    def log_metrics(self, split: str, metrics: dict[str, float]) -> None:
        _trainer_functions().log_metrics(self, split, metrics)

    def save_metrics(self, split: str, metrics: dict[str, float], combined: bool = True) -> None:
        _trainer_functions().save_metrics(self, split, metrics, combined)

    def save_state(self) -> None:
        _trainer_functions().save_state(self)

    def __getattr__(self, name: str) -> Any:
        import transformers

        if hasattr(transformers.Trainer, name) or name in ("optimizer", "lr_scheduler", "accelerator", "state"):
            raise AttributeError(f"meshfit.hf.Trainer has no {name}; meshfit.fit has what a training of its own needs")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # What fit is asked

    @property
    def _own_loss(self) -> bool:
        return type(self).compute_loss is not Trainer.compute_loss

    def _common(self, each: int) -> dict[str, Any]:
        return {
            "loss": None if self._own_loss else self._loss,
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

    def _settled(self) -> Job:
        asked = self._common(self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps)
        return settle(Job(model=self.model, data=self.train_dataset, **{**asked, "metrics": {}}))

    def _steps_of_epoch(self) -> int:
        size = self._settled().batch_size
        assert isinstance(size, int)
        return max(1, math.ceil(len(self.train_dataset) / size))

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


def _trainer_functions() -> Any:
    from transformers import trainer_pt_utils

    return trainer_pt_utils


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
