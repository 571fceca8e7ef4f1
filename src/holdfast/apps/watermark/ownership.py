"""Ownership: is the trigger accuracy of a suspect model too high for chance?

The null hypothesis is that the suspect knows nothing of the labels. If these were drawn at random, one for each
trigger, the number of right answers of *any* model made without them is Bin(T, 1/C), so that the p-value is exact. If
all triggers share one label it is not: a model may send all of them to that class for reasons of its own. `null_test`
then shows what independent models do.

White-box verification looks at the median over noisy copies. If half of the copies have at least r right answers, the
mean share of such copies under the null hypothesis is P[Bin >= r], and by Markov's inequality the probability that it
reaches one half is at most twice that: the p-value has a factor 2.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from scipy import special
from torch import nn

from holdfast.apps.watermark.adversaries import drift
from holdfast.apps.watermark.certificate import (
    WatermarkCertificate,
    check_watermarked,
    noisy_accuracies,
    trigger_accuracy,
)
from holdfast.apps.watermark.triggers import TriggerSet
from holdfast.errors import InputError


@dataclass(frozen=True)
class Ownership:
    """The verdict on one suspect model.

    Attributes:
        claim: the accuracy reaches the threshold.
        mode: what was looked at: the answers, or the weights.
        accuracy: on the triggers; with weights the median over noisy copies.
        threshold: accuracy from which on ownership is claimed.
        p_value: probability of such an accuracy by chance; exact for random labels only, see `exact`.
        exact: the labels were drawn at random, so that the p-value holds for every independent model.
        distance: l2 distance of the weights from the original, if that was given.
        buffer_distance: the same for buffers, such as batch-norm statistics, on which the certificate says nothing.
        certified: certified accuracy at that distance; None if there is none, or if buffers differ.
    """

    claim: bool
    mode: Literal["black-box", "white-box"]
    accuracy: float
    threshold: float
    p_value: float
    exact: bool
    distance: float | None = None
    buffer_distance: float | None = None
    certified: float | None = None


@dataclass(frozen=True)
class NullTest:
    """Trigger accuracies of models that were made without the triggers, and the share that would be claimed."""

    accuracies: tuple[float, ...]
    p_values: tuple[float, ...]
    false_claims: float


def chance(right: int, count: int, classes: int) -> float:
    """P[Bin(count, 1 / classes) >= right]: the p-value of `right` right answers.

    >>> round(chance(2, 2, 10), 10)
    0.01
    """
    if not 0 <= right <= count or count < 1 or classes < 2:
        raise InputError(
            f"expected 0 <= right <= count, count >= 1 and classes >= 2, got right={right}, count={count}, "
            f"classes={classes}"
        )
    return float(special.betainc(right, count - right + 1, 1 / classes)) if right else 1.0


def threshold(count: int, classes: int, *, false_claim: float = 1e-6) -> int:
    """Fewest right answers among `count` triggers whose p-value is at most `false_claim`.

    >>> threshold(100, 10)
    28
    """
    if not 0 < false_claim < 1:
        raise InputError(f"false_claim is a probability in (0, 1), got {false_claim}")
    for right in range(1, count + 1):
        if chance(right, count, classes) <= false_claim:
            return right
    raise InputError(
        f"{count} triggers of {classes} classes cannot reach a p-value of {false_claim:g}; take more triggers"
    )


def verify_black_box(model: nn.Module, triggers: TriggerSet, *, false_claim: float = 1e-6) -> Ownership:
    """The verdict from only the answers of the suspect, in eval mode, one query for each trigger."""
    accuracy = trigger_accuracy(model, triggers)
    right, least = round(accuracy * len(triggers)), threshold(len(triggers), triggers.classes, false_claim=false_claim)
    return Ownership(
        claim=right >= least,
        mode="black-box",
        accuracy=accuracy,
        threshold=least / len(triggers),
        p_value=chance(right, len(triggers), triggers.classes),
        exact=triggers.random_labels,
    )


def verify_white_box(
    model: nn.Module,
    triggers: TriggerSet,
    *,
    sigma: float,
    n: int = 1000,
    seed: int = 0,
    false_claim: float = 1e-6,
    original: nn.Module | None = None,
    certificate: WatermarkCertificate | None = None,
    show: bool = False,
) -> Ownership:
    """The verdict from the weights of the suspect: the median trigger accuracy over n noisy copies of them.

    Args:
        model: the suspect, in eval mode.
        sigma: the certificate's.  n: 100 will do to follow an attack.
        original: the owner's model, of the same architecture, to say how far the suspect has moved.
        certificate: the original's, to say what is proved at that distance.
    """
    check_watermarked(model, triggers)
    if certificate is not None and original is None:
        raise InputError("a certificate needs the original model, to know the distance of the suspect from it")
    if certificate is not None and certificate.sigma != sigma:
        raise InputError(f"the certificate was made with sigma = {certificate.sigma:g}, got sigma = {sigma:g}")
    least = threshold(len(triggers), triggers.classes, false_claim=false_claim / 2)
    counts = noisy_accuracies(model, triggers, sigma=sigma, n=n, seed=seed, show=show)
    right = int(counts.sort().values[(n - 1) // 2])  # at least half of the copies are as good as this
    moved = None if original is None else drift(model, original)
    proved = None
    if certificate is not None and moved is not None and moved.buffers == 0:
        # The balls are open, and the distance is rounded.
        proved = certificate.at(moved.parameters * (1 + 1e-6) + 1e-9)
    return Ownership(
        claim=right >= least,
        mode="white-box",
        accuracy=right / len(triggers),
        threshold=least / len(triggers),
        p_value=min(1.0, 2 * chance(right, len(triggers), triggers.classes)),
        exact=triggers.random_labels,
        distance=None if moved is None else moved.parameters,
        buffer_distance=None if moved is None else moved.buffers,
        certified=proved,
    )


def null_test(models: Sequence[nn.Module], triggers: TriggerSet, *, false_claim: float = 1e-6) -> NullTest:
    """What the black-box test says of models that never saw the triggers; any claim is a false one."""
    if not models:
        raise InputError("give at least one independently trained model")
    found = [verify_black_box(model, triggers, false_claim=false_claim) for model in models]
    return NullTest(
        tuple(each.accuracy for each in found),
        tuple(each.p_value for each in found),
        statistics.fmean(each.claim for each in found),
    )
