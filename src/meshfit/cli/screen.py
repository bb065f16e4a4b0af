"""The output of ``meshfit inspect``: a description of a model on one screen."""

import os
import re
from itertools import takewhile

from rich.console import Console
from rich.table import Table

from meshfit.anatomy.axes import EVEN
from meshfit.anatomy.describe import Description
from meshfit.observe.columns import columns
from meshfit.units import flop, quantity, size

WIDTH = 100


def show(found: Description, tensor: list[str]) -> None:
    """``tensor``: the splits of tensor=2, in words."""
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(highlight=False, width=WIDTH)
    for part in (_facts(found), _modules_table(found), _stages_table(found), _axes_table(found)):
        console.print()
        console.print(part)
    console.print("\n [dim]forward, kept and sent: for one sample. time: by flops and bytes, with the backward[/]")
    if tensor:
        console.print("\n [bold]tensor=2[/bold]")
    for line in tensor:
        console.print(f" {line}", markup=False)


def _facts(found: Description) -> Table:
    table = columns("what", "~", header=False)
    table.columns[0].style = "dim"
    table.add_row("model", f"[bold]{found.kind}[/]  {found.name}, traced on {_listed(found.inputs, 4)}")
    frozen = found.parameters - found.trained
    some = f", {quantity(frozen)} of them frozen" if frozen else ""
    table.add_row("parameters", f"{quantity(found.parameters, 'B')}, {size(found.parameter_bytes)}{some}")
    flops = f"{flop(found.flops)} forward, {flop(found.flops_backward)} backward"
    table.add_row("one sample", f"{flops}, {size(found.kept)} kept for backward")
    ties = tuple(f"{name} is {first}" for name, first in found.ties.items())
    lists = {"tied": ties, "BatchNorm": found.norms, "dropout": found.dropouts, "unused": found.unused}
    for word, names in lists.items():
        if names:
            table.add_row(word, _listed(names, 2 if word == "tied" else 3))
    for place in found.dynamic[:4]:
        module = place["module"] or "the model itself"
        table.add_row("dynamic", f"{place['what']} at {_short(place['line'])} in {module}, on {place['depends_on']}")
    if len(found.dynamic) > 4:
        table.add_row("", f"and {len(found.dynamic) - 4} more places")
    for note in found.notes:
        if "as a whole" in note or note == "real tensors":
            table.add_row("note", re.sub(r"[^ (]*site-packages/", "", note))
    return table


def _modules_table(found: Description) -> Table:
    table = columns("module", "", ">parameters", ">time", ">forward", ">kept")
    for row in found.rows:
        table.add_row(
            "  " * row.depth + row.name,
            f"[dim]{row.kind}[/]" + (f" x{row.count}" if row.count > 1 else ""),
            quantity(row.parameters, "B") if row.parameters else "",
            f"{row.share:.1%}",
            flop(row.flops) if row.flops else "",
            size(row.kept) if row.kept else "",
        )
    return table


def _stages_table(found: Description) -> Table:
    table = columns(">stages", "cut before~", ">imbalance", ">sent", ">weights")
    for each in found.splits:
        if not each.possible:
            table.add_row(str(each.stages), f"[yellow]{each.why}[/]", "", "", "")
            continue
        uneven = f"[yellow]{each.imbalance:.1%}[/]" if each.imbalance > EVEN else f"{each.imbalance:.1%}"
        sent, weights = _between(each.bytes), _between(each.parameter_bytes)
        table.add_row(str(each.stages), _brief(each.before), uneven, sent, weights)
        if each.imbalance > EVEN and each.indivisible:
            table.add_row("", f"[dim]in one piece: {_listed(each.indivisible, 2)}[/]", "", "", "")
    return table


def _axes_table(found: Description) -> Table:
    table = columns("axis", "", "~")
    words = {True: "[green]yes[/]", False: "[red]no[/]", None: "[yellow]?[/]"}
    for axis, verdict in found.axes.items():
        table.add_row(axis, words[verdict.takes], verdict.why.replace(os.getcwd() + os.sep, ""))
    return table


def _between(sizes: tuple[float, ...]) -> str:
    low, high = size(min(sizes)), size(max(sizes))
    if low == high:
        return high
    return f"{low.split()[0] if low.split()[1] == high.split()[1] else low} - {high}"


def _listed(items: tuple[str, ...], most: int) -> str:
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more


def _brief(places: tuple[str, ...]) -> str:
    """Names of modules, shortened, with their common prefix once: "model.layers: 8, 16, 24"."""
    places = tuple(place if len(place) < 42 else place[:40].rstrip(".") + ".." for place in places)
    if len(places) < 2:
        return ", ".join(places)
    parts = [place.split(".") for place in places]
    stem = ".".join(same[0] for same in takewhile(lambda same: len(set(same)) == 1, zip(*parts, strict=False)))
    return f"{stem}: {', '.join(place[len(stem) + 1 :] for place in places)}" if stem else ", ".join(places)


def _short(line: str) -> str:
    """file:line, relative to this folder, or to that of the packages."""
    file, _, at = line.rpartition(":")
    here = os.path.relpath(file) if file and os.path.isabs(file) else file
    return f"{min(here, re.split(r'site-packages/', file)[-1], key=len)}:{at}" if file else line
