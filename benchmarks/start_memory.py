"""Host memory of every rank at the start and at the end of a training under torchrun, of a model given as a function.

    python benchmarks/start_memory.py                              # 0.5 billion parameters, shard=4 and tensor=4
    python benchmarks/start_memory.py --shape 8b --layers 8        # a quarter of the layers of Llama 3, 8B
    python benchmarks/start_memory.py --from-file                  # weights that a safetensors file has
    python benchmarks/start_memory.py --as-object                  # the model itself, for comparison

Peaks are the largest resident memory (VmHWM) beyond that of a process that has trained a small model before: until the
weights are in place, and from the last step until the training is over. ``share`` is what a rank holds of the weights;
``unit`` the largest block, or the embedding.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.models import Llama, LlamaShape

GIB = 2**30
SHAPES = {"0.5b": (1536, 14, 32000), "1b": (2048, 16, 32000), "8b": (4096, 32, 128256)}
"""Width, layers, vocabulary."""
SLACK = 0.1
"""GiB that may be the allocator's: what it keeps, and has kept from the model before."""


class ClassesFirst(Llama):
    """As ``F.cross_entropy`` takes them."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).transpose(1, 2)


def llama(width: int, layers: int, vocabulary: int, *, frozen: bool = False) -> Llama:
    heads = width // 128
    shape = LlamaShape(
        layers=layers,
        width=width,
        heads=heads,
        key_heads=max(1, heads // 4),
        inner=width * 7 // 2,
        vocabulary=vocabulary,
        length=16,
    )
    model = ClassesFirst(shape)
    if frozen:
        model.requires_grad_(False)
        model.norm.requires_grad_(True)
    return model


def resident(word: str) -> int:
    """VmRSS or VmHWM, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(word))
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def say_where(began: float) -> None:
    """What this process is at, every few seconds."""
    main = threading.main_thread().ident
    while True:
        time.sleep(10)
        frame, at = sys._current_frames().get(main or 0), "?"
        while frame is not None:
            if "meshfit/" in frame.f_code.co_filename:
                at = f"{frame.f_code.co_filename.rpartition('meshfit/')[2]}:{frame.f_lineno}"
                break
            frame = frame.f_back
        since = time.perf_counter() - began
        print(f"{since:.0f} s, {resident('VmRSS') / GIB:.2f} GiB, at {at}", file=sys.stderr, flush=True)


def rank(
    shape: tuple[int, int, int], plan: str, as_object: bool, one_gpu: bool, file: Path | None, frozen: bool
) -> None:
    """One rank, under torchrun: prints what it saw."""
    if os.environ["RANK"] == "0":
        threading.Thread(target=say_where, args=(time.perf_counter(),), daemon=True).start()
    if one_gpu:
        from benchmarks.nccl_ranks import RIG

        os.environ |= RIG | {"NCCL_HOSTID": f"host{os.environ['RANK']}"}
    import meshfit
    from meshfit.axes import place
    from meshfit.drive import begin

    build = lambda: llama(*shape, frozen=frozen)
    with torch.device("meta"):
        empty = build()
    weights = sum(p.nbytes for p in empty.parameters())
    units = [*empty.blocks, empty.token, empty.head]
    ids = torch.randint(1000, (8, 17), generator=torch.Generator().manual_seed(0))
    asked: dict[str, Any] = {
        "loss": F.cross_entropy,  # what it is a mean over is known: no forward to find out
        "optimizer": lambda params: torch.optim.SGD([p for p in params if p.requires_grad], lr=0.01, foreach=False),
        "steps": 1,
        "batch_size": 4,
        "plan": plan,
        "devices": "auto" if one_gpu else "cpu",
    }
    data = ids[:, :-1], ids[:, 1:]
    meshfit.fit(lambda: llama(512, 2, 32000), data, progress=False, **asked)  # imports, connections, CUDA's own memory
    base = resident("VmRSS")
    job = meshfit.Job(build() if as_object else build, data, weights=file, **asked).training()
    forget_peak()
    seen: dict[str, Any] = {}
    began = time.perf_counter()

    def in_place(*_: Any) -> None:
        seen["start"], seen["seconds"] = resident("VmHWM") - base, time.perf_counter() - began
        said = f"rank {os.environ['RANK']}: weights in place, {seen['start'] / GIB:.2f} GiB, {seen['seconds']:.0f} s"
        print(said, file=sys.stderr, flush=True)
        if one_gpu:
            seen["gpu_start"] = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()

    last = "fill" if not as_object else "look_away_from"  # what ``place`` calls when weights are where they belong
    before = getattr(place, last)
    setattr(place, last, lambda *given: (before(*given), in_place()))
    training = begin(job, lockstep=False)
    with training:
        for step in training:
            loss = step.loss
            del step
            seen["trained"] = resident("VmHWM") - base
            seen["held"] = resident("VmRSS") - base
            forget_peak()
    seen |= {"end": resident("VmHWM") - base, "left": resident("VmRSS") - base, "loss": loss}
    if one_gpu:
        seen |= {"gpu_left": torch.cuda.memory_allocated(), "gpu_trained": torch.cuda.max_memory_allocated()}
    seen |= {"weights": weights, "unit": max(sum(p.nbytes for p in unit.parameters()) for unit in units)}
    print("SEEN " + json.dumps(seen | {"rank": int(os.environ["RANK"])}), flush=True)


def pretend_weights(shape: tuple[int, int, int], folder: Path) -> Path:
    """A file of the model's shape; each tensor is a row of random numbers, again and again."""
    from meshfit.checkpoint.export import write

    with torch.device("meta"):
        empty = llama(*shape)
    row = 0.02 * torch.randn(2**20, generator=torch.Generator().manual_seed(0))
    described = {name: (p.dtype, tuple(p.shape)) for name, p in empty.named_parameters()}

    def chunks(name: str) -> Iterator[torch.Tensor]:
        left = prod(described[name][1])
        while left > 0:
            yield row[:left]
            left -= len(row)

    return Path(write(folder / "weights.safetensors", described, chunks)[0])


def measured(arguments: argparse.Namespace, plan: str, file: Path | None) -> list[dict[str, Any]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    size = arguments.ranks
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size), "--master-port", str(port)]
    command += [__file__, "--rank", "--plan", plan, "--shape", arguments.shape]
    command += [] if arguments.layers is None else ["--layers", str(arguments.layers)]
    command += ["--frozen"] * arguments.frozen
    command += [] if file is None else ["--file", str(file)]
    command += ["--as-object"] * arguments.as_object + ["--one-gpu"] * arguments.one_gpu
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    found = [json.JSONDecoder().raw_decode(said)[0] for said in done.stdout.split("SEEN ")[1:]]  # ranks share a line
    if len(found) < size:
        sys.exit(f"{len(found)} of {size} ranks came to the end")
    return sorted(found, key=lambda each: each["rank"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--layers", type=int, help="other than the shape has")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--plan", action="append", help="default: shard and tensor over all ranks")
    parser.add_argument("--as-object", action="store_true")
    parser.add_argument("--from-file", action="store_true")
    parser.add_argument("--frozen", action="store_true", help="all but the last norm: a third of a step's traffic")
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--one-gpu", action="store_true", help="ranks share one GPU, as in benchmarks/nccl_ranks.py")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    width, layers, vocabulary = SHAPES[arguments.shape]
    shape = width, arguments.layers or layers, vocabulary
    if arguments.rank:
        rank(shape, arguments.plan[0], arguments.as_object, arguments.one_gpu, arguments.file, arguments.frozen)
        return
    with tempfile.TemporaryDirectory() as folder:
        compare(arguments, pretend_weights(shape, Path(folder)) if arguments.from_file else None)


def compare(arguments: argparse.Namespace, file: Path | None) -> None:
    for plan in arguments.plan or [f"shard={arguments.ranks}", f"tensor={arguments.ranks}"]:
        found = measured(arguments, plan, file)
        weights, unit = found[0]["weights"] / GIB, found[0]["unit"] / GIB
        share = weights / arguments.ranks
        print(f"{plan}: {weights:.2f} GiB of weights; share {share:.2f}, unit {unit:.2f}, both {share + unit:.2f} GiB")
        for each in found:
            start, end, left = (each[key] / GIB for key in ("start", "end", "left"))
            more = end - each["held"] / GIB
            fits = "within" if start <= share + unit + SLACK and more <= unit + SLACK else "above"
            print(
                f"  rank {each['rank']}   start {start:.2f}   a step {each['trained'] / GIB:.2f}   held after it"
                f" {each['held'] / GIB:.2f}   end {end:.2f}   left {left:.2f} GiB   {fits}"
            )
            if arguments.one_gpu:
                start, step, left = (each[key] / GIB for key in ("gpu_start", "gpu_trained", "gpu_left"))
                print(f"    on the GPU: start {start:.2f}   a step {step:.2f}   left {left:.2f} GiB")


if __name__ == "__main__":
    main()
