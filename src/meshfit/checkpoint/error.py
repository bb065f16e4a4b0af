"""What checkpoints say when something is wrong."""

from meshfit.errors import MeshfitError


class CheckpointError(MeshfitError):
    """A checkpoint cannot be written, or cannot be loaded: names the file, and what is known of it."""


class Damaged(CheckpointError):
    """What is on disk is not what was written: another checkpoint may do."""
