"""Loading: what a checkpoint holds, into a run, under whatever plan that run has.

A rank lists the boxes it needs, reads them into memory of their own, and only when every rank has read everything, and
every block was what had been written, are they put in place: a run is loaded, or it is as it was.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshfit.checkpoint import manifest
from meshfit.checkpoint.files import Files
from meshfit.checkpoint.into import Loading
from meshfit.checkpoint.manifest import Manifest, Skipped
from meshfit.checkpoint.ranks import Ranks
from meshfit.errors import CheckpointError, Damaged, MeshfitError

if TYPE_CHECKING:
    from meshfit.run import Run

SHOWN = 5
NO_SENSE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
"""Raised where values of a manifest are not what they should be."""


def restore(
    run: "Run", path: Files | Path | str, *, allow_partial: bool = False, skipped: list[Skipped] | None = None
) -> Manifest:
    """Load the checkpoint at ``path``, or the newest in it that is intact, into ``run``, which then goes on from there.

    All ranks call it together, before the first step. ``allow_partial`` loads what fits and notes what does not.
    """
    ranks = Ranks(run.world.rank, run.world.size)
    skipped = [] if skipped is None else skipped
    try:
        while True:
            files, name = _agreed(ranks, path, skipped)
            found = _loaded(run, files, name, ranks, allow_partial)
            if isinstance(found, Manifest):
                run.notes.extend(f"resume: {each.name} was skipped: {each.why}" for each in skipped)
                run.notes.append(f"resume: from step {found.step} of {found}")
                return found
            if manifest.find(path)[1] is not None or not isinstance(found, Damaged):
                raise _with_others(found, files, name)
            skipped.append(Skipped(name, "; ".join((found.headline, *found.facts))))
    finally:
        ranks.close()


def _agreed(ranks: Ranks, path: Any, skipped: list[Skipped]) -> tuple[Files, str]:
    """The checkpoint to load: what the first rank finds."""
    word: Any = None
    if ranks.rank == 0:
        try:
            files, name = manifest.find(path)
            bad = {each.name for each in skipped}
            passed: list[Skipped] = []
            every = [manifest.read(files, name)] if name is not None else manifest.complete(files, passed)
            found = next((each for each in every if each.name not in bad), None)
            skipped += [each for each in passed if each.name not in bad]
            if found is None:
                why = [f"{each.name}: {each.why}" for each in skipped[:SHOWN]]
                raise CheckpointError(f"there is no checkpoint to load in {files}", *why)
            word = found.name
        except Damaged as error:
            word = _with_others(error, *manifest.find(path))
        except MeshfitError as error:
            word = error
    word = ranks.gather(word)[0]
    if isinstance(word, MeshfitError):
        raise word
    return manifest.find(path)[0], word


def _loaded(run: "Run", files: Files, name: str, ranks: Ranks, allow_partial: bool) -> Manifest | CheckpointError:
    """Load a checkpoint; or what stands against it, the same on every rank, and the run is as it was."""
    found: Manifest | None = None
    loading: Loading | None = None
    said: Any = None
    try:
        found = manifest.read(files, name)
        loading = Loading(run, found)
        said = (loading.differences, loading.used)
    except CheckpointError as error:
        said = error
    except NO_SENSE as error:
        said = _no_sense(found, error)
    every = ranks.gather(said)
    if (error := _first_error(every)) is not None:
        return error
    assert found is not None
    assert loading is not None
    differences = list(dict.fromkeys(line for lines, _ in every for line in lines))
    used = set().union(*(names for _, names in every))
    differences += [
        f"{name} is in the checkpoint, and not in the model"
        for name in found.named("model")
        if f"model/{name}" not in used
    ]
    if run.update.average is None and found.named("average"):
        differences.append("the checkpoint has an average of the weights (ema=), and this run keeps none")
    if differences and not allow_partial:
        return mismatch(str(found), differences)
    word: CheckpointError | None = None
    try:
        loading.read()
    except (CheckpointError, OSError) as error:
        word = error if isinstance(error, CheckpointError) else Damaged(f"{found} cannot be read", str(error))
    if (error := _first_error(ranks.gather(word))) is not None:
        return error
    try:
        loading.commit()
    except NO_SENSE as error:
        raise _no_sense(found, error) from error
    run.notes.extend(f"resume: skipped: {line}" for line in differences)
    return found


def _first_error(said: list[Any]) -> CheckpointError | None:
    return next((each for each in said if isinstance(each, CheckpointError)), None)


def _no_sense(found: Manifest | None, error: Exception) -> CheckpointError:
    return Damaged(f"{found} is damaged", f"its state makes no sense: {type(error).__name__}: {error}")


def mismatch(where: str, differences: list[str]) -> CheckpointError:
    more = len(differences) - SHOWN
    return CheckpointError(
        f"{where} does not fit this run: {len(differences)} difference{'s' * (len(differences) != 1)}",
        *differences[:SHOWN],
        f"and {more} more" if more > 0 else "",
        "nothing was loaded; allow_partial=True loads what fits",
    )


def _with_others(error: CheckpointError, files: Files, name: str | None) -> CheckpointError:
    """``error``, and what could be loaded instead."""
    if not isinstance(error, Damaged):
        return error
    other = next((each.name for each in manifest.complete(files) if each.name != name), None)
    return Damaged(error.headline, *error.facts, f"{other} is complete: resume from that one" if other else "")
