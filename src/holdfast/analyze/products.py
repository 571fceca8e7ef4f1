"""What attacks and bounds cost, counted in products of numbers, not in seconds.

Nearly all the work is matrix products and convolutions. They are counted as they are run, in multiplications, so that
the figure is of the program and not of a formula: it knows of neurons that need no bound, of layers that are merged,
and of rows that all inputs share. For a network of L layers of n neurons, M inputs and K classes (Liu, "Towards
verifiable, generalizable and efficient robust deep neural networks", 2022, Table 3.4):

    PGD, one step; intervals    L n^2          forward affine form (I-PER), MMR    L M n^2
    CROWN-IBP                   L K n^2 *      Fast-Lin, KW, L-PER                 L^2 n^3

(*) printed as L n^3, which is the cost of as many rows as neurons: CROWN-IBP carries only the K rows of the margins
back. Products of a matrix with one vector that do not go through these kernels, sums and activations are left out.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from holdfast.attacks.core.gradients import input_gradient
from holdfast.attacks.core.losses import cross_entropy
from holdfast.bounding import interval
from holdfast.bounding.core.region import BALLS, region
from holdfast.bounding.graph.trace import trace
from holdfast.bounding.linear import relaxation as linear
from holdfast.bounding.linear.forward import forward_planes
from holdfast.bounding.linear.relax import Slopes
from holdfast.certificates.core.distance import norm_of
from holdfast.checks import check_task
from holdfast.errors import InputError, UnsupportedError
from holdfast.threats import Threat
from holdfast.training.objectives.mmr import local_map, region_distances
from holdfast.training.objectives.per import DUAL


def multiplications(call: Callable[[], object]) -> int:
    """Multiplications in all matrix products and convolutions that `call` runs, with their backward passes.

    >>> multiplications(lambda: torch.rand(2, 3) @ torch.rand(3, 5))
    30
    """
    counter = _Counter()
    with counter:
        call()
    return counter.operations // 2  # an addition goes with each


class _Counter(TorchDispatchMode):
    """Adds up the operations of every kernel that torch has a formula for."""

    # Not torch's own FlopCounterMode: it hooks the modules for a table of them, and its hooks refuse `autograd.grad`
    # for an input that is a leaf.

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.operations += count(*args, **(kwargs or {}), out_val=found)
        return found


@torch.no_grad()
def cost_of_methods(model: nn.Module, x: Tensor, y: Tensor, threat: Threat) -> dict[str, int]:
    """Multiplications for one input, on average over the inputs, by method.

    A pass forward; a step of PGD; and the bounds of all margins by intervals, CROWN-IBP, the forward affine form
    (I-PER), Fast-Lin (KW, L-PER), CROWN, and the distances of MMR. A method without a rule for a layer is left out.

    Args:
        model: from (B, ...) to logits (B, K), in eval mode.
        x: inputs, shape (B, ...).  y: labels, shape (B,).
        threat: a ball. The larger it is, the more neurons are unstable, and need rows of their own.
    """
    if threat.name not in BALLS:
        raise InputError(f"costs are compared over balls ({', '.join(BALLS)}), got '{threat}'")
    check_task(model, x, y, threat)
    graph, ball = trace(model, x, threat), region(threat, x, sound=False)

    def backward(slopes: Slopes, *, hidden: bool) -> Tensor:
        return linear.margin_bounds(linear.relaxation(graph, ball, slopes=slopes, hidden=hidden, sound=False), y)

    calls: dict[str, Callable[[], object]] = {
        "forward": lambda: model(x),
        "pgd step": lambda: input_gradient(model, x, y, cross_entropy),
        "ibp": lambda: interval.margin_bounds(graph, ball.lower, ball.upper, y, sound=False),
        "crown-ibp": lambda: backward("adaptive", hidden=False),
        "forward form": lambda: forward_planes(graph, ball, y),
        "fastlin": lambda: backward("parallel", hidden=True),
        "crown": lambda: backward("adaptive", hidden=True),
    }
    if linear.hidden_layers(graph):
        calls["mmr"] = lambda: region_distances(local_map(graph, x), DUAL[norm_of(threat)])
    found = {}
    for name, call in calls.items():
        try:
            found[name] = multiplications(call) // len(x)
        except UnsupportedError:
            continue
    return found
