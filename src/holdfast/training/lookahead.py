"""Lookahead: an optimiser runs ahead for k steps, and slow weights follow it part of the way.

Every k steps slow <- slow + rate (fast - slow), and the fast weights start from there again (Zhang, Lucas, Hinton and
Ba, "Lookahead optimizer: k steps forward, 1 step back", 2019). The state of the optimiser itself is kept.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

SLOW, DONE = "lookahead_slow", "lookahead_steps"
"""In the optimiser's own state, so that checkpoints hold them: slow weights of a parameter, and the steps done."""


def with_lookahead(optimizer: Optimizer, *, every: int, rate: float) -> Optimizer:
    """The optimiser itself, which from now on looks ahead `every` steps; no step may have been done before.

    Args:
        optimizer: any that keeps its state by parameter.
        every: k, at least 1.
        rate: share of the way that the slow weights follow, above 0 and at most 1; with 1 nothing changes.

    >>> w = torch.nn.Parameter(torch.tensor([1.0]))
    >>> optimizer = with_lookahead(torch.optim.SGD([w], lr=1.0), every=2, rate=0.5)
    >>> for _ in range(2):
    ...     w.grad = torch.ones(1)
    ...     optimizer.step()
    >>> w.item()  # two steps to -1, and half of the way back
    0.0
    """
    first: dict[Tensor, Tensor] = {}
    optimizer.param_groups[0].setdefault(DONE, 0)

    @torch.no_grad()
    def before(_: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer.param_groups[0][DONE] == 0:
            first.update({p: p.detach().clone() for group in optimizer.param_groups for p in group["params"]})

    @torch.no_grad()
    def after(_: Optimizer, args: Any, kwargs: Any) -> None:
        done = optimizer.param_groups[0][DONE] = optimizer.param_groups[0][DONE] + 1
        for p, start in first.items():
            optimizer.state[p][SLOW] = start
        first.clear()
        if done % every:
            return
        for group in optimizer.param_groups:
            for p in group["params"]:
                slow = optimizer.state[p][SLOW]
                slow.lerp_(p, rate)
                p.copy_(slow)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    return optimizer
