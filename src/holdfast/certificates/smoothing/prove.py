"""From votes under any noise to a certificate: what the variants of randomised smoothing have in common.

A variant brings its noise, and the probability that y must have at x so that y keeps more than one half on the set.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn, where

from holdfast.certificates.smoothing.sample import Sampling, Watch, check_reach, sample
from holdfast.certificates.smoothing.votes import Counts, Draw
from holdfast.checks import check_logits
from holdfast.results import CertifyResult


@dataclass(frozen=True, eq=False)
class Variant:
    """A kind of noise and what it proves.

    Attributes:
        name: name of the certificate.
        noise: what `draw` does, in words: a stopped run goes on with the same only.
        draw: noisy copies of one input.
        probability: (G,) float64, rounded up: above the first y is proved; the others are settled on the way.
        radius: from lower bounds of the probability (B,), float64, to what they prove, rounded down.
        budget: budget of the threat; the proved radius must be larger, or at least as large if it is a `count`.
        what: is asked for, in words.
        count: whether the budget is a whole number, such as one of pixels.
    """

    name: str
    noise: str
    draw: Draw
    probability: Tensor
    radius: Callable[[Tensor], Tensor]
    budget: float
    what: str
    count: bool = False


def prove(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    variant: Variant,
    how: Sampling,
    *,
    logits: Tensor | None,
    index: Tensor | None,
    counts: Counts | None,
    watch: Watch | None,
) -> CertifyResult:
    """Sample until it is settled whether y is proved; arguments as for the certificate `smoothing`.

    Returns:
        `margin` is the lower bound of the probability of y, 0 where y is not the class guessed, minus what is needed.
    """
    check_reach(how, variant.probability, variant.what)
    classes = (check_logits(model, x[:1]) if logits is None else logits).shape[1]
    targets = variant.probability if how.adaptive else variant.probability[:0]
    found = sample(
        *(model, x, y, variant.draw, targets, how),
        noise=variant.noise,
        classes=classes,
        index=index,
        counts=counts,
        watch=watch,
    )
    lower = where(found.guess == y, found.lower, 0.0)
    radius, needed = variant.radius(lower), variant.probability[0]
    reached = radius >= variant.budget if variant.count else radius > variant.budget
    certified = (lower > needed) & reached
    by = tuple(variant.name if ok else "" for ok in certified.tolist())
    return CertifyResult(certified, lower - needed, radius, how.alpha, by)
