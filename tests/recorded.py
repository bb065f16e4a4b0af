"""Run folders written by hand, for what is hard to provoke."""

import json
from pathlib import Path
from typing import Any

PHASES = {"data": 0.0, "forward_backward": 0.08, "exchange": 0.0, "update": 0.01}


def folder(
    path: Path,
    ranks: list[dict[str, float]],
    *,
    steps: int = 40,
    plan: str = "data=2",
    step: float = 0.1,
    within: list[tuple[str, float, float, dict[str, Any]]] = (),  # type: ignore[assignment]
    facts: dict[str, Any] | None = None,
    sample: dict[str, Any] | None = None,
    hosts: list[str] | None = None,
    skew: list[float] | None = None,
    done: bool = True,
    loss: float = 2.0,
) -> Path:
    """A run of ``steps`` steps of ``step`` seconds, whose ranks spend the given seconds in each phase of a step.

    ``within``: spans of every step (name, from, for, about) inside forward_backward. ``skew``: how far each rank's
    clock is off.
    """
    (path / "events").mkdir(parents=True)
    about: dict[str, Any] = {"plan": plan, "batch_size": 64, "seed": 0, "torch": "2", "python": "3"}
    if done:
        about |= {"seconds": steps * step, "steps": steps, "notes": [], "metrics": {}}
    (path / "run.json").write_text(json.dumps(about))
    with (path / "metrics.jsonl").open("w") as file:
        for i in range(1, steps + 1):
            line = {"step": i, "epoch": 0, "loss": loss / i, "grad_norm": 1.0, "lr": 1e-3, "samples": 64 * i}
            file.write(json.dumps({**line, "seconds": i * step, "rate": 64 / step}) + "\n")
    for rank, phases in enumerate(ranks):
        known = {"host": (hosts or ["here"] * len(ranks))[rank], "device": "cpu", "cores": 64, "threads": 1}
        known |= {"batch": 64, "microbatches": 1, **(facts or {})}
        off = (skew or [0.0] * len(ranks))[rank]
        lines: list[dict[str, Any]] = [{"rank": rank, "time": 1000.0 + off}, {"facts": known, "at": 0.0}]
        for i in range(1, steps + 1):
            at = (i - 1) * step
            for name, took in {**PHASES, **phases}.items():
                if name == "forward_backward":
                    for inner, start, length, more in within:
                        lines.append({"span": inner, "step": i, "at": at + start, "for": length, **more})
                if took:
                    lines.append({"span": name, "step": i, "at": at, "for": took})
                at += took
        every = max(1, steps // 8)
        for first in range(1, steps + 1, every):
            last = min(first + every - 1, steps)
            count = last - first + 1
            by = {name: took * count for name, took in {**PHASES, **phases}.items() if took}
            for inner, _, length, _ in within:
                by[inner] = by.get(inner, 0.0) + length * count
            lines.append({"totals": by, "steps": [first, last], "at": (first - 1) * step, "for": count * step})
            lines.append({"sample": {"cpu": 90.0, "rss": 3e8, "workers": 0, **(sample or {})}, "at": last * step})
        (path / "events" / f"rank{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
