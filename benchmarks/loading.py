"""Samples a second from data to host memory, meshfit beside what people write today, in one run.

    python benchmarks/loading.py --data PATH

PATH holds cifar10-train.parquet (columns image: JPEG, label). Every line gives samples/s and the ratio to meshfit's
best: above 1 the other is faster. Batches of 256, shuffled, best of ``--rounds``, which take turns; each DataLoader
with 0 and 2 workers.

    none      images decoded beforehand, no transform             against a NumPy gather of the same batches, and
                                                                  Hugging Face's datasets, where installed
    augment   crop (padding 4), flip, normalise to float32        against torchvision v2, sample by sample, and against
                                                                  a DataLoader that is given the same functions
    jpeg      decoded from JPEG                                   against PIL, in a DataLoader and, where installed, in
                                                                  webdataset, grain and streaming
    tokens    rows of 1024 of 100 M uint16 tokens, batches of 32  against slices of a memory map
"""

import argparse
import contextlib
import importlib.util
import io
import multiprocessing
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).parents[1]))

import meshfit
from benchmarks.loading_peers import peers
from meshfit.data.draw import Key, SampleRandom
from meshfit.data.loader import Loader
from meshfit.data.transform import CIFAR10, crop, flip, normalise
from meshfit.launch import heap

BATCH = 256
VECTORISED = (crop(32, padding=4), flip(), normalise(*CIFAR10))


def vision() -> Any:
    """torchvision's transforms; on a CPU torch with the operators that its C library lacks there."""
    with contextlib.suppress(ImportError, RuntimeError):
        from torchvision.transforms import v2

        return v2
    beside = Path(sys.prefix) / "torchvision"
    if beside.is_dir():
        sys.path.append(str(beside))
    with contextlib.suppress(Exception):
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        for name in ("roi_align", "ps_roi_align", "roi_pool", "ps_roi_pool", "deform_conv2d"):
            library.define(f"{name}(Tensor a) -> Tensor")
            library.define(f"_{name}_backward(Tensor a) -> Tensor")
        globals()["_library"] = library
    from torchvision.transforms import v2

    return v2


class Plain(Dataset):
    """What people write: a sample at a time."""

    def __init__(self, images: Any, labels: np.ndarray, change: Callable[[Any], Any] | None = None):
        self.images, self.labels, self.change = images, labels, change

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> Any:
        image = self.images[i]
        return (image if self.change is None else self.change(image)), int(self.labels[i])


class Batched(Plain):
    """A batch at a time, with ``__getitems__``."""

    def __getitems__(self, ids: list[int]) -> Any:
        at = np.asarray(ids)
        batch = torch.from_numpy(self.images.numpy()[at]), torch.from_numpy(self.labels[at])
        return batch if self.change is None else self.change((*batch, at))


def vectorised(batch: Any) -> Any:
    images, labels, ids = batch
    content = (images, labels)
    for place, function in enumerate(VECTORISED):
        content = function(content, SampleRandom(ids, Key(0, 0, place)))
    return content


def from_pil(data: bytes) -> torch.Tensor:
    from PIL import Image

    return torch.from_numpy(np.array(Image.open(io.BytesIO(data)).convert("RGB"))).permute(2, 0, 1).contiguous()


def itself(batch: Any) -> Any:
    return batch


def loaded(data: Dataset, workers: int, *, batched: bool = False) -> Callable[[int], Iterator[Any]]:
    how: dict[str, Any] = {"collate_fn": itself} if batched else {}
    if workers:
        how |= {"persistent_workers": True, "prefetch_factor": 4}
    made = DataLoader(data, batch_size=BATCH, shuffle=True, num_workers=workers, **how)
    return lambda epoch: iter(made)


def ours(source: Any, workers: int | None = None, batch: int = BATCH, **how: Any) -> Callable[[int], Iterator[Any]]:
    device = torch.device("cpu")
    made = Loader(source=source, batch_size=batch, rank=0, ranks=1, device=device, workers=workers, **how)
    return lambda epoch: made.epoch(epoch)


def arrow(images: torch.Tensor, labels: torch.Tensor) -> Callable[[int], Iterator[Any]]:
    """Of Hugging Face's datasets, in memory, as tensors."""
    import datasets

    shape = datasets.Array3D(tuple(images.shape[1:]), "uint8")
    features = datasets.Features({"x": shape, "y": datasets.Value("int64")})
    held = datasets.Dataset.from_dict({"x": images.numpy(), "y": labels.numpy()}, features=features)
    held = held.with_format("torch")

    def batches(epoch: int) -> Iterator[Any]:
        order = np.random.default_rng(epoch).permutation(len(held))
        return (held[order[start : start + BATCH]] for start in range(0, len(order), BATCH))

    return batches


def speed(batches: Iterator[Any], samples: int, seconds: float) -> float:
    """Samples a second of one epoch, cut after ``seconds``; the first batch, which starts workers, is not timed."""
    next(batches)
    start, seen = time.perf_counter(), 0
    for _ in batches:
        seen += 1
        if time.perf_counter() - start > seconds:
            break
    return seen * samples / (time.perf_counter() - start)


class Apart:
    """A case in a process of its own, as each has in training; meshfit's with the memory that ``fit`` keeps."""

    def __init__(self, epoch: Callable[[int], Iterator[Any]], samples: int, seconds: float, name: str):
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()

        def work() -> None:
            if name.startswith("meshfit"):
                heap.keep()
            while (number := theirs.recv()) is not None:
                theirs.send(speed(epoch(number), samples, seconds))

        self.process = context.Process(target=work)
        self.process.start()
        theirs.close()

    def __call__(self, number: int) -> float:
        self.pipe.send(number)
        return self.pipe.recv()

    def end(self) -> None:
        self.pipe.send(None)
        self.process.join()


def compare(title: str, cases: dict[str, Callable[[int], Iterator[Any]]], args: Any, samples: int = BATCH) -> None:
    best = dict.fromkeys(cases, 0.0)
    running = {name: Apart(epoch, samples, args.seconds, name) for name, epoch in cases.items()}
    for number in range(args.rounds):
        for name, case in running.items():
            best[name] = max(best[name], case(number))
    for case in running.values():
        case.end()
    mine = max(value for name, value in best.items() if name.startswith("meshfit"))
    print(f"\n{title}")
    for name, value in best.items():
        print(f"  {name:44s} {value:12,.0f} /s   {value / mine:6.3f}", flush=True)


def main() -> None:
    asked = argparse.ArgumentParser(description="Samples a second, meshfit beside others.")
    asked.add_argument("--data", type=Path, required=True, help="folder with cifar10-train.parquet")
    asked.add_argument("--rounds", type=int, default=3)
    asked.add_argument("--seconds", type=float, default=4.0, help="most that one round takes")
    asked.add_argument("--only", default="none,augment,jpeg,tokens")
    args = asked.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        cache = meshfit.data.Cache(Path(folder) / "cache")
        file = args.data / "cifar10-train.parquet"
        jpeg = meshfit.data.parquet(file, columns=("image", "label"), cache=cache)
        raw = meshfit.data.parquet(file, columns=("image", "label"), cache=cache, decode=False)
        parts = [jpeg.fetch(ids) for ids in np.array_split(np.arange(len(jpeg)), 20)]
        images, labels = (torch.cat(side) for side in zip(*parts, strict=True))
        numpy_labels = labels.numpy()
        memory = meshfit.data.memory((images, labels))
        np.save(Path(folder) / "x.npy", images.numpy())
        np.save(Path(folder) / "y.npy", numpy_labels)
        mapped = meshfit.data.arrays(Path(folder) / "x.npy", Path(folder) / "y.npy")

        def gather(epoch: int) -> Iterator[Any]:
            order, held = np.random.default_rng(epoch).permutation(len(images)), images.numpy()
            for start in range(0, len(order), BATCH):
                ids = order[start : start + BATCH]
                yield held[ids], numpy_labels[ids]

        if "none" in args.only:
            cases = {
                "meshfit, memory": ours(memory),
                "meshfit, mapped file": ours(mapped),
                "NumPy gather": gather,
            }
            for workers in (0, 2):
                cases[f"DataLoader {workers} workers, __getitems__"] = loaded(
                    Batched(images, numpy_labels), workers, batched=True
                )
                cases[f"DataLoader {workers} workers, sample by sample"] = loaded(Plain(images, numpy_labels), workers)
            if importlib.util.find_spec("datasets"):
                cases["Hugging Face datasets, a batch at a time"] = arrow(images, labels)
            compare("no transform", cases, args)
        if "augment" in args.only:
            v2 = vision()
            mean, std = CIFAR10
            steps = [v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip()]
            steps += [v2.ToDtype(torch.float32, scale=True), v2.Normalize(list(mean), list(std))]
            source = memory.map(*VECTORISED)
            cases = {
                "meshfit": ours(source, 0),
                "meshfit, 2 threads": ours(source, 2),
                "meshfit, 2 processes": ours(source, 2, kind="processes"),
                "meshfit, 2 threads, normalise on device": ours(memory.map(*VECTORISED[:2]), 2),
            }
            for workers in (0, 2):
                cases[f"DataLoader {workers} workers, the same vectorised"] = loaded(
                    Batched(images, numpy_labels, vectorised), workers, batched=True
                )
                cases[f"DataLoader {workers} workers, torchvision v2"] = loaded(
                    Plain(images, numpy_labels, v2.Compose(steps)), workers
                )
            compare("crop + flip + normalise", cases, args)
        if "jpeg" in args.only:
            held = [bytes(data) for data in raw.fetch(np.arange(len(raw)))[0]]
            cases = {"meshfit": ours(jpeg, 0), "meshfit, 2 threads": ours(jpeg, 2)}
            for workers in (0, 2):
                cases[f"DataLoader {workers} workers, PIL"] = loaded(Plain(held, numpy_labels, from_pil), workers)
            vision()  # which streaming imports
            cases |= peers(held, numpy_labels, from_pil, BATCH, Path(folder))
            compare("JPEG decoding", cases, args)
        if "tokens" in args.only:
            words = np.random.default_rng(0).integers(0, 50_000, 100_000_000, dtype=np.uint16)
            words.tofile(Path(folder) / "train.bin")
            tokens = meshfit.data.tokens(Path(folder) / "train.bin", length=1024)
            view = np.memmap(Path(folder) / "train.bin", np.uint16, "r")

            class Rows(Dataset):
                def __len__(self) -> int:
                    return len(tokens)

                def __getitem__(self, i: int) -> Any:
                    row = torch.from_numpy(view[i * 1024 : i * 1024 + 1025].astype(np.int64))
                    return row[:-1], row[1:]

            def rows(workers: int) -> Callable[[int], Iterator[Any]]:
                made = DataLoader(Rows(), batch_size=32, shuffle=True, num_workers=workers)
                return lambda epoch: iter(made)

            cases = {"meshfit": ours(tokens, batch=32)}
            cases |= {f"DataLoader {workers} workers": rows(workers) for workers in (0, 2)}
            compare("tokens, rows of 1024", cases, args, samples=32)


if __name__ == "__main__":
    main()
