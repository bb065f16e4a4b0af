"""The CPU's side: source (where samples lie) -> order (which come next) -> loader (this rank's share, on
its device). Randomness follows the sample, never the worker: DESIGN rule 7."""
