"""``meshfit.fit``: train a model over many devices. The training step itself is in ``loop.py``.

    fit      train, and return the result
    steps    the same as a generator, for a loop of your own

On one device both run in the caller's process. On several, ranks are started and each runs the loop on its share;
the caller gets every ``Step`` as it happens, and may end the training:

    callbacks=    called with steps as they arrive; no device waits. "stop" takes effect some steps later
    each_step=    all devices wait for it after every step. "stop" takes effect at exactly that step
    steps()       all devices wait for the loop's body. Leaving the loop ends it at exactly that step
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from meshfit.arguments import NO_METRICS, verb
from meshfit.drive import Training, begin
from meshfit.errors import JobError
from meshfit.history import History
from meshfit.job import Job
from meshfit.observe.folder import RunFolder
from meshfit.observe.progress import Progress
from meshfit.observe.summary import show
from meshfit.plan import Plan
from meshfit.result import Result
from meshfit.step import Step

Callback = Callable[[Step], Any]
"""Called with a step in the caller's process; returning "stop" ends the training."""

asked_through: Callable[[dict[str, Any]], dict[str, Any]] = lambda asked: asked
"""Called with the arguments of ``fit``, and returns those to use: the command line replaces it."""


@verb
def fit(
    model: nn.Module | Callable[[], nn.Module],
    data: Any,
    *,
    loss: Callable[..., Any] | None = None,
    step: Callable[..., Any] | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] | torch.optim.Optimizer | None = None,
    scheduler: Callable[..., Any] | None = None,
    batch_size: int | str = 32,
    epochs: float | None = None,
    steps: int | None = None,
    valid: Any = None,
    valid_every: int | None = None,
    metrics: Mapping[str, Any] = NO_METRICS,
    best: str | None = None,
    patience: int | None = None,
    ema: float | None = None,
    clip: float | None = None,
    on_nan: Literal["stop", "skip"] = "stop",
    shuffle: bool = True,
    workers: int | str | None = None,
    seed: int = 0,
    plan: Plan | str = "auto",
    devices: str | int = "auto",
    out: Path | str | None = None,
    checkpoint: int | str | None = None,
    resume: bool | Path | str = False,
    listen: str | None = None,
    join: str | None = None,
    timeout: float = 600.0,
    independent: bool = False,
    callbacks: Callback | Sequence[Callback] = (),
    each_step: Callback | Sequence[Callback] = (),
    progress: bool | None = None,
) -> Result:
    """Train ``model`` on ``data`` over the devices of ``plan``. The model ends with the trained weights.

    What is trained
        model        an nn.Module, or a function that builds one, which on several devices is then nowhere whole (see
                     Result.gather_model); called as model(x), model(*x) or model(**x)
        data         tensors, arrays, a Dataset, an IterableDataset; or a function that returns one, called in each rank
        loss         loss(outputs, targets): a mean, or (sum, count). None: the model returns it (Hugging Face's .loss)
        step         instead of loss: step(model, batch) returns the loss, for distillation and the like
        optimizer    needed: a function of the parameters, lambda params: torch.optim.AdamW(params, lr=3e-4); one whose
                     argument is named ``model`` is given the model, for parameter groups
        scheduler    a function of the optimizer (and, with two arguments, of the number of steps), stepped every step
        batch_size   samples of an optimizer step, over all devices; "32/device" derives it
        epochs       passes over the data; one of epochs and steps is needed, with both the shorter ends it
        steps        optimizer steps
        clip         largest norm of the gradient; longer ones are scaled down to it
        ema          also keep an exponential moving average of the weights with this decay; evaluated and returned
        on_nan       a NaN or infinite loss or gradient: "stop" the run or "skip" the step; weights stay finite
        shuffle      visit the samples in a new order each epoch, the same under every plan
        workers      readers of data ahead of each rank: 4, "processes", "4 threads", 0 (the training itself reads);
                     None: as many as keep up, where that helps
        seed         of initial weights (of a model function), order of samples, dropout

    Evaluation
        valid        data to evaluate on, in the form of data; every sample counts once
        valid_every  steps between evaluations; None: at the end of each epoch
        metrics      {name: function of outputs and targets} giving a number, one a sample, or (sum, count); or objects
                     with update, compute and reset, as torchmetrics has them. The same value under every plan
        best         keep the weights of the best evaluation by this metric: "accuracy" (highest), "-loss" (lowest)
        patience     stop after so many evaluations without a new best

    Devices
        plan         how to spread it, and how each device computes: "data=4", "shard=8 precision=bf16 microbatches=2";
                     "auto" takes every device for the data. All words: help(meshfit.Plan)
        devices      "auto" (every GPU; without GPUs as many CPU ranks as the plan names), a number, "cpu:4",
                     "cuda:0,2", "mps"
        timeout      seconds that a rank may wait for the others in a collective; then the training ends with an error
        listen       where workers of other hosts may join, with server= in the plan: "10.0.0.5:7000"
        join         run workers for the run that listens there, one for each device; plan and end are that run's
        independent  train in this process alone, although srun, mpirun or Kubernetes started several: for a sweep

    Files
        out          folder of the run's files; if it is not empty, a new one beside it
        checkpoint   how often to save into out/checkpoints: 500 (steps), "10 minutes", "3%" of the time; None: never
        resume       continue from the newest intact checkpoint of out, if there is one (True), or from the one at a
                     path: at the same sample, under any plan

    Watching
        callbacks    called with each step as it arrives, and no device waits; returning "stop" ends the training soon,
                     after the same step on all devices
        each_step    called after each step, and all devices wait for it; returning "stop" ends it at exactly that step
        progress     show a bar; None: on terminals
    """
    asked = dict(locals())
    callbacks, each_step = (_functions(name, asked.pop(name)) for name in ("callbacks", "each_step"))
    if (shown := asked.pop("progress")) is not None and not isinstance(shown, bool):
        raise JobError(f"progress={shown!r} is not True or False")
    job = Job(**asked_through(asked)).training()
    history = History()
    unread: deque[Step] = deque()  # steps whose loss is still on its way from a GPU: a callback would wait for it
    training = begin(job, lockstep=bool(each_step))
    with training, Progress(training, shown=shown) as bar, RunFolder(training) as folder:
        for each in training:
            history.add(each)
            bar.show(each)
            folder.add(each)
            said = [function(each) for function in each_step]
            unread.append(each)
            while unread and unread[0].reading.ready:
                arrived = unread.popleft()
                said += [callback(arrived) for callback in callbacks]
            if any(isinstance(word, str) and word == "stop" for word in said):
                training.stop()
        for each in unread:
            for callback in callbacks:
                callback(each)
    for function in (*callbacks, *each_step):
        getattr(function, "finish", lambda: None)()
    result = Result.of(training, history)
    if bar.shown:
        show(result)
    return result


@verb
def steps(
    model: nn.Module | Callable[[], nn.Module],
    data: Any,
    *,
    loss: Callable[..., Any] | None = None,
    step: Callable[..., Any] | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] | torch.optim.Optimizer | None = None,
    scheduler: Callable[..., Any] | None = None,
    batch_size: int | str = 32,
    epochs: float | None = None,
    steps: int | None = None,
    valid: Any = None,
    valid_every: int | None = None,
    metrics: Mapping[str, Any] = NO_METRICS,
    best: str | None = None,
    patience: int | None = None,
    ema: float | None = None,
    clip: float | None = None,
    on_nan: Literal["stop", "skip"] = "stop",
    shuffle: bool = True,
    workers: int | str | None = None,
    seed: int = 0,
    plan: Plan | str = "auto",
    devices: str | int = "auto",
    out: Path | str | None = None,
    checkpoint: int | str | None = None,
    resume: bool | Path | str = False,
    listen: str | None = None,
    join: str | None = None,
    timeout: float = 600.0,
    independent: bool = False,
) -> Generator[Step, None, None]:
    """Train, yielding after every optimizer step. The arguments are those of ``fit``, checked at the call.

    All devices wait for the caller at each step. Leaving the loop ends the training; the caller's model then has the
    weights of that step.
    """
    asked = dict(locals())
    return _steps(begin(Job(**asked_through(asked)).training(), lockstep=True))


def _steps(training: Training) -> Generator[Step, None, None]:
    with training, RunFolder(training) as folder:
        try:
            for step in training:
                folder.add(step)
                yield step
        finally:
            training.finish()


def _functions(name: str, given: Any) -> list[Callback]:
    if not callable(given) and not isinstance(given, Iterable):
        raise JobError(f"{name}={given!r} is neither a function nor a list of functions")
    functions = [given] if callable(given) else list(given)
    for function in functions:
        if not callable(function):
            raise JobError(f"{name}= holds {function!r}, which is not a function")
    return functions
