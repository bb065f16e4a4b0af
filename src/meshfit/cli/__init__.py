"""The command line: ``meshfit VERB train.py [-- args]``. Every verb parses, calls, prints.

A script runs as ``python`` would run it. At its call of ``fit`` the verb takes over.
"""

import sys

from meshfit.errors import DataError, JobError, MeshfitError, NoCheckpoint, PlanError


def main() -> None:
    """Run the command line. A ``MeshfitError`` is one block on standard error, not a traceback."""
    from meshfit.cli.verbs import app

    try:
        app()
    except MeshfitError as error:
        sys.exit(tell(error))


def tell(error: Exception) -> int:
    """Print ``error`` as one block; the exit code that goes with it."""
    print(f"meshfit: {error}", file=sys.stderr)
    return 2 if isinstance(error, PlanError | JobError | DataError | NoCheckpoint) else 1
