"""Rehearsals of plans: good ones pass, broken ones are caught with the rank and the cause; and the parts of it."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

import meshfit
from benchmarks.one_of_eight import SMALL
from benchmarks.rehearse import BROKEN, GOOD, MLP, Broken, Good, caught, let_through, llama
from meshfit.cli.rehearse import rehearse_config, show
from meshfit.comm.order_check import Operation, check
from meshfit.errors import PlanError
from meshfit.plan import Plan
from meshfit.rehearsal.hub import Hub
from meshfit.rehearsal.others import Never, Question, Said
from meshfit.rehearsal.places import Places
from tests.few import few


@pytest.mark.parametrize("case", few(GOOD, "pipeline"))
def test_a_good_plan_passes(case: Good) -> None:
    found = let_through(case)
    assert found.problems == []
    assert found.operations > 0
    assert sorted(found.samples) == list(range(found.plan.shares))
    assert len(found.memory) == found.plan.pipeline * found.plan.branch
    assert found.timeline.startswith("<svg")


@pytest.mark.parametrize(
    "case",
    few(
        BROKEN,
        "a collective on rank 0 alone",
        "a sample's file is gone",
        "a degree that does not divide",
        "cannot be sent to ranks",
    ),
)
def test_a_broken_plan_is_caught(case: Broken) -> None:
    said, right = caught(case)
    assert right, said


@pytest.mark.parametrize(
    "plan",
    ["shard=2 pipeline=2 microbatches=2", pytest.param("tensor=2 pipeline=2 microbatches=2", marks=pytest.mark.more)],
)
def test_models_too_large_for_values_go_through_by_shape(plan: str, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(importlib.import_module("meshfit.rehearse"), "LARGEST", 0)
    found = meshfit.rehearse(**llama(SMALL), plan=plan, on="4xH100")
    assert found.problems == []
    assert not found.values
    assert [each.stage for each in found.memory] == [0, 1]
    show(found)
    assert "the plan would start" in capsys.readouterr().out


def test_memory_is_predicted_where_context_splits_the_stages() -> None:
    found = meshfit.rehearse(**llama(SMALL), plan="context=2 pipeline=2 microbatches=2", on="4xH100")
    assert found.problems == []
    assert [each.stage for each in found.memory] == [0, 1], found.notes


@pytest.mark.more
def test_a_config_alone_is_rehearsed(tmp_path: Path, capsys: Any) -> None:
    """Its ranks run a narrow model, memory is that of the wide one: too much for one card, not for another."""
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 12, "num_attention_heads": 32}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, **sizes}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config, "num_key_value_heads": 8, "tie_word_embeddings": False}))
    assert rehearse_config(path, 2048, 8, "shard=2 pipeline=2 microbatches=4", "4xH100", None) == 0
    assert "16 times narrower" in capsys.readouterr().out
    assert rehearse_config(path, 2048, 8, "shard=2 pipeline=2 microbatches=4", "4xT4", None) == 1
    assert "does not fit: rank" in capsys.readouterr().out


def test_what_is_not_rehearsed_is_refused() -> None:
    with pytest.raises(PlanError, match="model servers"):
        meshfit.rehearse(**MLP, plan="server=1 data=2", on="2xH100")
    with pytest.raises(PlanError, match="nothing to rehearse"):
        meshfit.rehearse(**MLP, plan="data=1", on="1xH100")
    with pytest.raises(PlanError, match="on= is missing"):
        meshfit.rehearse(**MLP, plan="data=2")


# Its parts, without processes


def test_the_ranks_that_run_stand_for_all() -> None:
    places = Places(Plan.parse("data=4 tensor=8 pipeline=4"))
    sample = places.sample()
    assert sample == [0, 31, 32, 63, 64, 95, 96, 127]  # the first and the last of each stage
    assert {places.nearest(rank, sample) for rank in range(128)} == set(sample)
    assert places.moved((0, 8, 16, 24), 0, 37) == (37, 45, 53, 61)  # along data
    assert places.moved(tuple(range(8)), 0, 37) == tuple(range(32, 40))
    assert places.moved((0, 32), 0, 69) == (5, 37)  # a message of two stages
    assert places.moved(tuple(range(128)), 7, 3) == tuple(range(128))
    assert places.named(37) == "rank 37 (pipeline 1, data 0, tensor 5)"


def test_logs_of_ranks_that_did_not_run() -> None:
    places = Places(Plan.parse("data=2 tensor=2"))
    issued = lambda ranks: Operation(",".join(map(str, ranks)) + "#0", "all_reduce", ranks, 4, "f")
    first = [issued((0, 1)), issued((0, 2)), issued((0, 1, 2, 3))]
    logs = [places.log_of(rank, 0, first) for rank in range(4)]
    assert logs[3] == [issued((2, 3)), issued((1, 3)), issued((0, 1, 2, 3))]
    assert check(logs) == []
    assert check([*logs[:3], logs[3][1:]]) != []


def test_what_ranks_say_to_each_other() -> None:
    """Ranks 0 and 3 of a data=4 run; the others say what the nearest one says, and who waits in vain is told."""
    heard: list[tuple[int, Any]] = []
    hub = Hub(Places(Plan.parse("data=4")), lambda rank, message: heard.append((rank, message)))
    hub.begin([0, 3])
    every, key = (0, 1, 2, 3), ("all_gather", "0,1,2,3#0", 1)
    hub.hear(0, Said(key, "a"))
    hub.hear(0, Question(key, every, every))
    assert heard == []
    hub.hear(3, Said(key, "b"))
    assert heard == [(0, ["a", "a", "a", "b"])]
    hub.hear(3, Question(("send", "0,3#0", (0, 3), 1), (0,), (0,)))
    assert len(heard) == 1  # rank 0 runs, and may send it yet
    hub.ended(0)
    assert heard[1:] == [(3, Never((0,)))]
