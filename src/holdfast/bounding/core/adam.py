"""Adam for tensors that are optimised for a moment.

Kingma and Ba, "Adam: a method for stochastic optimization", 2015. `torch.optim.Adam` takes the same steps, but making
the first one in a process loads a compiler, which takes longer than most proofs.
"""

import torch
from torch import Tensor

FIRST, SECOND, SMALL = 0.9, 0.999, 1e-8
"""Decay of the mean gradient and of the mean square, and what is added to its root: the paper's values."""


class Adam:
    """Moves tensors against their gradients, in place; the rate decays by a factor after every step."""

    def __init__(self, tensors: list[Tensor], *, rate: float, decay: float) -> None:
        self.tensors, self.rate, self.decay, self.steps = tensors, rate, decay, 0
        self.means = [torch.zeros_like(one, requires_grad=False) for one in tensors]
        self.squares = [torch.zeros_like(one, requires_grad=False) for one in tensors]

    @torch.no_grad()
    def step(self, gradients: tuple[Tensor | None, ...]) -> None:
        """One step; a tensor without a gradient stays."""
        self.steps += 1
        first, second = 1 - FIRST**self.steps, 1 - SECOND**self.steps
        for one, gradient, mean, square in zip(self.tensors, gradients, self.means, self.squares, strict=True):
            if gradient is None:
                continue
            mean.lerp_(gradient, 1 - FIRST)
            square.mul_(SECOND).addcmul_(gradient, gradient, value=1 - SECOND)
            one.addcdiv_(mean, square.div(second).sqrt_().add_(SMALL), value=-self.rate / first)
        self.rate *= self.decay
