"""Randomised smoothing in l1: noise that is uniform, or has the density of Laplace, in each value.

p(x) = P[f(x + U) = y] of the smoothed classifier moves by at most so much over ||delta||_1 <= r:

    uniform on [-scale, scale]:              p(x + delta) >= p(x) - r / (2 scale)
    Laplace, density ~ exp(-|u| / scale):    1 - p(x + delta) <= exp(r / scale) (1 - p(x))

so that y keeps more than one half within 2 scale (p - 1/2), and within -scale log(2 (1 - p)). For the proofs see
docs/smoothing-variants.md. Both are for the smoothed classifier, with probability 1 - alpha.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from holdfast.certificates.smoothing.prove import Variant, prove
from holdfast.certificates.smoothing.votes import Draw
from holdfast.errors import InputError
from holdfast.registry import Certificate
from holdfast.results import CertifyResult
from holdfast.threats import L1
from holdfast.utils.intervals import SLACK
from holdfast.utils.options import NotNegative, Positive, options_from

Shape = Literal["uniform", "laplace"]


def l1_noise(noise: Shape, scale: float) -> Draw:
    """Copies of one input with noise of its own in each value."""

    def uniform(x: Tensor, number: int, generator: torch.Generator) -> Tensor:
        return x.new_empty(number, *x.shape).uniform_(-scale, scale, generator=generator).add_(x)

    def laplace(x: Tensor, number: int, generator: torch.Generator) -> Tensor:
        # The difference of two exponential variables.
        first, second = (x.new_empty(number, *x.shape).exponential_(generator=generator) for _ in range(2))
        return first.sub_(second).mul_(scale).add_(x)

    return uniform if noise == "uniform" else laplace


def l1_probability(radius: Tensor, noise: Shape, scale: float) -> Tensor:
    """The probability of y at x above which the radius is proved, float64, rounded up."""
    r = radius.double() / scale * (1 + SLACK)
    needed = 0.5 + r / 2 if noise == "uniform" else 1 - (-r).exp() / 2
    return (needed * (1 + SLACK)).clamp(max=1.0)


def l1_radius(probability: Tensor, noise: Shape, scale: float) -> Tensor:
    """The radius that a probability proves, float64, rounded down; 0 for one half or less."""
    p = (probability.double() * (1 - SLACK)).clamp(0.5, 1)
    r = 2 * p - 1 if noise == "uniform" else (0.5 / (1 - p)).log()
    return r.clamp(min=0) * (scale * (1 - SLACK))


@Certificate(
    "smoothing-l1",
    summary="randomised smoothing with uniform or Laplace noise; needs a model trained with noise",
    guarantee="probabilistic proof",
    threats=("l1",),
    reference="Yang et al., Randomized smoothing of all shapes and sizes, 2020; Levine and Feizi, Improved, "
    "deterministic smoothing for L1 certified robustness, 2021",
    smoothed=True,
)
@options_from(prove)
def smoothing_l1(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: L1,
    *,
    noise: Shape = "uniform",  # the better one as a rule
    scale: Positive | None = None,  # half the width of uniform noise, mean absolute value of Laplace noise
    radii: tuple[NotNegative, ...] = (),  # further ones to settle
    **sampling: Any,
) -> CertifyResult:
    """Certified if the smoothed classifier is shown to answer y on the l1 ball; see the top of this file.

    Returns:
        `margin` is the lower bound of P[f(x + U) = y], 0 where y is not the class guessed, minus what eps needs.
    """
    if scale is None:
        raise InputError("'smoothing-l1' needs scale, the scale of the noise that the model was trained with")
    asked = torch.tensor([threat.eps, *radii], dtype=torch.float64, device=x.device)
    variant = Variant(
        name="smoothing-l1",
        noise=f"{noise} {scale!r}",
        draw=l1_noise(noise, scale),
        probability=l1_probability(asked, noise, scale),
        radius=lambda p: l1_radius(p, noise, scale),
        budget=threat.eps,
        what=f"l1 {float(asked.min()):g} at scale {scale:g}",
    )
    return prove(model, x, y, variant, **sampling)
