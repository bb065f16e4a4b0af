"""The steps of which single spans are written: the first 256, then 256 in each doubling of their number, in windows of
8, the same on all ranks. So a file of events grows by kilobytes a minute however long the run.

A CUDA event costs some microseconds: on a GPU spans within phases are timed and written in a quarter of the first 256
steps, and their totals are estimated from those.
"""

FULL_STEPS, WINDOW = 256, 8
MARKED = 4  # one in so many windows of the first steps is timed in depth


def in_detail(step: int) -> bool:
    """Whether the spans of ``step`` are written one by one: the same on every rank."""
    if step <= FULL_STEPS:
        return True
    octave = 1 << (step.bit_length() - 1)
    return (step - octave) % (octave * WINDOW // FULL_STEPS) < WINDOW


def in_depth(step: int) -> bool:
    """Whether a GPU times the spans within the phases of ``step``, too."""
    return in_detail(step) and (step > FULL_STEPS or (step - 1) // WINDOW % MARKED == 0)


def stands_for(step: int) -> float:
    """How many steps a step timed in depth represents."""
    return max(1.0, (1 << (step.bit_length() - 1)) / FULL_STEPS) if step > FULL_STEPS else float(MARKED)
