"""A picture that is gone through from left to right, in a loop: SVG by itself, without a script.

Who wants less motion, or has a viewer that moves nothing, sees the whole.
"""

STYLE = (
    ".seen{clip-path:url(#seen)}.cursor{stroke:#c8553d;stroke-width:1.5}"
    "@media(prefers-color-scheme:dark){.cursor{stroke:#e2765e}}"
    "@media(prefers-reduced-motion:reduce){.seen{clip-path:none}.cursor{display:none}}"
)
REST = 0.8
"""Share of the loop after which all is shown, for the rest of it."""


def cursor(left: float, right: float, top: float, bottom: float, seconds: float) -> str:
    """What shows an element of class "seen" up to a line, and moves the line from ``left`` to ``right``."""
    loop = f'dur="{seconds:g}s" repeatCount="indefinite" keyTimes="0;{REST};1"'
    width = right - left
    wide = f'<animate attributeName="width" values="0;{width:g};{width:g}" {loop}/>'
    along = (
        f'<animateTransform attributeName="transform" type="translate" values="0 0;{width:g} 0;{width:g} 0" {loop}/>'
    )
    return (
        f'<clipPath id="seen"><rect x="{left:g}" y="0" width="{width:g}" height="{bottom:g}">{wide}</rect></clipPath>'
        f'<line class="cursor" x1="{left:g}" x2="{left:g}" y1="{top:g}" y2="{bottom:g}">{along}</line>'
    )
