"""What lies where: a card for each device, with its share of the batch, weights, gradients and optimizer state.

Bytes are those that the ranks of a real run held and moved. A model is drawn as four blocks; what a device holds of
each is filled.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from html import escape
from typing import Any

from meshfit.observe.reading import RecordedRun
from meshfit.observe.svg import document
from meshfit.units import size

Fill = Callable[[int, int], list[tuple[float, float, float, float]]]
"""Of rank r of n: what it holds of each block, as (left, top, right, bottom) between 0 and 1."""

CARD, GAP, ROW, LABEL, BLOCK, TOP = 264, 150, 30, 74, 26, 34
KINDS = ("weights", "gradients", "optimizer")
STYLE = (
    "<style>.card{fill:none;stroke:#8a857b;stroke-width:1.2;rx:6}.none{fill:#efece4}.samples{fill:#d9a521}"
    ".weights{fill:#5b8fd6}.gradients{fill:#c8553d}.optimizer{fill:#3d8b5f}"
    ".arrow{stroke:#8a857b;stroke-width:1.5;fill:none;marker-end:url(#end);marker-start:url(#end)}"
    "@media(prefers-color-scheme:dark){.none{fill:#22252a}.samples{fill:#e0b44a}.weights{fill:#7fb0f0}"
    ".gradients{fill:#e2765e}.optimizer{fill:#5cb885}}</style>"
    '<marker id="end" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto-start-reverse">'
    '<path d="M0 0 8 4 0 8z" fill="#8a857b"/></marker>'
)

whole: Fill = lambda rank, ranks: [(0, 0, 1, 1)] * 4
slices: Fill = lambda rank, ranks: [(0, rank / ranks, 1, (rank + 1) / ranks)] * 4
columns: Fill = lambda rank, ranks: [(rank / ranks, 0, (rank + 1) / ranks, 1)] * 4
layers: Fill = lambda rank, ranks: [(0, 0, 1, 1) if i * ranks // 4 == rank else (0, 0, 0, 0) for i in range(4)]
copies_of_layers: Fill = lambda rank, ranks: layers(rank * 2 // ranks, 2)
experts: Fill = lambda rank, ranks: [
    (0, 0, 1, 1) if i % 2 == 0 else (rank / ranks, 0, (rank + 1) / ranks, 1) for i in range(4)
]


def cards(
    run: RecordedRun,
    fill: Fill,
    samples: Callable[[int, int], tuple[float, float, str]],
    moved: Mapping[str, str],
    gaps: Sequence[Collection[str]] = (),
) -> tuple[str, float, float]:
    """The devices of ``run`` side by side, and what travels between them; with its width and height. ``samples``: from
    where to where the batch of rank r of n goes, in words too. ``moved``: what each collective carries; ``gaps``: which
    of them go between one card and the next."""
    everyone = [(f"rank {r.rank}", r, False) for r in run.ranks]
    everyone[1:1] = [(f"server {s.rank}", s, True) for s in run.servers]  # between its workers
    bottom = TOP + 4 * ROW + 20
    parts = []
    for i, (name, rank, serves) in enumerate(everyone):
        left = 12 + i * (CARD + GAP)
        parts.append(f'<rect class="card" x="{left}" y="{TOP - 22}" width="{CARD}" height="{bottom - TOP + 18}"/>')
        parts.append(f'<text class="name" x="{left + 10}" y="{TOP - 5}">{name}</text>')
        begins, ends, said = (0.0, 0.0, "none") if serves else samples(rank.rank, len(run.ranks))
        parts.append(_row(left, 0, "samples", [(begins, 0, ends, 1)], said, 1))
        held = rank.facts.get("memory", {})
        for row, kind in enumerate(KINDS, 1):
            said = "all" if serves else size(held[kind]) if held.get(kind) else "none"
            filled = whole(0, 1) if serves else fill(rank.rank, len(run.ranks)) if held.get(kind) else []
            parts.append(_row(left, row, kind, filled, said, 4))
    counts = {name: count for name, count in (run.traffic or {}).items() if count >= 1024}
    for i in range(len(everyone) - 1):
        traffic = [(moved.get(name, ""), count) for name, count in counts.items() if not gaps or name in gaps[i]]
        left, y = 12 + i * (CARD + GAP) + CARD, TOP + 40
        parts.append(f'<path class="arrow" d="M{left + 6} {y}H{left + GAP - 6}"/>')
        for line, (what, count) in enumerate(traffic):
            at, down = f'x="{left + GAP / 2}" text-anchor="middle"', y + 20 + 36 * line
            parts.append(f'<text class="lane" {at} y="{down}">{size(count)} a step</text>')
            parts.append(f'<text class="dim" {at} y="{down + 14}">{escape(what)}</text>')
    return "".join(parts), 24 + len(everyone) * CARD + (len(everyone) - 1) * GAP, bottom + 8


def placement(run: RecordedRun, *how: Any) -> str:
    """The same as a picture."""
    body, width, height = cards(run, *how)
    return document(STYLE + body, (), width, height)


def overview(panels: list[tuple[str, tuple[str, float, float]]]) -> str:
    """Several of them, two in a row, each under its name."""
    wide, tall = max(each[1] for _, each in panels) + 16, max(each[2] for _, each in panels) + 40
    head = '<text class="head" x="12" y="22">'
    drawn = [
        f'<g transform="translate({i % 2 * wide:g} {i // 2 * tall:g})">{head}{escape(name)}</text>'
        f'<g transform="translate(0 30)">{body}</g></g>'
        for i, (name, (body, _, _)) in enumerate(panels)
    ]
    return document(STYLE + "".join(drawn), (), 2 * wide, (len(panels) + 1) // 2 * tall)


def _row(
    left: float, row: int, kind: str, filled: list[tuple[float, float, float, float]], said: str, blocks: int
) -> str:
    top, wide = TOP + 6 + row * ROW, 108 if blocks == 1 else (108 - 3 * 4) / 4
    parts = [f'<text class="dim" x="{left + 10}" y="{top + 15}">{kind}</text>']
    for i in range(blocks):
        x = left + LABEL + i * (wide + 4)
        parts.append(f'<rect class="none" x="{x:.1f}" y="{top}" width="{wide:.1f}" height="{BLOCK - 4}" rx="2"/>')
        if i < len(filled):
            a, b, c, d = filled[i]
            place = f'x="{x + a * wide:.1f}" y="{top + b * (BLOCK - 4):.1f}" width="{(c - a) * wide:.1f}"'
            parts.append(f'<rect class="{kind}" {place} height="{(d - b) * (BLOCK - 4):.1f}" rx="2"/>')
    return "".join(parts) + f'<text class="lane" x="{left + LABEL + 116}" y="{top + 15}">{escape(said)}</text>'
