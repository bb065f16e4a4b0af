"""Faults: whatever happens to a save, and to what is on disk, a checkpoint is complete and true, or it is none."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshfit.checkpoint import CheckpointError, Damaged, Saver, newest, restore, save
from meshfit.checkpoint.files import Files
from meshfit.checkpoint.lock import Lock
from meshfit.checkpoint.manifest import Skipped, complete, render
from meshfit.checkpoint.read import verify
from meshfit.checkpoint.saver import expected_bytes
from meshfit.loop import train
from meshfit.run import Run
from tests.command import run as run_python
from tests.distributed import distributed
from tests.test_checkpoint import advance, assert_same, begun, state_of

MODEL = lambda: nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 4))
BLOCK = 2048
WRITES = ("write", "open", "fsync", "make", "rename")


class Faulty(Files):
    """Lets the ``n``-th act on the disk fail: by an error, or by the end of this process."""

    def __init__(self, root: Path, fault: Callable[[int, str, str], None]):
        super().__init__(root)
        self.fault, self.acts = fault, 0

    def about(self, act: str, name: str) -> None:
        self.acts += 1
        self.fault(self.acts, act, name)

    def write(self, name: str, chunks: Any) -> int:
        return super().write(name, _small(chunks))


def _small(chunks: Any) -> Iterator[memoryview]:
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        yield from (view[at : at + 512] for at in range(0, len(view), 512))


def saved(folder: Path, steps: int = 1) -> tuple[Run, dict[str, Tensor]]:
    run = begun(MODEL)
    advance(run, steps)
    saver = Saver(folder, block=BLOCK, keep=9)
    saver.save(run, wait=True)
    saver.close()
    return run, state_of(run)


# Killed


def test_killed_at_any_point_of_a_save(tmp_path: Path) -> None:
    """Each act on the disk in turn: a process that saves is killed right before it. The save is whole or not there; an
    intact one always loads, with what it was saved with; and the next run can save."""
    run, first = saved(tmp_path / "start")
    counted = Faulty(tmp_path / "count", lambda n, act, name: None)
    advance(run, 1)
    second = state_of(run)
    shutil.copytree(tmp_path / "start", tmp_path / "count")
    Saver(counted, block=BLOCK).save(run, wait=True)
    points, seen = counted.acts, {1: 0, 2: 0}
    assert points >= 30
    for point in range(1, points + 1):
        folder = tmp_path / "now"
        shutil.copytree(tmp_path / "start", folder)

        def kill(n: int, act: str, name: str, point: int = point) -> None:
            if n == point:
                os.kill(os.getpid(), signal.SIGKILL)

        if (child := os.fork()) == 0:
            try:
                Saver(Faulty(folder, kill), block=BLOCK).save(run, wait=True)
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), f"point {point} of {points}"
        again = begun(MODEL)
        found = restore(again, folder)
        assert_same(state_of(again), {1: first, 2: second}[found.step])
        assert verify(found) == []
        seen[found.step] += 1
        saver = Saver(folder, keep=1)  # the lock of the dead is no hindrance
        saver.save(again, wait=True)
        saver.close()
        assert len([name for name in os.listdir(folder) if "step" in name]) == 1
        shutil.rmtree(folder)
    assert min(seen.values()) > 0


def test_killed_while_older_ones_are_removed(tmp_path: Path) -> None:
    """The new one is whole before the first byte of another goes; the best is never touched; the next save goes on."""
    run, start = begun(MODEL), tmp_path / "start"
    saver = Saver(start, block=BLOCK, keep=9)
    for loss in (1.0, 3.0, 2.0):
        advance(run, 1)
        saver.save(run, {"loss": loss}, wait=True)
    saver.close()
    advance(run, 1)
    seen: set[tuple[str, ...]] = set()
    for point in range(1, 99):
        folder = tmp_path / "now"
        shutil.copytree(start, folder)

        def kill(n: int, act: str, name: str, removed: list[int] = [], point: int = point) -> None:  # noqa: B006
            removed += [n] * ((act == "remove" and "manifest" in name) or bool(removed))
            if len(removed) == point:
                os.kill(os.getpid(), signal.SIGKILL)

        if (child := os.fork()) == 0:
            try:
                Saver(Faulty(folder, kill), block=BLOCK, keep=1, keep_best="-loss").save(run, {"loss": 4.0}, wait=True)
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        there = [found.name for found in complete(Files(folder))]
        assert {"0001-step-1", "0004-step-4"} <= set(there)
        assert all(verify(found) == [] for found in complete(Files(folder)))
        seen.add(tuple(there))
        again = begun(MODEL)
        assert restore(again, folder).step == 4
        saver = Saver(folder, keep=1, keep_best="-loss")
        saver.save(again, wait=True)
        saver.close()
        assert sorted(name for name in os.listdir(folder) if "step" in name) == ["0001-step-1", "0005-step-4"]
        shutil.rmtree(folder)
        if not os.WIFSIGNALED(status):
            break
    assert len(seen) == 3
    assert point >= 8


@distributed(world=2)
def test_a_rank_that_fails_after_the_other_has_written(tmp_path: Path) -> None:
    """Never a mix: the older checkpoint is used, and both ranks hear of it."""
    run = begun(MODEL, "shard=2")
    advance(run, 1)
    want = state_of(run)
    save(run, tmp_path)
    advance(run, 1)

    def fault(n: int, act: str, name: str) -> None:
        if dist.get_rank() == 1 and act == "fsync" and name.endswith("rank1.safetensors"):
            raise OSError(errno.EIO, "Input/output error")

    saver = Saver(Faulty(tmp_path, fault))
    with pytest.raises(CheckpointError, match="Input/output error"):
        saver.save(run, wait=True)
    dist.barrier()
    again = begun(MODEL, "shard=2")
    assert restore(again, tmp_path).step == 1
    assert_same(state_of(again), want)


def test_a_leftover_acknowledgement_is_not_believed(tmp_path: Path) -> None:
    run, _ = saved(tmp_path)
    advance(run, 1)

    def leave(n: int, act: str, name: str) -> None:
        if act == "rename" and name.endswith("rank0.json"):
            path = tmp_path / (name + ".part")
            path.write_text(json.dumps({**json.loads(path.read_text()), "number": "of another save"}))

    with pytest.raises(CheckpointError, match="another save"):
        Saver(Faulty(tmp_path, leave)).save(run, wait=True)
    assert newest(tmp_path).step == 1


# Full disks


def test_full_disk_at_any_offset(tmp_path: Path) -> None:
    run, want = saved(tmp_path)
    advance(run, 1)
    acts: list[str] = []
    Saver(Faulty(tmp_path / "x", lambda n, act, name: acts.append(act)), block=BLOCK).save(run, wait=True)
    last = max(n for n, act in enumerate(acts, 1) if act in WRITES)
    for point in range(2, last + 1, max(1, last // 12)):

        def full(n: int, act: str, name: str, point: int = point) -> None:
            if n >= point and act in WRITES and not name.startswith("probe"):
                raise OSError(errno.ENOSPC, "No space left on device")

        faulty = Faulty(tmp_path, full)
        saver = Saver(faulty, block=BLOCK)
        with pytest.raises(CheckpointError) as error:
            saver.save(run, wait=True)
        assert "No space left" in str(error.value)
        assert str(tmp_path) in str(error.value)
        assert "free: " in str(error.value)
        assert newest(tmp_path).step == 1
        faulty.fault = lambda n, act, name: None  # somebody makes room
        saver.save(run, wait=True)
        saver.close()
        assert newest(tmp_path).step == 2
        shutil.rmtree(tmp_path / newest(tmp_path).name)
    again = begun(MODEL)
    assert restore(again, tmp_path).step == 1
    assert_same(state_of(again), want)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)], capture_output=True)
    if made.returncode:
        pytest.skip("no tmpfs can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_small_file_system(small: Path) -> None:
    big = lambda: nn.Sequential(nn.Linear(8, 9000), nn.Linear(9000, 4))  # 1.4 MB a checkpoint
    run = begun(big)
    advance(run, 1)
    saver = Saver(small, keep=2)
    saver.save(run, wait=True)
    filler = small / "filler"
    for missing in (1, 50, 200, 400, 700, 900, 1100, 1200, 1300, 1350):  # KB of it that find room
        with filler.open("wb") as file:
            file.write(b"0" * max(0, shutil.disk_usage(small).free - missing * 1000))
        advance(run, 1) if run.step < 8 else None
        with pytest.raises(CheckpointError, match=r"(?s)could not be written.*needed: .*free: "):
            saver.save(run, wait=True)
        assert newest(small).step == 1
        filler.unlink()
    assert shutil.disk_usage(small).free > 2e6  # nothing is left of those
    saver.save(run, wait=True)
    assert newest(small).step == run.step
    saver.close()
    with (small / "filler").open("wb") as file:
        file.write(b"0" * 1_000_000)
    with pytest.raises(CheckpointError, match="no room for two checkpoints"):
        Saver(small).begin(run)


def test_what_is_expected_is_about_what_it_takes(tmp_path: Path) -> None:
    run = begun(lambda: nn.Sequential(nn.Linear(8, 3000), nn.Linear(3000, 4)))
    expected = expected_bytes(run)
    advance(run, 1)
    save(run, tmp_path)
    assert abs(newest(tmp_path).nbytes - expected) < 0.1 * expected


# Damage


def damaged(tmp_path: Path, times: int, harm: Callable[[random.Random, list[Path]], None]) -> None:
    """Harm the newer of two checkpoints again and again: always told, and the older one is used."""
    run, want = saved(tmp_path / "good")
    advance(run, 1)
    saver = Saver(tmp_path / "good", block=BLOCK, keep=9)
    saver.save(run, wait=True)
    saver.close()
    draw, again = random.Random(1), begun(MODEL)
    for i in range(times):
        shutil.copytree(tmp_path / "good", tmp_path / "bad")
        files = sorted((tmp_path / "bad" / "0002-step-2").iterdir())
        harm(draw, files)
        skipped: list[Skipped] = []
        assert restore(again, tmp_path / "bad", skipped=skipped).step == 1, f"harm {i} was not seen"
        assert skipped[0].name == "0002-step-2"
        assert any(file.name in skipped[0].why for file in files) or "manifest" in skipped[0].why
        with pytest.raises(Damaged) as error:
            restore(again, tmp_path / "bad" / "0002-step-2")
        assert "0001-step-1 is complete" in str(error.value)
        shutil.rmtree(tmp_path / "bad")
    assert_same(state_of(again), want)


def test_flipped_bits(tmp_path: Path) -> None:
    """200 of 200, over all files by their sizes, and as many in the small ones."""

    def flip(draw: random.Random, files: list[Path]) -> None:
        file = draw.choice(files)
        content = bytearray(file.read_bytes())
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        file.write_bytes(content)

    damaged(tmp_path, 200, flip)


def test_truncated_files(tmp_path: Path) -> None:
    def cut(draw: random.Random, files: list[Path]) -> None:
        file = draw.choice(files)
        os.truncate(file, draw.randrange(file.stat().st_size))

    damaged(tmp_path, 60, cut)


def test_zeroed_pages(tmp_path: Path) -> None:
    def zero(draw: random.Random, files: list[Path]) -> None:
        file = draw.choice(files)
        content = bytearray(file.read_bytes())
        at = draw.randrange(len(content))
        size = len(content[at : at + 4096])
        before = bytes(content)
        content[at : at + size] = bytes(size)
        if bytes(content) == before:
            content[at] ^= 1
        file.write_bytes(content)

    damaged(tmp_path, 100, zero)


def test_missing_and_swapped_files(tmp_path: Path) -> None:
    def harm(draw: random.Random, files: list[Path]) -> None:
        file = draw.choice(files)
        if draw.random() < 0.5:
            file.unlink()
        else:
            shutil.copy(file.parent.parent / "0001-step-1" / file.name, file)
            if file.name == "manifest.json":  # an old manifest with new files
                return

    damaged(tmp_path, 20, harm)


def test_a_file_too_many_is_found_by_verify(tmp_path: Path) -> None:
    saved(tmp_path)
    found = newest(tmp_path)
    assert verify(found) == []
    (tmp_path / found.name / "rank7.safetensors").write_bytes(b"x")
    assert verify(found) == ["rank7.safetensors does not belong to it"]


def test_what_is_no_checkpoint_is_skipped(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "0099-step-5").mkdir()
    (tmp_path / "0098-step-5").write_text("a stray file")
    (tmp_path / "0097-step-5").mkdir()
    (tmp_path / "0097-step-5" / "manifest.json").write_text("{}")
    (tmp_path / "0096-step-5").mkdir()
    (tmp_path / "0096-step-5" / "rank0.safetensors").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("")
    skipped: list[Skipped] = []
    assert newest(tmp_path, skipped).step == 1
    assert [each.name for each in skipped] == [f"00{n}-step-5" for n in (99, 98, 97, 96)]
    run = begun(MODEL)
    restore(run, tmp_path)
    assert len([note for note in run.notes if "was skipped" in note]) == 4
    assert len(list(complete(Files(tmp_path)))) == 1
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        restore(run, tmp_path / "nowhere")


@pytest.mark.parametrize("kind", ["CRC-32", "SHA-256"])
def test_a_block_is_checked_by_what_there_is(kind: str, tmp_path: Path) -> None:
    """A manifest without CRC-32 is one written before there were any."""
    from meshfit.checkpoint.manifest import parse

    _, want = saved(tmp_path)
    folder = tmp_path / "0001-step-1"
    if kind == "SHA-256":
        body = parse((folder / "manifest.json").read_bytes(), "")
        for about in body["files"].values():
            del about["crc32"]
        (folder / "manifest.json").write_bytes(render(body))
    run = begun(MODEL)
    restore(run, folder)
    assert_same(state_of(run), want)
    tensors = bytearray((folder / "rank0.safetensors").read_bytes())
    tensors[-9] ^= 1
    (folder / "rank0.safetensors").write_bytes(tensors)
    with pytest.raises(Damaged, match=f"their {kind} differs"):
        restore(begun(MODEL), folder)


def test_a_manifest_names_no_file_elsewhere(tmp_path: Path) -> None:
    from meshfit.checkpoint.manifest import parse

    saved(tmp_path)
    path = tmp_path / "0001-step-1" / "manifest.json"
    body = parse(path.read_bytes(), "")
    body["files"]["../../secret"] = {"size": 1, "sha256": ["0"]}
    path.write_bytes(render(body))
    with pytest.raises(CheckpointError, match="no name within"):
        restore(begun(MODEL), tmp_path / "0001-step-1")


def _part(body: dict[str, Any]) -> list[Any]:
    return body["tensors"]["model/0.weight"]["parts"][0]


RESIGNED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "an offset past the end": lambda body: _part(body).__setitem__(1, 10**9),
    "an offset below 0": lambda body: _part(body).__setitem__(1, -8),
    "a box beyond the shape": lambda body: _part(body)[2][0].__setitem__(1, 10**6),
    "a part in no file": lambda body: _part(body).__setitem__(0, "rank7.safetensors"),
    "block=-1": lambda body: body.update(block=-1),
    "block=0": lambda body: body.update(block=0),
    "a block of text": lambda body: body.update(block="4"),
    "few blocks": lambda body: body.update(block=3),
    "text steps": lambda body: body.update(step="12"),
    "a list as state": lambda body: body.update(state=[]),
    "lists in the state": lambda body: body["state"].update(optimizer=[], data=[]),
    "a schedule of text": lambda body: body["state"].update(scheduler="StepLR"),
    "settings of numbers": lambda body: body["state"]["optimizer"].update(settings=5),
    "no epoch": lambda body: body["state"].update(data={}),
    "tensors of numbers": lambda body: body.update(tensors=5),
    "no such dtype": lambda body: body["tensors"]["model/0.weight"].update(dtype="Tensor"),
    "a shape of text": lambda body: body["tensors"]["model/0.weight"].update(shape=["8", 8]),
    "a size of text": lambda body: body["files"]["rank0.safetensors"].update(size="1"),
}


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resigned")
    saved(folder)
    return folder / "0001-step-1"


@pytest.mark.parametrize("change", RESIGNED.values(), ids=RESIGNED)
def test_a_manifest_that_was_signed_again_is_looked_at(change: Callable, once: Path) -> None:
    path = once / "manifest.json"
    before = path.read_bytes()
    body = json.loads(before)["manifest"]
    change(body)
    path.write_bytes(render(body))
    try:
        with pytest.raises(CheckpointError):
            restore(begun(MODEL), once)
    finally:
        path.write_bytes(before)
    restore(begun(MODEL), once)


# Folders


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    def fault(n: int, act: str, name: str) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    run = begun(MODEL)
    with pytest.raises(CheckpointError, match="Read-only file system"):
        Saver(Faulty(tmp_path, fault)).begin(run)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        Saver(tmp_path / "file" / "below").begin(run)


def test_a_read_only_mount(small: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
    with pytest.raises(CheckpointError, match="Read-only file system"):
        Saver(small).begin(begun(MODEL))
    with pytest.raises(CheckpointError, match="Read-only file system"):
        Saver(small / "new").begin(begun(MODEL))


def test_a_second_run_on_a_folder_is_refused(tmp_path: Path) -> None:
    run = begun(MODEL)
    saver = Saver(tmp_path)
    saver.begin(run)
    with pytest.raises(CheckpointError, match=f"process {os.getpid()} on "):  # by this process
        Saver(tmp_path).begin(run)
    code = f"from meshfit.checkpoint.lock import Lock; from pathlib import Path; Lock(Path({str(tmp_path)!r})).take()"
    impatient = f"from meshfit.checkpoint import lock; lock.LINGER = 0.2; {code}"
    other = run_python("-c", impatient)
    assert f"process {os.getpid()} on " in other.stderr
    saver.close()
    killed = run_python("-c", code + "; import os; os.kill(os.getpid(), 9)")
    assert killed.returncode == -signal.SIGKILL
    lock = Lock(tmp_path)
    lock.take()  # the dead do not hold it
    lock.release()


def test_who_has_just_lost_its_caller_is_waited_for(tmp_path: Path) -> None:
    code = f"from meshfit.checkpoint.lock import Lock; from pathlib import Path; Lock(Path({str(tmp_path)!r})).take()"
    dying = subprocess.Popen(
        [sys.executable, "-c", code + "; print(flush=True); import os, time; time.sleep(1); os._exit(0)"], stdout=-1
    )
    assert dying.stdout is not None
    with dying, dying.stdout:
        dying.stdout.readline()
        lock = Lock(tmp_path)
        lock.take()
        lock.release()


# In the background


def test_a_write_that_fails_in_the_background(tmp_path: Path) -> None:
    run = begun(MODEL)

    def fault(n: int, act: str, name: str) -> None:
        if act == "write" and "safetensors" in name:
            raise OSError(errno.EIO, "Input/output error")

    saver = Saver(Faulty(tmp_path, fault), every=2)

    def go_on() -> None:
        for _ in train(run):
            saver.after(run)
            if saver._thread is not None:
                saver._thread.join()

    with pytest.raises(CheckpointError, match="Input/output error"):
        go_on()
    assert run.step == 3  # told at the step after the save
    assert saver.newest is None


def test_the_order_of_a_save(tmp_path: Path) -> None:
    acts: list[tuple[str, str]] = []
    run = begun(MODEL)
    files = Faulty(tmp_path, lambda n, act, name: acts.append((act, name)))
    saver = Saver(files)
    saver.begin(run)
    acts.clear()
    folder = saver.save(run, wait=True)
    order = [act for i, act in enumerate(acts) if i == 0 or acts[i - 1] != act]
    where = lambda name: f"{folder}/{name}"
    assert order == [
        ("make", folder),
        ("fsync folder", ""),
        ("open", where("rank0.safetensors")),
        ("write", where("rank0.safetensors")),
        ("fsync", where("rank0.safetensors")),
        ("open", where("rank0.json.part")),
        ("write", where("rank0.json.part")),
        ("fsync", where("rank0.json.part")),
        ("rename", where("rank0.json")),
        ("fsync folder", folder),
        ("remove", where("rank0.json")),
        ("open", where("manifest.json.part")),
        ("write", where("manifest.json.part")),
        ("fsync", where("manifest.json.part")),
        ("rename", where("manifest.json")),
        ("fsync folder", folder),
        ("fsync folder", ""),
    ]
    saver.close()


def test_the_state_at_the_save_is_saved_not_a_later_one(tmp_path: Path) -> None:
    run = begun(MODEL)
    slow = Faulty(tmp_path, lambda n, act, name: time.sleep(0.05) if "safetensors" in name else None)
    saver = Saver(slow)
    advance(run, 1)
    want = state_of(run)
    saver.save(run)
    advance(run, 3)
    assert saver.newest is None
    saver.close()
    again = begun(MODEL)
    restore(again, tmp_path)
    assert_same(state_of(again), want)
    assert again.step == 1


def test_training_waits_for_a_copy_alone(tmp_path: Path) -> None:
    run = begun(lambda: nn.Sequential(nn.Linear(8, 1000), nn.Linear(1000, 1000), nn.Linear(1000, 4)))
    advance(run, 1)
    saver = Saver(Faulty(tmp_path, lambda n, act, name: time.sleep(0.01) if act == "fsync" else None))
    saver.begin(run)
    saver.save(run)
    saver.wait()
    took = []
    for _ in range(5):  # in one of which, at least, nobody else has the processor
        began = time.perf_counter()
        saver.save(run)
        blocked = time.perf_counter() - began
        saver.wait()
        took.append(saver.seconds["write"] / blocked)
    saver.close()
    assert max(took) > 2
    assert torch.is_tensor(saver._host)
