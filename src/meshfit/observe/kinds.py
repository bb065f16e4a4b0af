"""What spans are called, what they mean, and how they are drawn.

A *phase* is a part of the step as the loop sees it; phases do not overlap and fill a rank's time. What lies within a
phase (forward and backward of each microbatch, say) is drawn in its place.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kind:
    name: str
    label: str
    colour: str
    """In light; pages have another for dark."""
    dark: str
    waits: bool = False
    """Whether the device has nothing to do meanwhile."""
    phase: str = ""
    """The phase within which it lies; "" for phases themselves."""


KINDS = {
    kind.name: kind
    for kind in (
        Kind("data", "waiting for data", "#d9a521", "#e0b44a", waits=True),
        Kind("forward_backward", "forward and backward", "#4373b8", "#6f9fe0"),
        Kind("forward", "forward", "#5b8fd6", "#7fb0f0", phase="forward_backward"),
        Kind("backward", "backward", "#2f5a9e", "#4f82cc", phase="forward_backward"),
        Kind("weight", "weight gradient", "#7c6bb5", "#a191dd", phase="forward_backward"),
        Kind("receive", "waiting for a stage", "#c9c4b8", "#54514a", waits=True, phase="forward_backward"),
        Kind("gather", "gathering weights", "#1b998b", "#35bfae", waits=True, phase="forward_backward"),
        Kind("meet", "meeting other ranks", "#dd8a3c", "#eea45c", waits=True, phase="forward_backward"),
        Kind("branch", "branches of its own", "#2a9d8f", "#4cc4b4", phase="forward_backward"),
        Kind("join", "waiting for branches", "#c9c4b8", "#54514a", waits=True, phase="forward_backward"),
        Kind("exchange", "waiting for other ranks", "#c8553d", "#e2765e", waits=True),
        Kind("collective", "traffic under way", "#e6a08f", "#a8584a", phase="overlapped"),
        Kind("sum", "adding gradients", "#8fb339", "#a9cc57"),
        Kind("update", "optimizer", "#3d8b5f", "#5cb885"),
        Kind("average", "averaging weights", "#1b998b", "#35bfae", waits=True, phase="update"),
        Kind("evaluate", "evaluation", "#8a8378", "#a39c8f"),
        Kind("checkpoint", "checkpoint", "#b0508f", "#d377b3"),
        Kind("compile", "compiling", "#6b7a8f", "#8b9bb2"),
    )
}
PHASES = tuple(kind.name for kind in KINDS.values() if not kind.phase)
OTHER = Kind("other", "between the phases", "#b8b2a6", "#6a665e", waits=True)


def kind_of(name: str) -> Kind:
    """Known, or a span of the user's own."""
    return KINDS.get(name) or Kind(name, name.replace("_", " "), "#9a8f7a", "#8c826f", phase="own")
