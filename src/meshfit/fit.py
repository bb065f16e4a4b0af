"""``meshfit.fit``: train a model over many devices. The training step itself is in ``loop.py``.

    fit      train, and return what came of it
    steps    the same as a generator, for a loop of one's own

On one device both run in the caller's process. On several, ranks are started and each runs the loop on its share;
the caller gets every ``Step`` as it happens, and may end the training:

    callbacks=    called with steps as they arrive; no device waits. "stop" takes effect some steps later
    each_step=    all devices wait for it after every step. "stop" takes effect at exactly that step
    steps()       all devices wait for the loop's body. Leaving the loop ends it at exactly that step
"""

from collections import deque
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
"""Called with a step in the caller's process; returning "stop" ends the training."""

asked_through: Callable[[dict[str, Any]], dict[str, Any]] = lambda asked: asked
"""The command line looks at what a script asks of ``fit``, and may change it, by putting a function here."""


@clearly
def fit(
    model: Any,
    data: Any,
    *,
    callbacks: Callback | Sequence[Callback] = (),
    each_step: Callback | Sequence[Callback] = (),
    progress: bool | None = None,
    **asked: Any,
) -> Result:
    """Train ``model`` on ``data``. The keywords are those of ``Job``: loss, optimizer, batch_size, epochs, plan, ...

    The caller's model ends with the trained weights (the best ones with ``best=``, the averaged ones with
    ``ema=``). ``progress`` shows a bar; by default on terminals only.
    """
    job = Job.of(asked_through({"model": model, "data": data, **asked})).training()
    callbacks, each_step = _functions("callbacks", callbacks), _functions("each_step", each_step)
    if progress is not None and not isinstance(progress, bool):
        raise JobError(f"progress={progress!r} is not True or False")
    history: list[Step] = []
    unread: deque[Step] = deque()  # steps whose loss is still on its way from a GPU: a callback would wait for it
    training = begin(job, lockstep=bool(each_step))
    with training, Progress(training, shown=progress) as bar, Folder(training) as folder:
        for step in training:
            history.append(step)
            bar.show(step)
            folder.add(step)
            said = [function(step) for function in each_step]
            unread.append(step)
            while unread and unread[0].reading.ready:
                arrived = unread.popleft()
                said += [callback(arrived) for callback in callbacks]
            if any(isinstance(word, str) and word == "stop" for word in said):
                training.stop()
        for step in unread:
            for callback in callbacks:
                callback(step)
    for function in (*callbacks, *each_step):
        getattr(function, "finish", lambda: None)()
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


def _functions(name: str, given: Any) -> list[Callback]:
    if not callable(given) and not isinstance(given, Iterable):
        raise JobError(f"{name}={given!r} is neither a function nor some of them")
    functions = [given] if callable(given) else list(given)
    for function in functions:
        if not callable(function):
            raise JobError(f"{name}= holds {function!r}, which is no function")
    return functions
