"""Does a rank that has 1/n of every sequence keep 1/n of the activations, and does the plan's cost foretell it?

    python benchmarks/context_memory.py
    python benchmarks/context_memory.py --models gpt2,llama --plans "context=2;context=4"

Trains each model for three steps on one CPU rank and under each plan, and counts in every rank what a forward has made
and not given back when it ends. Foretold is ``meshfit.plan_cost.cost``. The table shows the rank that keeps most, as
a part of what one device keeps. Exits with 1 if that is more than 1.25/n, or further than 10 % from what was foretold.
"""

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # ranks look the models up under the name benchmarks.memory

from benchmarks.memory import CASES, SAMPLES, job_of, measured, trace_of
from benchmarks.zoo import Case
from meshfit.axes.context.axis import plan_context
from meshfit.axes.find import as_number
from meshfit.plan import Plan
from meshfit.plan_cost import cost

MODELS, PLANS = "gpt2,llama,bert,t5,vit", "context=2;context=4"
MORE, OFF = 1.25, 0.10


def foretold(case: Case, plan: Plan) -> int:
    objective = job_of(case, Plan()).objective
    trace, optimizer = trace_of(case)
    step = lambda model, batch: as_number(objective(model, batch))
    sequence = plan_context(case.build().train(), step, case.data(SAMPLES), plan.context)
    return cost(plan, trace, optimizer, found={"context": sequence}).held["activations"]


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--models", default=MODELS, help="names, with commas between")
    parser.add_argument("--plans", default=PLANS, help="plans, with semicolons between")
    options = parser.parse_args()
    plans = [Plan.parse(plan) for plan in options.plans.split(";")]
    table = Table("model", "one device", *(f"{plan}: measured" + " / foretold / of one device" for plan in plans))
    kept = True
    for case in (case for case in CASES if case.name in options.models.split(",")):
        alone = measured(case, Plan())[0].held["activations"]
        row = [case.name, f"{alone / 2**20:.2f} MiB"]
        for plan in plans:
            most = max(each.held["activations"] for each in measured(case, plan))
            said = foretold(case, plan)
            ok = most <= MORE / plan.context * alone and abs(most - said) <= OFF * most
            kept &= ok
            row.append(f"{most / 2**20:.2f} / {said / 2**20:.2f} MiB / {most / alone:.3f}{'' if ok else ' FAIL'}")
        table.add_row(*row)
    console = Console()
    console.width = max(console.width, 128)
    console.print(table)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
