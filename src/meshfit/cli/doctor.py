"""``meshfit doctor``: what this machine can do, what is wrong with it, and how to mend that."""

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console

from meshfit.launch import machine
from meshfit.observe.columns import columns
from meshfit.units import seconds, size


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Start no ranks: nothing is measured.")] = False,
) -> None:
    """Say what this machine can do, and what is wrong with it. Exit code 1 if something is broken."""
    found = machine.facts()
    measured = [] if quick else machine.speeds(found)
    speeds = [each for each in measured if isinstance(each, machine.AllReduceSpeed)]
    wrong = [*machine.problems(found), *(each for each in measured if isinstance(each, machine.Complaint))]
    if as_json:
        told: dict[str, Any] = {"versions": machine.versions(), **found}
        told |= {"speeds": [asdict(each) for each in speeds], "problems": [asdict(each) for each in wrong]}
        print(json.dumps(told, indent=2))
    else:
        _show(found, speeds, wrong)
    raise typer.Exit(int(any(each.broken for each in wrong)))


def _show(found: dict[str, Any], speeds: list[machine.AllReduceSpeed], wrong: list[machine.Complaint]) -> None:
    console = Console(highlight=False)
    table = columns("this machine", "~")
    for name, words in _rows(found, speeds):
        table.add_row(name, words)
    console.print(table)
    for each in wrong:
        style = "bold red" if each.broken else "yellow"
        console.print(f"\n {'broken' if each.broken else 'note'}: {each.what}", style=style, soft_wrap=True)
        console.print(f"   {each.fix}", soft_wrap=True)
    console.print(f"\n {'nothing is broken' if not any(each.broken for each in wrong) else 'something is broken'}")


def _rows(found: dict[str, Any], speeds: list[machine.AllReduceSpeed]) -> list[tuple[str, str]]:
    versions = machine.versions()
    main = ("meshfit", "python", "torch", "cuda", "nccl")
    memory, shared, temporary = found["memory"], found["shared_memory"], found["temporary"]
    rows = [
        ("versions", ", ".join(f"{name} {versions[name]}" for name in main if name in versions)),
        ("", ", ".join(f"{name} {version}" for name, version in versions.items() if name not in main)),
        ("system", f"{found['system']}, {found['cores']} cores"),
        ("memory", f"{size(memory['available'])} free of {size(memory['total'])}"),
        ("/dev/shm", f"{size(shared['free'])} free of {size(shared['total'])}" if shared else "none"),
        ("temporary", f"{temporary['path']}, {size(temporary['free'])} free" if "free" in temporary else "none"),
        ("cache", found["cache"]),
        ("open files", f"{found['descriptors']['soft']} a process, may be raised to {found['descriptors']['hard']}"),
    ]
    for i, gpu in enumerate(found["gpus"]):
        free = f"{size(gpu['free'])} free of {size(gpu['memory'])}"
        rows.append((f"cuda:{i}", f"{gpu['name']}, {free}, capability {gpu['capability']}"))
    if not found["gpus"]:
        rows.append(("GPUs", "none"))
    for each in speeds:
        words = f"{size(each.bytes_a_second)}/s, {seconds(each.seconds)} for the smallest"
        rows.append((each.backend, f"all-reduce over {each.ranks} ranks of this machine: {words}"))
    return rows
