"""A training that is started while a rank imports the module it was defined in.

Ranks unpickle their job, and so import the modules that its model, data and functions are from. Where one of them
trains at its top level, each rank would start ranks of its own, and these again: refused, before it starts.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from meshfit.errors import JobError

_under_way = False


@contextmanager
def importing_job() -> Iterator[None]:
    """Around the unpickling of a rank's job."""
    global _under_way
    _under_way = True
    try:
        yield
    finally:
        _under_way = False


def refuse_in_import() -> None:
    if not _under_way:
        return
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    raise JobError(
        "a training was started by a module that is being imported in a rank",
        f"at {frame.f_code.co_filename}, line {frame.f_lineno}",
        "ranks import the modules that the model, the data and the functions are from: what stands there at top level"
        " runs in each of them",
        'put the call under if __name__ == "__main__":, or into a function (a script that is run, not imported, needs'
        " neither)",
    )
