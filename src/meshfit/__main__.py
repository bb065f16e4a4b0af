"""``python -m meshfit``: the command line."""

from meshfit.cli import main

if __name__ == "__main__":
    main()
