"""How far is the planner's cost model from trainings that others have measured?

    python benchmarks/plan_published.py --data published.jsonl
    python benchmarks/plan_published.py --data published.jsonl --rows korthikanti    # every row of a source

Each line of the file is one published training: model, hardware, parallel degrees, batch, precision, what was measured.
One physical model predicts the seconds of a step (or tokens a second, where that is what was published); devices have
one set of constants each (planner/accelerators.py), families of frameworks three (slack, host, exposed), fitted here on
all sources (known) or on all but the one that is predicted (left out; a family that no other source has takes the
defaults of planner/software.py). Trainings that differ in nothing that the model sees are taken once.

Errors are |predicted / measured - 1|: median and 90th percentile of each source, then the plain mean over sources.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import log
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.published import Published, read, shaped
from meshfit.planner.memory import step_memory
from meshfit.planner.operations import Timing
from meshfit.planner.software import FAMILIES, Software
from meshfit.planner.step import StepModel
from meshfit.planner.transformer import step_work

HOSTS = (2e-6, 8e-6, 20e-6, 35e-6, 50e-6)
EXPOSED = (0.0, 0.15, 0.3)


@dataclass(frozen=True)
class Constants:
    """Of a family of frameworks."""

    slack: float
    host: float
    exposed: float


@dataclass
class Predicted:
    """A training with its seconds under every pair of host and exposed, before slack."""

    row: Published
    seconds: dict[tuple[float, float], float]
    ideal: float
    """Seconds of the model's own arithmetic at the devices' peak: what a constant share of the peak is a share of."""

    @property
    def measured(self) -> float:
        """Seconds of a step."""
        if self.row.seconds:
            return self.row.seconds
        assert self.row.throughput
        return self.row.degrees.batch * self.row.degrees.length / self.row.throughput

    def ratio(self, constants: Constants) -> float:
        """Predicted seconds over measured ones."""
        return self.seconds[constants.host, constants.exposed] * constants.slack / self.measured

    def error(self, constants: Constants) -> float:
        """Of seconds; of tokens a second, where no seconds were published."""
        ratio = self.ratio(constants)
        return abs(ratio - 1) if self.row.seconds else abs(1 / ratio - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path, metavar="PATH", help="the published trainings, a line each")
    parser.add_argument("--rows", metavar="SOURCE", help="every row of this source, predicted without it")
    options = parser.parse_args()
    rows, left = read(options.data)
    trained = [row for row in rows if row.ran and (row.seconds or row.throughput) and shaped(row.row)]
    both = len(trained) + len(left)
    print(f"{len(trained)} of {both} trainings with a shape and a time can be described ({coverage(trained, left)})")
    unique = without_twins(trained)
    print(f"{len(unique)} without twins")
    predicted = predict(unique)
    known = fitted(predicted)
    out = {source: fitted([p for p in predicted if p.row.source != source]) for source in sources(predicted)}
    if options.rows:
        show(options.rows, predicted, out[options.rows])
        return
    report(predicted, known, out)
    report_memory(rows)


def coverage(trained: Sequence[Published], left: Sequence[object]) -> str:
    return f"{100 * len(trained) / max(1, len(trained) + len(left)):.1f} %"


def without_twins(rows: Sequence[Published]) -> list[Published]:
    seen: dict[tuple, Published] = {}
    for row in rows:
        seen.setdefault(row.twin, row)
    return list(seen.values())


def sources(predicted: Sequence[Predicted]) -> list[str]:
    return sorted({p.row.source for p in predicted})


def predict(rows: Sequence[Published]) -> list[Predicted]:
    timings: dict[str, Timing] = {}
    found = []
    for row in rows:
        device = row.cluster.accelerator
        timing = timings.setdefault(device.name, Timing(device))
        work = step_work(row.model, row.degrees, row.software)
        seconds = {}
        times: dict[tuple, float] = {}
        for host, exposed in product(HOSTS, EXPOSED):
            model = StepModel(row.cluster, replace(row.software, slack=1.0, host=host, exposed=exposed), timing)
            key = (
                *model.stages(work),
                *model.stages(replace(work, stages=(replace(work.stages[0], calls=work.calls),))),
            )
            times[key] = seconds[host, exposed] = times[key] if key in times else model(work).seconds
        peak = device.rate(row.degrees.precision) * row.devices
        found.append(Predicted(row, seconds, work.model_flops / peak))
    return found


def fitted(predicted: Sequence[Predicted]) -> dict[str, Constants]:
    """By family: slack so that sources of grades A and B are right on average; of host and exposed the pair with the
    smallest mean over all sources of the median error."""
    found = {}
    for family in FAMILIES:
        groups = defaultdict(list)
        for p in predicted:
            if p.row.family == family and not p.row.moe:
                groups[p.row.source].append(p)
        if not groups:
            continue
        best = None
        for host, exposed in product(HOSTS, EXPOSED):
            plain = Constants(1.0, host, exposed)
            graded = [group for group in groups.values() if group[0].row.grade in "AB"] or list(groups.values())
            middles = [median(log(p.ratio(plain)) for p in group) for group in graded]
            constants = replace(plain, slack=2.718281828 ** -(sum(middles) / len(middles)))
            error = sum(median(p.error(constants) for p in group) for group in groups.values()) / len(groups)
            if best is None or error < best[0]:
                best = (error, constants)
        assert best is not None
        found[family] = best[1]
    return found


def default() -> Constants:
    """Of a family that no other source has."""
    software = Software("unknown")
    nearest = lambda value, among: min(among, key=lambda other: abs(other - value))
    return Constants(software.slack, nearest(software.host, HOSTS), nearest(software.exposed, EXPOSED))


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def errors(group: Sequence[Predicted], constants: Callable[[Predicted], Constants]) -> list[float]:
    return [p.error(constants(p)) for p in group]


def report(predicted: list[Predicted], known: dict[str, Constants], out: dict[str, dict[str, Constants]]) -> None:
    of_known = lambda p: known.get(p.row.family) or default()
    of_left = lambda p: out[p.row.source].get(p.row.family) or default()
    print("\nconstants of families, all sources known")
    for family, c in known.items():
        print(f"  {family:14} slack {c.slack:.3f}  host {c.host * 1e6:.0f} us  exposed {c.exposed:.2f}")
    for title, choose in (("dense", lambda p: not p.row.moe), ("mixtures of experts", lambda p: p.row.moe)):
        print(f"\n{title:20} grade rows | left out: median   p90  rank | known: median   p90  rank")
        for source in sources(predicted):
            group = [p for p in predicted if p.row.source == source and choose(p)]
            if group:
                cells = [
                    f"{_pair(errors(group, of))} {correlation(group, of) if len(group) >= 8 else '':5}"
                    for of in (of_left, of_known)
                ]
                print(f"  {source:18} {group[0].row.grade:5} {len(group):4} | {' | '.join(cells)}")
    dense = [p for p in predicted if not p.row.moe]
    print("\nmeans over sources                 sources rows | median   p90 | goal")
    for title, chosen, constants, goal in (
        ("dense A, left out", [p for p in dense if p.row.grade == "A"], of_left, "9 / 22"),
        ("dense A, known", [p for p in dense if p.row.grade == "A"], of_known, ""),
        ("dense A and B, left out", [p for p in dense if p.row.grade in "AB"], of_left, ""),
        ("dense A and B, known", [p for p in dense if p.row.grade in "AB"], of_known, "5 / 18"),
        ("dense C, left out", [p for p in dense if p.row.grade == "C"], of_left, ""),
        ("experts A and B, known", [p for p in predicted if p.row.moe and p.row.grade in "AB"], of_known, "15 / 45"),
        ("experts A and B, left out", [p for p in predicted if p.row.moe and p.row.grade in "AB"], of_left, ""),
    ):
        names = sources(chosen)
        each = [errors([p for p in chosen if p.row.source == name], constants) for name in names]
        middle = sum(median(e) for e in each) / len(each)
        high = sum(percentile(e, 0.9) for e in each) / len(each)
        print(f"  {title:32} {len(names):5} {len(chosen):4} | {100 * middle:5.1f} {100 * high:6.1f} | {goal}")
    middle, high = of_peak([p for p in dense if p.row.grade == "A"])
    print(f"  {'dense A, a constant share of peak':43} | {100 * middle:5.1f} {100 * high:6.1f} |")


def of_peak(predicted: Sequence[Predicted]) -> tuple[float, float]:
    """Errors of a model that knows the share of the peak that other sources reach, and nothing else."""
    shares = {
        name: median(log(p.ideal / p.measured) for p in predicted if p.row.source == name)
        for name in sources(predicted)
    }
    each = []
    for name in shares:
        others = [share for other, share in shares.items() if other != name]
        guess = 2.718281828 ** (sum(others) / len(others))
        each.append([abs(p.ideal / guess / p.measured - 1) for p in predicted if p.row.source == name])
    count = len(each)
    return sum(map(median, each)) / count, sum(percentile(e, 0.9) for e in each) / count


def report_memory(rows: Sequence[Published]) -> None:
    """Errors of the peak, by what was measured; and which trainings are said not to fit."""
    print("\nmemory                 measured as   rows | median   p90 | predicted / measured")
    groups: dict[tuple[str, str, bool], list[float]] = defaultdict(list)
    for row in without_twins([row for row in rows if row.memory and row.ran]):
        assert row.memory
        found = step_memory(row.model, row.degrees, row.software)
        middle = {"allocated": found.allocated, "nvidia-smi": sum(found.device) / 2}
        predicted = middle.get(row.memory_kind, sum(found.reserved) / 2)
        groups[row.source, row.memory_kind, row.moe].append(predicted / row.memory)
    for (source, kind, moe), ratios in sorted(groups.items()):
        wrong = [abs(ratio - 1) for ratio in ratios]
        title = f"{source}{' experts' if moe else ''}"
        print(f"  {title:20} {kind:12} {len(ratios):5} |{_pair(wrong)[5:]} | {median(ratios):.2f}")
    fits = lambda row: (
        step_memory(row.model, row.degrees, row.software).device[1] < row.cluster.accelerator.memory,
        row.ran,
    )
    known = [fits(row) for row in without_twins([row for row in rows if row.recompute_known and row.grade in "AB"])]
    failed = [fit for fit, ran in known if not ran]
    ran = [fit for fit, ran in known if ran]
    said = f"{failed.count(False)} of {len(failed)} predicted so, and {ran.count(False)} of {len(ran)} that ran"
    print(f"  out of memory: {said}")


def _pair(values: Sequence[float]) -> str:
    return f"{100 * median(values):11.1f} {100 * percentile(values, 0.9):6.1f}"


def correlation(group: Sequence[Predicted], constants: Callable[[Predicted], Constants]) -> str:
    """Spearman's, of tokens a second and device, predicted and measured."""

    def ranks(values: Sequence[float]) -> list[float]:
        order = sorted(range(len(values)), key=values.__getitem__)
        found = [0.0] * len(values)
        for rank, index in enumerate(order):
            found[index] = rank
        return found

    speed = lambda p, seconds: p.row.degrees.batch * p.row.degrees.length / seconds / p.row.devices
    a = ranks([speed(p, p.measured) for p in group])
    b = ranks([speed(p, p.measured * p.ratio(constants(p))) for p in group])
    middle = (len(group) - 1) / 2
    spread = sum((x - middle) ** 2 for x in a)
    return f"{sum((x - middle) * (y - middle) for x, y in zip(a, b, strict=True)) / spread:5.2f}"


def show(source: str, predicted: Sequence[Predicted], constants: dict[str, Constants]) -> None:
    for p in predicted:
        if p.row.source == source:
            c, d, row = constants.get(p.row.family) or default(), p.row.degrees, p.row
            print(
                f"{p.ratio(c):6.3f}  {p.measured:9.3f} s  {row.row['model']['name']:22} {row.devices:5} x "
                f"{row.cluster.accelerator.name:14} length {d.length} batch {d.batch} microbatch {d.microbatch} "
                f"tensor={d.tensor} pipeline={d.pipeline}x{d.chunks} data={d.data} context={d.context} "
                f"expert={d.expert} zero={d.zero} {d.precision} {d.recompute} {d.attention} {d.schedule}"
            )


if __name__ == "__main__":
    main()
