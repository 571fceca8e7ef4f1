"""Muon: every step moves a weight matrix by the same amount in all its directions.

The momentum M = U S V^T of a matrix is replaced by U V^T, steepest descent in the spectral norm (Carlson et al.,
"Stochastic spectral descent for discrete graphical models", 2015; Jordan et al., "Muon: an optimizer for hidden layers
in neural networks", 2024). That suits networks whose Lipschitz constants count: a step changes the norm of a layer by a
known amount, and flat spectra do not slow it down. torch's own Muon refuses the kernels of convolutions.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

BETAS, EPS = (0.9, 0.999), 1e-8
STEPS = 5
# x -> a x + b x^3 + c x^5 takes every singular value of (0, 1] into about (0.7, 1.2) in five steps; values of Jordan.
A, B, C = 3.4445, -4.7750, 2.0315


def orthogonalize(m: Tensor) -> Tensor:
    """About U V^T of m = U S V^T, shape (n, k), by Newton and Schulz: singular values between 0.7 and 1.2.

    x -> (a + b G + c G^2) x with G = x x^T. For a wide matrix all factors are gathered first, as G -> p G p needs small
    matrices only.
    """
    n, k = m.shape
    if n > k:
        return orthogonalize(m.T).T
    x: Tensor = m / torch.linalg.matrix_norm(m).clamp(min=torch.finfo(m.dtype).tiny)
    if k < 2 * n:
        for _ in range(STEPS):
            x = _factor(x @ x.T) @ x
        return x
    gram = x @ x.T
    p = product = _factor(gram)
    for _ in range(STEPS - 1):
        gram = p @ gram @ p
        p = _factor(gram)
        product = p @ product
    return product @ x


def _factor(gram: Tensor) -> Tensor:
    p = torch.addmm(gram, gram, gram, beta=B, alpha=C)
    p.diagonal().add_(A)
    return p


class Muon(Optimizer):
    """Matrices and kernels (out, ...) by Muon, with Nesterov momentum; vectors, such as biases, by AdamW.

    Steps have the size of AdamW's for the same `lr`: 0.2 for each entry in the mean square (Liu et al., "Muon is
    scalable for LLM training", 2025). Weight decay is decoupled.
    """

    def __init__(self, parameters: Iterable[Tensor], *, lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # nobody asks for a closure
        """One step from the gradients as they stand."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    (self._matrix if p.ndim > 1 else self._vector)(p, group)

    def _matrix(self, p: Tensor, group: dict[str, Any]) -> None:
        state, lr, momentum = self.state[p], group["lr"], group["momentum"]
        if not state:
            state["momentum"] = torch.zeros_like(p)
        assert p.grad is not None
        moved = state["momentum"].mul_(momentum).add_(p.grad)
        m = p.grad.add(moved, alpha=momentum).flatten(1)
        p.mul_(1 - lr * group["weight_decay"])
        p.add_(orthogonalize(m).view_as(p), alpha=-lr * 0.2 * max(m.shape) ** 0.5)

    def _vector(self, p: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state.update(step=torch.zeros(()), mean=torch.zeros_like(p), square=torch.zeros_like(p))
        assert p.grad is not None
        mean, square, step = ([state[key]] for key in ("mean", "square", "step"))
        how: dict[str, Any] = {"lr": group["lr"], "weight_decay": group["weight_decay"], "beta1": BETAS[0], "eps": EPS}
        adamw([p], [p.grad], mean, square, [], step, beta2=BETAS[1], amsgrad=False, maximize=False, **how)
