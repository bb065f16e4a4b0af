"""Adapters over a base in 4 bits (bitsandbytes, peft): under every layout like on one device, resumed to the bit."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import meshfit
from meshfit.errors import PlanError
from meshfit.quantised import states_of
from tests.few import every_other
from tests.small import fit, losses

os.environ.setdefault("HF_HUB_OFFLINE", "1")
IDS = torch.randint(64, (24, 16), generator=torch.Generator().manual_seed(1))
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


def build(seed: int = 0) -> nn.Module:
    bnb, peft = pytest.importorskip("bitsandbytes"), pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=64, max_position_embeddings=32))
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and path != "lm_head":
            made = bnb.nn.Linear4bit(module.in_features, module.out_features, bias=False, quant_type="nf4")
            made.weight = bnb.nn.Params4bit(module.weight.data, requires_grad=False, quant_type="nf4")
            model.set_submodule(path, made.to("cpu"))
    model.requires_grad_(False)
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj", "down_proj"])
    return peft.get_peft_model(model, config)


def train(plan: str, model: Any = None, **how: Any) -> meshfit.Result:
    adamw = lambda params: torch.optim.AdamW([p for p in params if p.requires_grad], lr=1e-2)
    defaults = {
        "loss": None,
        "data": {"input_ids": IDS, "labels": IDS},
        "optimizer": adamw,
        "batch_size": 8,
        "steps": 4,
    }
    return fit(plan, model=build() if model is None else model, **(defaults | how))


@pytest.fixture(scope="module")
def alone() -> meshfit.Result:
    return train("data=1")


PLANS = ("data=2", "shard=2", "tensor=2", "pipeline=2", "offload=parameters")


@pytest.mark.parametrize(("plan", "model"), every_other(PLANS, [None, build]))
def test_as_on_one_device(plan: str, model: Any, alone: meshfit.Result) -> None:
    got = train(plan, model)
    assert losses(got) == pytest.approx(losses(alone), rel=1e-5)
    want = {name: p for name, p in alone.model.named_parameters() if "lora" in name}
    for name, p in got.model.named_parameters():
        if name in want:
            torch.testing.assert_close(p, want[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("first", "then"), [("data=1", "data=1"), ("shard=2", "data=1"), ("pipeline=2", "pipeline=2")])
def test_resumes(first: str, then: str, alone: meshfit.Result, tmp_path: Path) -> None:
    train(first, steps=2, out=tmp_path / "run", checkpoint=2)
    rest = train(then, out=tmp_path / "run", checkpoint=2, resume=True)
    assert losses(rest) == pytest.approx(losses(alone)[2:], rel=1e-6)
    if first == then == "data=1":
        want = dict(alone.model.named_parameters())
        assert all(torch.equal(p, want[name]) for name, p in rest.model.named_parameters())


def test_a_checkpoint_holds_codes_and_scales_of_one_base(tmp_path: Path) -> None:
    """Resumed over another base, both come from the checkpoint."""
    train("data=1", steps=2, out=tmp_path / "run", checkpoint=2)
    first, other = build(), build(seed=5)
    assert any(not torch.equal(a, b) for a, b in zip(states_of(first).values(), states_of(other).values(), strict=True))
    rest = train("data=1", other, out=tmp_path / "run", checkpoint=2, resume=True)
    for name, tensor in states_of(rest.model).items():
        assert torch.equal(tensor, states_of(first)[name]), name


def test_adapters_alone_are_saved(alone: meshfit.Result, tmp_path: Path) -> None:
    files = alone.save(tmp_path / "adapters")
    assert "adapter_model.safetensors" in {path.name for path in files}


class _Composed(nn.Parameter):
    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return [], None


def test_weights_made_of_other_tensors_are_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    model[0].weight = _Composed(torch.zeros(8, 8))
    with pytest.raises(PlanError, match="made of others"):
        fit("data=2", model=model)
