"""What meshfit says when it cannot go on.

An error is a value of three parts: what is wrong, the facts, what would work. It prints as one block
and, on the command line, ends with exit code 2. Anything that is not a ``MeshfitError`` is a bug of
ours, or the user's own exception, and keeps its traceback.

    meshfit: the plan needs 24 devices but there are 16
      pipeline=2 x data=3 x shard=4 = 24
      with the rest unchanged, data=2 would fit
"""

import difflib
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Self

PASSWORD = re.compile(r"(\b[a-zA-Z][\w+.-]*://[^/\s:@'\"]*):[^@/\s'\"]+@")
SIGNATURE = re.compile(
    r"([?&;](?:x-amz-(?:signature|credential|security-token)|x-goog-(?:signature|credential)|awsaccesskeyid|signature|sig|"
    r"(?:access_?)?token|(?:api_?)?key|password|secret)=)[^&;\s'\"]+",
    re.IGNORECASE,
)


def masked(text: str) -> str:
    """Without the passwords and signatures of URLs in it."""
    return SIGNATURE.sub(r"\1***", PASSWORD.sub(r"\1:***@", text)) if "://" in text else text


class MeshfitError(Exception):
    """One clear block: a headline, then one fact or remedy a line."""

    step = 0
    """In which a rank met it; 0: outside of steps."""
    rank: int | None = None
    """That died, if one did."""

    def __init__(self, headline: str, *facts: str):
        self.headline, self.facts = masked(headline), tuple(masked(fact) for fact in facts if fact)
        super().__init__("\n  ".join((self.headline, *self.facts)))

    def __reduce__(self):  # travels from a rank to the caller as it is
        return type(self), (self.headline, *self.facts)

    def saying(self, *facts: str) -> Self:
        """The same error, with more to say."""
        said = type(self)(self.headline, *self.facts, *facts)
        vars(said).update({name: value for name, value in vars(self).items() if name != "facts"})
        return said


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


class NoCheckpoint(CheckpointError):
    """There is none where one was asked for."""


class NonFiniteError(MeshfitError):
    """A loss or a gradient was NaN or infinite; names the step and the samples."""


class RankError(MeshfitError):
    """A rank raised, or ended, before its work was done. ``trace`` is its traceback."""

    out_of_memory = False
    held: Mapping[str, int] = MappingProxyType({})
    """Bytes by kind that a rank held when it ran out of memory, as far as it could tell."""

    def __init__(self, headline: str, *facts: str, trace: str = "", step: int = 0):
        super().__init__(headline, *facts)
        self.trace, self.step = masked(trace), step

    def __str__(self) -> str:
        return f"{super().__str__()}\n\n{self.trace}" if self.trace else super().__str__()


class Died(RankError):
    """A process ended, or had to be ended, before its work was done: started again, it may get further."""

    def __init__(self, headline: str, *facts: str, trace: str = "", step: int = 0, agreed: int | None = None):
        super().__init__(headline, *facts, trace=trace, step=step)
        self.agreed = agreed
        """Where replicas were found to differ, or collectives to be mixed up: the last step before that. All that is
        known of later ones may be wrong."""


NO_MEMORY = ("can't allocate memory", "out of memory", "Cannot allocate memory")
"""How torch says it of host memory, and of a GPU's."""


def out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or any(words in str(error) for words in NO_MEMORY)


def in_short(error: BaseException) -> str:
    """An exception in one line; of our own, the headline alone."""
    line = masked(next(iter(str(error).splitlines()), ""))[:160]
    return line if isinstance(error, MeshfitError) else f"{type(error).__name__}: {line}"


def did_you_mean(word: str, known: list[str] | tuple[str, ...]) -> str:
    """``word`` beside the known words it may stand for."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
