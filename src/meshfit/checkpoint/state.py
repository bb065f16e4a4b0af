"""What a run is made of, for saving: tensors as boxes under names that no strategy changes, and facts as plain values.

Tensors: weights and buffers (tied ones once, under the name they are first known by), what the optimizer keeps for each
parameter, the average, the best weights so far, the loss scale, random states. Facts: how far it is, the optimizer's
kind, groups and settings, the schedule, the position in the data, the plan.
"""

import hashlib
import json
import platform
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from meshfit.anatomy.record_build import tied
from meshfit.axes.buffers.watch import named_state
from meshfit.checkpoint import plain
from meshfit.checkpoint.box import Box, whole
from meshfit.checkpoint.pieces import ShardLayout, layout_of, uncut
from meshfit.errors import CheckpointError
from meshfit.generators import set_state_of, state_of
from meshfit.optimizers import Optimizers, Schedulers
from meshfit.quantised import states_of
from meshfit.torch_private.modules import non_persistent_buffers
from meshfit.version import VERSION

if TYPE_CHECKING:
    from meshfit.run import Run

KERNELS = ("fused", "foreach", "capturable", "differentiable")
"""Settings of an optimizer that choose a kernel: those of the run, not of the checkpoint."""


@dataclass(frozen=True, slots=True)
class Item:
    """A box of a tensor that this rank could write."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of the whole tensor."""

    box: Box
    view: Tensor
    """The rank's memory."""

    first: bool = False
    """Where several ranks hold it, the first writes it: it may differ, as local BatchNorm statistics do."""

    @property
    def nbytes(self) -> int:
        return self.view.numel() * self.dtype.itemsize


def items_of(run: "Run") -> list[Item]:
    """Everything that this rank holds. Views: to be copied before the next step."""
    parameters, layouts = canonical(run)
    own = run.plan.exchange != "allreduce"  # then each rank has states of its own: those of one go together
    found = []
    for key, layout, tensor, _ in held_by(run):
        first = own if key.startswith(("average/", "scale/")) else not isinstance(tensor, nn.Parameter)
        found += _items(key, layout, tensor, first=first)
    for name, p in parameters.items():
        for key, value in flattened(optimizer_state(run, p)).items():
            if isinstance(value, Tensor):
                cut = p not in run.stepped_whole and key.rpartition("/")[2] != "step"
                moment = cut and value.shape == p.shape  # laid out as its parameter
                found += _items(f"optimizer/{key}/{name}", layouts[name] if moment else uncut(value), value, first=own)
    if run.best is not None and run.best.weights:
        for name, tensor in named_state(run.model).items():
            found += _items(f"best/{name}", layout_of(run.placed, tensor), run.best.weights[name], first=True)
    for kind, state in random_states(run).items():
        found += _items(f"random/rank{run.world.rank}/{kind}", uncut(state), state)
    return found


def held_by(run: "Run") -> Iterator[tuple[str, ShardLayout, Tensor, str]]:
    """Key, layout, tensor, and its name for people, of all that a run holds beside the optimizer's state, the best
    weights and random states: what is saved and loaded in place."""
    parameters, layouts = canonical(run)
    for name, p in parameters.items():
        yield f"model/{name}", layouts[name], p, name
    for kind, name, buffer in buffers(run.model):
        yield f"{kind}/{name}", layout_of(run.placed, buffer), buffer, name
    for name, tensor in states_of(run.model).items():
        yield f"model/{name}", uncut(tensor), tensor, name
    if run.update.average is not None:
        for name, mine in zip(parameters, run.update.average.weights, strict=True):
            yield f"average/{name}", layouts[name], mine, f"the average of {name}"
    if (scale := run.update.scale) is not None:
        yield "scale/value", uncut(scale.value), scale.value, "the loss scale"
        yield "scale/good_steps", uncut(scale._good_steps), scale._good_steps, "the loss scale's steps"


def canonical(run: "Run") -> tuple[dict[str, nn.Parameter], dict[str, ShardLayout]]:
    """Parameters by the name they are first known by, and the layout of each."""
    parameters = dict(run.model.named_parameters())
    return parameters, {name: layout_of(run.placed, p) for name, p in parameters.items()}


def buffers(model: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Kind, name and tensor; "extra" are those that a state dict leaves out, and a model can make anew."""
    extra = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in non_persistent_buffers(module)
    }
    for name, buffer in model.named_buffers():
        yield "extra" if name in extra else "model", name, buffer


def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Those of a state dict, tied weights once."""
    kept = {name: buffer for kind, name, buffer in buffers(model) if kind == "model"}
    return {**dict(model.named_parameters()), **kept}


def _items(key: str, layout: ShardLayout, mine: Tensor, *, first: bool = False) -> list[Item]:
    if isinstance(mine, nn.Parameter) and not hasattr(mine, "__tensor_flatten__"):  # of bitsandbytes' own class
        mine = mine.detach().as_subclass(Tensor)
    if type(mine) not in (Tensor, nn.Buffer) or mine.layout is not torch.strided:
        raise CheckpointError(
            f"{key} cannot be saved: it is a {type(mine).__name__} of layout {mine.layout}".replace("torch.", ""),
            "checkpoints hold plain, dense tensors",
        )
    mine = mine.detach()
    if prod(layout.shape) == 0:
        return [Item(key, mine.dtype, layout.shape, whole(layout.shape), mine.new_empty(layout.shape), first)]
    return [Item(key, mine.dtype, layout.shape, piece.box, piece.of(mine), first) for piece in layout.pieces]


# The optimizer


def optimizer_state(run: "Run", p: nn.Parameter) -> dict[Any, Any]:
    """What the optimizer keeps for ``p``; nothing where this rank has nothing of it to step."""
    shards = run.placed.shards
    if shards is not None and p in shards.place and not p.numel():
        return {}
    offload = run.update.offload
    if offload is not None and offload.move:
        return offload.read(p)
    return run.optimizer.state.get(p, {})


def flattened(state: dict[Any, Any], at: str = "") -> dict[str, Any]:
    """Nested dicts, lists that hold tensors, and tensors that are made of others (quantised states), as one: "a/b",
    "a/#0", "a/codes"."""
    found = {}
    for key, value in state.items():
        if isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__"):
            value = _parts(value)
        if isinstance(value, list) and any(isinstance(one, Tensor) for one in value):
            value = {f"#{i}": one for i, one in enumerate(value)}
        if not isinstance(key, str) or "/" in key:
            raise CheckpointError(f"the optimizer keeps state under {key!r}", "a checkpoint needs names without /")
        if isinstance(value, dict):
            found |= flattened(value, f"{at}{key}/")
        else:
            found[at + key] = value
    return found


def nested(state: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in state.items():
        *path, last = key.split("/")
        inner = found
        for name in path:
            inner = inner.setdefault(name, {})
        inner[last] = value
    return {key: _listed(value) for key, value in found.items()}


def _listed(value: Any) -> Any:
    """With dicts that were lists as lists again."""
    if not isinstance(value, dict):
        return value
    inner = {key: _listed(one) for key, one in value.items()}
    if KIND in inner:
        return _put_together(inner)
    was_list = inner and all(isinstance(key, str) and key.startswith("#") for key in inner)
    return [inner[f"#{i}"] for i in range(len(inner))] if was_list else inner


KIND, ABOUT = "=kind", "=about"


def _parts(tensor: Any) -> dict[str, Any]:
    """A tensor that is made of others as those, its class, and what else that needs."""
    names, about = tensor.__tensor_flatten__()
    kind = f"{type(tensor).__module__}:{type(tensor).__qualname__}"
    about = [about, list(tensor.shape), list(tensor.stride())]
    return {KIND: kind, ABOUT: about, **{name: getattr(tensor, name) for name in names}}


def _put_together(parts: dict[str, Any]) -> Tensor:
    """The inverse of ``_parts``. Nothing is imported for it: an optimizer that keeps such tensors has done so."""
    module, _, name = parts[KIND].partition(":")
    found: Any = getattr(sys.modules.get(module), name, None)
    if not (isinstance(found, type) and issubclass(found, Tensor) and hasattr(found, "__tensor_unflatten__")):
        raise CheckpointError(f"the optimizer's state holds a {name} of {module}, which this process does not know")
    about, shape, stride = parts[ABOUT]
    inner = {key: value for key, value in parts.items() if key not in (KIND, ABOUT)}
    unflatten: Any = found.__tensor_unflatten__  # type: ignore[attr-defined]
    return unflatten(inner, about, torch.Size(shape), tuple(stride))


def kind_of(several: Optimizers | Schedulers) -> str:
    return " + ".join(f"{type(one).__module__}.{type(one).__qualname__}" for one in several.each)


def short_kind(kind: str) -> str:
    return " + ".join(one.rpartition(".")[2] for one in kind.split(" + "))


def own_facts(run: "Run") -> dict[str, Any]:
    """What this rank knows and others may not: names of its optimizer's groups, state that is no tensor, the data's."""
    parameters, _ = canonical(run)
    names = {p: name for name, p in parameters.items()}
    values = {}
    for name, p in parameters.items():
        state = flattened(optimizer_state(run, p))
        rest = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
        if rest:
            values[name] = plain.encode(rest, f"the optimizer's state of {name}")
    epoch, batch = run.position.now(run.step)
    return {
        "groups": [[names[p] for p in group["params"] if p in names] for group in run.optimizer.param_groups],
        "values": values,
        "data": plain.encode(run.loader.state(epoch, batch), "the state of the data"),
    }


def common_facts(run: "Run", metrics: Any = None) -> dict[str, Any]:
    """What all ranks agree on; the first rank's are written."""
    job = run.job
    for phase in run.phases:
        phase.update.settle()
    groups = [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in run.optimizer.param_groups
    ]
    state: dict[str, Any] = {
        "optimizer": {"kind": kind_of(run.optimizer), "settings": plain.encode(groups, "the optimizer's groups")},
        "scheduler": None,
        "best": None,
        "metrics": plain.encode(metrics, "metrics"),
    }
    if run.position.ahead:
        state["ahead"] = list(run.position.ahead)
    if run.scheduler is not None:
        held = _scheduler_state(run.scheduler)
        state["scheduler"] = {"kind": kind_of(run.scheduler), "state": plain.encode(held, "the scheduler's state")}
    if run.best is not None:
        state["best"] = plain.encode(run.best.facts(), "best")
    epoch, batch = run.position.now(run.step)
    per_epoch = run.loader.batches_per_epoch
    return {
        "step": run.step,
        "samples": run.samples,
        "epoch": epoch + (batch / per_epoch if per_epoch else 0),
        "plan": str(run.plan),
        "world": run.world.size,
        "batch_size": run.loader.batch_size,
        "seed": job.seed,
        "ties": tied(run.placed.shape),
        "versions": {
            "meshfit": VERSION,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "state": state,
    }


def _scheduler_state(scheduler: Any) -> dict[str, Any]:
    """What a schedule keeps, less its functions: those are the script's."""

    def bare(value: Any) -> Any:
        if isinstance(value, dict) and type(value) is dict:
            return {key: bare(item) for key, item in value.items() if not callable(item)}
        if isinstance(value, list | tuple):
            return type(value)(bare(item) for item in value)
        return value

    return bare(scheduler.state_dict())


def merged(every: list[dict[str, Any]]) -> dict[str, Any]:
    """The ranks' own facts as one."""
    first = every[0]
    groups = [
        list(dict.fromkeys(name for each in every for name in each["groups"][g])) for g in range(len(first["groups"]))
    ]
    values = {name: value for each in every for name, value in each["values"].items()}
    data = dict(first["data"])
    for each in every[1:]:
        data = _joined(data, each["data"])
    return {"groups": groups, "values": values, "data": data}


def _joined(one: Any, other: Any) -> Any:
    """Both dicts in one: what ranks have learnt of the data adds up."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return one
    return {**other, **{key: _joined(value, other.get(key)) for key, value in one.items()}}


def fingerprint(tensors: dict[str, Any]) -> str:
    """Of names, shapes and dtypes of a model's tensors, as a manifest lists them."""
    lines = [
        f"{key} {about['dtype']} {about['shape']}" for key, about in sorted(tensors.items()) if key.startswith("model/")
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


# Random numbers


def random_states(run: "Run") -> dict[str, Tensor]:
    """Of this process's generators."""
    name, keys, *rest = np.random.get_state()
    assert isinstance(keys, np.ndarray)
    states = {
        "torch": torch.get_rng_state(),
        "python": _text([random.getstate()[0], list(random.getstate()[1]), random.getstate()[2]]),
        "numpy": _text([name, keys.tolist(), *rest]),
    }
    if (own := state_of(run.world.device)) is not None:
        states[run.world.device.type] = own
    return states


def set_random_states(run: "Run", states: dict[str, Tensor]) -> None:
    torch.set_rng_state(states["torch"])
    version, keys, gauss = json.loads(states["python"].numpy().tobytes())
    random.setstate((version, tuple(keys), gauss))
    name, keys, *rest = json.loads(states["numpy"].numpy().tobytes())
    np.random.set_state((name, np.array(keys, np.uint32), *rest))
    if (own := states.get(run.world.device.type)) is not None:
        set_state_of(run.world.device, own)


def _text(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
