"""Checkpoints in a bucket: the same code, the same guarantees."""

import errno
import json
import os
from typing import Any

import pytest

from meshfit.checkpoint import CheckpointError, Saver, newest, restore
from meshfit.checkpoint.bucket import Bucket, Lease
from meshfit.checkpoint.read import verify
from tests import traps
from tests.test_checkpoint import advance, assert_same, begun, state_of

obstore = pytest.importorskip("obstore")


@pytest.fixture
def bucket() -> Bucket:
    return Bucket("memory:///runs", store=obstore.store.MemoryStore())


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
    obstore.put(bucket.store, "0002-step-2/rank0.safetensors", bytes(content))
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


def test_the_lease(bucket: Bucket) -> None:
    lease = Lease(bucket)
    lease.take()
    with pytest.raises(CheckpointError, match=f"process {os.getpid()} on "):
        Lease(bucket).take()
    held: Any = json.loads(bucket.read("lock"))
    obstore.put(bucket.store, "lock", json.dumps({**held, "renewed": held["renewed"] - 400}).encode())
    other = Lease(bucket)
    other.take()  # nobody has renewed it
    other.release()
    assert bucket.names() == []
