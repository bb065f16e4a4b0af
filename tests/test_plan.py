"""The plan: text in, one value out, or one clear error."""

import pytest

from meshfit.errors import PlanError
from meshfit.launch.devices import Devices, find
from meshfit.plan import Plan, settle


@pytest.mark.parametrize("text", ["data=4", "data=1", "data=2 microbatches=3 precision=bf16", "data=2 batchnorm=local"])
def test_text_form_reads_back(text: str) -> None:
    assert str(Plan.parse(text)) == text
    assert Plan.parse(str(Plan.parse(text))) == Plan.parse(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("dta=2", "did you mean data?"),
        ("data=two", "not a number"),
        ("fsdp=2", "no key 'fsdp'\n  in meshfit that is shard=2"),
        ("FSDP=4", "in meshfit that is shard=4"),
        ("ddp", "in meshfit that is data=2"),
        ("tp=4", "in meshfit that is tensor=4"),
        ("grad_accum=8", "in meshfit that is microbatches=8"),
        ("data=2 gradient_checkpointing=true", "in meshfit that is recompute=full"),
        ("xyzzy=1", "its degrees are pipeline, data, shard"),
        ("data=2,shard=2", "holds a comma\n  write spaces between words: data=2 shard=2"),
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
