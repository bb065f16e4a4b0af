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
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from meshfit.arguments import verb_of
from meshfit.drive import Training, begin
from meshfit.drive.ranked import Ranked
from meshfit.drive.untouched import note_of
from meshfit.errors import JobError
from meshfit.history import History
from meshfit.job import Job
from meshfit.observe.about import about
from meshfit.observe.folder import RunFolder
from meshfit.observe.progress import Progress
from meshfit.observe.summary import show
from meshfit.observe.track import Track
from meshfit.result import Result
from meshfit.step import Step

Callback = Callable[[Step], Any]
"""Called with a step in the caller's process; returning "stop" ends the training."""

asked_through: Callable[[dict[str, Any]], dict[str, Any]] = lambda asked: asked
"""Called with the arguments of ``fit``, and returns those to use: the command line replaces it."""


@dataclass(frozen=True, kw_only=True)
class FitArguments(Job):
    """What ``fit`` is asked: a job, and who watches it."""

    callbacks: Callback | Sequence[Callback] = ()
    each_step: Callback | Sequence[Callback] = ()
    progress: bool | None = None


@verb_of(FitArguments)
def fit(asked: dict[str, Any]) -> Result:
    """Train ``model`` on ``data`` over the devices of ``plan``. The model ends with the trained weights.

    What is trained
        model        an nn.Module, or a function that builds one, which on several devices is then nowhere whole (see
                     Result.gather_model); called as model(x), model(*x) or model(**x)
        data         tensors, arrays, a Dataset, an IterableDataset, a DataLoader (its batch size, order and collate_fn
                     are taken over); or a function that returns one, called in each rank
        loss         loss(outputs, targets): a mean, or (sum, count). None: the model returns it (Hugging Face's .loss)
        step         instead of loss: step(model, batch) returns the loss, for distillation and the like; or
                     (loss, {"name": value}), to log values: they are averaged as the loss is. Or a dict of phases:
                     {"critic": f, "generator": g}, run in order on each batch; meshfit.every(5, g): in each 5th step
        weights      what the model starts from: safetensors, a Hugging Face folder, a state dict, a checkpoint; or a
                     list, a base and its adapters. Each rank reads its part
        partial      of weights what fits, for a model with a new head; else every name and shape must fit
        optimizer    needed: a function of the parameters, lambda params: torch.optim.AdamW(params, lr=3e-4); one whose
                     argument is named ``model``, or used as one, is given the model, for parameter groups. A list
                     of optimizers steps together. With phases a dict: each steps by the gradients of its phase
        scheduler    a function of the optimizer (and, with two arguments, of the number of steps), stepped every step;
                     of a list of optimizers a function of the list, or a list of functions; of phases a dict
        batch_size   samples of an optimizer step, over all devices; "32/device" derives it; None: 32, or a DataLoader's
        batch_tokens in place of batch_size: as many samples as make so many tokens, padded to the longest of them
        collate      makes a batch of a list of samples, as a DataLoader's collate_fn does; None: they are stacked, and
                     Hugging Face's fields (input_ids, labels, ...) padded
        length       of a sample: the name of a field, a function of a sample, or a list of all lengths; batches are
                     then made of samples of similar lengths
        pack         tokens of a row: documents (dicts with input_ids) are packed into rows, kept apart by position_ids;
                     batch_size is of rows
        epochs       passes over the data; one of epochs and steps is needed, with both the shorter ends it
        steps        optimizer steps
        clip         largest norm of the gradient; longer ones are scaled down to it
        ema          also keep an exponential moving average of the weights with this decay; evaluated and returned
        on_nan       a NaN or infinite loss or gradient: "stop" the run or "skip" the step; weights stay finite
        shuffle      visit the samples in a new order each epoch, the same under every plan; None: yes, or as the
                     DataLoader does
        workers      readers of data ahead of each rank: 4, "processes", "4 threads", 0 (the training itself reads);
                     None: as many as keep up, where that helps
        seed         of initial weights (of a model function), order of samples, dropout

    Evaluation
        valid        data to evaluate on, in the form of data; every sample counts once
        valid_every  steps between evaluations; None: at the end of each epoch
        valid_step   what evaluations run in place of loss or step: valid_step(model, batch) returns what step does; as
                     (loss, {"name": value}, outputs) it hands metrics its outputs
        metrics      {name: function of outputs and targets} giving a number, one a sample, or (sum, count); or objects
                     with update, compute and reset, as torchmetrics has them. The same value under every plan
        best         keep the weights of the best evaluation by this metric: "accuracy" (highest), "-loss" (lowest)
        patience     stop after so many evaluations without a new best

    Devices
        plan         how to spread it, and how each device computes: "data=4", "shard=8 precision=bf16 microbatches=2";
                     "auto" searches for the fastest that fits. All words: help(meshfit.Plan)
        devices      "auto" (every GPU; without GPUs as many CPU ranks as the plan names), a number, "cpu:4",
                     "cuda:0,2", "mps"; "2..8": as many as are there, also after one is lost, or comes back
        timeout      seconds that a rank may wait for the others in a collective; then the training ends with an error
        hang_timeout how long a rank may stand still in a step ("30 s") until it is ended, with a verdict: who stands
                     where, who waits for whom. None: a minute more than timeout
        check_replicas  steps after which ranks that hold the same compare a digest of it, bit by bit; None: so many
                     that it takes less than 0.5 % of the time; False: never
        listen       where workers of other hosts may join, with server= in the plan: "10.0.0.5:7000"
        join         run workers for the run that listens there, one for each device; plan and end are that run's
        independent  train in this process alone, although srun, mpirun or Kubernetes started several: for a sweep

    Files
        out          folder of the run's files; if it is not empty, a new one beside it
        checkpoint   how often to save into out/checkpoints: 500 (steps), "10 minutes", "3%" of the time; None: never
        keep         checkpoints that stay, the newest; older ones go when the next one is on disk
        keep_best    one more stays, that of the best evaluation by this metric: "accuracy", "-loss"; saved at once
        resume       continue from the newest intact checkpoint of out, if there is one (True), or from the one at a
                     path: at the same sample, under any plan
        restarts     ranks that die, or raise, are started again from the newest checkpoint, at the same sample: so many
                     times in a row without coming to a newer one. "auto": 3 times with checkpoint=, else never
        preemption   a file that appears, or an address (http://...) that says so, when this machine is about to be
                     taken away: the training ends after a step, saved, with exit code 75: run me again
        grace        how long a save may take after such a notice, "30 s"; then it ends without

    Watching
        callbacks    called with each step as it arrives, and no device waits; returning "stop" ends the training soon,
                     after the same step on all devices
        each_step    called after each step, and all devices wait for it; returning "stop" ends it at exactly that step
        progress     show a bar; None: on terminals and in notebooks
    """
    callbacks, each_step = (_functions(name, asked.pop(name)) for name in ("callbacks", "each_step"))
    if (shown := asked.pop("progress")) is not None and not isinstance(shown, bool):
        raise JobError(f"progress={shown!r} is not True or False")
    job = Job(**asked_through(asked)).training()
    history = History()
    unread: deque[Step] = deque()  # steps whose loss is still on its way from a GPU: a callback would wait for it
    training = begin(job, lockstep=bool(each_step))
    if isinstance(training, Ranked):
        training.said += note_of(training.model, [*callbacks, *each_step])
    if not training.first:  # of torchrun's ranks: a run is told to a tracker once
        callbacks, each_step = ([f for f in some if not isinstance(f, Track)] for some in (callbacks, each_step))
    with training, Progress(training, shown=shown) as bar, RunFolder(training) as folder:
        for tracker in (function for function in (*callbacks, *each_step) if isinstance(function, Track)):
            tracker.begin(about(training.job), folder.path)
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
    if bar.shown and bar.notebook is None:  # a notebook shows the result itself
        show(result)
    return result


@verb_of(Job)
def steps(asked: dict[str, Any]) -> Generator[Step, None, None]:
    """Train, yielding after every optimizer step. The arguments are those of ``fit``, checked at the call.

    All devices wait for the caller at each step. Leaving the loop ends the training; the caller's model then has the
    weights of that step.
    """
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
    if not callable(given) and (not isinstance(given, Iterable) or isinstance(given, str | bytes)):
        raise JobError(f"{name}={given!r} is neither a function nor a list of functions")
    functions = [given] if callable(given) else list(given)
    for function in functions:
        if not callable(function):
            raise JobError(f"{name}= holds {function!r}, which is not a function")
    return functions
