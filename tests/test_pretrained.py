"""Pretrained models: ``weights=`` reads what ``save_pretrained`` wrote, ``result.save`` writes what ``from_pretrained``
opens; trained between under any plan like on one device."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import meshfit
from meshfit.checkpoint import CheckpointError
from tests.few import diagonal

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

PLANS = ["data=2", "shard=2", "tensor=2", "pipeline=2"]
IDS = torch.randint(5, 40, (16, 8), generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(3, (16,), generator=torch.Generator().manual_seed(1))


def llama(kind: str = "LlamaForCausalLM") -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_labels=3,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return getattr(transformers, kind)(config)


def gpt2() -> nn.Module:
    special = {"bos_token_id": 1, "eos_token_id": 2, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=40, n_positions=8, **special)
    return transformers.GPT2LMHeadModel(config)


def bert(labels: int = 3) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=40,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=labels,
    )
    return transformers.BertForSequenceClassification(config)


MODELS: dict[str, Callable[[], nn.Module]] = {"llama": llama, "gpt2": gpt2, "bert": bert}


def data_of(name: str) -> dict[str, torch.Tensor]:
    return {"input_ids": IDS, "labels": LABELS if name == "bert" else IDS}


def fit(model: Any, data: Any, plan: str = "data=1", **asked: Any) -> meshfit.Result:
    sgd = lambda params: torch.optim.SGD([p for p in params if p.requires_grad], lr=0.1, momentum=0.9)
    return meshfit.fit(model, data, optimizer=sgd, steps=3, batch_size=8, plan=plan, devices="cpu", **asked)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders as ``save_pretrained`` writes them, with a tokenizer beside."""
    found = {}
    for i, (name, build) in enumerate(MODELS.items()):
        torch.manual_seed(70 + i)
        found[name] = tmp_path_factory.mktemp("pretrained") / name
        build().save_pretrained(found[name], max_shard_size="20kB")
        (found[name] / "tokenizer.json").write_text("{}")
        assert (found[name] / "model.safetensors.index.json").exists()
    return found


@pytest.fixture(scope="module")
def alone(saved: dict[str, Path]) -> dict[str, meshfit.Result]:
    """What ``from_pretrained`` and a training on one device come to."""
    opened = {name: type(build()).from_pretrained(saved[name]) for name, build in MODELS.items()}
    return {name: fit(model, data_of(name)) for name, model in opened.items()}


@pytest.mark.parametrize(("name", "plan"), diagonal(MODELS, PLANS))
def test_from_a_folder_and_back(
    name: str, plan: str, saved: dict[str, Path], alone: dict[str, meshfit.Result], tmp_path: Path
) -> None:
    result = fit(MODELS[name], data_of(name), plan, weights=saved[name])
    want = alone[name]
    assert not [note for note in result.notes if note.startswith("model:")]  # it was nowhere whole
    assert [step.loss for step in result.history] == pytest.approx([step.loss for step in want.history], rel=1e-5)
    files = result.save(tmp_path / "out", shard=20_000)
    assert {path.name for path in files} >= {"config.json", "model.safetensors.index.json", "tokenizer.json"}
    opened, told = type(want.model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    for key, tensor in want.model.state_dict().items():
        torch.testing.assert_close(opened.state_dict()[key], tensor, rtol=1e-4, atol=1e-6)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [type(opened).__name__]


def test_a_model_given_as_an_object(saved: dict[str, Path], alone: dict[str, meshfit.Result], tmp_path: Path) -> None:
    model = gpt2()
    result = fit(model, data_of("gpt2"), "shard=2", weights=str(saved["gpt2"]))
    assert result.model is model
    losses = [step.loss for step in alone["gpt2"].history]
    assert [step.loss for step in result.history] == pytest.approx(losses, rel=1e-5)
    result.save(tmp_path / "half", dtype=torch.bfloat16)
    opened = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "half")
    assert opened.dtype is torch.bfloat16
    assert opened.lm_head.weight is opened.transformer.wte.weight


@pytest.mark.parametrize("plan", ["data=1", "shard=2"])
def test_a_base_with_a_new_head(plan: str, saved: dict[str, Path], tmp_path: Path) -> None:
    """Names of the base have no prefix, and the head is the function's, bit for bit."""
    base = transformers.LlamaModel.from_pretrained(saved["llama"])
    base.save_pretrained(tmp_path / "base")
    build = lambda: llama("LlamaForSequenceClassification")
    data = {"input_ids": IDS, "labels": LABELS}
    with pytest.raises(CheckpointError, match=r"missing, 1 of the model's: score.weight") as refused:
        fit(build, data, plan, weights=tmp_path / "base")
    assert "partial=True" in str(refused.value)
    result = fit(build, data, plan, weights=tmp_path / "base", partial=True)
    assert any("score.weight is not in the checkpoint" in note for note in result.notes)
    torch.manual_seed(0)
    want = build()
    want.model.load_state_dict(base.state_dict())
    with torch.no_grad():
        loss = want(input_ids=IDS, labels=LABELS).loss
    order = fit(want, data, plan)
    assert result.history[0].loss == pytest.approx(order.history[0].loss, rel=1e-5)
    assert loss.isfinite()


def test_what_does_not_fit_is_listed_once(saved: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as refused:
        fit(lambda: bert(labels=7), data_of("bert"), weights=saved["bert"])
    assert "classifier.weight, [7, 32] here, [3, 32] in the checkpoint" in str(refused.value)
    with pytest.raises(CheckpointError) as refused:
        fit(bert, data_of("bert"), weights=saved["gpt2"], partial=True)
    assert "not one tensor fits" in str(refused.value)
    assert "transformer.h.#.attn.c_attn.weight (2)" in str(refused.value)
    with pytest.raises(meshfit.JobError, match="partial= needs weights="):
        fit(bert, data_of("bert"), partial=True)
    head = fit(lambda: bert(labels=7), data_of("bert"), weights=saved["bert"], partial=True)
    assert sum("has shape" in note for note in head.notes) == 2


def test_a_name_of_the_hub_is_no_path() -> None:
    with pytest.raises(
        CheckpointError, match=r'(?s)there is nothing at some/model\n.*snapshot_download\("some/model"\)'
    ):
        meshfit.load_weights(nn.Linear(2, 2), "some/model")


def test_experts_that_transformers_puts_together(tmp_path: Path) -> None:
    """In files each expert has its own tensors; a model has all of a layer in one."""
    config = transformers.MixtralConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        bos_token_id=1,
        eos_token_id=2,
    )
    build = lambda: transformers.MixtralForCausalLM(config)
    torch.manual_seed(5)
    first = build()
    first.save_pretrained(tmp_path / "in")
    want = fit(first, data_of("mixtral"))
    for plan in ("shard=2", "expert=2"):
        result = fit(build, data_of("mixtral"), plan, weights=tmp_path / "in")
        losses = [step.loss for step in want.history]
        assert [step.loss for step in result.history] == pytest.approx(losses, rel=1e-4)
    result.save(tmp_path / "out")
    opened = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "out")
    for key, tensor in want.model.state_dict().items():
        torch.testing.assert_close(opened.state_dict()[key], tensor, rtol=1e-3, atol=1e-5)


def test_a_model_that_is_not_hugging_faces(tmp_path: Path) -> None:
    build = lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    data = torch.randn(16, 4), torch.randn(16, 2)
    how: dict[str, Any] = {"loss": nn.functional.mse_loss}
    first = fit(build, data, "shard=2", **how)
    assert [path.name for path in first.save(tmp_path / "folder")] == ["model.safetensors"]
    assert first.save(tmp_path / "one.safetensors") == [tmp_path / "one.safetensors"]
    with pytest.raises(CheckpointError, match="is there already"):
        first.save(tmp_path / "folder")
    more = [fit(build, data, plan, weights=tmp_path / "one.safetensors", **how) for plan in ("data=1", "tensor=2")]
    again = fit(first.model, data, **how)
    for each in more:
        losses = [step.loss for step in again.history]
        assert [step.loss for step in each.history] == pytest.approx(losses, rel=1e-5)
