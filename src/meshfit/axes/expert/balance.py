"""Auxiliary losses of Hugging Face's mixtures over the samples of all ranks.

A load-balancing loss is a product of two means over tokens (how often an expert was chosen, how likely it was): the
mean of the ranks' losses is not the loss of their batch. So the router's logits of all ranks are gathered where
``load_balancing_loss_func`` is called, and each computes the loss of the whole batch. Each then counts it by its share
of the samples; shares add up to one, and backward sums over ranks what came to each rank's logits.

Of several microbatches each has an auxiliary loss of its own, as on one device.

    traffic   an all_gather of the logits of all layers a forward, a reduce_scatter of their gradients a backward
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from meshfit.axes.data import batchnorm
from meshfit.axes.forward import wrap
from meshfit.comm.collectives import gather_rows
from meshfit.comm.group import Group
from meshfit.patches import replaced
from meshfit.plan import Plan
from meshfit.torch_private.autograd import ThreadValue

NAME = "load_balancing_loss_func"

_running: ThreadValue[frozenset[int]] = ThreadValue("balance.running", frozenset())
"""Scopes in which a library's function is replaced while a forward runs."""


def left_out(model: nn.Module) -> AbstractContextManager[None]:
    """Within it, the auxiliary losses of ``model`` are zero: whether the rest of a loss is a mean can then be tried."""
    return _replaced(model, lambda local: partial(_none, local))


def recorded(model: nn.Module, group: Group | None = None) -> AbstractContextManager[None]:
    """Within it, an auxiliary loss of ``model`` is recorded as one step: run again, it is over the samples of
    ``group``."""
    return _replaced(model, lambda local: partial(_one_step, _AuxLoss(local, group)))


@contextmanager
def _replaced(model: nn.Module, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    scopes = {id(scope): scope for scope in (_scope(module) for module in balanced(model))}
    with ExitStack() as stack:
        for scope in scopes.values():
            stack.enter_context(replaced(scope, NAME, make))
        yield


class _AuxLoss:
    """An auxiliary loss over the samples of ``group``; on meta tensors, which nobody else has, of what is given."""

    __name__ = NAME

    def __init__(self, local: Callable[..., Any], group: Group | None):
        self.local, self.group = local, group

    def __call__(self, gate_logits: Any, num_experts: Any, top_k: Any, attention_mask: Any, **more: Any) -> Any:
        if self.group is not None and not gate_logits[0].is_meta:
            gate_logits, attention_mask = _gathered(gate_logits, attention_mask, self.group)
        return self.local(gate_logits, num_experts, top_k, attention_mask, **more)


def _one_step(
    step: _AuxLoss,
    gate_logits: Any,
    num_experts: Any = None,
    top_k: Any = 2,
    attention_mask: Any = None,
    **more: Any,
) -> Any:
    if not _logits(gate_logits):
        return step.local(gate_logits, num_experts, top_k, attention_mask, **more)
    given = tuple(logits for logits in gate_logits if logits is not None)
    if has_torch_function(given):  # whoever records the forward
        return handle_torch_function(step, given, given, num_experts, top_k, attention_mask, **more)  # type: ignore
    return step(given, num_experts, top_k, attention_mask, **more)


def _logits(given: Any) -> bool:
    return isinstance(given, tuple) and bool(given) and isinstance(given[0], Tensor)


def _none(local: Callable[..., Any], logits: Any, *args: Any, **kwargs: Any) -> Any:
    return logits[0].new_zeros(()) if _logits(logits) else local(logits, *args, **kwargs)


def balanced(model: nn.Module) -> list[nn.Module]:
    """Modules whose forward may compute an auxiliary loss."""
    return [module for module in model.modules() if _scope(module) is not None]


def _scope(module: nn.Module) -> dict[str, Any] | None:
    """Where the forward of a module looks the function up."""
    forward = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    if code is None or NAME not in code.co_names:
        return None
    scope = forward.__globals__  # type: ignore[union-attr]
    return scope if callable(scope.get(NAME)) else None


def is_apart(plan: Plan) -> bool:
    """Whether each rank has an auxiliary loss of its own samples, which is not that of the batch."""
    return plan.shares > 1 and (plan.branch > 1 or (plan.pipeline > 1 and plan.server > 0))


def apply(model: nn.Module, group: Group) -> bool:
    """Whether there is any such loss in ``model``; it is one over ``group`` then."""
    found = balanced(model)
    for module in found:
        scope = _scope(module)
        assert scope is not None
        wrap(module, lambda forward, scope=scope: _over_all(forward, scope, group))
    return bool(found)


def _over_all(forward: Callable[..., Any], scope: dict[str, Any], group: Group) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if id(scope) in (running := _running.get()):  # a module around this one sees to it
            return forward(*args, **kwargs)
        with _running.set_to(running | {id(scope)}), replaced(scope, NAME, lambda local: partial(loss, local)):
            return forward(*args, **kwargs)

    def loss(
        local: Any, gate_logits: Any, num_experts: Any = None, top_k: Any = 2, attention_mask: Any = None, **more: Any
    ):
        if not _logits(gate_logits):
            return local(gate_logits, num_experts, top_k, attention_mask, **more)
        gathered = _gathered(tuple(each for each in gate_logits if each is not None), attention_mask, group)
        return local(gathered[0], num_experts, top_k, gathered[1], **more)

    return run


def _gathered(
    logits: tuple[Tensor, ...], mask: Tensor | None, group: Group
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Rows of all ranks; a rank that runs a stand-in has none."""
    device = logits[0].device
    rows = [each.reshape(-1, each.shape[-1]).to(device) for each in logits]
    if mask is not None:
        rows.append(mask.reshape(-1, 1).to(device, rows[0].dtype))
    mine = torch.cat(rows, 1)[: None if batchnorm.counted() else 0]
    parts = gather_rows(mine, group).split([each.shape[1] for each in rows], 1)
    return parts[: len(logits)], None if mask is None else parts[-1].detach().to(mask.dtype)
