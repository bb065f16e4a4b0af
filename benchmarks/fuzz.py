"""Trainings drawn at random under plans drawn at random: each trains as a plain loop on one device does, or is refused.

    python benchmarks/fuzz.py --draws 200
    python benchmarks/fuzz.py --draws 50 --seed 7 --plans "tensor=2;data=2 pipeline=2"
    python benchmarks/fuzz.py --draws 50 --set "optimizer=muon clip=0.5"        # what all draws have in common
    python benchmarks/fuzz.py --draw "blocks=LSTM,Experts loss='ce ignore' plan='shard=2'"     # one, again, with traces
    python benchmarks/fuzz.py --draw "..." --shrink                          # the same finding in fewer words

A draw is a model of odd and ordinary blocks (fuzz_blocks.py), data, a loss, an optimizer and options (fuzz_models.py)
and a plan of one to four CPU ranks, in double precision. ``fit`` trains it for a few steps, and so does a loop without
meshfit (fuzz_alone.py). Compared are the loss, gradient norm and learning rate of each step, what it logged,
evaluations, and in the end all weights, buffers and optimizer states, within LIMIT, or what a change of the weights by
their last bit makes of the loop.

    equal       within the limit
    refused     an error of meshfit's own before the first step, or while it traced it
    late        one after the first step
    dropped     the loop does not run, or is not equal to itself after such a change
    WRONG, RAW (another error), HUNG

The seed is printed: the same one makes the same draws. Exit code 1 if any is in capitals.
"""

import argparse
import dataclasses
import json
import math
import multiprocessing
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # ranks look the blocks up under the name benchmarks.fuzz_blocks

import torch
from torch import Tensor

import meshfit
from benchmarks import fuzz_alone, fuzz_models
from benchmarks.fuzz_alone import Trained
from benchmarks.fuzz_blocks import BLOCKS
from benchmarks.fuzz_models import METRICS, OPTIMIZERS, SCHEDULERS, STEPS, Draw
from meshfit.checkpoint.manifest import newest
from meshfit.checkpoint.read import OnDisk
from meshfit.errors import MeshfitError, RankError
from meshfit.history import History
from meshfit.plan import Plan

LIMIT, LIMIT_SINGLE = 1e-9, 2e-4
"""Relative; where a block computes in single precision, the second."""
SHAKE, SHAKE_SINGLE, CHAOS = 2e-15, 1e-7, 1e-6
"""Changes of the weights that the loop is tried with; what it may become by the first is at most the last."""
SMALL = 0.1  # a tensor whose largest element is smaller is compared by this
SECONDS = 300.0  # until a draw counts as hung

WORDS = ("data", "shard", "tensor", "pipeline", "context", "expert", "branch")
SCHEDULES = ("sequential", "gpipe", "1f1b", "interleaved", "zbv", "dualpipev")


# Draws


def drawn_plan(draw: random.Random, blocks: tuple[str, ...], head: str) -> str:
    """Words of one to four ranks, most of them such as this model can be spread by."""
    axes = ["data", "data", "shard", "shard", "tensor", "tensor", "pipeline", "pipeline", "context"]
    axes += ["expert"] * 4 * ("Experts" in blocks) + ["branch"] * 4 * ("Towers" in blocks)
    axes += ["expert", "branch"] * (draw.random() < 0.1)
    kind = draw.random()
    if kind < 0.08:
        words = {"data": 1}
    elif kind < 0.6:
        words = {draw.choice(axes): draw.choice((2, 2, 2, 3, 4))}
    else:
        words = dict.fromkeys((draw.choice(axes), draw.choice(axes)), 2)
    more: dict[str, Any] = {}
    if draw.random() < 0.15:
        words.setdefault("data", 2)
        if math.prod(words.values()) <= 4 and words["data"] > 1:
            more["server"] = draw.choice((1, 1, 2))
    if "shard" in words and draw.random() < 0.5:
        more["zero"] = draw.choice((1, 2))
    if "tensor" in words and draw.random() < 0.4:
        more["sequence"] = draw.choice(("split", "whole"))
    if "context" in words and draw.random() < 0.4:
        more["attention"] = draw.choice(("gather", "ulysses"))
    if "pipeline" in words and draw.random() < 0.6:
        more["schedule"] = draw.choice(SCHEDULES)
    if draw.random() < 0.35:
        more["microbatches"] = draw.choice((2, 2, 3, 4))
    if draw.random() < 0.25:
        more["recompute"] = draw.choice(("full", "selective", *("loss", "full+loss") * (head in ("words", "tied"))))
    if draw.random() < 0.2:
        several = ("optimizer", "parameters", "activations", "optimizer+activations")
        more["offload"] = draw.choice(("activations",) if "server" in more else several)
    return " ".join(f"{word}={value}" for word, value in (more | words).items())


def drawn(draw: random.Random, given: dict[str, Any]) -> Draw:
    """A draw; ``given`` holds what is not left to chance."""
    some = lambda share, value, other: value if draw.random() < share else other
    how = draw.choice(("loss", "loss", "loss", "loss", "own", *STEPS))
    stem = draw.choice(("features", "features", "tokens", "pair", "fields"))
    heads = ["classes", "classes", "words", "numbers"] + ["tied"] * (2 * (stem in ("tokens", "fields")))
    blocks = given.get("blocks", tuple(draw.choices(list(BLOCKS), k=draw.choice((1, 1, 2, 2, 3)))))
    head = given.get("head", draw.choice(heads))
    made: dict[str, Any] = {
        "stem": stem,
        "blocks": blocks,
        "wiring": draw.choice(
            ("plain", "plain", "pre", "post", "shared", "dense", "scaled", "twice", "albert", "frozen")
        ),
        "head": head,
        "form": draw.choice(("tensor", "tensor", "dict", "tuple", "dataclass")),
        "given": draw.choice(("object", "function")),
        "how": how,
        "data": draw.choice(
            ("tensors", "tensors", "tensors", "dataset", "list", "loader", "drops", "stream", "function")
        ),
        "samples": draw.choice((5, 7, 8, 11, 12)),
        "batch": draw.choice((2, 3, 4, 4, 5, 6, 8)),
        "shuffle": some(0.3, 1, 0),
        "steps": draw.choice((3, 4, 5, 6)),
        "plan": drawn_plan(draw, blocks, head),
        "optimizer": some(0.3, "adamw", draw.choice(list(OPTIMIZERS))),
        "scheduler": some(0.3, draw.choice(list(SCHEDULERS)), ""),
        "clip": some(0.35, draw.choice((0.05, 0.5, 100.0)), 0.0),
        "ema": some(0.2, 0.7, 0.0),
        "valid": some(0.3, draw.choice((1, 2, 10)), 0),
        "metrics": "",
        "resume": some(0.25, drawn_plan(draw, blocks, head), ""),
        "after": draw.choice((1, 2)),
        "verb": draw.choice(("fit", "fit", "fit", "steps", "callbacks")),
        "seed": draw.randrange(100),
    }
    made["loss"] = draw.choice(list(fuzz_models.LOSSES_OF[given.get("head", made["head"])]))
    by_head = {"classes": ("accuracy", "spread", "top"), "numbers": ("error", "spread", "top")}
    made["metrics"] = some(0.6, draw.choice(by_head.get(made["head"], ("accuracy", "kept", "spread", "top"))), "")
    return sensible(Draw(**(made | given)))


def sensible(draw: Draw) -> Draw:
    """Without what means nothing, or what the plain loop does not do."""
    change: dict[str, Any] = {}
    if draw.how == "own":
        change |= {
            "loss": draw.loss.replace(" aux", ""),
            "form": "tensor",
            "metrics": "",
            "stem": "features" if draw.stem == "pair" else draw.stem,
        }
        if "each" in draw.loss:
            change["loss"] = "ce"
    if draw.how == "parts":
        change |= {
            "stem": "features" if draw.stem == "fields" else draw.stem,
            "loss": draw.loss.replace(" aux", ""),
            "form": "tensor",
        }
    if draw.how in ("temperature", "twice"):
        change["loss"] = draw.loss.replace(" aux", "").replace(" pair", "")
    if draw.how in ("twice", "decay", "logs") and " pair" in draw.loss:
        change["loss"] = change.get("loss", draw.loss).replace(" pair", "")
    if draw.loss == "each" or not draw.valid:
        change["metrics"] = ""
    if (draw.head == "tied" and draw.stem not in ("tokens", "fields")) or (
        draw.head == "tied" and change.get("stem") == "features"
    ):
        change["head"] = "words"
    if draw.scheduler == "plateau" and not draw.valid:
        change["valid"] = 1
    if "module" in draw.loss:
        change["form"] = "tensor"
    if draw.data in ("stream", "loader", "drops"):
        change["shuffle"] = 0
    if draw.data == "drops":
        change["samples"] = max(draw.samples, draw.batch)
    if draw.batch_norms and draw.how != "loss":  # the loop knows parts of a batch by its outputs alone
        change |= {
            name: " ".join(w for w in getattr(draw, name).split() if "microbatches" not in w)
            for name in ("plan", "resume")
        }
    parts = max(math.prod(draw.degree(word) for word in ("data", "shard", "expert", "microbatches")), 1)
    if draw.batch < parts and draw.seed % 8:  # else the plan is refused
        change |= {"batch": parts, "samples": parts + draw.samples}
    if not draw.resume:
        change["after"] = 0
    elif draw.counts or draw.verb == "steps" or draw.data == "function":
        change |= {"resume": "", "after": 0}
    return dataclasses.replace(draw, **change)


# A training by meshfit


def fitted(draw: Draw) -> Trained:
    """The same as ``fuzz_alone.train``, by meshfit."""
    if not draw.resume:
        return _fitted(draw, draw.plan, draw.steps, None)
    with tempfile.TemporaryDirectory(prefix="meshfit-fuzz-") as folder:
        first = _fitted(draw, draw.plan, min(draw.after, draw.steps - 1), folder)
        rest = _fitted(draw, draw.resume, draw.steps, folder)
        for name in ("losses", "norms", "rates", "values"):
            setattr(rest, name, getattr(first, name) + getattr(rest, name))
        return rest


def _fitted(draw: Draw, plan: str, steps: int, folder: str | None) -> Trained:
    model, data = fuzz_models.build(draw), fuzz_models.as_data(draw, fuzz_models.whole(draw, draw.samples, 1))
    loaded = draw.data in ("loader", "drops")
    kept: list[Any] = []
    schedule = fuzz_models.SCHEDULERS.get(draw.scheduler)
    total = draw.steps

    def scheduler(optimizer: Any) -> Any:
        if isinstance(optimizer, list):
            return [scheduler(one) for one in optimizer]
        assert schedule is not None
        return schedule(optimizer, total) if schedule.__code__.co_argcount == 2 else schedule(optimizer)

    asked: dict[str, Any] = {
        "model": model if draw.given == "object" else lambda: fuzz_models.build(draw),
        "data": data,
        "optimizer": fuzz_models.OPTIMIZERS[draw.optimizer],
        "batch_size": None if loaded else draw.batch,
        "shuffle": None if loaded else bool(draw.shuffle),
        "steps": steps,
        "plan": plan,
        "devices": f"cpu:{Plan.parse(plan).devices}",
        "seed": draw.seed,
        "timeout": 120.0,
    }
    if draw.how == "loss":
        asked["loss"] = fuzz_models.LOSSES[draw.loss]
    elif draw.how != "own":
        asked["step"] = fuzz_models.make_step(draw)
    if draw.scheduler:
        asked["scheduler"] = scheduler
    asked |= {name: getattr(draw, name) for name in ("clip", "ema") if getattr(draw, name)}
    if draw.valid:
        asked |= {"valid": fuzz_models.whole(draw, draw.samples + 1, 2), "valid_every": draw.valid}
        if draw.metrics:
            asked["metrics"] = {draw.metrics: METRICS[draw.metrics]}
    if folder is not None:
        asked |= {"out": folder, "checkpoint": 1000, "resume": steps == draw.steps}
    if draw.verb == "steps":
        history = History()
        for step in meshfit.steps(**asked):
            history.add(step)
        trained = model if draw.given == "object" else None
    else:
        asked |= {"progress": False}
        if draw.verb == "callbacks":
            asked |= {"callbacks": kept.append, "each_step": lambda step: kept.append(step.loss)}
        result = meshfit.fit(**asked)
        history, trained = result.history, result.model
    found = Trained()
    for step in history:
        found.losses.append(step.loss)
        found.norms.append(step.grad_norm)
        found.rates.append(step.lr)
        found.values.append(dict(step.values))
        if step.valid:
            found.valid[step.step] = [dict(step.valid)]
    if trained is not None:
        found.tensors = fuzz_alone.tensors_of(trained)
    if folder is not None:
        found.states = _saved_states(folder)
    return found


def _saved_states(folder: str) -> dict[str, Tensor]:
    manifest = newest(Path(folder))
    files, states = OnDisk.of(manifest), {}
    for name, stored in manifest.tensors.items():
        if name.startswith("optimizer/"):
            room = torch.empty(stored.shape, dtype=stored.dtype)
            files.fill(room, tuple((0, size) for size in stored.shape), stored)
            states[name.removeprefix("optimizer/")] = room
    return states


# What became of it


def far(got: Trained, want: Trained) -> list[tuple[float, str]]:
    """How far apart, relative, each thing that both have; the farthest first."""
    found: list[tuple[float, str]] = []

    def number(name: str, a: float, b: float) -> None:
        off = 0.0 if a == b or (math.isnan(a) and math.isnan(b)) else abs(a - b) / max(abs(b), SMALL)
        found.append((math.inf if math.isnan(off) else off, f"{name} {a!r}, alone {b!r}"))

    for name in ("losses", "norms", "rates"):
        mine, theirs = getattr(got, name), getattr(want, name)
        if len(mine) != len(theirs):
            return [(math.inf, f"{len(mine)} {name}, alone {len(theirs)}")]
        for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            number(f"{name}[{i}]", a, b)
    for i, (a, b) in enumerate(zip(got.values, want.values, strict=True)):
        for name in a.keys() | b.keys():
            number(f"value {name} of step {i + 1}", a.get(name, math.inf), b.get(name, math.nan))
    for step, (theirs, *_) in got.valid.items():
        best: list[tuple[float, str]] = []
        for mine in want.valid.get(step, [{}]):
            start = len(found)
            for name in theirs.keys() | mine.keys():
                number(f"valid {name} after step {step}", theirs.get(name, math.inf), mine.get(name, math.nan))
            tried = sorted(found[start:], reverse=True)
            del found[start:]
            best = tried if not best or tried[0][0] < best[0][0] else best
        found += best
    for kind in ("tensors", "states"):
        mine, theirs = getattr(got, kind), getattr(want, kind)
        for name in mine.keys() & theirs.keys() if mine else ():
            a, b = mine[name], theirs[name]
            if a.shape != b.shape or a.dtype != b.dtype:
                found.append((math.inf, f"{kind} {name}: {a.dtype}{tuple(a.shape)}, alone {b.dtype}{tuple(b.shape)}"))
            elif a.numel():
                wide = torch.complex128 if a.is_complex() else torch.float64
                off = (a.to(wide) - b.to(wide)).abs().max().item() / max(b.to(wide).abs().max().item(), SMALL)
                found.append((math.inf if math.isnan(off) else off, f"{kind} {name}"))
        if mine and kind == "tensors" and mine.keys() != theirs.keys():
            found.append((math.inf, f"tensors {sorted(mine.keys() ^ theirs.keys())[:3]} are there once"))
    return sorted(found, reverse=True)


def judged(draw: Draw) -> tuple[str, str]:
    """(verdict, why)."""
    try:
        want = fuzz_alone.train(draw)
        shaken = far(fuzz_alone.train(draw, shake=SHAKE_SINGLE if draw.single else SHAKE), want)[0]
    except Exception as error:
        return "dropped", f"alone: {type(error).__name__}: {error}"
    if not all(map(math.isfinite, want.losses + want.norms)):
        return "dropped", "not finite"
    if not shaken[0] < (1e-2 if draw.single else CHAOS):
        return "dropped", f"chaotic: {shaken[0]:.0e} {shaken[1]}"
    limit = max(LIMIT_SINGLE if draw.single else LIMIT, 300 * shaken[0])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got = fitted(draw)
    except MeshfitError as error:
        said = str(error)
        if isinstance(error, RankError):
            return "RAW", said
        return ("late" if error.step > 1 else "refused"), said
    except Exception:
        return "RAW", traceback.format_exc()
    off, where = far(got, want)[0]
    return ("equal", f"{off:.0e}") if off <= limit else ("WRONG", f"{off:.1e} {where} (limit {limit:.0e})")


# Running them


def serve(pipe: Any) -> None:
    """Judge draws until the other end has left."""
    torch.set_num_threads(1)
    while True:
        try:
            pipe.send(judged(Draw.parse(pipe.recv())))
        except EOFError:
            return


class Worker:
    """A process that judges draws, and is ended where one takes too long."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.pipe, theirs = multiprocessing.get_context("spawn").Pipe()
        self.process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,))
        self.process.start()
        theirs.close()

    def __call__(self, draw: Draw) -> tuple[str, str]:
        self.pipe.send(str(draw))
        try:
            if self.pipe.poll(SECONDS):
                return self.pipe.recv()
            said = "HUNG", f"no end after {SECONDS:.0f} s"
        except EOFError:
            said = "RAW", "the process ended"
        self.end()
        self.start()
        return said

    def end(self) -> None:
        self.process.kill()
        self.process.join()


def shrunk(draw: Draw, worker: Worker, verdict: str) -> Draw:
    """The same verdict in fewer words: each is set to the plainest value, as long as the verdict stays."""
    plainest = Draw()
    while True:
        tries = [
            dataclasses.replace(draw, blocks=(*draw.blocks[:i], *draw.blocks[i + 1 :])) for i in range(len(draw.blocks))
        ]
        tries += [
            dataclasses.replace(draw, **{field.name: getattr(plainest, field.name)})
            for field in dataclasses.fields(draw)
            if field.name not in ("plan", "blocks")
        ]
        tries.append(dataclasses.replace(draw, resume="", after=0))
        tries += [dataclasses.replace(draw, resume="", after=0, plan=draw.resume)] * bool(draw.resume)
        for name in ("plan", "resume"):
            words = getattr(draw, name).split()
            tries += [
                dataclasses.replace(draw, **{name: " ".join(words[:i] + words[i + 1 :])})
                for i in range(len(words) * (len(words) > 1))
            ]
        tries += [dataclasses.replace(draw, steps=steps) for steps in (1, 2) if steps < draw.steps]
        for each in tries:
            try:
                fewer = len(str(each)) < len(str(draw)) and each == sensible(each) and worker(each)[0] == verdict
            except Exception:
                fewer = False
            if fewer:
                draw = each
                print(f"    {draw}", flush=True)
                break
        else:
            return draw


def headline(said: str) -> str:
    """The first line, without what differs from draw to draw."""
    return said.strip().splitlines()[0][:160] if said.strip() else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="number of the first draw")
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--plans", default="", help="plans to choose from, with ; between them")
    parser.add_argument("--set", default="", help="words that all draws have")
    parser.add_argument("--draw", default="", help="one draw, in words")
    parser.add_argument("--shrink", action="store_true")
    parser.add_argument("--out", default="", help="a file for each draw's verdict, as lines of JSON")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.draw:
        draw = Draw.parse(given.draw)
        if given.shrink:
            worker = Worker()
            verdict = worker(draw)[0]
            print(verdict, shrunk(draw, worker, verdict), sep="\n")
            worker.end()
            return 0
        verdict, said = judged(draw)
        print(verdict, said, sep="\n")
        return int(verdict.isupper())
    seed = random.randrange(10**6) if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)
    fixed = {
        name: getattr(Draw.parse(given.set), name)
        for name in (w.partition("=")[0] for w in fuzz_models.shlex.split(given.set))
    }
    worker, until = Worker(), time.monotonic() + 60 * given.minutes
    tally, reasons = Counter[str](), Counter[str]()
    for i in range(given.first, given.first + given.draws):
        if time.monotonic() > until:
            break
        chance = random.Random(f"{seed}/{i}")
        if given.plans:
            fixed["plan"] = chance.choice(given.plans.split(";"))
        draw, start = drawn(chance, fixed), time.monotonic()
        verdict, said = worker(draw)
        tally[verdict] += 1
        if verdict in ("refused", "late"):
            reasons[headline(said).partition(": ")[2] or headline(said)] += 1
        shown = headline(said) if not verdict.isupper() else said.strip().splitlines()[-1][:160]
        print(f"{i:4} {verdict:8} {time.monotonic() - start:5.1f} s  {draw}\n{'':14}{shown}", flush=True)
        if given.out:
            with Path(given.out).open("a") as file:
                file.write(
                    json.dumps({"i": i, "seed": seed, "verdict": verdict, "draw": str(draw), "said": said}) + "\n"
                )
    worker.end()
    print("\n" + ", ".join(f"{count} {name}" for name, count in tally.most_common()))
    for reason, count in reasons.most_common():
        print(f"{count:6} {reason}")
    return int(any(name.isupper() for name in tally))


if __name__ == "__main__":
    sys.exit(main())
