"""The command line: ``meshfit VERB train.py [-- args]``. Every verb parses, calls, prints.

A script is run as ``python`` would run it. When it comes to its ``fit``, the verb takes over.
"""

import sys


def main() -> None:
    """Run the command line. A ``MeshfitError`` is one block on standard error, not a traceback."""
    from meshfit.errors import DataError, JobError, MeshfitError, PlanError

    try:
        from meshfit.cli.verbs import app

        app()
    except MeshfitError as error:
        print(f"meshfit: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, PlanError | JobError | DataError) else 1)
