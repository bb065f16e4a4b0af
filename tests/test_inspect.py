"""What ``meshfit inspect`` says, of scripts, functions and configurations."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshfit.cli.inspect import inputs_of, inspect
from meshfit.errors import JobError
from meshfit.units import flop, quantity, size
from tests.command import meshfit

SCRIPT = """
import torch
from torch import nn
import meshfit

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(6))
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x.mean(1)))

print("starting")
ids = torch.randint(50, (32, 8))
meshfit.fit(
    Net, (ids, ids[:, 0]), loss=nn.functional.cross_entropy,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1), batch_size=8, epochs=1,
)
print("trained")
"""

NETS = """
from torch import nn

class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(8, 32), nn.Linear(8, 32)
        self.head = nn.Linear(32, 4)

    def forward(self, a, b):
        return self.head(self.left(a) * self.right(b))

def with_argument(width):
    return nn.Linear(width, width)

def nothing():
    return 5
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "nets_of_this_test.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


def test_a_script_on_one_screen(here: Path):
    done = meshfit(here, "inspect", "train.py")
    assert done.returncode == 0, done.stderr
    assert "starting" in done.stdout
    assert "trained" not in done.stdout  # the script went no further than its fit
    lines = done.stdout.splitlines()
    assert len(lines) < 50
    assert max(map(len, lines)) <= 100
    assert "int64 4x8" in done.stdout
    assert any(line.split()[:3] == ["layers.0-5", "TransformerEncoderLayer", "x6"] for line in lines)
    assert "head.weight is embed.weight" in done.stdout
    assert any(line.split() == ["BatchNorm", "norm"] for line in lines)
    assert any(line.startswith(" dropout ") and "layers.0.self_attn" not in line for line in lines)
    assert any(line.split()[:2] == ["2", "layers.3"] for line in lines)
    for axis in ("data", "shard", "pipeline", "branch", "tensor", "context", "expert", "recompute"):
        assert any(line.split()[:1] == [axis] for line in lines), axis


def test_a_script_for_machines(here: Path):
    done = meshfit(here, "inspect", "train.py", "--json")
    assert done.returncode == 0, done.stderr
    assert "starting" in done.stderr  # what the script prints stays out of the way
    found = json.loads(done.stdout)
    assert found["kind"] == "Net"
    assert found["samples"] == 4
    assert found["ties"] == {"head.weight": "embed.weight"}
    assert found["norms"] == ["norm"]
    assert [split["stages"] for split in found["splits"]] == [2, 4, 8]
    assert found["splits"][0]["ties"] == ["embed.weight"]
    assert found["splits"][0]["before"] == ["layers.3"]
    assert found["axes"]["data"]["takes"] is True
    layers = next(row for row in found["rows"] if row["name"] == "layers.0-5")
    assert layers["count"] == 6
    net = nn.TransformerEncoderLayer(16, 2, 32)
    assert layers["parameters"] == 6 * sum(p.numel() for p in net.parameters())
    assert 0.5 < layers["share"] < 1
    assert found["flops_backward"] > found["flops"] > 0


def said(capsys: pytest.CaptureFixture[str], target: str, *specs: str, as_json: bool = False) -> str:
    inspect(target, None, list(specs), as_json)
    return capsys.readouterr().out


def test_a_class_and_what_it_is_called_on(here: Path, capsys: pytest.CaptureFixture[str]):
    found = json.loads(said(capsys, "nets_of_this_test:Towers", "4x8", "float32 4x8", as_json=True))
    assert found["parameters"] == 2 * (8 * 32 + 32) + 32 * 4 + 4
    assert found["inputs"] == ["float32 4x8", "float32 4x8"]
    assert found["axes"]["branch"]["takes"] is True
    assert found["axes"]["tensor"] == found["axes"]["tensor"] | {"takes": True, "most": 32}
    (pair,) = found["pairs"]
    assert pair["columns"] == ["left.weight", "right.weight"]
    assert pair["rows"] == ["head.weight"]
    named = json.loads(said(capsys, "nets_of_this_test:Towers", "b=4x8", "a=4x8", as_json=True))
    assert named["flops"] == found["flops"]


def test_a_hugging_face_configuration(here: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("transformers")
    config: dict[str, Any] = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "vocab_size": 1000,
    }
    (here / "config.json").write_text(json.dumps(config))
    text = said(capsys, "config.json")
    assert "LlamaForCausalLM" in text
    assert "int64 2x128" in text
    assert "layers.0-2" in text
    assert "LlamaDecoderLayer x3" in text
    assert "int64 3x64" in said(capsys, "config.json", "input_ids=int64 3x64")


@pytest.mark.parametrize(
    ("target", "specs", "words"),
    [
        ("model", [], "model cannot be inspected"),
        ("nowhere.py", [], "there is no script nowhere.py"),
        ("nowhere.json", [], "there is no file"),
        ("nets_of_this_test:Absent", ["4x8"], "there is no nets_of_this_test:Absent"),
        ("nets_of_this_test:Towers", [], "what is nets_of_this_test:Towers called on"),
        ("nets_of_this_test:with_argument", ["4x8"], "cannot be called without arguments"),
        ("nets_of_this_test:nothing", ["4x8"], "made something of type int, not an nn.Module"),
        ("nets_of_this_test:Towers", ["flot32 4x8"], "'flot32 4x8' is not understood"),
        ("nets_of_this_test:Towers", ["4 by 8"], "'4 by 8' is not understood"),
        ("nets_of_this_test:Towers", ["a=4x8", "4x8"], "some of --input have names"),
    ],
)
def test_what_cannot_be_inspected(here: Path, target: str, specs: list[str], words: str):
    with pytest.raises(JobError) as error:
        inspect(target, None, specs)
    assert words in str(error.value)


def test_inputs_from_words():
    ids = inputs_of(["int64 4x128"])
    assert (ids.shape, ids.dtype) == ((4, 128), torch.int64)
    pair = inputs_of(["2x3", "bool 2"])
    assert [tensor.dtype for tensor in pair] == [torch.float32, torch.bool]
    assert list(inputs_of(["x = bfloat16 2x3"])) == ["x"]


def test_units():
    assert [quantity(n, "B") for n in (0, 12, 999, 1000, 12_345, 8_030_000_000)] == [
        "0",
        "12",
        "999",
        "1 k",
        "12.3 k",
        "8.03 B",
    ]
    assert flop(3.42e9) == "3.42 GFLOP"
    assert flop(5) == "5 FLOP"
    assert [size(n) for n in (0, 512, 1024, 1536, 12 << 20, 1.5 * 2**40)] == [
        "0 B",
        "512 B",
        "1 KiB",
        "1.5 KiB",
        "12 MiB",
        "1.5 TiB",
    ]
