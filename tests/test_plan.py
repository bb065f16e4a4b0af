"""The plan: text in, one value out, or one clear error."""

import re

import pytest

from meshfit.axes.buffers.check import check
from meshfit.axes.buffers.find import BufferWriter, Written
from meshfit.errors import PlanError
from meshfit.launch.devices import Devices, find
from meshfit.plan import Plan
from meshfit.plan_devices import settle
from meshfit.plan_words import translated


@pytest.mark.parametrize("text", ["data=4", "data=1", "data=2 microbatches=3 precision=bf16", "data=2 batchnorm=local"])
def test_text_form_reads_back(text: str) -> None:
    assert str(Plan.parse(text)) == text
    assert Plan.parse(str(Plan.parse(text))) == Plan.parse(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("dta=2", "did you mean data?"),
        ("data=two", "not a number"),
        ("hsdp=8", "no key 'hsdp'\n  in meshfit that is data=2 shard=4"),
        ("tp", "'tp' in the plan has no value\n  write tensor=2, say"),
        ("tp=2 tensor=2", "names tensor twice"),
        ("Tensor_Parallel=4", "in meshfit that is tensor=4"),
        ("grad_accum=8", "in meshfit that is microbatches=8"),
        ("data=2 gradient_checkpointing=true", "in meshfit that is recompute=full"),
        ("xyzzy=1", "its degrees are pipeline, data, shard"),
        ("data=2,ddp", "holds a comma\n  write spaces between words: data=2 ddp"),
        ("data=0", "counts from 1"),
        ("data", "no value"),
        ("data=2 data=3", "twice"),
        ("precision=bf61", "did you mean bf16?"),
        ("data=-1", "not a number"),
    ],
)
def test_what_cannot_be_read_is_said(text: str, says: str) -> None:
    with pytest.raises(PlanError) as error:
        Plan.parse(text)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("text", "devices", "own", "said"),
    [
        ("tp=2", None, "tensor=2", ["plan: tp=2 is tensor=2 here"]),
        ("FSDP=8", 8, "shard=8", ["plan: FSDP=8 is shard=8 here"]),
        ("ddp=2,pp=4, microbatches=8", None, "data=2 pipeline=4 microbatches=8", ["ddp=2", "pp=4"]),
        ("cp=2 ep=2", None, "context=2 expert=2", ["cp=2", "ep=2"]),
        ("pipeline=2,cut=layers.4,tp=2", None, "tensor=2 pipeline=2 cut=layers.4", ["tp=2"]),
        ("pipeline=3 cut=layers.4,layers.8", None, "pipeline=3 cut=layers.4,layers.8", []),
        ("ddp", 4, "data=4", ["plan: ddp takes the devices that are left: data=4"]),
        ("ddp", None, "data=1", ["data=1"]),
        ("data", 4, "data=4", ["data=4"]),
        ("fsdp tp=2 precision=bf16", 8, "shard=4 tensor=2 precision=bf16", ["shard=4", "tensor=2"]),
        ("data=2 fsdp", 8, "data=2 shard=4", ["shard=4"]),
        ("zero=1", 4, "shard=4 zero=1", []),
        ("zero=3", 4, "shard=4", []),
        ("zero=2 tp=2", 8, "shard=4 zero=2 tensor=2", ["tp=2"]),
    ],
)
def test_the_words_of_other_libraries(text: str, devices: int | None, own: str, said: list[str]) -> None:
    plan = settle(text, devices)
    assert plan == Plan.parse(own)
    assert len(notes := translated(text, plan)) == len(said)
    assert all(each in note for each, note in zip(said, notes, strict=True))


def test_one_degree_may_be_open() -> None:
    with pytest.raises(PlanError, match="leaves two degrees open"):
        settle("ddp fsdp", 8)
    with pytest.raises(PlanError, match="needs 6 devices but there are 8"):
        settle("fsdp tp=3", 8)
    with pytest.raises(PlanError, match="shard=1 cuts nothing"):
        settle("data=4 zero=1", 4)


def test_auto_takes_every_device() -> None:
    assert settle("auto", 4) == Plan(data=4)
    assert settle("auto", None) == Plan(data=1)
    assert settle("auto microbatches=2", 4) == Plan(data=4, microbatches=2)


def test_degrees_must_make_the_devices() -> None:
    with pytest.raises(PlanError, match="needs 3 devices but there are 4") as error:
        settle("data=3", 4)
    assert "data=4 would use all of them" in str(error.value)
    assert settle("data=3", None) == Plan(data=3)  # CPU ranks: as many as the plan names


def test_devices_as_written() -> None:
    assert find("cpu:3") == Devices("cpu", (0, 1, 2))
    assert find("cpu").count is None
    for asked in ("gpu", "cpu:x", "cuda:0,0", "cuda:99", "cpu:0", -1):
        with pytest.raises(PlanError):
            find(asked)


@pytest.mark.parametrize(
    ("text", "axes", "left"),
    [
        ("data=2 context=2 attention=ulysses", ["context"], "data=4"),
        ("tensor=3 sequence=split", ["tensor"], "data=3"),
        ("shard=2 zero=1 tensor=2", ["shard"], "data=2 tensor=2"),
        ("pipeline=2 schedule=zbv branch=2 microbatches=2", ["pipeline", "branch"], "data=4 microbatches=2"),
        ("server=1 data=2 compress=int8 lost=average", ["server"], "data=2"),
    ],
)
def test_without_an_axis_its_devices_hold_copies(text: str, axes: list[str], left: str) -> None:
    assert str(Plan.parse(text).without(*axes)) == left


@pytest.mark.parametrize("text", ["data=2 context=2 attention=ulysses", "context=2 attention=gather recompute=full"])
def test_a_refusal_for_a_buffer_names_a_plan_that_works(text: str) -> None:
    written = Written(writers=(BufferWriter(path="block", states=("mean",), updates=(), opaque=()),))
    with pytest.raises(PlanError, match=r"the buffer mean, which the forward writes(.|\n)*data=\d.* works"):
        check(Plan.parse(text), written, by_rows=False, joins=False)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("data = 2", "write data=2"),
        ("shard= 2 zero =1", "write shard=2 zero=1"),
        ("DATA=2", "write data=2"),
        ("zero1", "in meshfit that is zero=1"),
        ({"data": 2, "tensor": 2}, 'plan="data=2 tensor=2"'),
        (4, 'plan="data=4"'),
    ],
)
def test_what_people_write_at_first_is_answered_with_what_works(text, said: str) -> None:
    with pytest.raises(PlanError, match=re.escape(said)):
        Plan.parse(text)
