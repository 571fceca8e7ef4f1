"""Sound over-approximation of what a network can output: one file per bound, one front door."""

from typing import Any

import torch
from torch import Tensor, nn

from holdfast.bounding import alpha_crown as _alpha_crown  # noqa: F401  (registers the methods)
from holdfast.bounding import cap as _cap  # noqa: F401
from holdfast.bounding import crown as _crown  # noqa: F401
from holdfast.bounding import fastlin as _fastlin  # noqa: F401
from holdfast.bounding import ibp as _ibp  # noqa: F401
from holdfast.bounding.graph.once import trace_once
from holdfast.bounding.interval import check_order
from holdfast.bounding.linear.alpha import Ascent
from holdfast.checks import check_precision, check_task
from holdfast.errors import HoldfastError
from holdfast.registry import get
from holdfast.results import Bounds
from holdfast.threats import Threat
from holdfast.threats import threat as read_threat

__all__ = ["Ascent", "bounds"]


def bounds(model: nn.Module, x: Tensor, threat: Threat | str, method: str = "crown", **options: Any) -> Bounds:
    """Bound every logit over the threat set from below and above.

    Gradients flow to the parameters of the model, so that a bound can be trained.

    Args:
        model: from (B, ...) to logits (B, K), in eval mode, of layers that the method has rules for.
        x: inputs in the threat's valid range, shape (B, ...).
        threat: what the adversary may do.
        method: a name from `hf.methods("bounds")`.
        **options: options of the method; `sound=True` accounts for floating-point rounding.

    Example:
        >>> import holdfast as hf
        >>> model = torch.nn.Linear(2, 3).eval()
        >>> result = hf.bounds(model, torch.rand(4, 2), hf.Linf(0.1), method="ibp")
        >>> bool((result.lower <= result.upper).all())
        True
    """
    entry = get("bounds", method)
    threat = read_threat(threat)
    options = entry.check(threat, options)
    check_precision(x)
    logits = check_task(model, x, None, threat)
    with trace_once(model, x, logits):
        result: Bounds = entry.function(model, x, threat, **options)
    if not (bool(torch.isfinite(result.lower).all()) and bool(torch.isfinite(result.upper).all())):
        raise HoldfastError(
            f"the bounds of '{method}' overflowed: the weights or the budget are too large for {x.dtype}. "
            "Convert model and inputs to float64, or take a smaller budget."
        )
    if options.get("sound", True):
        check_order(result.lower, result.upper, f"the logits by '{method}'")
        return result
    # Without a term for rounding rounding may make the two cross.
    return Bounds(torch.minimum(result.lower, result.upper), torch.maximum(result.lower, result.upper))
