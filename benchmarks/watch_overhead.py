"""What do heartbeats, agreement and digests cost a step?

    python benchmarks/watch_overhead.py                 # of a 20 ms step, in CPU time of the rank

Each is measured by itself, in CPU time of the thread that runs it, so that a busy machine does not matter; shares are
of a step of 20 ms.

    phases        step, phases and times written for the caller to read: 14 spans a step, with them less without
    collectives   noting 4 of them before they are handed over
    heartbeat     the thread that beats, every 2.2 s; and as often as with hang_timeout="5 s"
    agreement     what rides in the last bucket of gradients: loss, count, stop, and a flag for each of 8 ranks, put
                  there and read; on the wire it is 11 numbers of the millions that go anyway
    digests       of a model's weights and AdamW's state, every so many steps as it chooses for itself
"""

import argparse
import tempfile
import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn

from meshfit.launch.channel import memory_file
from meshfit.launch.heartbeat import BEATS, SILENCE, Heart, SharedBoard
from meshfit.live import LIVE, StepTimes
from meshfit.run.replicas import LEAST, SHARE, mixed, total
from meshfit.transfer import together

STEP = 0.02
SPANS, COLLECTIVES, RIDERS = 14, 4, 11
LIMIT = 0.01


def each(work: Any, count: int) -> float:
    """Seconds of CPU time of this thread, the best of three."""
    best = float("inf")
    for _ in range(3):
        began = time.thread_time()
        for _ in range(count):
            work()
        best = min(best, (time.thread_time() - began) / count)
    return best


def phases() -> float:
    def step() -> None:
        for _ in range(SPANS):
            LIVE.phase(LIVE.phase("forward"))
        LIVE.step(3)
        LIVE.timed(StepTimes(3, 0.1, 0.1, 0.1, 0.1, 0.1))

    return each(step, 5000)


def collectives() -> float:
    """Of noting alone: with the wrapper, less without, on a group of one rank."""
    from meshfit.torch_private.groups import noted

    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group("gloo", store=dist.FileStore(file.name, 1), rank=0, world_size=1)
        tensor, took = torch.ones(1000), {}
        group, options = dist.group.WORLD, dist.AllreduceOptions()
        for on in (True, False):
            with noted(LIVE.collective) if on else nullcontext():
                took[on] = each(lambda: group.allreduce([tensor], options).wait(), 3000)  # type: ignore[union-attr]
        dist.destroy_process_group()
    return COLLECTIVES * max(0.0, took[True] - took[False])


def heartbeat() -> float:
    """Of one beat, while the main thread works."""
    heart = Heart(SharedBoard(memory_file(), 1), 0, silence=SILENCE)
    return each(lambda: (LIVE.tick(), heart._look(time.monotonic())), 300)


def agreement() -> float:
    """What rides in the last bucket for all ranks to agree on, put there and read."""
    numbers = torch.zeros(RIDERS, dtype=torch.float64)
    return each(
        lambda: (numbers.copy_(together([0.0] * RIDERS, numbers.device, numbers.dtype)), numbers.tolist()), 3000
    )


def digest(model: nn.Module) -> float:
    held = [tensor for p in model.parameters() for tensor in (p, torch.zeros_like(p), torch.ones_like(p))]
    return each(lambda: mixed([int(total(tensor)) for tensor in held]), 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512, help="of a model of eight layers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(options.width, options.width) for _ in range(8)))
    elements = sum(p.numel() for p in model.parameters())
    took, every = digest(model), LEAST
    while took > SHARE * every * STEP:
        every *= 2
    beat = heartbeat()
    rows = {
        f"phases, {SPANS} spans a step": (phases(), 1.0),
        f"collectives, {COLLECTIVES} a step": (collectives(), 1.0),
        f"a heartbeat every {SILENCE / BEATS:.1f} s": (beat, STEP / (SILENCE / BEATS)),
        "the same every 0.56 s": (beat, 0.0),
        f"agreement, {RIDERS} of {elements / 1e6:.1f} M numbers": (agreement(), 1.0),
        f"a digest every {every} steps": (took, 1 / every),
    }
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for name in ("", "once", "of a 20 ms step"):
        table.add_column(name, justify="left" if not name else "right")
    for name, (seconds, often) in rows.items():
        shown = f"{seconds / 0.56:.3%}" if not often else f"{seconds * often / STEP:.3%}"
        table.add_row(name, f"{seconds * 1e6:.1f} us", shown)
    share = sum(seconds * often for seconds, often in rows.values()) / STEP
    table.add_row(f"together (limit {LIMIT:.0%})", "", f"{share:.3%}")
    Console().print(table)
    raise SystemExit(0 if share < LIMIT else 1)


if __name__ == "__main__":
    main()
