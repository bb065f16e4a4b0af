"""What meshfit says when it cannot go on.

An error is a value of three parts: what is wrong, the facts, what would work. It prints as one block
and, on the command line, ends with exit code 2. Anything that is not a ``MeshfitError`` is a bug of
ours, or the user's own exception, and keeps its traceback.

    meshfit: the plan needs 24 devices but there are 16
      pipeline=2 x data=3 x shard=4 = 24
      with the rest unchanged, data=2 would fit
"""

import difflib


class MeshfitError(Exception):
    """One clear block: a headline, then one fact or remedy a line."""

    def __init__(self, headline: str, *facts: str):
        self.headline, self.facts = headline, tuple(fact for fact in facts if fact)
        super().__init__("\n  ".join((self.headline, *self.facts)))

    def __reduce__(self):  # travels from a rank to the caller as it is
        return type(self), (self.headline, *self.facts)


class PlanError(MeshfitError):
    """The plan cannot be carried out: raised in the caller, before any process starts."""


class JobError(MeshfitError):
    """What was asked of ``fit`` does not make sense: raised before any process starts."""


class DataError(MeshfitError):
    """The data does not hold what the job needs."""


class CheckpointError(MeshfitError):
    """A checkpoint cannot be written, or cannot be loaded: names the file, and what is known of it."""


class Damaged(CheckpointError):
    """What is on disk is not what was written: another checkpoint may do."""


class NonFiniteError(MeshfitError):
    """A loss or a gradient was NaN or infinite; names the step and the samples."""


class RankError(MeshfitError):
    """A rank raised, or ended, before its work was done. ``trace`` is its traceback."""

    def __init__(self, headline: str, *facts: str, trace: str = ""):
        super().__init__(headline, *facts)
        self.trace = trace

    def __str__(self) -> str:
        return f"{super().__str__()}\n\n{self.trace}" if self.trace else super().__str__()


def in_short(error: BaseException) -> str:
    """An exception in one line; of our own, the headline alone."""
    line = next(iter(str(error).splitlines()), "")[:160]
    return line if isinstance(error, MeshfitError) else f"{type(error).__name__}: {line}"


def did_you_mean(word: str, known: list[str] | tuple[str, ...]) -> str:
    """``word`` beside the known words it may stand for."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
