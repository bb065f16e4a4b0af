"""The search: what it drops, it may drop; what it returns is the best of all that the cost model knows."""

from dataclasses import replace
from itertools import product

import pytest

from meshfit import Cluster, Plan, PlanError
from meshfit.planner.decoder import Decoder, Experts
from meshfit.planner.search import Allowed, Found, search
from meshfit.planner.sizes import DecoderPredictor
from meshfit.schedule.actions import Action
from meshfit.schedule.orders import schedule
from meshfit.schedule.simulate import duration, simulate

SMALL = Decoder(layers=8, hidden=1024, heads=16, ffn=4096, vocab=32000, dropout=False, bias=False, rotary=True)
LARGE = replace(
    Decoder(layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=128256),
    **dict.fromkeys(("gated", "rotary"), True),
    **dict.fromkeys(("bias", "dropout", "tied"), False),
)


def found(model: Decoder, on: str, batch: int, words: str = "auto", length: int = 2048) -> Found:
    return search(DecoderPredictor(model, Cluster.of(on), length), batch, Allowed.of(words))


def test_nothing_that_was_dropped_is_faster() -> None:
    """Against every plan of four devices that fits, one by one."""
    predictor = DecoderPredictor(SMALL, Cluster.of("4xT4"), 2048)
    best = search(predictor, 16, Allowed(precisions=("fp16",))).best
    assert best is not None
    every = 0
    for data, shard, tensor, pipeline in product((1, 2, 4), repeat=4):
        if data * shard * tensor * pipeline != 4:
            continue
        for micro, zero, recompute in product((1, 2, 4, 8, 16), (1, 2, 3), ("none", "selective", "full", "full+loss")):
            if 16 % (data * shard * micro) or (shard == 1 and zero < 3):
                continue
            for word in ("1f1b", "zbv") if pipeline > 1 else ("1f1b",):
                plan = Plan(data=data, shard=shard, tensor=tensor, pipeline=pipeline, schedule=word, zero=zero)
                one = predictor(replace(plan, microbatches=micro, recompute=recompute, precision="fp16"), 16)
                every += 1
                assert not one.fits or one.seconds >= best.seconds * (1 - 1e-9), f"{one.plan} beats {best.plan}"
    assert every > 100


def test_words_that_are_said_stay() -> None:
    said = found(LARGE, "64xH100", 128, "tensor=4 schedule=zbv recompute=full")
    assert said.best is not None
    for family in said.families:
        if family.best is not None:
            plan = family.best.plan
            assert (plan.tensor, plan.recompute) == (4, "full")
            assert plan.pipeline == 1 or plan.schedule == "zbv"
    free = found(LARGE, "64xH100", 128)
    assert free.best is not None
    assert free.best.seconds <= said.best.seconds


def test_every_plan_of_a_family_fits_and_takes_all_devices() -> None:
    some = found(LARGE, "64xH100", 128)
    assert len(some.families) > 5
    for family in some.families:
        if family.best is not None:
            assert family.best.fits
            assert family.best.plan.devices == 64
            assert family.best.seconds == pytest.approx(sum(family.best.items.values()))
    times = [family.best.seconds for family in some.families if family.best is not None]
    assert times == sorted(times)
    assert some.best is some.families[0].best


def test_a_family_that_does_not_fit_says_what_it_needs() -> None:
    rejected = {family.name: family for family in found(LARGE, "8xH100", 64).rejected}
    assert "data" in rejected
    assert "of 80 GiB" in rejected["data"].reason
    assert rejected["data"].reason.startswith("data=8")


def test_host_memory_is_the_last_resort() -> None:
    tight = Decoder(layers=24, hidden=2560, heads=32, ffn=10240, vocab=50304, dropout=False)
    alone = found(tight, "1xRTX3090", 8)
    assert alone.best is not None, "with its optimizer state on the host it fits"
    assert alone.best.plan.offloads("optimizer")
    assert alone.best.items["offload"] > 0
    many = found(tight, "8xRTX3090", 8)
    assert many.best is not None
    assert many.best.plan.offload == "none"


def test_degrees_divide_what_they_split() -> None:
    odd = replace(SMALL, heads=6, hidden=768, layers=7)
    for family in found(odd, "8xH100", 16).families:
        if family.best is not None:
            assert 6 % family.best.plan.tensor == 0
            assert family.best.plan.pipeline <= 7
    mixture = replace(SMALL, gated=True, experts=Experts(count=8, chosen=2, ffn=2048))
    spread = [f.best.plan for f in found(mixture, "8xH100", 16).families if f.best is not None and "expert" in f.axes]
    assert spread
    assert all(8 % plan.expert == 0 for plan in spread)
    assert not any("expert" in family.axes for family in found(SMALL, "8xH100", 16).families)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("tensor=3", "16 heads do not divide by 3"),
        ("data=16", "does not divide 8 devices"),
        ("pipeline=16", "8 layers"),
    ],
)
def test_words_that_no_layout_has_are_told(words: str, why: str) -> None:
    none = found(SMALL, "8xH100", 16, words)
    assert none.best is None
    assert why in none.refused


def test_a_batch_that_does_not_divide_is_told_family_by_family() -> None:
    odd = found(SMALL, "8xH100", 7)
    assert odd.best is not None
    (data,) = (family for family in odd.rejected if family.axes == ("data",))
    assert (data.reason, data.remedy) == ("data: 7 samples do not divide over 8", "a batch of 8 would")


def test_what_compiled_code_does_not_do_is_not_planned() -> None:
    whole = found(SMALL, "4xH100", 16, "compile=whole")
    assert whole.best is not None
    assert {family.axes for family in whole.families if family.best is not None} == {("data",)}
    assert whole.best.plan.recompute == "none"


def test_tensor_parallelism_stays_where_the_fast_link_reaches() -> None:
    assert all(f.best is None or f.best.plan.tensor <= 4 for f in found(LARGE, "16x4xA100-80GB", 128).families)


def test_a_partial_plan_is_read() -> None:
    assert Allowed.of("auto").fixed == {}
    assert Allowed.of("auto zero=1 schedule=zbv").fixed == {"zero": 1, "schedule": "zbv"}
    assert Allowed.of("tp=2 precision=fp8").precisions == ("fp8",)
    with pytest.raises(PlanError, match="no key"):
        Allowed.of("tensr=2")
    with pytest.raises(PlanError, match="int4"):
        Allowed.of("auto", ("bf16", "int4"))


@pytest.mark.parametrize("word", ["1f1b", "interleaved", "zbv", "dualpipev"])
def test_the_bound_is_below_what_is_simulated(word: str) -> None:
    predictor = DecoderPredictor(LARGE, Cluster.of("64xH100"), 2048)
    for micro, tensor in product((8, 16), (2, 8)):
        plan = Plan(data=16 // tensor, tensor=tensor, pipeline=4, schedule=word, microbatches=micro)
        assert predictor.at_least(plan, 512) <= predictor(plan, 512).seconds * (1 + 1e-9)


@pytest.mark.parametrize("word", ["gpipe", "1f1b", "interleaved", "zbv", "dualpipev"])
def test_a_duration_is_that_of_the_simulation(word: str) -> None:
    made = schedule(word, 4, 8)
    takes = lambda action: 1.0 + 0.1 * action.stage + (0.7 if action.kind != "F" else 0.0)
    assert duration(made, takes, 0.3) == simulate(made, takes, 0.3).seconds
    ends = {span.action: span.end for rank in simulate(made, takes, 0.3).spans for span in rank}
    for rank in simulate(made, takes, 0.3).spans:
        for span in rank:
            for need in made.needs(span.action):
                far = 0.3 if made.rank_of(need.stage) != made.rank_of(span.action.stage) else 0.0
                assert span.start >= ends[need] + far - 1e-9
    assert Action("F", 0, 0) in ends
