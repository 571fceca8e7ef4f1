"""Sampling that stops when its question is settled, for any noise: the common part of all certificates by smoothing."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from holdfast.attacks.fast.fold import slimmed
from holdfast.attacks.fast.lean import halved
from holdfast.certificates.smoothing.stopping import stopping
from holdfast.certificates.smoothing.votes import Counts, Draw, add_votes, check_counts, new_counts, select
from holdfast.errors import InputError, either
from holdfast.random import Noise
from holdfast.utils import clock
from holdfast.utils.intervals import AT_THE_CAP, SLACK, Looks, binomial_lower, looks

Precision = Literal["full", "bfloat16"]
Watch = Callable[[Counts, Tensor], None]
"""Called after each forward pass with the counts so far and an estimate of the samples left for each input (B,)."""


@dataclass(frozen=True)
class Sampling:
    """How to sample; `n`, `n0` and `alpha` as in the paper."""

    n: int = 100_000  # most samples for each input, after the n0 that guess its class
    n0: int = 100
    alpha: float = 0.001  # probability of a wrong statement about one input
    adaptive: bool = True  # stop as soon as all that is asked about an input is settled
    batch: int = 1000  # noisy copies in one forward pass, of many inputs
    seed: int = 0
    precision: Precision = "full"  # in bfloat16 it is another classifier that votes, and that the bounds are about

    def looks(self) -> Looks:
        """When the sample of an input is looked at."""
        return looks(self.n, self.alpha) if self.adaptive else Looks((self.n,), (self.alpha,))


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
    """Sample until it is settled, for each input, which of `targets` the probability of its class is above.

    An input whose guess is not `y` is settled at once. Serves any noise: `draw` makes the copies, and the caller turns
    radii into `targets` and `Counts.lower` into a radius.

    Without `targets` (G,), probabilities, each input is sampled n times. `noise` describes `draw` for the settings of
    the counts, such as "gaussian 0.5".
    """
    settings = {"noise": noise, "n": how.n, "n0": how.n0, "alpha": how.alpha, "looks": how.adaptive, "seed": how.seed}
    if how.precision != "full":
        settings["precision"] = how.precision
    if counts is None:
        counts = new_counts(len(x), classes, settings, x.device)
    check_counts(counts, len(x), classes, settings)
    model = voter(model, x, how.precision)
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
        if clock.over() or not bool(going.any()):
            return counts
        left = torch.where(going, test.left(counts.hits, counts.drawn, counts.lower), 0) + counts.drawn
        goal = torch.where(going, test.next_look(counts.drawn), counts.drawn)
        for after in add_votes(model, x, draw, counts, goal, Noise(how.seed, names, 2), batch=how.batch):
            counts = after
            tell(counts, left - counts.drawn)
            if clock.over():
                return counts


def voter(model: nn.Module, x: Tensor, precision: Precision) -> nn.Module:
    """The classifier that votes: the model itself, or its copy in bfloat16, which is another classifier.

    A certificate by votes of the copy speaks of the smoothed copy; `hf.Smoothed(voter(model, x, "bfloat16"), sigma)`
    is what to deploy then. Batch norms are folded in it where the model can be traced.

    Args:
        x: an input or more, shape (B, ...), to trace the model with.
    """
    if precision == "full":
        return model
    with torch.no_grad():
        x = x[:2].detach().clone()
        return halved(slimmed(model, x, model(x)))


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
        f"{either(f'n = {how.n} samples', f'--samples {how.n}')} cannot prove {what} with alpha {how.alpha:g}, "
        f"whatever the model; the smallest {either('n', '--samples')} that can is {smallest}"
    )


def _best(how: Sampling) -> float:
    """The bound if every sample is a hit."""
    return float(binomial_lower(torch.tensor(how.n), how.n, how.looks().alphas[-1]))
