"""Values that ranks exchange come as they were sent, and nothing in them is run."""

import json
import pickle
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from meshfit.comm.encoding import HEAD, Unreadable, dumps, loads
from meshfit.comm.objects import all_gather_object, broadcast_object, gather_object
from meshfit.data.tree import PerSample, Ragged
from meshfit.errors import JobError, RankError
from meshfit.loss.objective import LossDenominator, TargetPlace
from tests.distributed import distributed


class Pair(NamedTuple):
    left: int
    right: str


class Kind(Enum):
    ONE = 1


@dataclass(frozen=True, slots=True)
class Box:
    size: tuple[int, ...]
    inner: Any = None


class Named(OrderedDict):
    pass


VALUES = [
    None,
    True,
    2**80,
    -0.0,
    1e-300,
    float("inf"),
    "ü\0",
    b"\0\xff",
    [1, (2, [3])],
    {(1, 2): {"a": {3}}, None: frozenset({4})},
    torch.float32,
    torch.device("cuda:1"),
    torch.Size([2, 3]),
    slice(1, None, 2),
    range(3, 9, 2),
    complex(1, -2),
    Pair(1, "x"),
    Kind.ONE,
    Box((1, 2), [Box((3,))]),
    LossDenominator(kind="targets", targets=TargetPlace(1, 1)),
    Path("runs/a"),
    PerSample([Ragged(["a", "b"]), (1,)]),
    LossDenominator,
]


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_a_value_comes_as_it_was_sent(value: Any) -> None:
    got = loads(dumps(value))
    assert got == value
    assert type(got) is type(value)
    assert str(got) == str(value)  # -0.0, the order of a dict


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_tensors_come_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    sent = [torch.randn(shape).to(dtype), {"t": torch.randn(3, 2).to(dtype).t()}, np.arange(4.0), np.float32(0.1)]
    got = loads(dumps(sent))
    assert got[0].dtype == dtype
    assert torch.equal(got[0], sent[0])
    assert torch.equal(got[1]["t"], sent[1]["t"])
    assert (got[2] == sent[2]).all()
    assert got[3] == sent[3]
    assert type(got[3]) is np.float32
    column = torch.randn(3, 3).to(dtype)[:1, 1]
    assert torch.equal(loads(dumps(column)), column)


def test_outputs_with_a_name_keep_their_attributes() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    sent = outputs.CausalLMOutput(logits=torch.ones(2, 3))
    got = loads(dumps([sent, Named(a=1, b=Named())]))
    assert type(got[0]) is outputs.CausalLMOutput
    assert torch.equal(got[0].logits, sent.logits)
    assert got[0].loss is None
    assert list(got[0].keys()) == ["logits"]
    assert got[1] == Named(a=1, b=Named())
    assert type(got[1]["b"]) is Named


class Own(ValueError):
    def __init__(self, one: int, two: int):
        super().__init__(f"{one} and {two}")


def test_a_class_under_no_name_is_found() -> None:
    """Of a function; so is that of a script, in ranks."""

    @dataclass
    class Local:
        logits: torch.Tensor

    back = loads(dumps(Local(torch.ones(2))))
    assert type(back) is Local
    assert torch.equal(back.logits, torch.ones(2))


def test_errors_say_what_they_said() -> None:
    got = loads(dumps([JobError("no", "a", "b"), RankError("x", trace="t"), KeyError("k"), Own(1, 2)]))
    assert [str(each) for each in got] == ["no\n  a\n  b", "x\n\nt", "'k'", "Own: 1 and 2"]
    assert [type(each) for each in got] == [JobError, RankError, KeyError, ValueError]
    missing = loads(dumps(FileNotFoundError(2, "No such file", "a.txt")))
    assert str(missing) == "[Errno 2] No such file: 'a.txt'"


def test_what_cannot_be_sent_is_refused() -> None:
    ring: list[Any] = []
    ring.append(ring)
    for value in (lambda: 0, object(), print, torch.nn.Linear(1, 1), ring):
        with pytest.raises(TypeError, match="cannot be sent to another rank"):
            dumps(value)


class Canary:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def words(said: Any, tail: bytes = b"") -> bytes:
    text = json.dumps(said).encode()
    return len(text).to_bytes(HEAD, "big") + text + tail


@pytest.mark.parametrize(
    "said",
    [
        ["dataclass", "os:system", {"a": 1}],
        ["dataclass", "subprocess:Popen", {"args": "touch canary"}],
        ["dataclass", "antigravity:x", {}],
        ["dataclass", "tests.test_encoding:Box", {"__class__": 1}],
        ["dataclass", "meshfit.plan:Plan.parse", {}],
        ["named tuple", "tests.test_encoding:Pair", 1],
        ["named dict", "tests.test_encoding:Box"],
        ["enum", "tests.test_encoding:Kind", "__class__"],
        ["error", "builtins:exec", ["x"], None],
        ["error", "builtins:SystemExit", [0], None],
        ["torch", "load"],
        ["class", "subprocess:Popen"],
        ["tensor", "float32", [2**60]],
        ["tensor", "float32", [-1]],
        ["tensor", "load", [1]],
        ["nothing", 1],
        [],
        ["dict", 1],
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(said: Any) -> None:
    with pytest.raises(Unreadable):
        loads(words(said))


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    bad = pickle.dumps(Canary(tmp_path / "canary"))
    for sent in (bad, words(None) + bad, b"", b"\xff" * 40, words([[[]]])[:-2]):
        with suppress(Unreadable):
            loads(sent)
    assert not (tmp_path / "canary").exists()
    source = Path(__file__).parents[1] / "src" / "meshfit"
    for path in source.rglob("*.py"):
        text = path.read_text()
        assert "broadcast_object_list" not in text, path
        assert "dist.all_gather_object" not in text, path
        assert "dist.gather_object" not in text, path


@distributed(world=3)
def test_all_ranks_hear_all() -> None:
    import torch.distributed as dist

    rank = dist.get_rank()
    mine = {"rank": rank, "t": torch.full((rank,), float(rank))}
    every = all_gather_object(mine)
    assert [each["rank"] for each in every] == [0, 1, 2]
    assert torch.equal(every[2]["t"], torch.tensor([2.0, 2.0]))
    assert broadcast_object("a" * 1000 if rank == 0 else None) == "a" * 1000
    found = gather_object((rank, "x" * rank * 100))
    assert found == (None if rank else [(0, ""), (1, "x" * 100), (2, "x" * 200)])
