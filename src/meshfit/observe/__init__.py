"""What a run records, and what is shown of it: progress, summary, the run's folder, its report."""

from meshfit.observe.track import Track

__all__ = ["Track"]
