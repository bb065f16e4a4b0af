"""A training in a notebook: a bar that is updated in its place, and the result as a page of its own in the cell."""

import base64
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from html import escape
from typing import TYPE_CHECKING, Any

from meshfit.data.remote import without_secrets
from meshfit.observe.kinds import PHASES
from meshfit.observe.reading import RecordedSpan, read
from meshfit.observe.svg import lanes_picture
from meshfit.observe.timeline import picture

if TYPE_CHECKING:
    from meshfit.result import Result

LANE = 20
MOST_RANKS = 16
FONT = "font-family:ui-sans-serif,system-ui,sans-serif;font-size:13px"


def kernel_display() -> Callable[..., Any] | None:
    """IPython's ``display``, where this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is None or not hasattr(shell, "kernel"):
        return None
    from IPython.display import display  # type: ignore[import-not-found]

    return display


class NotebookBar:
    """One output of a cell, replaced as the training goes on."""

    def __init__(self, display: Callable[..., Any]):
        self._display = display
        self._handle: Any = None

    def move(self, done: int, total: int | None, epoch: str, said: str, notes: Sequence[str]) -> None:
        share = f"{100 * done / total:.1f}%" if total else "100%"
        of = f"{done:,} of {total:,} steps" if total else f"{done:,} steps"
        bar = (
            '<span style="display:inline-block;width:240px;height:8px;background:#8884;border-radius:4px">'
            f'<span style="display:block;width:{share};height:8px;background:#4373b8;border-radius:4px"></span></span>'
        )
        lines = "".join(f'<div style="opacity:.7">{escape(note)}</div>' for note in notes)
        html = f'<div style="{FONT}">{escape(epoch)}&ensp;{bar}&ensp;{of}&ensp;{escape(said)}{lines}</div>'
        shown = {"text/html": html, "text/plain": f"{epoch}  {of}  {said}"}
        if self._handle is None:
            self._handle = self._display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)


def page(result: "Result") -> str:
    """A result as HTML for a cell: its numbers, how busy each device was, and some usual steps in time."""
    rows = [*result.rows(), *(("note", note) for note in result.notes)]
    if result.folder is not None:
        rows.append(("folder", without_secrets(str(result.folder))))
    cell = '<td style="text-align:left;padding:1px 14px 1px 0;vertical-align:top'
    table = "".join(
        f'<tr>{cell};opacity:.7">{escape(word)}</td>{cell}">{escape(said)}</td></tr>' for word, said in rows
    )
    pictures = [busy(result.phases, result.seconds)] if result.phases else []
    with suppress(Exception):  # the numbers are shown even if the folder cannot be read
        if result.local is not None:
            pictures.append(picture(read(result.local)))
    images = "".join(_image(svg) for svg in pictures if svg)
    return f'<div style="{FONT}"><table style="border:none">{table}</table>{images}</div>'


def busy(phases: Sequence[Mapping[str, float]], seconds: float) -> str:
    """An SVG: a lane for each rank, its time by phase, what waits in pale colours of its own."""
    rows = []
    for rank, spent in enumerate(phases[:MOST_RANKS]):
        at, spans = 0.0, []
        for name in PHASES:
            took, share = spent.get(name, 0.0), spent.get(name, 0.0) / max(seconds, 1e-9)
            if share >= 0.002:
                spans.append(RecordedSpan(name, 0, at, took, {"took": f"{share:.1%}"}))
                at += took
        rows.append((f"rank {rank}", spans))
    more = f", the first {MOST_RANKS} of {len(phases)} ranks" if len(phases) > MOST_RANKS else ""
    return lanes_picture(
        f"How busy the devices were: {seconds:.1f} s{more}", rows, 0.0, seconds, height=LANE, ruler=0.0
    )


def _image(svg: str) -> str:
    """As an image: its styles are its own, and no script in it could run."""
    data = base64.b64encode(svg.encode()).decode()
    return f'<div><img alt="" style="max-width:100%" src="data:image/svg+xml;base64,{data}"/></div>'
