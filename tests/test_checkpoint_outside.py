"""Weights to and from the outside, and the command line."""

import io
import json
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, load_model, save_file
from torch import nn
from typer.testing import CliRunner

from meshfit.checkpoint import CheckpointError, Saver, newest, save
from meshfit.checkpoint.export import export, shards
from meshfit.checkpoint.outside import open_weights
from meshfit.checkpoint.weights import load_weights
from meshfit.cli.verbs import app
from tests import traps
from tests.command import run as run_python
from tests.ranked import built
from tests.test_checkpoint import advance, begun


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """A run of two steps, both saved."""
    run = begun(traps.Tied, ema=0.9)
    saver = Saver(tmp_path / "run" / "checkpoints", block=4096, keep=9)
    for _ in range(2):
        advance(run, 1)
        saver.save(run, wait=True)
    saver.close()
    return run


def assert_loaded(model: nn.Module, want: nn.Module) -> None:
    for (name, got), tensor in zip(model.state_dict().items(), want.state_dict().values(), strict=True):
        assert torch.equal(got, tensor), name


# Out


def test_one_file(run: Any, tmp_path: Path) -> None:
    (path,) = export(tmp_path / "run", tmp_path / "out.safetensors")
    fresh = traps.Tied()
    load_model(fresh, path)  # safetensors' own: knows ties by the file's metadata
    assert_loaded(fresh, run.model)
    assert "head.weight" not in load_file(path)
    read: list[int] = []
    with pytest.raises(CheckpointError, match="is there already"):
        export(tmp_path / "run", tmp_path / "out.safetensors", progress=read.append)
    assert not read
    (path,) = export(tmp_path / "run", tmp_path / "average.safetensors", kind="average")
    named = dict(zip((name for name, _ in run.model.named_parameters()), run.update.average.weights, strict=True))
    assert all(torch.equal(tensor, named[name]) for name, tensor in load_file(path).items())
    (path,) = export(tmp_path / "run", tmp_path / "half.safetensors", dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in load_file(path).values()} == {torch.bfloat16}
    with pytest.raises(CheckpointError, match="holds no best"):
        export(tmp_path / "run", tmp_path / "best.safetensors", kind="best")


def test_hugging_faces_layout(run: Any, tmp_path: Path) -> None:
    written = export(tmp_path / "run", tmp_path / "hf", shard=2000)
    assert len(written) > 2
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "hf" / file)[name], run.model.state_dict()[name])
    fresh = traps.Tied()
    load_weights(fresh, tmp_path / "hf")
    assert_loaded(fresh, run.model)
    assert [path.name for path in export(tmp_path / "run", tmp_path / "one")] == ["model.safetensors"]


def test_shards_by_size() -> None:
    assert shards({"a": 3, "b": 3, "c": 9, "d": 1}, 6) == [["a", "b"], ["c"], ["d"]]


def test_transformers_reads_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=40, n_positions=8)
    model = built(lambda: transformers.GPT2LMHeadModel(config))
    ids = torch.randint(40, (18, 8), generator=torch.Generator().manual_seed(0))
    run = begun(model, data={"input_ids": ids, "labels": ids}, loss=None)
    advance(run, 1)
    save(run, tmp_path / "run")
    export(tmp_path / "run", tmp_path / "hf", shard=10_000)
    config.save_pretrained(tmp_path / "hf")
    read = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf")
    assert_loaded(read, run.model)


# In


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("kind", ["pt", "nested", "old", "safetensors", "meshfit", "folder", "dcp"])
def test_weights_of_others(kind: str, tmp_path: Path, run: Any) -> None:
    model = run.model
    path = tmp_path / {"safetensors": "w.safetensors", "folder": "f", "dcp": "d"}.get(kind, "w.pt")
    if kind == "pt":
        torch.save(model.state_dict(), path)
    elif kind == "nested":
        torch.save({"epoch": 3, "state_dict": model.state_dict()}, path)
    elif kind == "old":
        torch.save(model.state_dict(), path, _use_new_zipfile_serialization=False)
    elif kind in ("safetensors", "folder"):
        state = {
            name: tensor for name, tensor in model.state_dict().items() if name not in ("head.weight", "other.weight")
        }
        path.mkdir() if kind == "folder" else None
        save_file(state, path / "model.safetensors" if kind == "folder" else path)
    elif kind == "meshfit":
        path = tmp_path / "run"
    else:
        dcp.save({"model": model.state_dict(), "optim": {"x": torch.ones(3)}}, checkpoint_id=path, no_dist=True)
    fresh = traps.Tied()
    assert load_weights(fresh, path) == []
    assert_loaded(fresh, model)
    assert fresh.head.weight is fresh.token.weight
    wide = nn.Linear(3, 3)
    before = wide.weight.clone()
    with pytest.raises(CheckpointError, match="does not fit the model"):
        load_weights(wide, path)
    assert torch.equal(wide.weight, before)


def test_other_dtypes_are_cast_and_parts_are_listed(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    torch.save({**model.half().state_dict(), "2.weight": torch.ones(1)}, tmp_path / "w.pt")
    fresh = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3))
    assert load_weights(fresh, tmp_path / "w.pt", partial=True) == [
        "1.weight has shape [3, 3] here, [2, 3] in the checkpoint",
        "1.bias has shape [3] here, [2] in the checkpoint",
        "2.weight is in the checkpoint, and not in the model",
    ]
    assert torch.equal(fresh[0].weight, model[0].weight.float())


class Evil:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_nothing_in_a_file_is_run(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    torch.save({"w": Evil(canary)}, tmp_path / "evil.pt")
    (tmp_path / "raw.pt").write_bytes(pickle.dumps(Evil(canary)))
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Evil(canary)))
    (tmp_path / "huge.safetensors").write_bytes(struct.pack("<Q", 2**60) + b"{}")
    lying = json.dumps({"w": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "lying.safetensors").write_bytes(struct.pack("<Q", len(lying)) + lying + b"1234")
    (tmp_path / "deep.safetensors").write_bytes(struct.pack("<Q", 200_000) + b"[" * 200_000)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "model.safetensors.index.json").write_text('{"weight_map": {"w": "../../etc/passwd"}}')
    (tmp_path / "empty.pt").write_bytes(b"")
    for name in (
        "evil.pt",
        "raw.pt",
        "dcp",
        "huge.safetensors",
        "lying.safetensors",
        "deep.safetensors",
        "hf",
        "empty.pt",
    ):
        with pytest.raises(CheckpointError):
            open_weights(tmp_path / name)
    assert not canary.exists()
    model = nn.Linear(2, 2)
    dcp.save({"weight": model.weight.detach()}, checkpoint_id=tmp_path / "chunk", no_dist=True)
    (data,) = (tmp_path / "chunk").glob("*.distcp")
    held = io.BytesIO()
    torch.save(Evil(canary), held)
    data.write_bytes(held.getvalue().ljust(data.stat().st_size, b"\0"))
    with pytest.raises(CheckpointError):
        load_weights(model, tmp_path / "chunk", partial=True)
    assert not canary.exists()


# The command line


def called(*words: Any) -> Any:
    return CliRunner().invoke(app, ["checkpoint", *map(str, words)])


def test_list_and_show(run: Any, tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints" / "0003-step-3").mkdir()
    said = called("list", tmp_path / "run").output
    assert [line.split()[0] for line in said.splitlines()[1:]] == ["0002-step-2", "0001-step-1", "0003-step-3"]
    assert "its save did not end" in said
    listed = json.loads(called("list", tmp_path / "run", "--json").output)
    assert [each.get("step") for each in listed] == [2, 1, None]
    said = called("show", tmp_path / "run", "--tensors").output
    assert "AdamW" in said
    assert "head.weight = token.weight" in said
    assert "optimizer/exp_avg/token.weight" in said
    assert json.loads(called("show", tmp_path / "run", "--json").output)["step"] == 2


def test_verify(run: Any, tmp_path: Path) -> None:
    where = tmp_path / "run" / "checkpoints"
    assert called("verify", where).exit_code == 0
    file = where / "0001-step-1" / "rank0.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert called("verify", where).exit_code == 0
    found = called("verify", where, "--all")
    assert found.exit_code == 1
    assert "0001-step-1  damaged" in found.output
    assert "rank0.safetensors" in found.output
    assert isinstance(called("verify", tmp_path / "nothing").exception, CheckpointError)


def test_diff(run: Any, tmp_path: Path) -> None:
    where = tmp_path / "run" / "checkpoints"
    assert called("diff", where / "0001-step-1", where / "0001-step-1").exit_code == 0
    found = called("diff", where / "0001-step-1", where / "0002-step-2", "--most", 99)
    assert found.exit_code == 1
    assert "model/token.weight" in found.output
    assert "step" in found.output


def test_export_and_prune(run: Any, tmp_path: Path) -> None:
    assert called("export", tmp_path / "run", tmp_path / "w.safetensors", "--dtype", "bf16").exit_code == 0
    assert load_file(tmp_path / "w.safetensors")["token.weight"].dtype == torch.bfloat16
    where = tmp_path / "run" / "checkpoints"
    (where / "0003-step-3").mkdir()
    assert "0001-step-1" in called("prune", where, "--keep", 1).output
    assert (where / "0001-step-1").exists()
    assert called("prune", where, "--keep", 1, "--yes").exit_code == 0
    assert sorted(path.name for path in where.iterdir()) == ["0002-step-2", "lock"]
    assert newest(where).step == 2


def test_a_model_is_never_all_in_memory(tmp_path: Path) -> None:
    """A checkpoint of 400 MB is verified, compared and exported by a process that may have 200 MB more than it needs
    to start."""
    saver_code = f"""
import torch
from torch import nn
from meshfit.checkpoint import save
from tests.test_checkpoint import begun
run = begun(nn.Sequential(nn.Linear(8, 1), *[nn.Linear(1, 25_000_000, bias=False) for _ in range(4)]))
save(run, {str(tmp_path / "big")!r})
"""
    assert run_python("-c", saver_code).returncode == 0
    code = f"""
import resource, sys
from meshfit.cli.verbs import app
from pathlib import Path
from meshfit.checkpoint import export as _, manifest
from meshfit.checkpoint.compare import differences
from meshfit.checkpoint.export import export
from meshfit.checkpoint.read import verify
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = manifest.newest({str(tmp_path / "big")!r})
assert found.nbytes > 400e6
assert verify(found) == []
assert list(differences(found, found)) == []
export({str(tmp_path / "big")!r}, {str(tmp_path / "out.safetensors")!r})
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 200
