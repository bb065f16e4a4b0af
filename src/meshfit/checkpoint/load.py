"""Loading: what a checkpoint holds, into a run, under whatever plan that run has.

A rank lists the boxes it needs, reads them into memory of their own, and only when every rank has read everything, and
every block was what had been written, are they put in place: a run is loaded, or it is as it was.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from meshfit.axes.buffers.watch import named_state
from meshfit.axes.tensors import tensors_of
from meshfit.checkpoint import manifest, plain
from meshfit.checkpoint.box import sizes, whole
from meshfit.checkpoint.files import Files
from meshfit.checkpoint.manifest import Manifest, Skipped, Stored
from meshfit.checkpoint.pieces import ShardLayout, layout_of
from meshfit.checkpoint.ranks import Ranks
from meshfit.checkpoint.read import OnDisk, Wanted, fill_all
from meshfit.checkpoint.state import (
    KERNELS,
    canonical,
    held_by,
    kind_of,
    nested,
    set_random_states,
    short_kind,
)
from meshfit.data.loader import Position
from meshfit.data.order import stream_seed
from meshfit.errors import CheckpointError, Damaged, MeshfitError

if TYPE_CHECKING:
    from meshfit.run import Run

SHOWN = 5
THREADS = 4
"""That read and check: while one waits for the disk, others hash."""


def restore(
    run: "Run", path: Files | Path | str, *, partial: bool = False, skipped: list[Skipped] | None = None
) -> Manifest:
    """Load the checkpoint at ``path``, or the newest in it that is intact, into ``run``, which then goes on from there.

    All ranks call it together, before the first step. ``partial`` loads what fits and notes what does not.
    """
    ranks = Ranks(run.world.rank, run.world.size)
    skipped = [] if skipped is None else skipped
    try:
        while True:
            files, name = agreed(ranks, path, skipped)
            try:
                loading = _read(run, files, name, ranks, partial)
            except CheckpointError as error:
                if manifest.find(path)[1] is not None or not isinstance(error, Damaged):
                    raise _with_others(error, files, name) from None
                skipped.append(Skipped(name, "; ".join((error.headline, *error.facts))))
                continue
            loading.commit()
            run.notes.extend(f"resume: {each.name} was skipped: {each.why}" for each in skipped)
            run.notes.append(f"resume: from step {loading.found.step} of {loading.found}")
            return loading.found
    finally:
        ranks.close()


def agreed(ranks: Ranks, path: Any, skipped: list[Skipped]) -> tuple[Files, str]:
    """The checkpoint to load: what the first rank finds."""

    def find() -> str:
        files, name = manifest.find(path)
        bad = {each.name for each in skipped}
        passed: list[Skipped] = []
        try:
            every = [manifest.read(files, name)] if name is not None else manifest.complete(files, passed)
            found = next((each for each in every if each.name not in bad), None)
        except Damaged as error:
            raise _with_others(error, files, name) from None
        skipped.extend(each for each in passed if each.name not in bad)
        if found is None:
            why = [f"{each.name}: {each.why}" for each in skipped[:SHOWN]]
            raise CheckpointError(f"there is no checkpoint to load in {files}", *why)
        return found.name

    return manifest.find(path)[0], ranks.first(find)


def _read(run: "Run", files: Files, name: str, ranks: Ranks, partial: bool) -> "Loading":
    """A checkpoint in memory, to be put in place. What stands against it is raised on every rank."""
    loading = ranks.together(lambda: Loading.of(run, files, name))
    found = loading.found
    every = ranks.gather((loading.differences, loading.used))
    differences = list(dict.fromkeys(line for lines, _ in every for line in lines))
    used = set().union(*(names for _, names in every))
    differences += [
        f"{name} is in the checkpoint, and not in the model"
        for name in found.named("model")
        if f"model/{name}" not in used
    ]
    if run.update.average is None and found.named("average"):
        differences.append("the checkpoint has an average of the weights (ema=), and this run keeps none")
    if differences and not partial:
        more = len(differences) - SHOWN
        raise CheckpointError(
            f"{found} does not fit this run: {len(differences)} difference{'s' * (len(differences) != 1)}",
            *differences[:SHOWN],
            f"and {more} more" if more > 0 else "",
            "nothing was loaded; partial=True loads what fits",
        )
    ranks.together(loading.read)
    run.notes.extend(f"resume: skipped: {line}" for line in differences)
    return loading


@contextmanager
def _sensible(found: Manifest) -> Iterator[None]:
    """Values of a manifest that are not what they should be are damage."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        said = f"its state makes no sense: {type(error).__name__}: {error}"
        raise Damaged(f"{found} is damaged", said) from error


def _with_others(error: CheckpointError, files: Files, name: str | None) -> CheckpointError:
    """``error``, and what could be loaded instead."""
    if not isinstance(error, Damaged):
        return error
    other = next((each.name for each in manifest.complete(files) if each.name != name), None)
    return Damaged(error.headline, *error.facts, f"{other} is complete: resume from that one" if other else "")


class Loading:
    """What one rank is about to load. Nothing is changed before ``commit``."""

    def __init__(self, run: "Run", found: Manifest):
        self.run, self.found, self.state = run, found, found.body["state"]
        self.differences: list[str] = []
        """Between the run and the checkpoint."""
        self.used: set[str] = set()
        """Names of what this rank has a place for."""
        self._wanted: list[Wanted] = []
        self._then: list[Callable[[], Any]] = []
        """What puts things in place."""
        self.parameters, self.layouts = canonical(run)
        self._want_weights()
        self._want_optimizer()
        self._want_best()
        self._want_scheduler()
        self._want_position()
        self._want_random()

    @classmethod
    def of(cls, run: "Run", files: Files, name: str) -> "Loading":
        found = manifest.read(files, name)
        with _sensible(found):
            return cls(run, found)

    def read(self) -> None:
        """Into memory of its own."""
        fill_all(OnDisk.of(self.found), self._wanted, threads=THREADS)

    @torch.no_grad()
    def commit(self) -> None:
        """Put everything in place."""
        with _sensible(self.found):
            for each in self._then:
                each()
            self.run.placed.changed()

    def _want(self, key: str, layout: ShardLayout, mine: Tensor, name: str, *, needed: bool, there: bool) -> None:
        """Read the tensor ``key`` into a copy of ``mine``, and from there into it; unless it is ``there``."""
        self.used.add(key)
        stored = self.found.tensors.get(key)
        if stored is None:
            wrong = f"{name} is not in the checkpoint"
        elif stored.shape != layout.shape:
            wrong = f"{name} has shape {list(layout.shape)} here, {list(stored.shape)} in the checkpoint"
        elif stored.dtype != mine.dtype:
            wrong = f"{name} is {mine.dtype} here, {stored.dtype} in the checkpoint".replace("torch.", "")
        else:
            if not there:
                staged = torch.empty_like(mine, device="cpu")
                self._read(key, layout, staged)
                self._then.append(lambda: mine.copy_(staged))
            return
        if needed:
            self.differences.append(wrong)

    def _read(self, key: str, layout: ShardLayout, room: Tensor) -> None:
        self._wanted += [Wanted(key, piece.box, piece.of(room)) for piece in layout.pieces if all(sizes(piece.box))]

    def _fresh(self, key: str, device: Any, layout: ShardLayout | None = None, like: Tensor | None = None) -> Tensor:
        """A new tensor that will hold ``key``: the part of it that ``layout`` gives this rank, or all of it."""
        self.used.add(key)
        stored = self.found.tensors[key]
        if layout is None or like is None:
            made = torch.empty(stored.shape, dtype=stored.dtype, device=device)
            self._wanted.append(Wanted(key, whole(stored.shape), made))
        else:
            made = torch.empty_like(like, dtype=stored.dtype, device=device, requires_grad=False)
            self._read(key, layout, made)
        return made

    def _want_weights(self) -> None:
        initial = self.run.initial
        there = () if initial is None or initial.checkpoint != str(self.found) else initial.read
        for key, layout, tensor, name in held_by(self.run):
            if key.startswith("scale/") and key not in self.found.tensors:
                continue
            needed = not key.startswith("extra/")
            self._want(key, layout, tensor.detach(), name, needed=needed, there=tensor in there)

    def _want_optimizer(self) -> None:
        optimizer, held, groups = self.run.optimizer, self.state["optimizer"], self.state["groups"]
        if held["kind"] != kind_of(optimizer):
            kind = short_kind(held["kind"])
            self.differences.append(f"the optimizer is {optimizer.name} here, {kind} in the checkpoint")
            return
        settings, count = plain.decode(held["settings"]), len(optimizer.param_groups)
        if len(groups) != count:
            self.differences.append(f"the optimizer has {count} groups here, {len(groups)} in the checkpoint")
            return
        names = {p: name for name, p in self.parameters.items()}
        elsewhere = [
            f"{names[p]} is in group {g} of the optimizer here, not in the checkpoint's"
            for g, group in enumerate(optimizer.param_groups)
            for p in group["params"]
            if p in names and names[p] not in groups[g] and f"model/{names[p]}" in self.found.tensors
        ]
        if elsewhere:
            self.differences += elsewhere
            return
        if "states=bf16" in self.found.body["plan"].split() and self.run.plan.states != "bf16":
            self.differences.append("the optimizer's states are rounded in the checkpoint (states=bf16), and not here")
            return
        made = self._optimizer_state()
        offload = self.run.update.offload

        def put() -> None:
            with nullcontext() if offload is None else offload.present():
                for p in self.parameters.values():
                    optimizer.state.pop(p, None)
                for p, values in made.items():
                    optimizer.state[p] = values
                for group, values in zip(optimizer.param_groups, settings, strict=True):
                    group.update({key: value for key, value in values.items() if key not in KERNELS})

        self._then.append(put)

    def _optimizer_state(self) -> dict[nn.Parameter, dict[str, Any]]:
        """The state of each parameter that this rank steps, in memory that will be filled."""
        kept: dict[str, dict[str, Stored]] = {}
        for key, stored in self.found.named("optimizer").items():
            path, name = _split(key, self.parameters)
            kept.setdefault(name, {})[path] = stored
        made, shards = {}, self.run.placed.shards
        group_of = {p: group for group in self.run.optimizer.param_groups for p in group["params"]}
        for name, p in self.parameters.items():
            layout, weight = self.layouts[name], self.found.tensors.get(f"model/{name}")
            if p not in group_of or (shards is not None and p in shards.place and not p.numel()):
                continue
            if weight is None or weight.shape != layout.shape:
                continue  # told already
            there = group_of[p].get("fused") or group_of[p].get("capturable")  # where the parameter is
            new: dict[str, Any] = {}
            for path, stored in kept.get(name, {}).items():
                counts = path.rpartition("/")[2] == "step"
                cut = stored.shape == layout.shape and not counts and p not in self.run.stepped_whole
                like = p.detach() if cut else None
                device = "cpu" if counts and not there else p.device
                new[path] = self._fresh(f"optimizer/{path}/{name}", device, layout, like)
            new |= plain.decode(self.state["values"].get(name, {}))
            if new:
                made[p] = nested(new)
        return made

    def _want_best(self) -> None:
        model, best, held = self.run.model, self.run.best, self.state["best"]
        if best is None or held is None:
            return
        facts = plain.decode(held)
        weights: dict[str, Tensor] = {}
        for name, tensor in named_state(model).items():
            stored, layout = self.found.tensors.get(f"best/{name}"), layout_of(self.run.placed, tensor)
            if stored is not None and stored.shape == layout.shape:
                weights[name] = self._fresh(f"best/{name}", tensor.device, layout, tensor.detach())

        def put() -> None:
            best.restore_facts(facts)
            named = named_state(model)
            held = {tensor.data_ptr(): name for name, tensor in named.items() if name in weights}
            best.weights = {
                name: weights[name] if name in weights else weights[held[tensor.data_ptr()]].clone()
                for name, tensor in tensors_of(model).items()
                if weights
            }

        self._then.append(put)

    def _want_scheduler(self) -> None:
        scheduler, held = self.run.scheduler, self.state["scheduler"]
        kind = "none" if held is None else short_kind(held["kind"])
        if scheduler is not None and held is not None and held["kind"] == kind_of(scheduler):
            values = plain.decode(held["state"])
            self._then.append(lambda: scheduler.load_state_dict(values))
        elif scheduler is not None:
            self.differences.append(f"the scheduler is {scheduler.name} here, {kind} in the checkpoint")
        elif held is not None:
            self.differences.append(f"the scheduler is {kind} in the checkpoint, and there is none here")

    def _want_position(self) -> None:
        run, body, data = self.run, self.found.body, plain.decode(self.state["data"])
        try:
            at = run.loader.resume(data)
        except MeshfitError as error:
            self.differences.append("; ".join((error.headline, *error.facts)))
            at = (int(data["epoch"]), 0)

        def put() -> None:
            run.step, run.samples = body["step"], body["samples"]
            run.position = Position(at, at, ahead=tuple(map(int, self.state.get("ahead", ()))))
            if hasattr(run.schedule, "steps"):  # a pipeline's random numbers follow from how many it has taken
                run.schedule.steps = run.step  # type: ignore[attr-defined, union-attr]

        self._then.append(put)

    def _want_random(self) -> None:
        """The rank's own random states if the plan is the same; else new ones, that no other step or share has
        drawn."""
        run, body = self.run, self.found.body
        own = f"random/rank{run.world.rank}/"
        kinds = [key.removeprefix(own) for key in self.found.tensors if key.startswith(own)]
        same = body["plan"] == str(run.plan) and body["world"] == run.world.size and body["seed"] == run.job.seed
        gpus = {run.world.device.type} - {"cpu"}
        if same and run.coordination.saves and "torch" in kinds and gpus == {"cuda", "mps"} & set(kinds):
            states = {kind: self._fresh(own + kind, "cpu") for kind in kinds}
            self._then.append(lambda: set_random_states(run, states))
            return

        def seed() -> None:
            torch.manual_seed(stream_seed(run.share, body["step"], run.job.seed))

        self._then.append(seed)


def _split(key: str, parameters: Any) -> tuple[str, str]:
    """ "exp_avg/blocks.0.weight" as ("exp_avg", "blocks.0.weight"); either may hold a /."""
    path, slash, name = key.partition("/")
    while slash and name not in parameters and "/" in name:
        more, _, name = name.partition("/")
        path = f"{path}/{more}"
    return path, name
