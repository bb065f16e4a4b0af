"""What a run needs of a checkpoint: boxes to read, and what to do with them once they are all there."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from meshfit.axes.tensors import tensors_of
from meshfit.checkpoint import plain
from meshfit.checkpoint.box import sizes, whole
from meshfit.checkpoint.manifest import Manifest, Stored
from meshfit.checkpoint.pieces import ShardLayout, lie, uncut
from meshfit.checkpoint.read import Tensors, Wanted, fill_all
from meshfit.checkpoint.state import KERNELS, buffers, canonical, kind_of, nested, set_random_states
from meshfit.data.loader import Position
from meshfit.data.order import mix
from meshfit.errors import MeshfitError

if TYPE_CHECKING:
    from meshfit.run import Run

THREADS = 4
"""That read and check: while one waits for the disk, others hash."""


@dataclass
class Loading:
    """What one rank is about to load. ``differences`` are between the run and the checkpoint; nothing is changed
    before ``commit``."""

    run: "Run"
    tensors: Tensors
    differences: list[str] = field(default_factory=list)
    wanted: list[Wanted] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    """Names of what this rank has a place for."""

    then: list[Callable[[], None]] = field(default_factory=list)
    """What puts things in place."""

    def want(self, key: str, lies: ShardLayout, mine: Tensor, name: str, *, needed: bool = True) -> None:
        """Read the tensor ``key`` into a copy of ``mine``, and from there into it."""
        self.used.add(key)
        stored = self.tensors.stored.get(key)
        if stored is None:
            if needed:
                self.differences.append(f"{name} is not in the checkpoint")
            return
        if stored.shape != lies.shape:
            said = f"{name} has shape {list(lies.shape)} here, {list(stored.shape)} in the checkpoint"
            if needed:
                self.differences.append(said)
            return
        if stored.dtype != mine.dtype:
            if needed:
                self.differences.append(
                    f"{name} is {_dtype(mine.dtype)} here, {_dtype(stored.dtype)} in the checkpoint"
                )
            return
        staged = torch.empty_like(mine, device="cpu")
        self._read(key, lies, staged)

        @torch.no_grad()
        def put() -> None:
            mine.copy_(staged)

        self.then.append(put)

    def _read(self, key: str, lies: ShardLayout, room: Tensor) -> None:
        self.wanted += [Wanted(key, piece.box, piece.of(room)) for piece in lies.pieces if all(sizes(piece.box))]

    def fresh(self, key: str, stored: Stored, lies: ShardLayout, like: Tensor | None, device: torch.device) -> Tensor:
        """A new tensor that will hold ``key``: as ``like`` lies, or all of it."""
        self.used.add(key)
        if like is None:
            made = torch.empty(stored.shape, dtype=stored.dtype, device=device)
            self.wanted.append(Wanted(key, whole(stored.shape), made))
        else:
            made = torch.empty_like(like, dtype=stored.dtype, device=device, requires_grad=False)
            self._read(key, lies, made)
        return made

    def read(self) -> None:
        fill_all(self.tensors, self.wanted, threads=THREADS)

    def commit(self) -> None:
        for each in self.then:
            each()
        self.run.placed.changed()


def want_all(loading: Loading, found: Manifest) -> None:
    run, state = loading.run, found.body["state"]
    parameters, lies = canonical(run)
    for name, p in parameters.items():
        loading.want(f"model/{name}", lies[name], p.detach(), name)
    for kind, name, buffer in buffers(run.model):
        loading.want(f"{kind}/{name}", lie(run.placed, buffer), buffer, name, needed=kind == "model")
    average = run.update.average
    if average is not None:
        for name, mine in zip(parameters, average.weights, strict=True):
            loading.want(f"average/{name}", lies[name], mine, f"the average of {name}")
    _want_optimizer(loading, found, parameters, lies)
    _want_best(loading, found, parameters)
    scale = run.update.scale
    if scale is not None and "scale/value" in found.tensors:
        loading.want("scale/value", uncut(scale.value), scale.value, "the loss scale")
        loading.want("scale/good_steps", uncut(scale._good_steps), scale._good_steps, "the loss scale's steps")
    if run.update.scheduler is not None:
        held = state["scheduler"]
        if held is None or held["kind"] != kind_of(run.update.scheduler):
            there = "none" if held is None else held["kind"].rpartition(".")[2]
            loading.differences.append(
                f"the scheduler is {type(run.update.scheduler).__name__} here, {there} in the checkpoint"
            )
        else:
            values = plain.decode(held["state"])
            loading.then.append(lambda: run.update.scheduler.load_state_dict(values))
    elif state["scheduler"] is not None:
        kind = state["scheduler"]["kind"].rpartition(".")[2]
        loading.differences.append(f"the scheduler is {kind} in the checkpoint, and there is none here")
    _want_position(loading, found)
    _want_random(loading, found)


def _want_optimizer(
    loading: Loading, found: Manifest, parameters: dict[str, nn.Parameter], lies: dict[str, ShardLayout]
) -> None:
    run, state = loading.run, found.body["state"]
    optimizer, held = run.optimizer, state["optimizer"]
    if held["kind"] != kind_of(optimizer):
        kind = held["kind"].rpartition(".")[2]
        loading.differences.append(f"the optimizer is {type(optimizer).__name__} here, {kind} in the checkpoint")
        return
    settings, groups = plain.decode(held["settings"]), state["groups"]
    if len(groups) != len(optimizer.param_groups):
        loading.differences.append(
            f"the optimizer has {len(optimizer.param_groups)} groups here, {len(groups)} in the checkpoint"
        )
        return
    names = {p: name for name, p in parameters.items()}
    elsewhere = False
    for g, (group, there) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        known = set(there)
        for p in group["params"]:
            if p in names and names[p] not in known and f"model/{names[p]}" in found.tensors:
                loading.differences.append(f"{names[p]} is in group {g} of the optimizer here, not in the checkpoint's")
                elsewhere = True
    if elsewhere:
        return
    kept: dict[str, dict[str, Stored]] = {}
    for key, stored in found.named("optimizer").items():
        path, _, name = _split(key, parameters)
        if name in parameters:
            kept.setdefault(name, {})[path] = stored
    made: dict[nn.Parameter, dict[str, Any]] = {}
    stepped = {p for group in optimizer.param_groups for p in group["params"]}
    shards = run.placed.shards
    for name, p in parameters.items():
        if p not in stepped or (shards is not None and p in shards.place and not p.numel()):
            continue
        new: dict[str, Any] = {}
        if (weight := found.tensors.get(f"model/{name}")) is None or weight.shape != lies[name].shape:
            continue  # told already
        for path, stored in kept.get(name, {}).items():
            last = path.rpartition("/")[2]
            like = p.detach() if stored.shape == lies[name].shape and last != "step" else None
            device = p.device if like is not None or last != "step" or _steps_there(optimizer, p) else "cpu"
            new[path] = loading.fresh(f"optimizer/{path}/{name}", stored, lies[name], like, torch.device(device))
        new |= plain.decode(state["values"].get(name, {}))
        if new:
            made[p] = nested(new)

    def put() -> None:
        offload = run.update.offload
        if offload is not None:
            offload.fetch()
        for p in parameters.values():
            optimizer.state.pop(p, None)
        for p, values in made.items():
            optimizer.state[p] = values
        for group, values in zip(optimizer.param_groups, settings, strict=True):
            group.update({key: value for key, value in values.items() if key not in KERNELS})
        if offload is not None:
            for chunk in offload.chunks:
                offload._send(chunk)

    loading.then.append(put)


def _steps_there(optimizer: torch.optim.Optimizer, p: nn.Parameter) -> bool:
    """Whether the counter of a parameter's steps is kept where the parameter is."""
    group = next(group for group in optimizer.param_groups if any(p is each for each in group["params"]))
    return bool(group.get("fused") or group.get("capturable"))


def _split(key: str, parameters: Any) -> tuple[str, str, str]:
    """ "exp_avg/blocks.0.weight" as ("exp_avg", "/", "blocks.0.weight"); either may hold a /."""
    path, slash, name = key.partition("/")
    while slash and name not in parameters and "/" in name:
        more, _, name = name.partition("/")
        path = f"{path}/{more}"
    return path, slash, name


def _want_best(loading: Loading, found: Manifest, parameters: dict[str, nn.Parameter]) -> None:
    run, held = loading.run, found.body["state"]["best"]
    best = run.best
    if best is None or held is None:
        return
    numbers = plain.decode(held)
    weights: dict[str, Tensor] = {}
    for name, tensor in {**parameters, **{name: buffer for _, name, buffer in buffers(run.model)}}.items():
        stored, lies = found.tensors.get(f"best/{name}"), lie(run.placed, tensor)
        if stored is not None and stored.shape == lies.shape:
            weights[name] = loading.fresh(f"best/{name}", stored, lies, tensor.detach(), tensor.device)

    def put() -> None:
        best.value, best.misses = numbers["value"], numbers["misses"]
        held = {tensor.data_ptr(): name for name, tensor in _named(run.model).items() if name in weights}
        best.weights = {
            name: weights[name] if name in weights else weights[held[tensor.data_ptr()]].clone()
            for name, tensor in tensors_of(run.model).items()
            if weights
        }

    loading.then.append(put)


def _named(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _want_position(loading: Loading, found: Manifest) -> None:
    run, body = loading.run, found.body
    data = plain.decode(body["state"]["data"])
    try:
        at = run.loader.resume(data)
    except MeshfitError as error:
        loading.differences.append("; ".join((error.headline, *error.facts)))
        at = (int(data["epoch"]), 0)

    def put() -> None:
        run.step, run.samples = body["step"], body["samples"]
        run.position = Position(at, at)
        if hasattr(run.schedule, "steps"):  # a pipeline's random numbers follow from how many it has taken
            run.schedule.steps = run.step  # type: ignore[attr-defined, union-attr]

    loading.then.append(put)


def _want_random(loading: Loading, found: Manifest) -> None:
    """The rank's own random states if the plan is the same; else new ones, that no other step or share has drawn."""
    run, body = loading.run, found.body
    own = f"random/rank{run.world.rank}/"
    kinds = [key.removeprefix(own) for key in found.tensors if key.startswith(own)]
    same = body["plan"] == str(run.plan) and body["world"] == run.world.size and body["seed"] == run.job.seed
    if same and run.coordination.saves and "torch" in kinds and ("cuda" in kinds) == (run.world.device.type == "cuda"):
        states = {
            kind: loading.fresh(own + kind, found.tensors[own + kind], ShardLayout((), ()), None, torch.device("cpu"))
            for kind in kinds
        }
        loading.then.append(lambda: set_random_states(run, states))
        return

    def seed() -> None:
        key = mix(np.array([run.share, body["step"]], np.uint64), np.uint64(run.job.seed % 2**64))
        torch.manual_seed(int((key[0] ^ (key[1] << np.uint64(1))) >> np.uint64(1)))

    loading.then.append(seed)


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
