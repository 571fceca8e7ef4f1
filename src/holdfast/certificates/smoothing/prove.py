"""From votes under any noise to a certificate: what the variants of randomised smoothing have in common.

A variant brings its noise, and the probability that y must have at x so that y keeps more than one half on the set.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn, where

from holdfast.certificates.smoothing.sample import Precision, Sampling, Watch, check_reach, sample
from holdfast.certificates.smoothing.votes import Counts, Draw
from holdfast.checks import check_logits
from holdfast.results import CertifyResult
from holdfast.utils.options import Count, Inside


@dataclass(frozen=True, eq=False)
class Variant:
    """A kind of noise and what it proves."""

    name: str  # of the certificate
    noise: str  # what `draw` does, in words: a stopped run goes on with the same only
    draw: Draw
    probability: Tensor  # (G,) float64, rounded up: above the first y is proved; the others are settled on the way
    radius: Callable[[Tensor], Tensor]  # from lower bounds of the probability (B,), float64; rounded down
    budget: float  # of the threat; the proved radius must be larger, or at least as large if it is a `count`
    what: str  # is asked for, in words
    count: bool = False  # whether the budget is a whole number, such as one of pixels


def prove(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    variant: Variant,
    *,
    n: Count = 100_000,  # most samples for each input
    n0: Count = 100,  # samples that guess its class; they are not used again
    alpha: Inside = 0.001,  # probability that the statement about one input is wrong
    adaptive: bool = True,  # stop early once the requested radius is certified or unlikely to be; else draw n
    batch: Count = 1000,  # noisy copies in one forward pass; the answer does not change
    seed: int = 0,  # fixes the noise
    precision: Precision = "full",  # "bfloat16": faster; the proof then speaks of the smoothed copy in bfloat16
    logits: Tensor | None = None,  # (B, K), if they are known; only K is used
    index: Tensor | None = None,  # (B,) what identifies each input for the noise; its position if not given
    counts: Counts | None = None,  # counts of a stopped run, to continue it
    watch: Watch | None = None,  # called after each forward pass
) -> CertifyResult:
    """Sample until it is settled whether y is proved; the options are those of every variant.

    Returns:
        `margin` is the lower bound of the probability of y, 0 where y is not the class guessed, minus what is needed.
    """
    how = Sampling(n, n0, alpha, adaptive, batch, seed, precision)
    check_reach(how, variant.probability, variant.what)
    classes = (check_logits(model, x[:1]) if logits is None else logits).shape[1]
    targets = variant.probability if how.adaptive else variant.probability[:0]
    task = (model, x, y, variant.draw, targets, how)
    found = sample(*task, noise=variant.noise, classes=classes, index=index, counts=counts, watch=watch)
    lower = where(found.guess == y, found.lower, 0.0)
    radius, needed = variant.radius(lower), variant.probability[0]
    reached = radius >= variant.budget if variant.count else radius > variant.budget
    certified = (lower > needed) & reached
    name = variant.name if precision == "full" else f"{variant.name} of the model in {precision}"
    by = tuple(name if ok else "" for ok in certified.tolist())
    return CertifyResult(certified, lower - needed, radius, how.alpha, by, seed=seed)
