"""What ``meshfit inspect`` shows: a description of a model on one screen, in units that people read."""

import os
import re
from itertools import takewhile

from rich.console import Console
from rich.table import Table

from meshfit.anatomy.axes import EVEN
from meshfit.anatomy.describe import Description

WIDTH = 100


def _console() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(highlight=False, width=WIDTH)
    return console


def show(found: Description) -> None:
    console = _console()
    for part in (_facts(found), _modules_table(found), _stages_table(found), _axes_table(found)):
        console.print()
        console.print(part)
    console.print("\n [dim]forward, kept and sent: for one sample. time: as flops and bytes tell, with the backward[/]")


def tell_of(title: str, lines: list[str]) -> None:
    """Some lines under a title."""
    if lines:
        console = _console()
        console.print(f"\n [bold]{title}[/bold]")
        for line in lines:
            console.print(f" {line}", markup=False, highlight=False)


def _table(*columns: str, header: bool = True) -> Table:
    """Columns by name; ">name" is set to the right, "name~" may take several lines."""
    table = Table(box=None, padding=(0, 1), header_style="dim", show_header=header)
    for name in columns:
        justify = "right" if name.startswith(">") else "left"
        table.add_column(name.strip(">~"), justify=justify, no_wrap=not name.endswith("~"), overflow="fold")
    return table


def _facts(found: Description) -> Table:
    table = _table("what", "~", header=False)
    table.columns[0].style = "dim"
    table.add_row("model", f"[bold]{found.kind}[/]  {found.name}, traced on {_listed(found.inputs, 4)}")
    frozen = found.parameters - found.trained
    some = f", {number(frozen)} of them frozen" if frozen else ""
    table.add_row("parameters", f"{number(found.parameters, 'B')}, {size(found.parameter_bytes)}{some}")
    flops = f"{flop(found.flops)} forward, {flop(found.flops_backward)} backward"
    table.add_row("one sample", f"{flops}, {size(found.kept)} kept for backward")
    ties = tuple(f"{name} is {first}" for name, first in found.ties.items())
    for word, names in (
        ("tied", ties),
        ("BatchNorm", found.norms),
        ("dropout", found.dropouts),
        ("unused", found.unused),
    ):
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
    table = _table("module", "", ">parameters", ">time", ">forward", ">kept")
    for row in found.rows:
        table.add_row(
            "  " * row.depth + row.name,
            f"[dim]{row.kind}[/]" + (f" x{row.count}" if row.count > 1 else ""),
            number(row.parameters, "B") if row.parameters else "",
            f"{row.share:.1%}",
            flop(row.flops) if row.flops else "",
            size(row.kept) if row.kept else "",
        )
    return table


def _stages_table(found: Description) -> Table:
    table = _table(">stages", "cut before~", ">imbalance", ">sent", ">weights")
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
    table = _table("axis", "", "~")
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
    """Places, long names cut short, with what their names begin with said once: "model.layers: 8, 16, 24"."""
    places = tuple(place if len(place) < 42 else place[:40].rstrip(".") + ".." for place in places)
    if len(places) < 2:
        return ", ".join(places)
    parts = [place.split(".") for place in places]
    stem = ".".join(same[0] for same in takewhile(lambda same: len(set(same)) == 1, zip(*parts, strict=False)))
    return f"{stem}: {', '.join(place[len(stem) + 1 :] for place in places)}" if stem else ", ".join(places)


def _short(line: str) -> str:
    """file:line from here, or from the packages' folder on."""
    file, _, at = line.rpartition(":")
    here = os.path.relpath(file) if file and os.path.isabs(file) else file
    return f"{min(here, re.split(r'site-packages/', file)[-1], key=len)}:{at}" if file else line


def number(count: float, billion: str = "G") -> str:
    """In three digits, with the letter of its unit: 12.3 M."""
    unit = ""
    for unit in ("", "k", "M", billion, "T", "P"):
        if abs(count) < 999.5 or unit == "P":
            break
        count /= 1000
    return f"{_digits(count)} {unit}".strip()


def flop(count: float) -> str:
    value, _, unit = number(count).partition(" ")
    return f"{value} {unit}FLOP"


def size(count: float) -> str:
    """Bytes, in powers of 1024."""
    unit = ""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 999.5 or unit == "TiB":
            break
        count /= 1024
    return f"{_digits(count)} {unit}"


def _digits(value: float) -> str:
    return f"{value:.0f}" if value == int(value) else f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"
