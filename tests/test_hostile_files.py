"""Files made to do harm: nothing in them runs, none takes much memory, and what is refused is named."""

import bz2
import gzip
import io
import json
import pickle
import struct
import tarfile
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import meshfit
from meshfit.data.unfold import Unfolding, unfolded
from meshfit.errors import MeshfitError
from meshfit.launch.limits import largest_picture, largest_unfolded

MOST = 120 * 2**20  # bytes that Python and NumPy may take while a file is refused


class Evil:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@contextmanager
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        taken = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert taken < MOST, f"{taken / 2**20:.0f} MiB"


def png(width: int, height: int) -> bytes:
    """What comes before its pixels; who would read them finds the end of the file."""
    chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000)))


def repeated(piece: bytes, size: int) -> bytes:
    """gzip of so many bytes, made without holding them."""
    packer, out = zlib.compressobj(1, wbits=31), []
    for _ in range(size // 2**20):
        out.append(packer.compress(piece * (2**20 // len(piece))))
    return b"".join(out) + packer.flush()


def npz(size: int, header: bytes | None = None) -> bytes:
    """An array of so many zeros; or one that says that it is another."""
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as made, made.open("x.npy", "w", force_zip64=True) as file:
        if header is None:
            about: dict[str, Any] = {"descr": "|u1", "fortran_order": False, "shape": (size,)}
            np.lib.format.write_array_header_1_0(file, about)
        file.write(header or b"")
        for _ in range(size // 2**20):
            file.write(bytes(2**20))
    return held.getvalue()


def npy_header(shape: str) -> bytes:
    text = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}}}"
    body = text.encode().ljust(118) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(body)) + body


def in_a_tar(path: Path, name: str, data: bytes) -> None:
    with tarfile.open(path, "w") as tar:
        for each, content in ((name, data), (f"{name.rpartition('.')[0]}.cls", b"1")):
            about = tarfile.TarInfo(each)
            about.size = len(content)
            tar.addfile(about, io.BytesIO(content))


def hostile(folder: Path) -> dict[str, Callable[[], Any]]:
    """By name: what opens the file, and reads its first sample."""
    first = lambda source: source.fetch(np.array([0]))
    (folder / "pictures" / "cat").mkdir(parents=True)
    (folder / "pictures" / "cat" / "1.png").write_bytes(png(13_000, 13_000))
    (folder / "bomb.npz").write_bytes(npz(128 * 2**20))
    (folder / "lying.npz").write_bytes(npz(0, npy_header("(2**50,)")))
    (folder / "huge.npz").write_bytes(npz(0, npy_header("(1125899906842624,)")))
    (folder / "below.npy").write_bytes(npy_header("(-1, 4)"))
    (folder / "huge.npy").write_bytes(npy_header("(1125899906842624,)"))
    (folder / "no.npz").write_bytes(b"PK\x03\x04 and nothing more")
    (folder / "bomb.jsonl.gz").write_bytes(repeated(b"[1]\n", 128 * 2**20))
    (folder / "bomb.csv.gz").write_bytes(repeated(b"1,2\n", 128 * 2**20))
    (folder / "deep.jsonl").write_text("[" * 500_000 + "\n")
    mnist = folder / "mnist"
    mnist.mkdir()
    for name in ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"):
        (mnist / name).write_bytes(repeated(b"\0", 128 * 2**20))
    (folder / "idx").mkdir()
    for name in ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"):
        (folder / "idx" / name).write_bytes(b"\0\0\x08\xff" + b"\xff" * 8)
    in_a_tar(folder / "picture.tar", "a.png", png(13_000, 13_000))
    in_a_tar(
        folder / "array.tar",
        "a.npy",
        npy_header("(1125899906842624,)"),
    )
    data = meshfit.data
    return {
        "a picture of 169 million pixels": lambda: first(data.folder(folder / "pictures")),
        "an npz of 128 MiB": lambda: data.arrays(folder / "bomb.npz"),
        "an npz with a header that computes": lambda: data.arrays(folder / "lying.npz"),
        "an npz of 8 PiB": lambda: data.arrays(folder / "huge.npz"),
        "an npy of 8 PiB": lambda: data.arrays(folder / "huge.npy"),
        "an npy of less than nothing": lambda: data.arrays(folder / "below.npy"),
        "a zip that is none": lambda: data.arrays(folder / "no.npz"),
        "jsonl.gz of 128 MiB": lambda: first(data.open(folder / "bomb.jsonl.gz")),
        "csv.gz of 128 MiB": lambda: first(data.open(folder / "bomb.csv.gz")),
        "deep json": lambda: first(data.open(folder / "deep.jsonl")),
        "mnist of 128 MiB": lambda: data.mnist(mnist),
        "idx of 255 dims": lambda: data.mnist(folder / "idx"),
        "a picture in a tar": lambda: first(data.tars(folder / "picture.tar", columns=("png", "cls"))),
        "an array in a tar": lambda: first(data.tars(folder / "array.tar", columns=("npy", "cls"))),
    }


def test_each_is_refused_with_little_memory(tmp_path: Path) -> None:
    for name, opened in hostile(tmp_path).items():
        with little_memory(), pytest.raises(MeshfitError) as caught:
            opened()
        said = "unfolds to more than" if "128 MiB" in name else "pixels" if "picture" in name else ""
        assert said in str(caught.value), name
        assert 0 < len(str(caught.value)) < 1000, name


def test_pickles_in_arrays_do_not_run(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    objects = np.empty(1, object)
    objects[0] = Evil(canary)
    np.save(tmp_path / "evil.npy", objects, allow_pickle=True)
    np.savez(tmp_path / "evil.npz", x=objects)
    held = io.BytesIO()
    np.save(held, objects, allow_pickle=True)
    in_a_tar(tmp_path / "evil.tar", "a.npy", held.getvalue())
    in_a_tar(tmp_path / "evil2.tar", "a.pyd", pickle.dumps(Evil(canary)))
    for opened in (
        lambda: meshfit.data.arrays(tmp_path / "evil.npy"),
        lambda: meshfit.data.arrays(tmp_path / "evil.npz"),
        lambda: meshfit.data.tars(tmp_path / "evil.tar", columns=("npy", "cls")).fetch(np.array([0])),
    ):
        with pytest.raises(MeshfitError):
            opened()
    meshfit.data.tars(tmp_path / "evil2.tar", columns=("pyd", "cls")).fetch(np.array([0]))
    assert not canary.exists()


def test_limits_can_be_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.npz").write_bytes(npz(80 * 2**20))
    with pytest.raises(MeshfitError, match="MESHFIT_LARGEST_UNFOLDED"):
        meshfit.data.arrays(tmp_path / "x.npz")
    monkeypatch.setenv("MESHFIT_LARGEST_UNFOLDED", "0.2 GB")
    assert len(meshfit.data.arrays(tmp_path / "x.npz")) == 80 * 2**20
    assert largest_unfolded(1) == 200_000_000
    monkeypatch.setenv("MESHFIT_LARGEST_PICTURE", "many")
    with pytest.raises(MeshfitError, match="is no number"):
        largest_picture()


def test_what_is_packed_well_is_read_as_ever(tmp_path: Path) -> None:
    text = b"".join(json.dumps({"x": i, "y": i % 3}).encode() + b"\n" for i in range(1000))
    assert unfolded("a", gzip.compress(text[:500]) + gzip.compress(text[500:])) == text
    assert unfolded("a", bz2.compress(text), "bz2") == text
    assert Unfolding("a", gzip.compress(b"")).read() == b""
    for cut in (5, 30, len(gzip.compress(text)) - 3):
        with pytest.raises(OSError, match=r"cut short|unpacked"):
            unfolded("a", gzip.compress(text)[:cut])
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(text))
    assert meshfit.data.open(tmp_path / "x.jsonl.gz").fetch(np.array([7]))["x"].tolist() == [7]
    (tmp_path / "x.csv.gz").write_bytes(gzip.compress(b"x,y\n" + b"".join(b"%d,1\n" % i for i in range(300))))
    assert meshfit.data.open(tmp_path / "x.csv.gz").fetch(np.array([299]))["x"].tolist() == [299]
    np.savez_compressed(tmp_path / "x.npz", x=np.arange(10), y=torch.ones(10).numpy())
    assert len(meshfit.data.arrays(tmp_path / "x.npz")) == 10
