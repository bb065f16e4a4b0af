"""One rank's training, put together from a job.

run            ``Run``: what a training is made of in one rank, and how it is built, step by step
denominators   what the loss of each phase is a mean over, found by trying it
phase_parts    a phase's forward and backward, its exchange and its update
coordination   who hands out batches, evaluates, reports and saves
evaluations    when they are due, and what they come to
compiling      whether compiling pays, and what is compiled
"""

from meshfit.run.run import Run

__all__ = ["Run"]
