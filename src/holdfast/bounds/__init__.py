"""Sound over-approximation of what a network can output: graph.py and ops.py, then one file per abstract domain."""

from typing import Any

import torch
from torch import Tensor, nn

from holdfast.bounds import interval
from holdfast.bounds.graph import trace
from holdfast.bounds.inputs import BOXES, boxes
from holdfast.checks import check_task
from holdfast.errors import HoldfastError
from holdfast.registry import get, register
from holdfast.results import Bounds
from holdfast.threats import Threat

__all__ = ["bounds"]


def bounds(model: nn.Module, x: Tensor, threat: Threat, method: str = "ibp", **options: Any) -> Bounds:
    """Lower and upper bounds of every logit over the threat set.

    Gradients flow to the parameters of the model, so that a bound can be trained.

    Args:
        model: from (B, ...) to logits (B, K), in eval mode, of layers that the method has rules for.
        x: inputs in the threat's valid range, shape (B, ...).
        threat: what the adversary may do.
        method: a name from `hf.methods("bounds")`.
        **options: of the method; `sound=True` accounts for floating-point rounding.

    Example:
        >>> import holdfast as hf
        >>> model = torch.nn.Linear(2, 3).eval()
        >>> result = hf.bounds(model, torch.rand(4, 2), hf.Linf(0.1), method="ibp")
        >>> bool((result.lower <= result.upper).all())
        True
    """
    entry = get("bounds", method)
    entry.check(threat if isinstance(threat, Threat) else None, options)
    check_task(model, x, None, threat)
    result: Bounds = entry.function(model, x, threat, **options)
    if not (bool(torch.isfinite(result.lower).all()) and bool(torch.isfinite(result.upper).all())):
        raise HoldfastError(
            f"the bounds of '{method}' overflowed: the weights or the budget are too large for {x.dtype}. "
            "Convert model and inputs to float64, or take a smaller budget."
        )
    return result


@register(
    "bounds",
    "ibp",
    summary="interval bound propagation: a box through every layer, at the cost of two forward passes",
    guarantee="proof",
    threats=BOXES,
    reference="Gowal et al., On the effectiveness of interval bound propagation, 2018; Mirman et al., 2018",
)
def ibp(model: nn.Module, x: Tensor, threat: Threat, *, sound: bool = True, chunk: int = 1024) -> Bounds:
    """Bounds of the logits by intervals; for patches the union over all locations.

    Args:
        model: from (B, ...) to logits (B, K).  x: inputs, shape (B, ...).
        threat: a ball (through its enclosing box), a box or a patch.
        sound: widen every interval by what rounding can do.
        chunk: boxes in memory at a time.
    """
    graph = trace(model, x)
    lowers, uppers = [], []
    for lower, upper, m in boxes(threat, x, sound=sound, chunk=chunk):
        low, high = interval.output_bounds(graph, lower, upper, sound=sound)
        lowers.append(low.unflatten(0, (-1, m)).amin(1))
        uppers.append(high.unflatten(0, (-1, m)).amax(1))
    return Bounds(torch.stack(lowers).amin(0), torch.stack(uppers).amax(0))
