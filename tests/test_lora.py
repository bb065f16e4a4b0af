"""Adapters (peft's LoRA) over a pretrained model: trained under every layout like on one device, saved alone."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import meshfit
from meshfit.checkpoint import CheckpointError
from tests.few import few
from tests.test_pretrained import IDS, LABELS, PLANS, fit, llama

os.environ.setdefault("HF_HUB_OFFLINE", "1")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
DATA = {"input_ids": IDS, "labels": IDS}


def with_lora(model: Any = None, **more: Any) -> nn.Module:
    targets = ["q_proj", "v_proj", "down_proj"]
    config = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=targets, **more)
    return peft.get_peft_model(model or llama(), config)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(77)
    folder = tmp_path_factory.mktemp("base")
    llama().save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def alone(base: Path) -> meshfit.Result:
    """As peft's users have it: from_pretrained, then adapters; the same initial adapters as a function's."""
    torch.manual_seed(0)
    model = with_lora()
    model.get_base_model().load_state_dict(
        {
            name.replace("_proj.", "_proj.base_layer.") if adapted(name) else name: tensor
            for name, tensor in transformers.LlamaForCausalLM.from_pretrained(base).state_dict().items()
        },
        strict=False,
    )
    return fit(model, DATA)


def adapted(name: str) -> bool:
    return any(word in name for word in ("q_proj", "v_proj", "down_proj"))


@pytest.mark.parametrize("plan", few(PLANS, "data=2", "shard=2", "tensor=2"))
def test_lora(plan: str, base: Path, alone: meshfit.Result, tmp_path: Path) -> None:
    result = fit(with_lora, DATA, plan, weights=base)
    assert not [note for note in result.notes if note.startswith("model:")]
    assert [step.loss for step in result.history] == pytest.approx([step.loss for step in alone.history], rel=1e-5)
    files = result.save(tmp_path / "adapters")
    assert {path.name for path in files} == {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"}
    opened = peft.PeftModel.from_pretrained(transformers.LlamaForCausalLM.from_pretrained(base), tmp_path / "adapters")
    want = alone.model.state_dict()
    assert any("lora_B" in name and tensor.any() for name, tensor in want.items())
    for name, tensor in opened.state_dict().items():
        torch.testing.assert_close(tensor, want[name], rtol=1e-4, atol=1e-6)
    if plan == "shard=2":  # and go on from the two
        more = fit(with_lora, DATA, "tensor=2", weights=[base, tmp_path / "adapters"])
        again = fit(result.model, DATA)
        losses = [step.loss for step in again.history]
        assert [step.loss for step in more.history] == pytest.approx(losses, rel=1e-5)


def test_a_new_head_beside_adapters(base: Path, tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = llama("LlamaForSequenceClassification")
        return with_lora(model, modules_to_save=["score"])

    data = {"input_ids": IDS, "labels": LABELS}
    with pytest.raises(CheckpointError, match="score"):
        fit(build, data, "shard=2", weights=base)
    result = fit(build, data, "shard=2", weights=base, partial=True)
    result.save(tmp_path / "out")
    fresh = llama("LlamaForSequenceClassification")
    fresh.model.load_state_dict(transformers.LlamaModel.from_pretrained(base).state_dict())
    opened = peft.PeftModel.from_pretrained(fresh, tmp_path / "out")
    trained = result.model.eval()
    with torch.no_grad():
        torch.testing.assert_close(opened.eval()(input_ids=IDS).logits, trained(input_ids=IDS).logits)


def test_what_adapters_would_leave_out_is_said(base: Path, tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = with_lora()
        model.get_base_model().model.norm.requires_grad_(True)
        return model

    result = fit(build, DATA, weights=base)
    with pytest.raises(CheckpointError, match="leave out 1 parameters that were trained"):
        result.save(tmp_path / "adapters")
    assert result.save(tmp_path / "all.safetensors")
