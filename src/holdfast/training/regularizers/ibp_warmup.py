"""The warm-up regulariser: narrow interval bounds, and active and dead ReLUs in balance, while the budget rises."""

import torch
from torch import Tensor

from holdfast.bounding.core.region import BALLS
from holdfast.bounding.linear.slopes import pre_activations
from holdfast.registry import Part
from holdfast.training.context import Metrics
from holdfast.training.step import Taken
from holdfast.utils.options import NotNegative, Positive

_TINY = 1e-12


@Part(
    "ibp-warmup",
    part="regularizers",
    summary="while the budget rises: keeps interval bounds narrow and active and dead ReLUs in balance",
    reference="Shi et al., Fast certified robust training with short warmup, 2021",
    threats=BALLS,
)
def ibp_warmup(taken: Taken, *, weight: NotNegative = 0.5, tolerance: Positive = 0.5) -> tuple[Tensor, Metrics]:
    """weight * (1 - ramp) * (tightness + balance), which is gone once the budget is full.

    With w_i the mean width of the bounds before ReLU i and w_0 the width of the input, over m ReLU layers:
    tightness = mean over i of relu(tolerance - w_0 / w_i) / tolerance, balance the same of the ratios of mean and of
    variance of the centres of active and dead ReLUs (the smaller of a ratio and its inverse). `weight` and `tolerance`
    are lambda_0 and tau of the paper.
    """
    r, factor = taken.relaxation(), weight * (1 - taken.context.ramp)
    zero = taken.x.new_zeros(())
    if r is None or factor == 0:
        return zero, {"tightness": zero, "balance": zero}
    width = (r.region.upper - r.region.lower).mean()
    layers = list(pre_activations(r).values())
    wide = [width / (upper - lower).mean().clamp(min=_TINY) for lower, upper in layers]
    ratios = [ratio for lower, upper in layers for ratio in _balance(lower, upper)]
    count = max(1, len(layers))
    tightness = sum(((tolerance - ratio).clamp(min=0) for ratio in wide), zero) / (tolerance * count)
    balance = sum(((tolerance - ratio).clamp(min=0) for ratio in ratios), zero) / (tolerance * count)
    return factor * (tightness + balance), {"tightness": tightness, "balance": balance}


def _balance(lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """Active against dead ReLUs, as ratios at most 1: of the mean distance of their centres from 0, of the variance.

    Bounds (B, n). Unstable ReLUs count for neither side; without any on one side the ratio is 0 and has no gradient.
    """
    centre = (lower + upper) / 2
    active, dead = (lower > 0).to(centre), (upper < 0).to(centre)
    apart = (centre - centre.mean()).square()
    means = (centre * active).sum(), -(centre * dead).sum()
    variances = (apart * active).sum(), (apart * dead).sum()
    return _ratio(*means), _ratio(*variances)


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    return torch.minimum(a, b) / torch.maximum(a, b).clamp(min=_TINY)
