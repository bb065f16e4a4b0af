"""``meshfit.fit``: train a model over many devices. The training step itself is in ``loop.py``.

    fit      train, and return what came of it
    steps    the same as a generator, for a loop of one's own

On one device both run in the caller's process. On several, ranks are started and each runs the loop on its share;
the caller gets every ``Step`` as it happens. Leaving the loop, or a callback that returns "stop", ends the training
with exactly the weights that it had after that step, on one device and on many.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from meshfit.drive import begin
from meshfit.errors import JobError, clearly
from meshfit.job import Job
from meshfit.observe.folder import Folder
from meshfit.observe.progress import Progress
from meshfit.observe.summary import show
from meshfit.result import Result
from meshfit.step import Step

Callback = Callable[[Step], Any]
"""Called in the caller's process after every step; returning "stop" ends the training there."""

asked_through: Callable[[dict[str, Any]], dict[str, Any]] = lambda asked: asked
"""The command line looks at what a script asks of ``fit``, and may change it, by putting a function here."""


@clearly
def fit(
    model: Any, data: Any, *, callbacks: Callback | Sequence[Callback] = (), progress: bool | None = None, **asked: Any
) -> Result:
    """Train ``model`` on ``data``. The keywords are those of ``Job``: loss, optimizer, batch_size, epochs, plan, ...

    The caller's model ends with the trained weights (the best ones with ``best=``, the averaged ones with
    ``ema=``). ``progress`` shows a bar; by default on terminals only.
    """
    job = Job.of(asked_through({"model": model, "data": data, **asked})).training()
    if not callable(callbacks) and not isinstance(callbacks, Iterable):
        raise JobError(f"callbacks={callbacks!r} is neither a function nor some of them")
    if progress is not None and not isinstance(progress, bool):
        raise JobError(f"progress={progress!r} is not True or False")
    watchers = [callbacks] if callable(callbacks) else list(callbacks)
    for watcher in watchers:
        if not callable(watcher):
            raise JobError(f"callbacks= holds {watcher!r}, which is no function")
    history: list[Step] = []
    training = begin(job, lockstep=not all(getattr(watcher, "passive", False) for watcher in watchers))
    with training, Progress(training, shown=progress) as bar, Folder(training) as folder:
        for step in training:
            history.append(step)
            bar.show(step)
            folder.add(step)
            said = [watcher(step) for watcher in watchers]
            if any(isinstance(word, str) and word == "stop" for word in said):
                training.stop()
    for watcher in watchers:
        getattr(watcher, "finish", lambda: None)()
    # Ranks that step apart tell of their steps when they come to it; some are told again, where a server had to go back
    history = [step for _, step in sorted({step.step: step for step in history}.items())]
    result = Result.of(training, history)
    if bar.shown:
        show(result)
    return result


def steps(model: Any, data: Any, **asked: Any) -> Iterator[Step]:
    """Train, yielding after every optimizer step; the keywords are those of ``fit``.

    The ranks wait for the caller at each step. Leaving the loop ends the training with the weights it has then,
    and puts them into the caller's model.
    """
    job = Job.of(asked_through({"model": model, "data": data, **asked})).training()
    with begin(job, lockstep=True) as training, Folder(training) as folder:
        try:
            for step in training:
                folder.add(step)
                yield step
        finally:
            training.finish()
