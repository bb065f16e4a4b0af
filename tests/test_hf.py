"""Hugging Face's Trainer over meshfit, beside the original on one device."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from meshfit.errors import JobError
from meshfit.hf import Trainer
from meshfit.step import Step

transformers = pytest.importorskip("transformers")


def classifier() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=60,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
        pad_token_id=0,
    )
    return transformers.BertForSequenceClassification(config)


def decoder() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=60, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    return transformers.LlamaForCausalLM(config)


def sentences(n: int) -> list[dict[str, Any]]:
    """Of several lengths, with a column that the model does not take."""
    random = np.random.default_rng(0)
    rows = [random.integers(1, 60, random.integers(4, 12)).tolist() for _ in range(n)]
    masks = [[1] * len(ids) for ids in rows]
    return [
        {"input_ids": ids, "attention_mask": mask, "label": ids[0] % 3, "text": "a column of its own"}
        for ids, mask in zip(rows, masks, strict=True)
    ]


def padded(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    longest = max(len(sample["input_ids"]) for sample in samples)
    fill = lambda name: [s[name] + [0] * (longest - len(s[name])) for s in samples]
    batch = {name: torch.tensor(fill(name)) for name in ("input_ids", "attention_mask")}
    return {**batch, "labels": torch.tensor([s["label"] for s in samples])}


def next_tokens(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The mean of the loss is over other numbers of tokens in every part of a batch."""
    batch = padded(samples)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "labels": labels}


def accuracy(of: Any) -> dict[str, float]:
    chosen = of.predictions.argmax(-1)
    right = chosen == of.label_ids
    return {"accuracy": right.mean(), "third": float(np.mean(chosen[right] == 2)) if right.any() else 0.0}


def arguments(folder: Path, **more: Any) -> Any:
    usual = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "num_train_epochs": 2,
        "learning_rate": 5e-3,
        "weight_decay": 0.1,
        "warmup_steps": 2,
        "logging_steps": 1,
        "eval_strategy": "epoch",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "train_sampling_strategy": "sequential",
        "optim": "adamw_torch",
    }
    return transformers.TrainingArguments(**{**usual, **more})


CLASSIFIER = {"data_collator": padded, "compute_metrics": accuracy}


def original(model: nn.Module, folder: Path, *, more: dict[str, Any], **given: Any) -> Any:
    trainer = transformers.Trainer(
        model, arguments(folder, **more), train_dataset=sentences(44), eval_dataset=sentences(13), **given
    )
    return trainer, trainer.train(), trainer.evaluate()


def ours(model: nn.Module, folder: Path, *, more: dict[str, Any], plan: str = "auto", **given: Any) -> Any:
    trainer = Trainer(
        model, arguments(folder, **more), train_dataset=sentences(44), eval_dataset=sentences(13), plan=plan, **given
    )
    output = trainer.train()
    return trainer, output


def weighted(base: type) -> type:
    """As the documentation of the original has it."""

    class Weighted(base):
        def __init__(self, *args: Any, class_weights: Tensor, **given: Any):
            super().__init__(*args, **given)
            self.class_weights = class_weights

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None):
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            logits = outputs.logits.view(-1, self.model.config.num_labels)
            loss = nn.functional.cross_entropy(logits, labels, weight=self.class_weights)
            return (loss, outputs) if return_outputs else loss

    return Weighted


class Watcher(transformers.TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.seen.append(("begin", state.max_steps))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        self.seen.append(("log", int("loss" in logs or "eval_loss" in logs)))

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> Any:
        control.should_training_stop = state.global_step == 2
        return control


class Saving(transformers.TrainerCallback):
    def on_save(self, *args: Any, **more: Any) -> None:
        pass


def losses(history: list[dict[str, float]], name: str) -> list[float]:
    return [each[name] for each in history if name in each]


def same_weights(one: nn.Module, other: nn.Module) -> None:
    for (name, want), (_, got) in zip(one.state_dict().items(), other.state_dict().items(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5, msg=lambda said, name=name: f"{name}: {said}")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("build", "given", "more"),
    [
        (classifier, CLASSIFIER, {}),
        (decoder, {"data_collator": next_tokens}, {"lr_scheduler_type": "cosine", "gradient_accumulation_steps": 2}),
    ],
    ids=["classifier", "decoder"],
)
def test_it_trains_as_the_original_does(build: Any, given: Any, more: dict[str, Any], tmp_path: Path) -> None:
    theirs, their_output, measured = original(build(), tmp_path / "theirs", more=more, **given)
    mine, output = ours(build(), tmp_path / "ours", more=more, **given)
    assert output.global_step == their_output.global_step
    assert output.training_loss == pytest.approx(their_output.training_loss, rel=1e-4)
    # the original weighs the loss of an evaluation by samples, also where it is a mean over tokens
    near = {"loss": 1e-4, "grad_norm": 2e-3, "eval_loss": 1e-4 if build is classifier else 1e-2, "eval_accuracy": 1e-6}
    for name, limit in near.items():
        want = losses(theirs.state.log_history, name)[: len(losses(mine.log_history, name))]
        assert losses(mine.log_history, name) == pytest.approx(want, rel=limit)
    same_weights(theirs.model, mine.model)
    got = mine.evaluate()
    assert got["eval_loss"] == pytest.approx(measured["eval_loss"], rel=near["eval_loss"])
    assert set(got) <= set(measured)


@pytest.mark.filterwarnings("ignore")
def test_a_subclass_computes_its_loss(tmp_path: Path) -> None:
    more = {"max_steps": 2, "eval_strategy": "no"}
    asked = {"train_dataset": sentences(44), **CLASSIFIER, "class_weights": torch.tensor([1.0, 5.0, 0.2])}
    theirs = weighted(transformers.Trainer)(classifier(), arguments(tmp_path / "theirs", **more), **asked)
    want, near = theirs.train(), theirs.evaluate(sentences(8))
    for plan, size in (("data=1", 8), ("data=2", 4)):
        args = arguments(tmp_path / plan, **more, per_device_train_batch_size=size)
        mine = weighted(Trainer)(classifier(), args, **asked, plan=plan)
        got = mine.train()
        assert got.training_loss == pytest.approx(want.training_loss, rel=1e-4)
        assert got.metrics.keys() <= want.metrics.keys()
        same_weights(theirs.model, mine.model)
    found = mine.evaluate(sentences(8))  # of one batch: it is a mean by class weights
    assert found["eval_loss"] == pytest.approx(near["eval_loss"], rel=1e-4)
    assert found["eval_accuracy"] == near["eval_accuracy"]


@pytest.mark.filterwarnings("ignore")
def test_callbacks_of_the_original(tmp_path: Path) -> None:
    watcher = Watcher()
    _, output = ours(classifier(), tmp_path, more={"eval_steps": 2, "eval_strategy": "steps"},
                           callbacks=[watcher, transformers.ProgressCallback], **CLASSIFIER)  # fmt: skip
    assert output.global_step == 2
    assert watcher.seen == [("begin", 12), ("log", 1), ("log", 1), ("log", 1)]


@pytest.mark.parametrize("name", ["get_train_dataloader", "create_optimizer", "training_step", "log", "evaluate"])
def test_methods_that_would_not_be_called_are_refused(name: str, tmp_path: Path) -> None:
    kind = type("Own", (Trainer,), {name: lambda self, *args: None})
    with pytest.raises(JobError, match=f"Own defines {name}, which is not called"):
        kind(classifier(), arguments(tmp_path), train_dataset=sentences(4))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("plan", ["data=2", "fsdp=2", "tp=2"])
def test_plans(plan: str, tmp_path: Path) -> None:
    more = {"num_train_epochs": 1}
    alone, _ = ours(classifier(), tmp_path / "one", more=more, **CLASSIFIER)
    spread, _ = ours(
        classifier(), tmp_path / "more", more={**more, "per_device_train_batch_size": 8 if plan == "tp=2" else 4},
        plan=plan, **CLASSIFIER,
    )  # fmt: skip
    for name in ("loss", "eval_loss", "eval_accuracy", "eval_third"):
        assert losses(spread.log_history, name) == pytest.approx(losses(alone.log_history, name), rel=1e-4)
    same_weights(alone.model, spread.model)


@pytest.mark.filterwarnings("ignore")
def test_saved_resumed_and_predicted(tmp_path: Path) -> None:
    steps: list[Step] = []
    more = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": False}
    trainer, output = ours(classifier(), tmp_path / "run", more=more, callbacks=[steps.append], **CLASSIFIER)
    assert (output.global_step, [each.step for each in steps]) == (4, [1, 2, 3, 4])
    further = Trainer(
        classifier(),
        arguments(tmp_path / "run", **{**more, "max_steps": 6}),
        train_dataset=sentences(44),
        eval_dataset=sentences(13),
        **CLASSIFIER,
    )
    assert further.train(resume_from_checkpoint=True).global_step == 6
    assert losses(further.log_history, "loss")[0] != losses(trainer.log_history, "loss")[0]  # from the fifth on
    further.save_model(str(tmp_path / "model"))
    again = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "model")
    same_weights(further.model, again)
    found = further.predict(sentences(5))
    assert found.predictions.shape == (5, 3)
    assert found.label_ids.tolist() == [sample["label"] for sample in sentences(5)]
    assert set(found.metrics) == {"test_loss", "test_accuracy", "test_third"}


@pytest.mark.filterwarnings("ignore")
def test_predictions_and_labels_of_several_lengths_are_padded_as_in_the_original(tmp_path: Path) -> None:
    args = arguments(tmp_path, per_device_eval_batch_size=2, eval_strategy="no")
    given: dict[str, Any] = {"data_collator": next_tokens}
    want = transformers.Trainer(decoder(), args, **given).predict(sentences(5))
    got = Trainer(decoder(), args, **given).predict(sentences(5))
    assert got.label_ids.tolist() == want.label_ids.tolist()
    np.testing.assert_allclose(got.predictions, want.predictions, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_what_scripts_do_after_a_training(tmp_path: Path) -> None:
    trainer, output = ours(classifier(), tmp_path, more={"max_steps": 2}, **CLASSIFIER)
    trainer.log_metrics("train", output.metrics)
    trainer.save_metrics("train", output.metrics)
    trainer.save_state()
    assert {"train_results.json", "all_results.json", "trainer_state.json"} <= {
        path.name for path in tmp_path.iterdir()
    }
    assert trainer.state.global_step == 2
    assert trainer.state.log_history == trainer.log_history


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"label_smoothing_factor": 0.1}, r"label_smoothing_factor=0.1\) is not taken over\n  compute_loss_func="),
        ({"neftune_noise_alpha": 5.0}, r"neftune_noise_alpha=5.0\) is not taken over"),
        ({"dataloader_drop_last": True}, "dataloader_drop_last"),
    ],
)
def test_what_is_not_taken_over_is_refused_by_name(more: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(JobError, match=says):
        Trainer(classifier(), arguments(tmp_path, **more), train_dataset=sentences(4))


def test_what_cannot_be(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    with pytest.raises(JobError, match="takes a model, or model_init="):
        Trainer(args=args)
    with pytest.raises(JobError, match="holds several data sets"):
        Trainer(classifier(), args, eval_dataset={"a": sentences(2)})
    with pytest.raises(JobError, match="labels must be named labels"):
        Trainer(classifier(), arguments(tmp_path, label_names=["starts"]), compute_metrics=accuracy)
    with pytest.raises(JobError, match="Saving defines on_save, which is not run"):
        Trainer(classifier(), args, callbacks=[Saving()])
    sgd = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    with pytest.raises(JobError, match="optimizers= holds a LambdaLR"):
        Trainer(classifier(), args, optimizers=(sgd, torch.optim.lr_scheduler.LambdaLR(sgd, lambda step: 1.0)))
    with pytest.raises(JobError, match="needs eval_dataset="):
        Trainer(classifier(), args, train_dataset=sentences(4), data_collator=padded).train()
