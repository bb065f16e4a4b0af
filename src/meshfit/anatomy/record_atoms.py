"""Which modules a recording takes as a whole."""

from collections.abc import Iterable

import torch
from torch import nn

from meshfit.anatomy.record_known import above

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
