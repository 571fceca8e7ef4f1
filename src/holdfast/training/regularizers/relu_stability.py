"""ReLU stability: fewer unstable ReLUs over the threat set, so that exact verification is fast."""

import torch
from torch import Tensor

from holdfast.bounding.core.region import BALLS
from holdfast.bounding.linear.relaxation import Relaxation
from holdfast.bounding.linear.slopes import pre_activations
from holdfast.registry import Part
from holdfast.training.context import Metrics
from holdfast.training.step import Taken
from holdfast.utils.options import NotNegative


def relu_stability_loss(r: Relaxation) -> Tensor:
    """Sum over the ReLUs of -tanh(1 + u l), (B,): large while u l < 0, flat where the ReLU is clearly stable.

    (Xiao et al., "Training for faster adversarial robustness verification via inducing ReLU stability", 2019.) The
    product is taken neuron by neuron: a single tanh of the inner product of u and l, as sometimes printed, would let
    stable neurons pay for unstable ones.
    """
    terms = [-torch.tanh(1 + upper * lower).sum(1) for lower, upper in pre_activations(r).values()]
    return torch.stack(terms).sum(0) if terms else r.region.x.new_zeros(len(r.region.x))


@Part(
    "relu-stability",
    part="regularizers",
    summary="fewer unstable ReLUs over the threat set, so that exact verification is fast",
    reference="Xiao et al., Training for faster adversarial robustness verification via inducing ReLU stability, 2019",
    threats=BALLS,
)
def relu_stability(taken: Taken, *, weight: NotNegative = 1e-4) -> tuple[Tensor, Metrics]:
    """weight * mean over the batch of the sum over the ReLUs of -tanh(1 + u l), with l and u by intervals.

    The sum runs over all neurons, so that large networks want a smaller weight.
    """
    r = taken.relaxation()
    loss = taken.x.new_zeros(()) if r is None else relu_stability_loss(r).mean()
    return weight * loss, {"loss": loss}
