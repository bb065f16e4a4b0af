"""Which modules are taken as a whole, and the copy of the model that a recording runs on."""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from meshfit.anatomy.record_known import above
from meshfit.anatomy.record_program import PLAIN, TraceError, tensors

ALWAYS_OPEN = (nn.ModuleList, nn.ModuleDict)
"""They are never called themselves."""

OPEN_IF_LARGE = (nn.Sequential, nn.TransformerEncoder, nn.TransformerDecoder)
"""Of torch.nn's own, those that call others in a row. (In eval mode the encoder may take a fast path of its own.)"""


def choose(model: nn.Module, *, share: float, forced: Iterable[str], opened: bool = False) -> set[str]:
    """Paths of the modules taken as a whole: from the root down, the first that are worth no more than ``share`` of
    all parameters, or are torch.nn's own, or are ``forced``. ``opened`` goes down as far as it can.

    Large atoms mean little glue, and glue is where recordings fail: open a module only for the balance.
    """
    forced = set(forced)
    towards = {path for name in forced for path in above(name)} - forced
    sizes = {path: sum(p.numel() for p in module.parameters()) for path, module in model.named_modules()}
    atoms: set[str] = set()

    def visit(path: str, module: nn.Module) -> None:
        if path not in towards and _whole(path, module):
            atoms.add(path)
            return
        for name, child in module.named_children():
            visit(f"{path}.{name}" if path else name, child)

    def _whole(path: str, module: nn.Module) -> bool:
        if path in forced:
            return True
        if not path or isinstance(module, ALWAYS_OPEN):
            return False
        if isinstance(module, torch.jit.ScriptModule) or type(module).__name__ == "OptimizedModule":
            return True
        own = type(module).__module__.startswith("torch.nn.") and not (
            isinstance(module, OPEN_IF_LARGE)
            and (module.training or isinstance(module, nn.Sequential) or not torch.backends.mha.get_fastpath_enabled())
        )
        childless = next(module.children(), None) is None
        small = sizes.get(path, 0) <= share * sizes[""] and not opened
        return own or childless or small

    visit("", model)
    return atoms


def twin(model: nn.Module, *, meta: bool) -> nn.Module:
    """A copy of ``model``: on meta (no memory, no values) or as it is. Whatever a forward does to it, the model and
    what it holds stay as they were; what cannot be copied is shared."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
            raise TraceError("the model has lazy modules", "run it once on a batch, so that its shapes are known")
        memo[id(tensor)] = _like(tensor, meta=meta)
    return copied(model, memo)


def copied(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy, in which ``memo`` says what stands for which tensor: also of a model whose attributes hold tensors
    that were computed, which Python's own refuses. What cannot be copied is shared."""
    for module in model.modules():
        for thing in vars(module).values():
            if not isinstance(thing, PLAIN) and id(thing) not in memo:
                for tensor in tensors(thing) if not isinstance(thing, nn.Module) else ():
                    memo.setdefault(id(tensor), tensor.detach().clone().requires_grad_(tensor.requires_grad))
    try:
        return copy.deepcopy(model, dict(memo))
    except Exception:
        for module in model.modules():
            for name, thing in vars(module).items():
                if name not in ("_parameters", "_buffers", "_modules") and not _copyable(thing, memo, model):
                    memo[id(thing)] = thing
        return copy.deepcopy(model, dict(memo))


def _like(tensor: Tensor, *, meta: bool) -> Tensor:
    data = torch.empty_like(tensor.detach(), device="meta") if meta else tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        new: Tensor = nn.Parameter(data, requires_grad=tensor.requires_grad)
    else:
        new = data.requires_grad_(tensor.requires_grad)
    for name, thing in vars(tensor).items():  # marks that libraries leave on parameters
        setattr(new, name, thing)
    return new


def _copyable(thing: Any, memo: dict[int, Any], model: nn.Module) -> bool:
    shared = dict(memo) | {id(module): module for module in model.modules()}
    try:
        copy.deepcopy(thing, shared)
    except Exception:
        return False
    return True
