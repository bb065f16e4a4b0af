"""What does watching a run cost it?

    python benchmarks/observe_overhead.py                 # a 20 ms step on the CPU
    python benchmarks/observe_overhead.py --cuda          # a 60 ms step on a GPU

Two figures, both shares of a step:

    calls    CPU time of the calls that a step makes (four phases, two spans for each of four microbatches, four
             collectives counted), and of the thread that samples the machine and writes: in the first 256 steps,
             where every span is written (and on a GPU those of every fourth window marked in depth: the mean is
             given, and both kinds), and later, where few are
    wall     a loop of steps with all of it over the same loop with none, taking turns; the median over turns

The first is exact and the one to hold to its limit. The second is what a user would see, and on a busy machine mostly
noise: its quartiles say how much. On a GPU the step waits for nothing but its own device.
"""

import argparse
import statistics
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from meshfit.event_detail import MARKED, WINDOW
from meshfit.events import Events
from meshfit.gpu_clock import SAME_SECONDS
from meshfit.observe.sampler import Sampler

LIMIT = 0.005
MICROBATCHES, COLLECTIVES = 4, 4
DEEP, WRITTEN, USUAL = 1, WINDOW + 1, 5000
"""Steps: two whose spans are written one by one, of which a GPU marks one in depth; one whose are only summed up."""


class Step:
    """A step of about ``seconds`` whose parts are timed, or not."""

    def __init__(self, seconds: float, device: torch.device):
        self.device = device
        self.a = torch.randn(512, 512, device=device)
        self.count = 1
        self._settle(seconds)

    def _settle(self, seconds: float) -> None:
        for _ in range(12):
            self(None)
            began = time.perf_counter()
            self(None)
            took = time.perf_counter() - began
            self.count = max(1, round(self.count * min(8.0, seconds / max(took, 1e-6))))

    def work(self) -> None:
        for _ in range(self.count):
            torch.mm(self.a, self.a)

    def __call__(self, events: Events | None) -> None:
        span: Any = (lambda name, **about: nullcontext()) if events is None else events.span
        if events is not None:
            events.step += 1
        with span("data"):
            pass
        with span("forward_backward"):
            for i in range(MICROBATCHES):
                with span("forward", microbatch=i):
                    self.work()
                with span("backward", microbatch=i):
                    self.work()
        if events is not None:
            for _ in range(COLLECTIVES):
                events.moved("all_reduce", 1 << 20)
        with span("exchange"):
            pass
        with span("update"):
            pass
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class Watched:
    """Events and sampler as a rank has them."""

    def __init__(self, folder: Path, device: torch.device):
        self.events = Events(folder)
        self.events.on(device)
        self.sampler = Sampler(self.events, device, first=True)
        self.sampler.start()

    def close(self) -> None:
        self.sampler.stop()
        self.events.close()


def short_step() -> Step:
    """The calls of a step with little between them, yet more than marks in a GPU's stream are merged over."""
    step = Step(0.0, torch.device("cpu"))

    def work() -> None:
        until = time.perf_counter() + 2 * SAME_SECONDS
        while time.perf_counter() < until:
            pass

    step.work = work  # type: ignore[method-assign]
    return step


def calls(folder: Path, device: torch.device, *, at: int, steps: int = 2000) -> float:
    """Seconds of CPU time that the calls of step ``at`` take in this thread: with them, less without."""
    step, taken = short_step(), []
    for events in (None, Events(folder)):
        if events is not None:
            events.on(device)
            events.own_flushes = False
        began = time.thread_time()
        for i in range(steps):
            if events is not None:
                events.step = at - 1
            step(events)
            if events is not None and i % 50 == 49:
                pause = time.thread_time()
                events.flush()  # the thread's business: counted with it
                began += time.thread_time() - pause
        taken.append((time.thread_time() - began) / steps)
        if events is not None:
            events.close()
    return taken[1] - taken[0]


def thread(folder: Path, device: torch.device, step_seconds: float, *, at: int, looks: int = 30) -> float:
    """Seconds of CPU time that the sampling thread takes for each second of a run that is at step ``at``."""
    events = Events(folder)
    events.on(device)
    events.own_flushes = False
    sampler = Sampler(events, device, first=True)
    step, taken = short_step(), 0.0
    for _ in range(looks):
        for _ in range(round(1 / step_seconds)):
            events.step = at - 1
            step(events)
        began = time.thread_time()
        events.sample(sampler.look())
        events.flush()
        taken += time.thread_time() - began
    events.close()
    return taken / looks


def wall(folder: Path, device: torch.device, step: Step, turns: int, steps: int) -> list[float]:
    """Ratios of a chunk of steps with everything on to one with nothing."""
    ratios = []
    for turn in range(turns):
        took = {}
        for on in (turn % 2 == 0, turn % 2 == 1):
            watched = Watched(folder, device) if on else None
            for _ in range(3):
                step(watched.events if watched else None)
            began = time.perf_counter()
            for _ in range(steps):
                step(watched.events if watched else None)
            took[on] = time.perf_counter() - began
            if watched:
                watched.close()
        ratios.append(took[True] / took[False])
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    device = torch.device("cuda" if options.cuda else "cpu")
    seconds = 0.06 if options.cuda else 0.02
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        looked = (DEEP, WRITTEN, USUAL) if options.cuda else (DEEP, USUAL)
        parts = {at: (calls(folder, device, at=at), thread(folder, device, seconds, at=at)) for at in looked}
        step = Step(seconds, device)
        ratios = wall(folder, device, step, options.turns, options.steps)
    low, middle, high = statistics.quantiles(ratios, n=4)
    if options.cuda:
        first = tuple((a + (MARKED - 1) * b) / MARKED for a, b in zip(parts[DEEP], parts[WRITTEN], strict=True))
        parts = {0: first, **parts}
    shares = {at: per_step / seconds + per_second for at, (per_step, per_second) in parts.items()}
    table = Table(box=None, padding=(0, 2), header_style="dim")
    names = {0: "first 256 steps", DEEP: "in depth", WRITTEN: "others of them", USUAL: "later"}
    for name in (f"of a {seconds * 1e3:.0f} ms step on {device}", *(names[at] for at in parts)):
        table.add_column(name if options.cuda or name != "in depth" else names[0], justify="right")
    table.columns[0].justify = "left"
    table.add_row("calls in the step", *(f"{per_step * 1e6:.0f} us" for per_step, _ in parts.values()))
    table.add_row("sampling and writing, a second", *(f"{took * 1e3:.2f} ms" for _, took in parts.values()))
    table.add_row(f"together (limit {LIMIT:.1%})", *(f"{share:.3%}" for share in shares.values()))
    table.add_row("wall clock, watched over not", f"{middle:.4f}")
    table.add_row("  its quartiles", f"{low:.4f} to {high:.4f}")
    Console().print(table)
    limited = [shares[0] if options.cuda else shares[DEEP], shares[USUAL]]
    raise SystemExit(0 if max(limited) < LIMIT else 1)


if __name__ == "__main__":
    main()
