"""What a run needs of a checkpoint: boxes to read, and what to do with them once they are all there."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from meshfit.axes.tensors import tensors_of
from meshfit.checkpoint import plain
from meshfit.checkpoint.box import sizes, whole
from meshfit.checkpoint.manifest import Manifest, Stored
from meshfit.checkpoint.pieces import ShardLayout, lie, uncut
from meshfit.checkpoint.read import OnDisk, Wanted, fill_all
from meshfit.checkpoint.state import KERNELS, buffers, canonical, kind_of, nested, set_random_states
from meshfit.data.loader import Position
from meshfit.data.order import mix
from meshfit.errors import MeshfitError

if TYPE_CHECKING:
    from meshfit.run import Run

THREADS = 4
"""That read and check: while one waits for the disk, others hash."""


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

    def _want(self, key: str, layout: ShardLayout, mine: Tensor, name: str, *, needed: bool = True) -> None:
        """Read the tensor ``key`` into a copy of ``mine``, and from there into it."""
        self.used.add(key)
        stored = self.found.tensors.get(key)
        if stored is None:
            wrong = f"{name} is not in the checkpoint"
        elif stored.shape != layout.shape:
            wrong = f"{name} has shape {list(layout.shape)} here, {list(stored.shape)} in the checkpoint"
        elif stored.dtype != mine.dtype:
            wrong = f"{name} is {mine.dtype} here, {stored.dtype} in the checkpoint".replace("torch.", "")
        else:
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
        for name, p in self.parameters.items():
            self._want(f"model/{name}", self.layouts[name], p.detach(), name)
        for kind, name, buffer in buffers(run.model):
            self._want(f"{kind}/{name}", lie(run.placed, buffer), buffer, name, needed=kind == "model")
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
            kind = held["kind"].rpartition(".")[2]
            self.differences.append(f"the optimizer is {type(optimizer).__name__} here, {kind} in the checkpoint")
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
        made = self._optimizer_state()
        offload = self.run.update.offload

        def put() -> None:
            if offload is not None:
                offload.fetch()
            for p in self.parameters.values():
                optimizer.state.pop(p, None)
            for p, values in made.items():
                optimizer.state[p] = values
            for group, values in zip(optimizer.param_groups, settings, strict=True):
                group.update({key: value for key, value in values.items() if key not in KERNELS})
            if offload is not None:
                for chunk in offload.chunks:
                    offload._send(chunk)

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
                like = p.detach() if stored.shape == layout.shape and not counts else None
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
        numbers = plain.decode(held)
        weights: dict[str, Tensor] = {}
        for name, tensor in {**self.parameters, **{name: buffer for _, name, buffer in buffers(model)}}.items():
            stored, layout = self.found.tensors.get(f"best/{name}"), lie(self.run.placed, tensor)
            if stored is not None and stored.shape == layout.shape:
                weights[name] = self._fresh(f"best/{name}", tensor.device, layout, tensor.detach())

        def put() -> None:
            best.value, best.misses = numbers["value"], numbers["misses"]
            named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
            held = {tensor.data_ptr(): name for name, tensor in named.items() if name in weights}
            best.weights = {
                name: weights[name] if name in weights else weights[held[tensor.data_ptr()]].clone()
                for name, tensor in tensors_of(model).items()
                if weights
            }

        self._then.append(put)

    def _want_scheduler(self) -> None:
        scheduler, held = self.run.update.scheduler, self.state["scheduler"]
        kind = "none" if held is None else held["kind"].rpartition(".")[2]
        if scheduler is not None and held is not None and held["kind"] == kind_of(scheduler):
            values = plain.decode(held["state"])
            self._then.append(lambda: scheduler.load_state_dict(values))
        elif scheduler is not None:
            self.differences.append(f"the scheduler is {type(scheduler).__name__} here, {kind} in the checkpoint")
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
            run.position = Position(at, at)
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
        cuda = run.world.device.type == "cuda"
        if same and run.coordination.saves and "torch" in kinds and ("cuda" in kinds) == cuda:
            states = {kind: self._fresh(own + kind, "cpu") for kind in kinds}
            self._then.append(lambda: set_random_states(run, states))
            return

        def seed() -> None:
            key = mix(np.array([run.share, body["step"]], np.uint64), np.uint64(run.job.seed % 2**64))
            torch.manual_seed(int((key[0] ^ (key[1] << np.uint64(1))) >> np.uint64(1)))

        self._then.append(seed)


def _split(key: str, parameters: Any) -> tuple[str, str]:
    """ "exp_avg/blocks.0.weight" as ("exp_avg", "blocks.0.weight"); either may hold a /."""
    path, slash, name = key.partition("/")
    while slash and name not in parameters and "/" in name:
        more, _, name = name.partition("/")
        path = f"{path}/{more}"
    return path, name
