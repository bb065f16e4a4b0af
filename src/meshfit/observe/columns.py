"""Tables for a terminal."""

from rich.table import Table


def columns(*names: str, header: bool = True) -> Table:
    """A table without borders. Column ">name" is aligned right, "name~" may take several lines."""
    table = Table(box=None, padding=(0, 1), header_style="dim", show_header=header)
    for name in names:
        wraps, justify = name.endswith("~"), "right" if name.startswith(">") else "left"
        table.add_column(name.strip(">~"), justify=justify, no_wrap=not wraps, overflow="fold" if wraps else "ellipsis")
    return table
