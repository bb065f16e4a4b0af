"""``meshfit data URL``: its columns, a few samples, and how fast it can be read."""

import json as json_text
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from torch import Tensor

from meshfit.data.extra import needed
from meshfit.data.look import Look, look, picture
from meshfit.data.opening import open as open_url
from meshfit.errors import DataError
from meshfit.observe.columns import columns
from meshfit.units import quantity, size

ROWS = 16
"""Of pixels, in the terminal: two to a line."""


def data(
    url: Annotated[str, typer.Argument(help="A file, folder, pattern, s3:// or http:// URL, database.")],
    columns: Annotated[str | None, typer.Option(help='Columns of a table: "image,label".')] = None,
    query: Annotated[str | None, typer.Option(help='Of a database: "select id, x, y from t".')] = None,
    key: Annotated[str | None, typer.Option(help="Of a database: the column that names a row.")] = None,
    length: Annotated[int | None, typer.Option(help="Of tokens and text: how many are a sample.", min=1)] = None,
    batch: Annotated[int, typer.Option(help="Samples that are read at a time.", min=1)] = 256,
    images: Annotated[Path | None, typer.Option(help="Write a few images to this PNG.")] = None,
    json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Show the data at a path or URL: columns, samples, sizes, a few images, and how fast each stage reads them."""
    options: dict[str, Any] = {"query": query, "key": key, "length": length}
    options = {name: value for name, value in options.items() if value is not None}
    if columns:
        options["columns"] = tuple(columns.split(","))
    if length is None and url.endswith((".txt", ".bin", ".tokens")):
        raise DataError(f"{url} holds tokens: how many are a sample?", "--length 1024, say")
    source = open_url(url, **options)
    found = look(source, batch=batch)
    if images is not None:
        _write(found, images)
    if json:
        print(json_text.dumps(_plain(found), indent=2))
    else:
        _show(found, tuple(columns.split(",")) if columns else ())


def _show(found: Look, names: tuple[str, ...]) -> None:
    console = Console(highlight=False)
    console.print(
        f"\n [bold]{found.samples:,}[/] samples of {size(found.sample_bytes)}, "
        f"{size(found.samples * found.sample_bytes)} as they reach a model; the first is {found.first}\n"
    )
    table = columns("", "type", "a sample", "values of some~")
    for i, column in enumerate(found.columns):
        shape = "differs" if column.shape is None else " x ".join(map(str, column.shape)) or "one"
        name = names[i] if len(names) == len(found.columns) else column.name
        table.add_row(name, column.kind, shape, column.values)
    console.print(table)
    if found.images and console.is_terminal:
        console.print()
        for line in _blocks(picture(found.images, ROWS)):
            console.print(line)
    table = columns("", ">samples a second", ">a second", f">a batch of {found.batch}")
    for speed in found.speeds:
        took = f"{1e3 * found.batch / speed.samples:.3g} ms"
        threads = f"{speed.threads} thread{'s' * (speed.threads > 1)}"
        table.add_row(threads, quantity(speed.samples), size(speed.bytes), took)
    console.print()
    console.print(table)
    parts = ", ".join(f"{name} {share:.0%}" for name, share in sorted(found.stages.items(), key=lambda x: -x[1]))
    best = max(found.speeds, key=lambda speed: speed.samples)
    console.print(f"\n where one thread's time goes: {parts}")
    console.print(
        f" a device that takes more than {quantity(best.samples)} samples a second waits for: [bold]{found.slowest}[/]"
        f"{_advice(found)}\n"
    )


def _advice(found: Look) -> str:
    alone, best = found.speeds[0], max(found.speeds, key=lambda speed: speed.samples)
    if best.samples < 1.3 * alone.samples and len(found.speeds) > 1:
        return "; more threads do not help"
    return f"; {best.threads} threads read {best.samples / alone.samples:.1f} times as fast as one"


def _blocks(pixels: Tensor) -> list[Text]:
    """Two rows of pixels to a line: the upper as a half block, the lower as its background."""
    lines = []
    colour = lambda y, x: "#{:02x}{:02x}{:02x}".format(*pixels[:, y, x].tolist())
    for y in range(0, pixels.shape[1] - 1, 2):
        line = Text(" ")
        for x in range(pixels.shape[2]):
            line.append("\u2580", style=f"{colour(y, x)} on {colour(y + 1, x)}")
        lines.append(line)
    return lines


def _write(found: Look, file: Path) -> None:
    if not found.images:
        raise DataError("there are no images to write", "the samples hold no bytes of height, width and colour")
    pixels = picture(found.images, max(64, *(image.shape[1] for image in found.images)))
    needed("PIL.Image", "data", "writing images").fromarray(pixels.permute(1, 2, 0).contiguous().numpy()).save(file)


def _plain(found: Look) -> dict[str, Any]:
    return {
        "samples": found.samples,
        "sample_bytes": found.sample_bytes,
        "columns": [{"name": c.name, "type": c.kind, "shape": c.shape, "values": c.values} for c in found.columns],
        "batch": found.batch,
        "speeds": [{"threads": s.threads, "samples": s.samples, "bytes": s.bytes} for s in found.speeds],
        "stages": found.stages,
        "slowest": found.slowest,
    }
