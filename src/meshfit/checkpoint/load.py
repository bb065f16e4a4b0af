"""Loading: what a checkpoint holds, into a run, under whatever plan that run has.

A rank lists the boxes it needs, reads them into memory of their own, and only when every rank has read everything, and
every block was what had been written, are they put in place: a run is loaded, or it is as it was.
"""

from collections.abc import Callable
from contextlib import nullcontext
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
from meshfit.checkpoint.pieces import ShardLayout, layout_of, uncut
from meshfit.checkpoint.ranks import Ranks
from meshfit.checkpoint.read import OnDisk, Wanted, fill_all
from meshfit.checkpoint.state import KERNELS, buffers, canonical, kind_of, nested, set_random_states, short_kind
from meshfit.data.loader import Position
from meshfit.data.order import stream_seed
from meshfit.errors import CheckpointError, Damaged, MeshfitError
from meshfit.quantised import states_of

if TYPE_CHECKING:
    from meshfit.run import Run

SHOWN = 5
THREADS = 4
"""That read and check: while one waits for the disk, others hash."""

NO_SENSE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
"""Raised where values of a manifest are not what they should be."""


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
            found = _loaded(run, files, name, ranks, partial)
            if isinstance(found, Manifest):
                run.notes.extend(f"resume: {each.name} was skipped: {each.why}" for each in skipped)
                run.notes.append(f"resume: from step {found.step} of {found}")
                return found
            if manifest.find(path)[1] is not None or not isinstance(found, Damaged):
                raise _with_others(found, files, name)
            skipped.append(Skipped(name, "; ".join((found.headline, *found.facts))))
    finally:
        ranks.close()


def agreed(ranks: Ranks, path: Any, skipped: list[Skipped]) -> tuple[Files, str]:
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


def _loaded(run: "Run", files: Files, name: str, ranks: Ranks, partial: bool) -> Manifest | CheckpointError:
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
    if differences and not partial:
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
        "nothing was loaded; partial=True loads what fits",
    )


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

    def read(self) -> None:
        fill_all(OnDisk.of(self.found), self._wanted, threads=THREADS)

    @torch.no_grad()
    def commit(self) -> None:
        for each in self._then:
            each()
        self.run.placed.changed()

    def _want(
        self, key: str, layout: ShardLayout, mine: Tensor, name: str, *, needed: bool = True, there: bool = False
    ) -> None:
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
        run = self.run
        initial = run.initial
        there = () if initial is None or initial.checkpoint != str(self.found) else initial.read
        for name, p in self.parameters.items():
            self._want(f"model/{name}", self.layouts[name], p.detach(), name, there=p in there)
        for kind, name, buffer in buffers(run.model):
            self._want(f"{kind}/{name}", layout_of(run.placed, buffer), buffer, name, needed=kind == "model")
        for name, tensor in states_of(run.model).items():
            self._want(f"model/{name}", uncut(tensor), tensor, name)
        if run.update.average is not None:
            for name, mine in zip(self.parameters, run.update.average.weights, strict=True):
                self._want(f"average/{name}", self.layouts[name], mine, f"the average of {name}")
        scale = run.update.scale
        if scale is not None and "scale/value" in self.found.tensors:
            self._want("scale/value", uncut(scale.value), scale.value, "the loss scale")
            self._want("scale/good_steps", uncut(scale._good_steps), scale._good_steps, "the loss scale's steps")

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
        for name, tensor in {**self.parameters, **{name: buffer for _, name, buffer in buffers(model)}}.items():
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
