"""Runs and checkpoints in a bucket, on a real S3 server: the same code, the same guarantees."""

import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import meshfit
from meshfit.checkpoint import CheckpointError, Saver, lock, newest, restore
from meshfit.checkpoint import bucket as buckets
from meshfit.checkpoint.bucket import Bucket
from meshfit.checkpoint.files import open_files
from meshfit.checkpoint.lock import Lease
from meshfit.checkpoint.read import verify
from meshfit.observe import mirror
from tests import traps
from tests.command import Forked
from tests.servers import ACCESS, READER, S3, SECRET
from tests.test_checkpoint import advance, assert_same, begun, state_of
from tests.test_resume import fit, network, weights

pytest.importorskip("obstore")


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    server = S3(tmp_path_factory.mktemp("s3") / "server")
    server.create_bucket("bucket")
    yield server
    server.stop()


@pytest.fixture
def url(s3: S3, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A place of this test's own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    asked = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{s3.port}", "AWS_ACCESS_KEY_ID": ACCESS, "AWS_REGION": "us-east-1"}
    for name, value in {**asked, "AWS_SECRET_ACCESS_KEY": SECRET}.items():
        monkeypatch.setenv(name, value)
    return f"s3://bucket/runs/{request.node.name.replace('[', '-').rstrip(']')}"


@pytest.fixture
def bucket(url: str) -> Bucket:
    return Bucket(url)


# Checkpoints


def test_there_and_back(bucket: Bucket) -> None:
    run = begun(traps.Tied)
    saver = Saver(bucket, keep=2, every=1)
    for _ in range(3):
        advance(run, 1)
        saver.after(run)
    saver.close()
    assert bucket.names() == ["0002-step-2", "0003-step-3"]
    again = begun(traps.Tied)
    restore(again, bucket)
    assert_same(state_of(again), state_of(run))
    assert verify(newest(bucket)) == []


def test_a_damaged_object_is_found(bucket: Bucket) -> None:
    run = begun(traps.Tied)
    saver = Saver(bucket)
    for _ in range(2):
        advance(run, 1)
        saver.save(run, wait=True)
    saver.close()
    content = bytearray(bucket.read("0002-step-2/rank0.safetensors"))
    content[-9] ^= 4
    bucket.write("0002-step-2/rank0.safetensors", [bytes(content)])
    again = begun(traps.Tied)
    assert restore(again, bucket).step == 1


def test_an_upload_that_fails_leaves_no_checkpoint(bucket: Bucket) -> None:
    run = begun(traps.Tied)
    saver = Saver(bucket)
    saver.save(run, wait=True)

    def fail(act: str, name: str) -> None:
        if act == "fsync" and name.startswith("0002"):
            raise OSError(errno.EIO, "connection reset")

    bucket.about = fail  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="connection reset"):
        saver.save(run, wait=True)
    assert newest(bucket).name == "0001-step-0"
    saver.close()


def test_a_large_object_is_uploaded_in_parts(bucket: Bucket) -> None:
    content = os.urandom(2**20) * 20
    chunks = (content[at : at + 3 * 2**20] for at in range(0, len(content), 3 * 2**20))
    assert bucket.write("large", chunks) == bucket.size("large") == 20 * 2**20
    assert bucket.read("large") == content
    assert bucket.read("large", 2**20, 2**20 + 7) == content[:7]


def test_the_lease(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "RENEWED", 0.2)
    monkeypatch.setattr(lock, "LOOK", 0.1)
    held = Lease(bucket)
    held.take()
    with pytest.raises(CheckpointError, match=f"process {os.getpid()} on "):
        Lease(bucket).take()  # it is renewed meanwhile
    held._over.set()
    time.sleep(0.3)
    about: Any = json.loads(bucket.read("lock"))
    bucket.write("lock", [json.dumps({**about, "pid": 2**22 - 1}).encode()])
    Lease(bucket).take()  # that process is gone
    bucket.write("lock", [json.dumps({**about, "machine": "another"}).encode()])
    monkeypatch.setattr(lock, "STALE", 0.5)
    other = Lease(bucket)
    other.take()  # nobody has renewed it for so long
    bucket.write("lock", [json.dumps({**about, "id": "another"}).encode()])
    time.sleep(0.5)
    with pytest.raises(CheckpointError, match="another run has taken"):
        other.check()


# Runs


@pytest.mark.parametrize(("first", "second"), [("data=1", "shard=2"), ("pipeline=2 microbatches=2", "data=1")])
def test_a_run_goes_on_under_another_plan(first: str, second: str, url: str) -> None:
    whole = fit(steps=9)
    begun = fit(url, steps=5, plan=first, checkpoint=2, keep=1)  # type: ignore[arg-type]
    files = open_files(url)
    assert begun.folder == url
    assert files.names("checkpoints") == ["0003-step-5"]
    written = {"run.json", "metrics.jsonl", "report.html", "events", "weights.safetensors", "checkpoints"}
    assert written <= set(files.names())
    rest = fit(url, steps=9, plan=second, checkpoint=100, resume=True)  # type: ignore[arg-type]
    assert any("from step 5 of s3://bucket/" in note for note in rest.notes), rest.notes
    assert [step.loss for step in (*begun.history, *rest.history)] == pytest.approx(
        [step.loss for step in whole.history], rel=1e-5
    )
    lines = [json.loads(line) for line in files.read("metrics.jsonl").splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 10))
    assert {"events", "events-1"} <= set(files.names())
    assert files.names("events-1")
    assert b"<html" in files.read("report.html")[:500]
    assert not list(Path(rest.local or "").rglob("checkpoints"))
    loaded = network()
    meshfit.load_weights(loaded, f"{url}/weights.safetensors")
    for name, tensor in weights(rest).items():
        torch.testing.assert_close(loaded.state_dict()[name], tensor)
    third = fit(url, steps=1)  # type: ignore[arg-type]
    assert third.folder == f"{url}-2"


SCRIPT = """
import sys
sys.path.insert(0, {root!r})
import time, torch
from tests.test_resume import fit
torch.set_num_threads(1)  # as in the tests: sums are the same to the last bit
def slowly(step):
    time.sleep(0.05)
if __name__ == "__main__":
    fit({url!r}, steps=15, checkpoint=1, each_step=slowly)
"""


def test_killed_and_resumed_is_never_stopped(url: str, tmp_path: Path) -> None:
    """What was being uploaded is no checkpoint; the lease of the dead is no hindrance."""
    script, files = tmp_path / "train.py", open_files(url)
    script.write_text(SCRIPT.format(root=str(Path(__file__).parents[1]), url=url))
    process = Forked(script)
    until = time.monotonic() + 90
    while len(files.names("checkpoints")) < 3 and time.monotonic() < until:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    resumed = fit(url, steps=15, checkpoint=100, resume=True)  # type: ignore[arg-type]
    assert 2 <= resumed.history[0].step <= 15
    never = fit(steps=15)
    for name, tensor in weights(never).items():
        assert torch.equal(weights(resumed)[name], tensor), name


def test_an_object_named_stop_ends_it(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "EVERY", 0.2)

    def stop(step: Any) -> None:
        time.sleep(0.05)
        if step.step == 3:
            open_files(url).write("stop", [b""])

    result = fit(url, steps=1000, checkpoint=1000, each_step=stop)  # type: ignore[arg-type]
    assert len(result.history) < 1000
    assert open_files(url).names("checkpoints") == [f"0001-step-{len(result.history)}"]
    assert "stop" not in open_files(url).names()


HOSTS = """
import os, sys
sys.path.insert(0, {root!r})
from pathlib import Path
import meshfit.drive
from tests.test_resume import fit
taken = meshfit.drive.Training._take_folder
if os.environ["RANK"] == "1":  # as on a host of its own
    meshfit.drive.Training._take_folder = lambda self, out, folder: taken(self, out, Path({there!r}) / folder.name)
fit({url!r}, steps=6, plan="shard=2", checkpoint=2)
"""


@pytest.mark.more
def test_ranks_of_several_hosts(url: str, tmp_path: Path) -> None:
    script, there = tmp_path / "train.py", tmp_path / "there"
    script.write_text(HOSTS.format(root=str(Path(__file__).parents[1]), there=str(there), url=url))
    asked = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(script)]
    subprocess.run(asked, check=True)
    files = open_files(url)
    assert files.names("events")[-2:] == ["rank0.jsonl", "rank1.jsonl"]
    assert b"rank 1" in files.read("timeline.svg")
    assert files.names("checkpoints") == ["0002-step-4", "0003-step-6"]
    assert list(there.iterdir()) == []


def test_refused_before_anything_is_trained(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = f"s3://{ACCESS}:{SECRET}@bucket/run"
    monkeypatch.setattr(mirror, "PATIENCE", 1.0)
    for name, value, out, says in (
        ("AWS_ACCESS_KEY_ID", READER, url, "cannot be written.*AccessDenied"),
        ("AWS_SECRET_ACCESS_KEY", "wrong", url, "cannot be written.*SignatureDoesNotMatch"),
        ("AWS_ENDPOINT_URL", "http://127.0.0.1:9", secret, "cannot be written"),
        ("X", "", "s3://bucket", "is a whole bucket.*s3://bucket/runs/one"),
        ("X", "", "ftp://host/run", "ftp:// is no place"),
    ):
        with monkeypatch.context() as changed:
            changed.setenv(name, value)
            with pytest.raises(meshfit.JobError, match=f"(?s){says}") as refused:
                fit(out, steps=1)  # type: ignore[arg-type]
            assert SECRET not in str(refused.value)


def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "PATIENCE", 0.5)
    for name, value in (("PATIENCE", 0.5), ("HURRIED", 0.2), ("TIMEOUT", "1s"), ("HURRIED_TIMEOUT", "0.3s")):
        monkeypatch.setattr(buckets, name, value)


def test_logs_that_cannot_be_written_end_nothing(
    s3: S3, url: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    impatient(monkeypatch)
    monkeypatch.setattr(mirror, "EVERY", 0.05)

    def gone(step: Any) -> None:
        if step.step == 2:
            s3.process.send_signal(signal.SIGSTOP)
        time.sleep(0.4)

    try:
        result = fit(url, steps=6, each_step=gone)  # type: ignore[arg-type]
    finally:
        s3.process.send_signal(signal.SIGCONT)
    assert len(result.history) == 6
    kept = next(note for note in result.notes if "they are in" in note)
    assert "report.html" in kept
    assert (result.local / "report.html").exists()  # type: ignore[operator]
    assert any("the training goes on" in note for note in result.notes)
    assert "the training goes on" in capfd.readouterr().err


def test_a_checkpoint_that_cannot_be_written_is_the_error(s3: S3, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    impatient(monkeypatch)

    def gone(step: Any) -> None:
        if step.step == 3:  # the save of step 2 may still be on its way
            time.sleep(1)
            s3.process.send_signal(signal.SIGSTOP)

    try:
        with pytest.raises(CheckpointError, match=r"step-4.*could not be written|step 4.*could not be written"):
            fit(url, steps=6, checkpoint=2, each_step=gone)  # type: ignore[arg-type]
    finally:
        s3.process.send_signal(signal.SIGCONT)
    rest = fit(url, steps=6, checkpoint=2, resume=True)  # type: ignore[arg-type]
    assert rest.history[0].step == 3


# Weights


def test_weights_of_a_bucket(url: str, tmp_path: Path) -> None:
    result = fit(steps=2)
    assert result.save(f"{url}/one.safetensors") == [f"{url}/one.safetensors"]
    with pytest.raises(CheckpointError, match="is there already"):
        result.save(f"{url}/one.safetensors")
    written = result.save(f"{url}/folder", shard=3000)
    assert f"{url}/folder/model.safetensors.index.json" in written
    assert len(written) > 2
    for where in (f"{url}/one.safetensors", f"{url}/folder"):
        other, (path,) = fit(steps=1, weights=where), result.save(tmp_path / f"{len(where)}.safetensors")
        same = weights(fit(steps=1, weights=path))
        for name, tensor in weights(other).items():
            assert torch.equal(tensor, same[name])
    with pytest.raises(CheckpointError, match="there is nothing at"):
        fit(steps=1, weights=f"{url}/nothing")


def test_a_model_of_hugging_face_in_a_bucket(url: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 4
    result = meshfit.fit(model, data, optimizer=torch.optim.SGD, steps=1, batch_size=2)
    names = {each.rpartition("/")[2] for each in map(str, result.save(f"{url}/model"))}
    assert {"config.json", "generation_config.json", "model.safetensors"} <= names
    files = open_files(f"{url}/model")
    for name in files.names():
        (tmp_path / name).write_bytes(files.read(name))
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert torch.equal(again.transformer.wte.weight, result.model.transformer.wte.weight)
