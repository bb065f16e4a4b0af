"""One page about a run: ``report.html``. Self-contained: opens from a file, without a network.

The page holds the data as JSON and the script that draws it. Its content security policy names both by their hashes, so
no other script can run in it, whatever a run's notes or names contain.
"""

import base64
import hashlib
import json
from functools import cache
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from meshfit.observe.page_data import page_data
from meshfit.observe.reading import RecordedRun, read
from meshfit.observe.timeline import picture, write_trace


def write(folder: Path | str, path: Path | str | None = None) -> Path:
    """Write the report of the run in ``folder``, and beside it the timeline as a picture and a trace."""
    run = read(folder)
    target = Path(path) if path is not None else run.folder / "report.html"
    target.write_text(page(run))
    if path is None and run.ranks:
        (run.folder / "timeline.svg").write_text(picture(run))
        write_trace(run, run.folder / "trace.json.gz")
    return target


def page(run: RecordedRun) -> str:
    """The report as HTML."""
    data = page_data(run)
    return fill(data, title=f"{data['name']} · meshfit")


def fill(data: dict[str, Any], *, title: str, nonce: str | None = None) -> str:
    """The page around ``data``. With a ``nonce`` the server sends the policy, otherwise the page holds it."""
    style, script = _part("page.css"), _part("page.js")
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    allowed = f"script-src {_hash(script)} {_hash(text)}; style-src {_hash(style)}"
    policy = f"default-src 'none'; {allowed}; img-src data:; base-uri 'none'; form-action 'none'"
    parts = {
        "title": escape(title),
        "policy": "" if nonce else f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        "nonce": f' nonce="{nonce}"' if nonce else "",
        "style": style,
        "script": script,
        "data": text,
    }
    before, *rest = _part("page.html").split("{{")
    found = [before]
    for piece in rest:
        name, _, after = piece.partition("}}")
        found += [parts[name], after]
    return "".join(found)


@cache
def _part(name: str) -> str:
    return (resources.files("meshfit.observe") / "page" / name).read_text()


def _hash(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"
