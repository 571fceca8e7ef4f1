"""Randomised smoothing: the class that a network gives most often to noisy copies of an input, and how far that holds.

The smoothed classifier g(x) = argmax_c P[f(x + G) = c], G ~ N(0, sigma^2 I), answers A on the whole ball of radius
sigma Phi^-1(p_A) around x if p_A = P[f(x + G) = A] > 1/2 (Cohen, Rosenfeld and Kolter, "Certified adversarial
robustness via randomized smoothing", 2019). p_A is bounded from below by samples, so the statement is wrong with
probability alpha at most. It needs nothing of f but its answers, and it speaks of g, not of f.
"""

from typing import Any

import torch
from scipy import special
from torch import Tensor, nn

from holdfast.certificates.core.radius_search import own_radius
from holdfast.certificates.smoothing.prove import Variant, prove
from holdfast.certificates.smoothing.votes import Draw
from holdfast.errors import InputError, either
from holdfast.registry import Certificate
from holdfast.results import CertifyResult
from holdfast.threats import L2
from holdfast.utils.intervals import SLACK
from holdfast.utils.options import NotNegative, Positive, options_from


def gaussian(sigma: float) -> Draw:
    """Noise N(0, sigma^2 I)."""

    def draw(x: Tensor, number: int, generator: torch.Generator) -> Tensor:
        return x.new_empty(number, *x.shape).normal_(0, sigma, generator=generator).add_(x)

    return draw


def gaussian_probability(radius: Tensor, sigma: float) -> Tensor:
    """Phi(radius / sigma), rounded up: the probability above which the radius is proved; float64."""
    share = special.ndtr(radius.cpu().double().numpy() / sigma) * (1 + SLACK)
    return torch.as_tensor(share).to(radius.device)


def gaussian_radius(probability: Tensor, sigma: float) -> Tensor:
    """sigma Phi^-1(probability), rounded down, and 0 for a probability of 1/2 or less; float64."""
    quantile = special.ndtri(probability.cpu().double().clamp(0.5, 1).numpy())
    return (torch.as_tensor(quantile).to(probability.device) * (sigma * (1 - SLACK))).clamp(min=0)


@Certificate(
    "smoothing",
    summary="randomised smoothing with Gaussian noise; needs a model trained with such noise",
    guarantee="probabilistic proof",
    threats=("l2",),
    reference="Cohen, Rosenfeld and Kolter, Certified adversarial robustness via randomized smoothing, 2019",
    smoothed=True,
    radius=own_radius,
)
@options_from(prove)
def smoothing(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: L2,
    *,
    sigma: Positive | None = None,  # standard deviation of the noise in training, in the units of x
    radii: tuple[NotNegative, ...] = (),  # further ones to settle; one alpha serves them all
    **sampling: Any,
) -> CertifyResult:
    """Certified if the smoothed classifier, `hf.Smoothed(model, sigma)`, is shown to answer y on the ball.

    The radius follows from the samples drawn: with `adaptive` sampling it is just above the requested radius.

    Returns:
        `margin` is the lower bound of P[f(x + G) = y], 0 where y is not the class guessed, minus Phi(eps / sigma).
    """
    if sigma is None:
        raise InputError(
            f"'smoothing' needs {either('sigma', '--sigma')}, the standard deviation of the noise that the model was "
            "trained with"
        )
    asked = torch.tensor([threat.eps, *radii], dtype=torch.float64, device=x.device)
    variant = Variant(
        name="smoothing",
        noise=f"gaussian {sigma!r}",
        draw=gaussian(sigma),
        probability=gaussian_probability(asked, sigma),
        radius=lambda p: gaussian_radius(p, sigma),
        budget=threat.eps,
        what=f"l2 {float(asked.min()):g} at sigma {sigma:g}",
    )
    return prove(model, x, y, variant, **sampling)
