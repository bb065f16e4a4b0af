"""The command line: ``meshfit VERB train.py [-- args]``. Every verb parses, calls, prints.

A script runs as ``python`` would run it. At its call of ``fit`` the verb takes over.
"""

import sys


def main() -> None:
    """Run the command line. A ``MeshfitError`` is one block on standard error, not a traceback."""
    from meshfit.errors import MeshfitError

    try:
        from meshfit.cli.verbs import app

        app()
    except MeshfitError as error:
        sys.exit(tell(error))


def tell(error: Exception) -> int:
    """Print ``error`` as one block; the exit code that goes with it."""
    from meshfit.errors import DataError, JobError, NoCheckpoint, PlanError

    print(f"meshfit: {error}", file=sys.stderr)
    return 2 if isinstance(error, PlanError | JobError | DataError | NoCheckpoint) else 1
