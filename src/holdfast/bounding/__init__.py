"""Sound over-approximation of what a network can output: graph.py and ops.py, then one file per abstract domain."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.bounding import interval
from holdfast.bounding.core.placements import boxes
from holdfast.bounding.core.region import REGIONS, Region, region
from holdfast.bounding.graph.trace import trace
from holdfast.bounding.interval import check_order
from holdfast.bounding.linear import affine, alpha
from holdfast.bounding.linear import dual as _dual  # noqa: F401  (registers 'cap')
from holdfast.bounding.linear import relaxation as linear
from holdfast.bounding.linear.alpha import ASCENT, Ascent
from holdfast.bounding.linear.relax import Slopes
from holdfast.checks import check_precision, check_task
from holdfast.errors import HoldfastError
from holdfast.registry import Bound, get, register
from holdfast.results import Bounds
from holdfast.threats import Patch, Threat

__all__ = ["Ascent", "bounds"]


def bounds(model: nn.Module, x: Tensor, threat: Threat, method: str = "crown", **options: Any) -> Bounds:
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
    options = entry.check(threat if isinstance(threat, Threat) else None, options)
    check_precision(x)
    check_task(model, x, None, threat)
    result: Bounds = entry.function(model, x, threat, **options)
    if not (bool(torch.isfinite(result.lower).all()) and bool(torch.isfinite(result.upper).all())):
        raise HoldfastError(
            f"the bounds of '{method}' overflowed: the weights or the budget are too large for {x.dtype}. "
            "Convert model and inputs to float64, or take a smaller budget."
        )
    if options.get("sound", True):
        check_order(result.lower, result.upper, f"the logits by '{method}'")
        return result
    # Without a term for rounding the two may cross by rounding alone.
    return Bounds(torch.minimum(result.lower, result.upper), torch.maximum(result.lower, result.upper))


def _over_boxes(
    threat: Threat, x: Tensor, sound: bool, chunk: int, one: Callable[[Region], interval.Interval]
) -> Bounds:
    """Bounds over the threat set; for patches the union over all locations."""
    if not isinstance(threat, Patch):
        return Bounds(*one(region(threat, x, sound=sound)))
    lowers, uppers = [], []
    for lower, upper, m in boxes(threat, x, sound=sound, chunk=chunk):
        low, high = one(Region(lower, upper, x.repeat_interleave(m, 0)))
        lowers.append(low.unflatten(0, (-1, m)).amin(1))
        uppers.append(high.unflatten(0, (-1, m)).amax(1))
    return Bounds(torch.stack(lowers).amin(0), torch.stack(uppers).amax(0))


@register(
    Bound(
        "ibp",
        summary="interval bound propagation: a box through every layer, at the cost of two forward passes",
        threats=REGIONS,
        reference="Gowal et al., On the effectiveness of interval bound propagation, 2018; Mirman et al., 2018",
    )
)
def ibp(model: nn.Module, x: Tensor, threat: Threat, *, sound: bool = True, chunk: int = 1024) -> Bounds:
    """Bounds of the logits by intervals.

    Args:
        model: from (B, ...) to logits (B, K).  x: inputs, shape (B, ...).
        threat: any; on a ball the first layer is bounded by the dual norm.
        sound: widen every interval by what rounding can do.
        chunk: boxes in memory at a time.
    """
    graph = trace(model, x, threat)

    def one(r: Region) -> interval.Interval:
        return affine.interval_bounds(graph, r, sound=sound)

    return _over_boxes(threat, x, sound, chunk, one)


@register(
    Bound(
        "crown",
        summary="linear bounds with two slopes, by backward passes for every layer",
        threats=REGIONS,
        reference="Zhang et al., Efficient neural network robustness certification with general activation "
        "functions, 2018",
    )
)
def crown(model: nn.Module, x: Tensor, threat: Threat, *, sound: bool = True, chunk: int = 64) -> Bounds:
    """Bounds of the logits by CROWN.

    Args:
        model: from (B, ...) to logits (B, K).  x: inputs, shape (B, ...).
        threat: any.
        sound: account for rounding.
        chunk: boxes in memory at a time, for patches.
    """
    return _linear(model, x, threat, "adaptive", True, sound, chunk)


@register(
    Bound(
        "crown-ibp",
        summary="intervals for the hidden layers, one backward pass of linear bounds for the logits",
        threats=REGIONS,
        reference="Zhang et al., Towards stable and efficient training of verifiably robust neural networks, 2020",
    )
)
def crown_ibp(model: nn.Module, x: Tensor, threat: Threat, *, sound: bool = True, chunk: int = 256) -> Bounds:
    """Bounds of the logits by CROWN-IBP; arguments as for `crown`."""
    return _linear(model, x, threat, "adaptive", False, sound, chunk)


@register(
    Bound(
        "fastlin",
        summary="linear bounds with one slope per neuron, by backward passes for every layer",
        threats=REGIONS,
        reference="Weng et al., Towards fast computation of certified robustness for ReLU networks, 2018",
    )
)
def fastlin(model: nn.Module, x: Tensor, threat: Threat, *, sound: bool = True, chunk: int = 64) -> Bounds:
    """Bounds of the logits by Fast-Lin; arguments as for `crown`."""
    return _linear(model, x, threat, "parallel", True, sound, chunk)


@register(
    Bound(
        "alpha-crown",
        summary="CROWN with lower slopes optimised by gradient ascent, per neuron and per output",
        threats=REGIONS,
        reference="Xu et al., Fast and complete: enabling complete verification with massively parallel incomplete "
        "verifiers, 2021",
    )
)
def alpha_crown(
    model: nn.Module, x: Tensor, threat: Threat, *, ascent: Ascent = ASCENT, sound: bool = True, chunk: int = 64
) -> Bounds:
    """Bounds of the logits by CROWN with optimised slopes.

    Args:
        model: from (B, ...) to logits (B, K).  x: inputs, shape (B, ...).
        threat: any.
        ascent: how to optimise the slopes; `Ascent(joint=True)` also those of the hidden layers.
        sound: account for rounding.
        chunk: boxes in memory at a time, for patches.
    """
    graph = trace(model, x, threat)

    def one(r: Region) -> interval.Interval:
        return alpha.output_bounds(graph, r, ascent, sound=sound)

    return _over_boxes(threat, x, sound, chunk, one)


def _linear(
    model: nn.Module, x: Tensor, threat: Threat, slopes: Slopes, hidden: bool, sound: bool, chunk: int
) -> Bounds:
    graph = trace(model, x, threat)

    def one(r: Region) -> interval.Interval:
        return linear.output_bounds(linear.relaxation(graph, r, slopes=slopes, hidden=hidden, sound=sound))

    return _over_boxes(threat, x, sound, chunk, one)
