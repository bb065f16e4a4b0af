"""Which parameters and buffers a forward writes, and in the call of which module. The model is left as it was.

Tried on a copy without memory (meta) where the model runs there, else on two samples. Writes are seen as operations on
the tensor's memory, ``.data`` or not; a new tensor put in a buffer's place is seen when the module returns.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshfit import generators
from meshfit.anatomy.copies import twin
from meshfit.axes.data.batchnorm import batch_norms
from meshfit.data import tree
from meshfit.torch_private.kernels import foreach_copy_
from meshfit.torch_private.modules import own_buffers, own_parameters
from meshfit.torch_private.operators import TorchDispatchMode, written
from meshfit.torch_private.tensors import storage_id
from meshfit.torch_private.trees import tree_leaves

Objective = Callable[[nn.Module, Any], Any]
See = Callable[[Any, tuple, Any], None]
"""Is shown an operation, and what it is given."""


@dataclass
class Writes:
    writers: dict[str, str | None] = field(default_factory=dict)
    """By parameter or buffer: the innermost module in whose forward all of it is written; None: outside of all."""
    read_later: dict[str, set[tuple[str, ...]]] = field(default_factory=lambda: defaultdict(set))
    """After they were written, and out of the module that did: in the calls of which modules, one in the other."""
    calls: Counter[str] = field(default_factory=Counter)
    """Of each module."""


def may_write(model: nn.Module) -> bool:
    """Whether there is anything to look for: a buffer that is not BatchNorm's, or a parameter that is not trained."""
    known = {id(b) for norm in batch_norms(model) for b in norm.buffers(recurse=False)}
    return any(id(b) not in known for b in model.buffers()) or any(not p.requires_grad for p in model.parameters())


def home_of(model: nn.Module) -> torch.device:
    return next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))


def writes(model: nn.Module, objective: Objective, batch: Any, tried: Callable[[], nn.Module]) -> Writes:
    """Of one forward in training, but for BatchNorm's own; ``tried`` returns it with values."""
    two = tree.map_tensors(lambda t: t[:2] if t.dim() else t, batch)
    try:
        with undisturbed(model):
            copy = twin(model, meta=True)
            found = _watched(copy, objective, tree.map_tensors(lambda t: t.to("meta"), two))
    except Exception:  # it looks at values, or makes tensors elsewhere
        real = tried()
        with undisturbed(real):
            found = _watched(real, objective, tree.map_tensors(torch.clone, tree.to_device(two, home_of(real))))
    norms = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        if module in batch_norms(model)
        for name, _ in module.named_buffers(recurse=False)
    }
    found.writers = {name: writer for name, writer in found.writers.items() if name not in norms}
    return found


def named_state(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _watched(model: nn.Module, objective: Objective, batch: Any) -> Writes:
    found, stack = Writes(), []
    for path, module in model.named_modules():
        if not isinstance(module, torch.jit.ScriptModule):
            module.__dict__["forward"] = _told(module.forward, path, module, stack, found)
    held = named_state(model)
    with _WriteWatch({storage_id(t): name for name, t in held.items()}, stack, found):
        objective(model, batch)
    now = named_state(model)
    for name, tensor in held.items():
        if now.get(name) is not tensor:
            found.writers.setdefault(name, "")
    return found


def _told(forward: Callable[..., Any], path: str, module: nn.Module, stack: list[str], found: Writes) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        found.calls[path] += 1
        own = {**own_buffers(module), **own_parameters(module)}
        stack.append(path)
        try:
            return forward(*args, **kwargs)
        finally:
            stack.pop()
            now = {**own_buffers(module), **own_parameters(module)}
            for name, tensor in own.items():
                if now.get(name) is not tensor:
                    found.writers.setdefault(f"{path}.{name}" if path else name, path)

    return run


class _WriteWatch(TorchDispatchMode):
    def __init__(self, names: dict[int, str], stack: list[str], found: Writes):
        super().__init__()
        self.names, self.stack, self.found = names, stack, found
        self.calls: dict[str, tuple[str, ...]] = {}
        """The modules in whose calls each of them was written, one in the other."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.layout is torch.strided]
        seen = {self.names[storage_id(t)] for t in given if storage_id(t) in self.names}
        for name in seen & self.found.writers.keys():
            writer = self.found.writers[name]
            if writer is None or writer not in self.stack:
                self.found.read_later[name].add(tuple(self.stack))
        for tensor in written(func, args, kwargs):
            if storage_id(tensor) in self.names and tensor.numel():
                name = self.names[storage_id(tensor)]
                calls = self.calls[name] = _shared(self.calls.get(name, tuple(self.stack)), tuple(self.stack))
                self.found.writers[name] = calls[-1] if calls else None
        return func(*args, **kwargs)


def _shared(calls: tuple[str, ...], others: tuple[str, ...]) -> tuple[str, ...]:
    """What both have in common, from the outermost on."""
    same = [a == b for a, b in zip(calls, others, strict=False)]
    return calls[: same.index(False) if False in same else len(same)]


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Afterwards the buffers of ``model`` are as before, whatever forwards write to them; and after each call of what
    it gives."""
    held = [(own_buffers(m), name, t) for m in model.modules() for name, t in own_buffers(m).items() if t is not None]
    expanded = lambda t: (
        t.layout is torch.strided and any(n > 1 and not s for n, s in zip(t.shape, t.stride(), strict=True))
    )
    tensors = [tensor for _, _, tensor in held if not expanded(tensor)]  # the others cannot be written to
    values = [tensor.detach().clone() for tensor in tensors]

    def restore() -> None:
        for buffers, name, tensor in held:
            buffers[name] = tensor
        if tensors:
            foreach_copy_([tensor.data for tensor in tensors], values)  # a forward may have set it

    try:
        yield restore
    finally:
        restore()


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[dict[nn.Module, bool]]:
    """Afterwards its modules are in training or eval mode as before: what it gives."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield modes
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Whatever runs within leaves the model (weights, buffers, attributes) and all random numbers as they were."""
    vars_of = [(m, dict(m.__dict__), dict(own_parameters(m)), dict(own_buffers(m))) for m in model.modules()]
    hooks = [
        (found, dict(found))
        for m in model.modules()
        for key, found in vars(m).items()
        if "_hooks" in key and isinstance(found, dict)
    ]
    try:
        devices = (t.device for t in (*model.parameters(), *model.buffers()))
        with generators.kept(*devices), buffers_kept(model), weights_kept(model):
            yield
    finally:
        for module, own, parameters, buffers in vars_of:
            for name in [name for name in module.__dict__ if name not in own]:
                del module.__dict__[name]
            module.__dict__.update(own)
            own_parameters(module).clear()
            own_parameters(module).update(parameters)
            own_buffers(module).clear()
            own_buffers(module).update(buffers)
        for found, own in hooks:  # transformers installs its own in the first forward: else a second time in the next
            found.clear()
            found.update(own)


@contextmanager
def weights_kept(
    model: nn.Module, seeing: Callable[[See], AbstractContextManager[Any]] | None = None
) -> Iterator[Callable[[], dict[str, Tensor]]]:
    """Afterwards the parameters of ``model`` are as before, whatever forwards write to them. What it gives says which
    were written so far, and their values now. ``seeing``: how operations are seen, where a mode is there already."""
    data = {name: (p, p.data) for name, p in model.named_parameters()}
    before = _Before({storage_id(p): p for p in model.parameters()})
    replaced = lambda p, own: p.data_ptr() != own.data_ptr()  # by p.data = ...

    def written() -> dict[str, Tensor]:
        changed = [name for name, (p, own) in data.items() if replaced(p, own) or storage_id(own) in before.kept]
        return {name: data[name][0].detach().clone() for name in changed}

    try:
        with (seeing or _Seeing)(before.see):
            yield written
    finally:
        for p, own in data.values():
            if replaced(p, own):
                p.data = own
        with torch.no_grad():
            for tensor, value in before.kept.values():
                tensor.data.copy_(value)


class _Before:
    """Keeps what parameters were before an operation wrote to them."""

    def __init__(self, parameters: dict[int, Tensor]):
        self.parameters = parameters
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def see(self, func: Any, args: tuple, kwargs: Any) -> None:
        for tensor in written(func, args, kwargs):
            if tensor.layout is torch.strided and (at := storage_id(tensor)) in self.parameters:
                whole = self.parameters[at]
                self.kept.setdefault(at, (whole, whole.detach().clone()))


class _Seeing(TorchDispatchMode):
    """Shows each operation to ``see``, before it runs."""

    def __init__(self, see: See):
        super().__init__()
        self.see = see

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        self.see(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))
