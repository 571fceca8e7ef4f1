"""Terms that look at the bounds before the ReLUs: for training that starts well, and for networks that verify fast."""

import torch
from torch import Tensor

from holdfast.bounding.core.region import BALLS, region
from holdfast.bounding.graph.trace import trace_batch
from holdfast.bounding.linear import relaxation as linear
from holdfast.bounding.linear.relaxation import Relaxation
from holdfast.bounding.linear.slopes import pre_activations
from holdfast.registry import Part, register
from holdfast.training.context import Metrics
from holdfast.training.step import Taken
from holdfast.utils.options import NotNegative, Positive

_TINY = 1e-12


def relaxed(taken: Taken) -> Relaxation | None:
    """The relaxed network of the objective; if it has bounded none, by intervals. None without a budget."""
    threat = taken.context.threat
    if taken.relaxed is not None or threat.budget == 0:
        return taken.relaxed
    graph, _ = trace_batch(taken.model, taken.x)
    return linear.relaxation(graph, region(threat, taken.x, sound=False), slopes=None, hidden=False, sound=False)


def relu_stability_loss(r: Relaxation) -> Tensor:
    """Sum over the ReLUs of -tanh(1 + u l), (B,): large while u l < 0, flat where the ReLU is clearly stable.

    (Xiao et al., "Training for faster adversarial robustness verification via inducing ReLU stability", 2019.) The
    product is taken neuron by neuron: a single tanh of the inner product of u and l, as sometimes printed, would let
    stable neurons pay for unstable ones.
    """
    terms = [-torch.tanh(1 + upper * lower).sum(1) for lower, upper in pre_activations(r).values()]
    return torch.stack(terms).sum(0) if terms else r.region.x.new_zeros(len(r.region.x))


@register(
    Part(
        "relu-stability",
        part="regularizers",
        summary="fewer unstable ReLUs over the threat set, so that exact verification is fast",
        reference="Xiao et al., Training for faster adversarial robustness verification via inducing ReLU "
        "stability, 2019",
        threats=BALLS,
    )
)
def relu_stability(taken: Taken, *, weight: NotNegative = 1e-4) -> tuple[Tensor, Metrics]:
    """weight * mean over the batch of the sum over the ReLUs of -tanh(1 + u l), with l and u by intervals.

    Args:
        taken: the step.
        weight: of the term; the sum runs over all neurons, so that large networks want less.
    """
    r = relaxed(taken)
    if r is None:
        zero = taken.x.new_zeros(())
        return zero, {"loss": zero}
    loss = relu_stability_loss(r).mean()
    return weight * loss, {"loss": loss}


@register(
    Part(
        "ibp-warmup",
        part="regularizers",
        summary="while the budget rises: keeps interval bounds narrow and active and dead ReLUs in balance",
        reference="Shi et al., Fast certified robust training with short warmup, 2021",
        threats=BALLS,
    )
)
def ibp_warmup(taken: Taken, *, weight: NotNegative = 0.5, tolerance: Positive = 0.5) -> tuple[Tensor, Metrics]:
    """weight * (1 - ramp) * (tightness + balance), which is gone once the budget is full.

    With w_i the mean width of the bounds before ReLU i and w_0 that of the input, over m ReLU layers:
    tightness = mean over i of relu(tolerance - w_0 / w_i) / tolerance, balance the same of the ratios of mean and of
    variance of the centres of active and dead ReLUs (the smaller of a ratio and its inverse).

    Args:
        taken: the step.
        weight: lambda_0 of the paper.
        tolerance: tau of the paper; smaller ratios are penalised.
    """
    r, factor = relaxed(taken), weight * (1 - taken.context.ramp)
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


@register(
    Part(
        "l1-weights",
        part="regularizers",
        summary="sum of the absolute weights, which keeps interval bounds narrow",
        reference="Müller et al., Certified training: small boxes are all you need, 2023",
    )
)
def l1_weights(taken: Taken, *, weight: NotNegative = 1e-6) -> tuple[Tensor, Metrics]:
    """weight * sum of |w| over the weights of all linear and convolutional layers, biases left out.

    Args:
        taken: the step.
        weight: of the term.
    """
    at = dict(taken.model.named_parameters()) if taken.weights is None else taken.weights
    total = sum((p.abs().sum() for p in at.values() if p.ndim > 1), taken.x.new_zeros(()))
    return weight * total, {"norm": total}
