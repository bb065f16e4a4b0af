"""How far is the planner from trainings on CPU ranks of this machine, once it has been calibrated?

    python benchmarks/plan_local.py            # 20 combinations of model and plan
    python benchmarks/plan_local.py --only "512 wide"      # those whose names say so
    python benchmarks/plan_local.py --shape 768x6          # another model instead: width and depth

Predicts each combination, trains it for some steps, and prints both: seconds of a step, bytes of weights, gradients and
optimizer state on the first rank, and whether the plan that is predicted to be the fastest of two ranks is within 10 %
of the fastest measured. Ranks share two cores with whatever else runs there: so the machine is calibrated, into a
folder of its own, before and after every training, and the prediction is the mean of both; beside it stands how far
each of the two is from it. Every rank has one thread: two that wait for each other beside other processes take as long
as these let them.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import nn

import meshfit
from meshfit import Cluster, Plan
from meshfit.auto import looked_at, predictor_of
from meshfit.job import Job
from meshfit.observe.reading import read
from meshfit.planner.calibrate import calibrated, save
from meshfit.planner.detect import profile_path
from meshfit.planner.prediction import Prediction

PLANS = ("data=1", "data=2", "shard=2", "shard=2 zero=1", "pipeline=2 microbatches=4")
STEPS = 24
BATCH = 64


class Residual(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def perceptron(width: int, depth: int) -> nn.Module:
    return nn.Sequential(nn.Linear(64, width), *(Residual(width) for _ in range(depth)), nn.Linear(width, 10))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "256 wide, 8 deep": lambda: perceptron(256, 8),
    "512 wide, 4 deep": lambda: perceptron(512, 4),
    "512 wide, 12 deep": lambda: perceptron(512, 12),
    "1024 wide, 4 deep": lambda: perceptron(1024, 4),
}


def job(build: Callable[[], nn.Module], plan: str) -> dict[str, Any]:
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(1024, 64), torch.randint(0, 10, (1024,)))
    devices = f"cpu:{Plan.parse(plan).devices}"
    how = {"loss": nn.CrossEntropyLoss(), "optimizer": lambda p: torch.optim.Adam(p, lr=1e-3), "batch_size": BATCH}
    return {"model": build(), "data": data, "plan": plan, "devices": devices, "steps": STEPS, **how}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--shape", help="width x depth of a model instead of the four")
    options = parser.parse_args()
    models = MODELS
    if options.shape:
        width, depth = map(int, options.shape.split("x"))
        models = {f"{width} wide, {depth} deep": lambda: perceptron(width, depth)}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MESHFIT_CACHE"] = str(Path(folder, "cache"))
        print(f"calibrated in {calibrate():.1f} s, then in {calibrate():.1f} s: {Cluster.detect(2)}\n")
        times, sizes, near = [], [], []
        print(
            f"{'model':20}{'plan':28}{'predicted':>11}{'+-':>6}{'measured':>11}{'error':>8}   state{'error':>8}  items"
        )
        for name, build in ((name, build) for name, build in models.items() if options.only in name):
            two: list[tuple[float, float]] = []
            for plan in PLANS:
                both, measured, told, held = one(build, plan, Path(folder, "run"))
                predicted = sum(each.seconds for each in both) / 2
                unsure = abs(both[0].seconds - both[1].seconds) / 2 / predicted
                items = {key: sum(each.items[key] for each in both) / 2 for key in both[0].items}
                times.append(predicted / measured - 1)
                sizes.append(abs(told / held - 1))
                print(
                    f"{name:20}{plan:28}{1e3 * predicted:>8.1f} ms{unsure:>6.0%}{1e3 * measured:>8.1f} ms"
                    f"{times[-1]:>+8.0%}{held / 2**20:>6.1f} M{sizes[-1]:>8.1%}  "
                    + ", ".join(f"{key} {1e3 * took:.1f}" for key, took in items.items() if took),
                    flush=True,
                )
                if Plan.parse(plan).devices == 2:
                    two.append((predicted, measured))
            best = min(two)[1]
            near.append(best <= 1.1 * min(measured for _, measured in two))
    off = median(map(abs, times))
    print(f"\nmedian error: time {off:.0%}, state {median(sizes):.1%}; {len(times)} combinations")
    print(f"the chosen plan of two ranks within 10 % of the fastest: {sum(near)} of {len(near)} models")


def calibrate(ranks: int = 2) -> float:
    """Seconds that it took."""
    path, began = profile_path(), time.perf_counter()
    assert path is not None
    save(calibrated(ranks, threads=1), path)
    return time.perf_counter() - began


def one(
    build: Callable[[], nn.Module], plan: str, out: Path
) -> tuple[tuple[Prediction, Prediction], float, float, float]:
    """Predictions with the machine before and after; seconds measured; bytes of state predicted and measured."""
    asked, settled = job(build, plan), Plan.parse(plan)

    def predicted() -> Prediction:
        calibrate(settled.devices)
        job = Job(**asked)
        return predictor_of(job, Cluster.detect(settled.devices), "cpu", looked_at(job))(settled, BATCH)

    before = predicted()
    place = out / plan.replace(" ", "_") / str(time.time_ns())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of one rank, which runs here
    meshfit.fit(**asked, out=place, progress=False)
    torch.set_num_threads(threads)
    after, run = predicted(), read(place)
    kinds = ("weights", "gradients", "optimizer")
    kept = run.ranks[0].facts.get("memory", {})
    held = float(sum(kept.get(kind, 0) for kind in kinds))
    return (before, after), run.step_seconds, sum(before.kinds["save"].get(kind, 0.0) for kind in kinds), held


if __name__ == "__main__":
    main()
