"""``meshfit plan``: what it prints, and its what-ifs."""

import json
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from meshfit import Cluster, JobError, Plan
from meshfit.planner.explain import row, warnings
from meshfit.planner.hf_config import decoder_of
from meshfit.planner.search import Allowed, search
from meshfit.planner.sizes import DecoderPredictor
from meshfit.planner.what_if import cheapest, largest_batch, largest_model, scale, time_of
from tests.command import meshfit

LLAMA = {
    **{"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32},
    **{"num_hidden_layers": 16, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True},
}
DEEPSEEK = {
    **{"model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_attention_heads": 128},
    **{"num_hidden_layers": 61, "vocab_size": 129280, "kv_lora_rank": 512, "q_lora_rank": 1536},
    **{"n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1},
    **{"first_k_dense_replace": 3, "num_nextn_predict_layers": 1, "tie_word_embeddings": False},
}


def predictor(on: str, length: int = 2048) -> DecoderPredictor:
    return DecoderPredictor(decoder_of(LLAMA), Cluster.of(on), length)


def test_sizes_of_configurations() -> None:
    llama = decoder_of(LLAMA)
    assert (llama.layers, llama.kv_heads, llama.gated, llama.rotary, llama.tied) == (16, 8, True, True, True)
    assert llama.layers * llama.dense_parameters + llama.embedding == pytest.approx(1.24e9, rel=0.01)
    gpt = decoder_of({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257})
    assert (gpt.ffn, gpt.gated, gpt.rotary, gpt.bias) == (3072, False, False, True)
    deep = decoder_of(DEEPSEEK)
    assert deep.experts is not None
    assert deep.latent is not None
    assert (deep.experts.count, deep.experts.shared, deep.experts.dense_layers, deep.predicted) == (256, 2048, 3, 1)
    total = 58 * (deep.shared_parameters + deep.expert_parameters) + 3 * deep.dense_parameters + 2 * deep.embedding
    assert total == pytest.approx(671e9, rel=0.02)


def test_what_is_no_decoder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="traces any model"):
        decoder_of({"model_type": "bert", "hidden_size": 768})
    with pytest.raises(JobError, match="hidden_size"):
        decoder_of({"model_type": "llama"})
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(JobError, match="cannot be read"):
        decoder_of(tmp_path)


def test_the_verb_prints_plans_and_reasons(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 120}))
    asked = ("plan", "--hf", "config.json", "--seq", "2048", "--batch", "16", "--on", "8xH100", "--steps", "1000")
    said = meshfit(tmp_path, *asked, "--picture", "step.svg")
    assert said.returncode == 0, said.stderr
    assert "not possible" in said.stdout
    assert "data=8" in said.stdout
    assert "of 80 GiB" in said.stdout
    assert "nine in ten" in said.stdout
    assert ElementTree.parse(tmp_path / "step.svg").getroot().tag.endswith("svg")
    found = json.loads(meshfit(tmp_path, *asked, "--json").stdout)
    assert found["best"]["plan"] in said.stdout.replace("\n", " ")
    assert sum(found["best"]["items"].values()) == pytest.approx(found["best"]["seconds"])
    assert Plan.parse(found["best"]["plan"]).devices == 8
    assert {"family", "reason", "remedy"} <= found["rejected"][0].keys()


def test_the_verb_refuses_what_it_cannot_plan(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    nothing = meshfit(tmp_path, "plan", "--on", "8xH100")
    assert nothing.returncode == 2
    assert "a script or --hf" in nothing.stderr
    small = meshfit(tmp_path, "plan", "--hf", "config.json", "--on", "1xT4", "--batch", "1", "--seq", "65536")
    assert small.returncode == 1
    assert "nothing fits" in small.stdout


def test_throughput_from_one_device_to_all() -> None:
    allowed = Allowed(precisions=("bf16",))
    cluster = Cluster.of("2x4xA100-80GB")
    found = list(scale(lambda on: DecoderPredictor(decoder_of(LLAMA), on, 2048), cluster, 64, allowed))
    assert [one.cluster.devices for one in found] == [1, 2, 4, 8]
    speeds = [one.found.best.samples_per_second for one in found if one.found.best is not None]
    assert len(speeds) == 4
    assert all(1 < later / sooner <= 2.1 for sooner, later in pairwise(speeds))


def test_the_cheapest_cluster_for_a_deadline() -> None:
    predicting = lambda on: DecoderPredictor(decoder_of(LLAMA), on, 2048)
    ask = (predicting, Cluster.of("4xp5.48xlarge"), 64, Allowed())
    every = list(scale(*ask))
    slowest, fastest = every[0].whole(1000), every[-1].whole(1000)
    assert slowest is not None
    assert fastest is not None
    easy, _ = cheapest(*ask, steps=1000, within=slowest.seconds * 1.01)
    hard, _ = cheapest(*ask, steps=1000, within=fastest.seconds * 1.01)
    none, tried = cheapest(*ask, steps=1000, within=fastest.seconds / 2)
    assert easy is not None
    assert hard is not None
    assert easy.cluster.devices < hard.cluster.devices == 32
    assert none is None
    assert len(tried) == len(every)


def test_the_largest_batch_and_model_fit_and_more_does_not() -> None:
    one = predictor("1xA100-40GB")
    most = largest_batch(one, 1, Allowed())
    assert most is not None
    assert most.fits
    alone = Allowed(fixed={"microbatches": 1}, offload=False)
    assert search(one, most.batch * 2, alone).best is None
    deeper = largest_model(
        decoder_of(LLAMA), lambda m: DecoderPredictor(m, Cluster.of("1xA100-40GB"), 2048), 1, Allowed(offload=False)
    )
    assert deeper is not None
    assert deeper[0].layers > 16
    assert deeper[1].fits


@pytest.mark.parametrize(("text", "seconds"), [("3 days", 259200), ("12h", 43200), ("90 minutes", 5400)])
def test_times(text: str, seconds: float) -> None:
    assert time_of(text) == seconds
    with pytest.raises(JobError, match="no time"):
        time_of("soon")


def test_axes_that_straddle_nodes_are_warned_of() -> None:
    cluster = Cluster.of("4x8xH100")
    assert warnings(Plan(data=4, tensor=8), cluster) == []
    assert "tensor=16" in warnings(Plan(data=2, tensor=16), cluster)[0]
    assert "shard=8" in warnings(Plan(data=2, shard=8, tensor=2), cluster)[0]
    assert warnings(Plan(shard=16, zero=1, tensor=2), cluster) == []


def test_prices_and_shares() -> None:
    found = search(predictor("1xp5.48xlarge"), 64).best
    assert found is not None
    about = row(found, Cluster.of("1xp5.48xlarge"), steps=1000)
    assert about["price"] == pytest.approx(39.33 * found.seconds * 1000 / 3600)
    assert 0.05 < about["share_of_peak"] < 0.8
    assert row(found, Cluster.of("8xH100"), steps=0)["price"] is None
