"""What the ReLUs of a network do over a threat set: active, dead, or unstable."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from holdfast.bounding.core.region import region
from holdfast.bounding.graph.trace import trace
from holdfast.bounding.linear import relaxation as linear
from holdfast.bounding.linear.relaxation import Relaxation
from holdfast.bounding.linear.slopes import LowerSlopes, pre_activations
from holdfast.checks import check_task
from holdfast.errors import InputError, UnsupportedError
from holdfast.threats import Patch, Threat
from holdfast.utils.show import Shown


@dataclass(frozen=True, eq=False, repr=False)
class ReluState(Shown):
    """Counts of the ReLUs of each input; l and u bound the value before the ReLU.

    Attributes:
        active: (B,) int64, l > 0: the ReLU is the identity.
        unstable: (B,) int64, l <= 0 <= u.
        dead: (B,) int64, u < 0: the ReLU is zero.
        slopes: (bins,) int64, histogram over [0, 1] of the chord's slope u / (u - l) of all unstable ones.
        low_zero: (B,) int64, unstable ReLUs whose lower line has slope 0.
        low_between: (B,) int64, slope strictly between 0 and 1.
        low_one: (B,) int64, slope 1.
    """

    active: Tensor
    unstable: Tensor
    dead: Tensor
    slopes: Tensor
    low_zero: Tensor
    low_between: Tensor
    low_one: Tensor


@torch.no_grad()
def relu_state(
    model: nn.Module,
    x: Tensor,
    threat: Threat,
    *,
    hidden: bool = False,
    bins: int = 20,
    rule: Callable[[Relaxation], LowerSlopes] | None = None,
) -> ReluState:
    """Count the states of ReLUs over the threat set.

    (Lee et al., "Towards better understanding of training certifiably robust models against adversarial examples",
    2021.)

    Args:
        model: from (B, ...) to logits (B, K), in eval mode, with ReLUs.
        threat: any but patches, which are many regions for each input.
        hidden: bounds by CROWN instead of intervals.
        bins: bins of the histogram.
        rule: lower slopes, such as `slopes.chord_slopes`; CROWN's own if none is given.
    """
    if isinstance(threat, Patch):
        raise UnsupportedError(f"ReLU states are counted over one region for each input; '{threat}' has many")
    if bins < 1:
        raise InputError(f"bins must be >= 1, got {bins}")
    check_task(model, x, None, threat)
    inputs = region(threat, x, sound=False)
    r = linear.relaxation(trace(model, x, threat), inputs, slopes="adaptive", hidden=hidden, sound=False)
    bounds = pre_activations(r)
    if not bounds:
        raise UnsupportedError("the model has no ReLU to count; the states of other activations are not defined")
    lower, upper = (torch.cat([b[side] for b in bounds.values()], 1) for side in (0, 1))
    given = {} if rule is None else rule(r)
    low = torch.cat([given[i].flatten(1) if i in given else r.lines[i].lower_slope.flatten(1) for i in bounds], 1)
    chord = torch.cat([r.lines[i].upper_slope.flatten(1) for i in bounds], 1)
    unstable = (lower <= 0) & (upper >= 0)
    slopes = torch.histc(chord[unstable].float(), bins, 0.0, 1.0).long()
    return ReluState(
        (lower > 0).sum(1),
        unstable.sum(1),
        (upper < 0).sum(1),
        slopes,
        (unstable & (low == 0)).sum(1),
        (unstable & (low > 0) & (low < 1)).sum(1),
        (unstable & (low == 1)).sum(1),
    )
