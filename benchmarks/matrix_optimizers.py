"""Optimizers that need whole matrices, written as people write them: for tests and benchmarks."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

ORTHOGONALISED: list[tuple[int, ...]] = []
"""Shapes of the matrices that ``Muon`` has orthogonalised in this process."""


def newton_schulz(gradient: Tensor, steps: int = 5) -> Tensor:
    """The nearest orthogonal matrix, about; in the gradient's own precision."""
    ORTHOGONALISED.append(tuple(gradient.shape))
    a, b, c = 3.4445, -4.7750, 2.0315
    x = gradient / (gradient.norm() + 1e-7)
    turned = x.size(-2) > x.size(-1)
    x = x.mT if turned else x
    for _ in range(steps):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if turned else x


class Muon(torch.optim.Optimizer):
    def __init__(self, params: Iterable[Tensor], lr: float = 0.02, momentum: float = 0.95, nesterov: bool = True):
        super().__init__(params, {"lr": lr, "momentum": momentum, "nesterov": nesterov})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                kept = state["momentum_buffer"]
                kept.lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(kept, group["momentum"]) if group["nesterov"] else kept
                update = newton_schulz(update.reshape(len(update), -1)).view_as(p)
                p.add_(update, alpha=-group["lr"] * max(1, p.size(0) / p[0].numel()) ** 0.5)


class Shampoo(torch.optim.Optimizer):
    """A preconditioner for each dim of a matrix; others are stepped by their gradient."""

    def __init__(self, params: Iterable[Tensor], lr: float = 0.05, eps: float = 1e-4):
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                update, state = p.grad, self.state[p]
                if p.dim() == 2:
                    if not state:
                        state["preconditioners"] = [group["eps"] * torch.eye(n, dtype=p.dtype) for n in p.shape]
                    left, right = state["preconditioners"]
                    left += update @ update.mT
                    right += update.mT @ update
                    update = _root(left) @ update @ _root(right)
                p.add_(update, alpha=-group["lr"])


def _root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values.clamp(min=1e-12) ** -0.25) @ vectors.mT


class SOAP(torch.optim.Optimizer):
    """Adam in the eigenbasis of Shampoo's preconditioners."""

    def __init__(self, params: Iterable[Tensor], lr: float = 3e-3, betas: tuple[float, float] = (0.9, 0.95)):
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                gradient, state = p.grad, self.state[p]
                if not state:
                    state["step"] = 0
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                    state["GG"] = [_apart(n, p.dtype) for n in p.shape] if p.dim() == 2 else []
                state["step"] += 1
                bases = []
                if state["GG"]:
                    state["GG"][0].lerp_(gradient @ gradient.mT, 1 - second)
                    state["GG"][1].lerp_(gradient.mT @ gradient, 1 - second)
                    bases = [torch.linalg.eigh(each)[1] for each in state["GG"]]
                    bases = [basis * torch.sign(basis.sum(0)) for basis in bases]
                turned = bases[0].mT @ gradient @ bases[1] if bases else gradient
                state["exp_avg"].lerp_(gradient, 1 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(turned, turned, value=1 - second)
                mean = bases[0].mT @ state["exp_avg"] @ bases[1] if bases else state["exp_avg"]
                update = mean / (state["exp_avg_sq"].sqrt() + 1e-8)
                update = bases[0] @ update @ bases[1].mT if bases else update
                p.add_(update, alpha=-group["lr"])


def _apart(size: int, dtype: torch.dtype) -> Tensor:
    """Eigenvalues that are not alike: of those that are, rounding decides the eigenvectors."""
    return torch.diag(torch.arange(1, size + 1, dtype=dtype) * 1e-2)


class LAMB(torch.optim.Optimizer):
    """Adam's update, as long as the weights of its tensor are."""

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                state["m"].lerp_(p.grad, 0.1)
                state["v"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                update = state["m"] / (state["v"].sqrt() + 1e-6)
                p.add_(update, alpha=float(-group["lr"] * p.norm() / (update.norm() + 1e-6)))


class Distance(torch.optim.Optimizer):
    """A step size that follows from all parameters together, as Prodigy and D-Adaptation have it."""

    def __init__(self, params: Iterable[Tensor], lr: float = 0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        size = torch.stack([p.grad.norm() for p in every]).norm()
        for p in every:
            p.add_(p.grad, alpha=float(-self.param_groups[0]["lr"] / (size + 1e-8)))


def matrices_and_rest(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    return [p for p in model.parameters() if p.dim() == 2], [p for p in model.parameters() if p.dim() != 2]
