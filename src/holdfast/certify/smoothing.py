"""Randomised smoothing: the class that a network gives most often to noisy copies of an input, and how far that holds.

The smoothed classifier g(x) = argmax_c P[f(x + G) = c], G ~ N(0, sigma^2 I), answers A on the whole ball of radius
sigma Phi^-1(p_A) around x if p_A = P[f(x + G) = A] > 1/2 (Cohen, Rosenfeld and Kolter, "Certified adversarial
robustness via randomized smoothing", 2019). p_A is bounded from below by samples, so the statement is wrong with
probability alpha at most. It needs nothing of f but its answers, and it speaks of g, not of f.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from scipy import special
from torch import Tensor, nn

from holdfast.certify.confidence import AT_THE_CAP, SLACK, Looks, binomial_lower, check_alpha, looks
from holdfast.certify.percentile import check_sigma
from holdfast.certify.smoothing_stopping import stopping
from holdfast.certify.smoothing_votes import Counts, Draw, add_votes, check_counts, new_counts, select
from holdfast.checks import check_logits
from holdfast.errors import InputError
from holdfast.random import Noise
from holdfast.registry import register
from holdfast.results import CertifyResult
from holdfast.threats import L2, Threat

Watch = Callable[[Counts, Tensor], None]
"""Called after each forward pass with the counts so far and an estimate of the samples left for each input (B,)."""


@dataclass(frozen=True)
class Sampling:
    """How to sample; `n`, `n0` and `alpha` as in the paper.

    Attributes:
        n: most samples for each input, after the n0 that guess its class.
        alpha: probability of a wrong statement about one input.
        adaptive: stop as soon as all that is asked about an input is settled.
        batch: noisy copies in one forward pass, of many inputs.
    """

    n: int = 100_000
    n0: int = 100
    alpha: float = 0.001
    adaptive: bool = True
    batch: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        check_alpha(self.alpha)
        for name in ("n", "n0", "batch"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}")

    def looks(self) -> Looks:
        """When the sample of an input is looked at."""
        return looks(self.n, self.alpha) if self.adaptive else Looks((self.n,), (self.alpha,))


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


def sample(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    draw: Draw,
    targets: Tensor,
    how: Sampling,
    *,
    noise: str,
    classes: int,
    index: Tensor | None = None,
    counts: Counts | None = None,
    watch: Watch | None = None,
) -> Counts:
    """Samples until it is settled, for each input, which of `targets` the probability of its class is above.

    An input whose guess is not `y` is settled at once. Serves any noise: `draw` makes the copies, and the caller turns
    radii into `targets` and `Counts.lower` into a radius.

    Args:
        x: inputs (B, ...).  y: labels (B,).
        targets: (G,) probabilities; none: sample each input n times.
        noise: describes `draw`, for the settings of the counts, such as "gaussian 0.5".
        classes: K.
        index: (B,) what identifies each input; its position if not given.
        counts: of an earlier run, to go on with.
        watch: see `Watch`.
    """
    settings = {"noise": noise, "n": how.n, "n0": how.n0, "alpha": how.alpha, "looks": how.adaptive, "seed": how.seed}
    if counts is None:
        counts = new_counts(len(x), classes, settings, x.device)
    check_counts(counts, len(x), classes, settings)
    test = stopping(how.looks(), targets.to(x.device))
    names = torch.arange(len(x), device=x.device) if index is None else index.to(x.device)
    tell: Watch = watch or (lambda counts, left: None)
    for after in select(model, x, draw, counts, Noise(how.seed, names, 1), n0=how.n0, batch=how.batch):
        counts = after
        tell(counts, test.left(counts.hits, counts.drawn, counts.lower))
    while True:
        # A run that was stopped may have reached a look without having looked.
        counts = replace(counts, lower=torch.maximum(counts.lower, test.lower(counts.hits, counts.drawn)))
        going = (counts.guess == y) & test.undecided(counts.hits, counts.drawn, counts.lower)
        if not bool(going.any()):
            return counts
        left = torch.where(going, test.left(counts.hits, counts.drawn, counts.lower), 0) + counts.drawn
        goal = torch.where(going, test.next_look(counts.drawn), counts.drawn)
        for after in add_votes(model, x, draw, counts, goal, Noise(how.seed, names, 2), batch=how.batch):
            counts = after
            tell(counts, left - counts.drawn)


@register(
    "certify",
    "smoothing",
    summary="randomised smoothing with Gaussian noise; needs a model trained with such noise",
    guarantee="probabilistic proof",
    threats=("l2",),
    reference="Cohen, Rosenfeld and Kolter, Certified adversarial robustness via randomized smoothing, 2019",
    smoothed=True,
)
def smoothing(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    *,
    sigma: float | None = None,
    n: int = 100_000,
    n0: int = 100,
    alpha: float = 0.001,
    adaptive: bool = True,
    radii: Sequence[float] = (),
    batch: int = 1000,
    seed: int = 0,
    logits: Tensor | None = None,
    index: Tensor | None = None,
    counts: Counts | None = None,
    watch: Watch | None = None,
) -> CertifyResult:
    """Certified if the smoothed classifier is shown to answer y on the ball; it is that of `hf.Smoothed(model, sigma)`.

    The radius is that of the sample as far as it went: with `adaptive` sampling it is just above the radius asked for.

    Args:
        model: from (B, ...) to logits (B, K).  x: inputs.  y: labels, shape (B,).
        threat: an l2 ball.
        sigma: standard deviation of the noise, in the units of x: that of the training.
        n: most samples for each input.  n0: samples that guess its class; they are not used again.
        alpha: probability that the statement about one input is wrong.
        adaptive: stop as soon as the radius asked for is proved, or will hardly be; False: n samples of each input.
        radii: further radii that shall be settled; one alpha serves them all.
        batch: noisy copies in one forward pass; the answer does not change.
        seed: fixes the noise.
        logits: of the inputs, if they are known; they only tell K.
        index: (B,) what identifies each input for the noise; its position if not given.
        counts: of a run that was stopped, to go on with.
        watch: called after each forward pass.

    Returns:
        `margin` is the lower bound of P[f(x + G) = y], 0 where y is not the class guessed, minus Phi(eps / sigma).
    """
    if not isinstance(threat, L2):
        raise InputError(f"'smoothing' certifies l2 balls, got '{threat}'")
    if sigma is None:
        raise InputError("'smoothing' needs sigma, the standard deviation of the noise that the model was trained with")
    check_sigma(sigma)
    how = Sampling(n, n0, alpha, adaptive, batch, seed)
    asked = torch.tensor([threat.eps, *radii], dtype=torch.float64, device=x.device)
    if not bool((asked.isfinite() & (asked >= 0)).all()):
        raise InputError(f"a radius must be a finite number, 0 or more, got {asked.tolist()}")
    targets = gaussian_probability(asked, sigma)
    check_reach(how, targets, f"l2 {float(asked.min()):g} at sigma {sigma:g}")
    classes = (check_logits(model, x[:1]) if logits is None else logits).shape[1]
    found = sample(
        *(model, x, y, gaussian(sigma), targets if adaptive else targets[:0], how),
        noise=f"gaussian {sigma!r}",
        classes=classes,
        index=index,
        counts=counts,
        watch=watch,
    )
    lower = torch.where(found.guess == y, found.lower, 0.0)
    radius = gaussian_radius(lower, sigma)
    certified = (lower > targets[0]) & (radius > threat.eps)
    by = tuple("smoothing" if ok else "" for ok in certified.tolist())
    return CertifyResult(certified, lower - targets[0], radius, alpha, by)


def check_reach(how: Sampling, targets: Tensor, what: str) -> None:
    """Refuse an n with which not even a model that is always right could reach the lowest of `targets`."""
    target = float(targets.min())
    if _best(how) > target:
        return
    if target >= 1 - 1000 * SLACK:
        raise InputError(f"{what} is out of reach of sampling; take more noise or a smaller radius")
    # All n are hits if the model is always right, and the bound is alpha^(1/n), with the alpha of the last look.
    step = math.log(target) - math.log1p(-SLACK)
    near = [math.ceil(math.log(share * how.alpha) / step) for share in (1, AT_THE_CAP)]
    tried = (n for first in near for n in (first, first + 1) if _best(replace(how, n=n)) > target)
    smallest = next(tried, near[-1] + 2)
    raise InputError(
        f"n = {how.n} samples cannot prove {what} with alpha {how.alpha:g}, whatever the model; "
        f"the smallest n that can is {smallest}"
    )


def _best(how: Sampling) -> float:
    """The bound if every sample is a hit."""
    return float(binomial_lower(torch.tensor(how.n), how.n, how.looks().alphas[-1]))
