"""The certificate: no small change of the weights takes the smoothed trigger accuracy below a stated value.

f(theta) is the accuracy on the whole trigger set, h(theta) the median of f(theta + G), G ~ N(0, sigma^2 I). For every
change delta of the weights with ||delta||_2 < epsilon

    h(theta + delta) >= the Phi(-epsilon / sigma) quantile of f(theta + G)

(Bansal et al., "Certified neural network watermarks with randomized smoothing", 2022). The quantile is bounded from
below, at a stated confidence, by an order statistic of n noisy accuracies; its rank is in
`holdfast.certificates.smoothing.percentile`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from holdfast.apps.watermark.embedding import noisy_weights, progress
from holdfast.apps.watermark.triggers import TriggerSet
from holdfast.certificates.smoothing.percentile import check_sigma, order_ranks, smallest_samples
from holdfast.checks import check_labels, check_logits, check_model, check_place
from holdfast.errors import InputError, either
from holdfast.random import Noise

SCOPE = (
    "The certificate speaks of the median trigger accuracy under noise, which needs the weights (white-box). It covers "
    "changes of the parameters within the radius (l2, all parameters together) in the same architecture with the same "
    "buffers, such as batch-norm statistics. A model that computes the same with other weights (rescaled, permuted) or "
    "was trained anew may lie far outside."
)
_CHUNK = 256  # triggers for each forward pass


@dataclass(frozen=True)
class WatermarkCertificate:
    """Certified trigger accuracy by radius.

    Attributes:
        radii: l2 radii of weight changes, each an open ball.  certified: lower bound of the median accuracy in each.
        median: the estimate of the median accuracy at the weights themselves.
        accuracy: without noise, what a black-box test sees.
        sigma: standard deviation of the noise.  n: noisy copies.  seed: fixes the noise.
        confidence: holds for each radius on its own, or for all radii together if `union`.
        triggers: size of the trigger set.  parameters: number of weights.  weight_norm: their l2 norm.
        right: (n,) triggers that each noisy copy gets right, sorted.
        scope: what the certificate does not say.
    """

    radii: tuple[float, ...]
    certified: tuple[float, ...]
    median: float
    accuracy: float
    sigma: float
    n: int
    seed: int
    confidence: float
    union: bool
    triggers: int
    parameters: int
    weight_norm: float
    right: tuple[int, ...]
    scope: str = SCOPE

    def at(self, radius: float) -> float | None:
        """Certified accuracy at another radius, on its own; None where n copies prove nothing."""
        if not math.isfinite(radius):
            return None
        rank = order_ranks(self.n, radius, self.sigma, confidence=self.confidence)[0]
        return None if rank is None else self.right[rank - 1] / self.triggers

    def to_json(self) -> dict[str, Any]:
        """Plain values; `WatermarkCertificate.from_json` reads them back."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "WatermarkCertificate":
        """What `to_json` gave."""
        try:
            lists = {key: tuple(values[key]) for key in ("radii", "certified", "right")}
            certificate = cls(**{**values, **lists})
            sound = len(certificate.right) == certificate.n and list(certificate.right) == sorted(certificate.right)
        except (KeyError, TypeError) as error:
            raise InputError(f"this is no certificate of a watermark: {error}") from error
        if not sound:
            raise InputError("this is no certificate of a watermark: it must hold n sorted numbers of right answers")
        return certificate


def certify_watermark(
    model: nn.Module,
    triggers: TriggerSet,
    radii: Sequence[float],
    *,
    sigma: float,
    n: int = 10_000,
    confidence: float = 0.99,
    union: bool = False,
    seed: int = 0,
    right: Tensor | None = None,
    show: bool = False,
) -> WatermarkCertificate:
    """The certificate of a marked model at each of the radii, from one set of n noisy copies.

    Args:
        model: in eval mode, with finite outputs.
        triggers: on the device of the model; the whole set is used for each copy.
        radii: l2 norms of weight changes, 0 or more.
        sigma: standard deviation of the noise; what the model was trained for, or a little less.
        confidence: that a bound holds.
        union: make it the confidence that the whole curve holds.
        right: what `noisy_accuracies` counted for these arguments, if that was done before.
    """
    each = check_reach(radii, sigma=sigma, n=n, confidence=confidence, union=union)
    if right is None:
        right = noisy_accuracies(model, triggers, sigma=sigma, n=n, seed=seed, show=show)
    if right.shape != (n,):
        raise InputError(f"right must have shape ({n},), one number for each copy, got {tuple(right.shape)}")
    ordered = right.sort().values.tolist()
    ranks = [order_ranks(n, radius, sigma, confidence=each)[0] for radius in radii]
    parameters = [p.detach().double() for p in model.parameters()]
    return WatermarkCertificate(
        radii=tuple(radii),
        certified=tuple(0.0 if rank is None else ordered[rank - 1] / len(triggers) for rank in ranks),
        median=ordered[(n - 1) // 2] / len(triggers),
        accuracy=trigger_accuracy(model, triggers),
        sigma=sigma,
        n=n,
        seed=seed,
        confidence=confidence,
        union=union,
        triggers=len(triggers),
        parameters=sum(p.numel() for p in parameters),
        weight_norm=math.sqrt(sum(float(p.square().sum()) for p in parameters)),
        right=tuple(ordered),
    )


def check_reach(radii: Sequence[float], *, sigma: float, n: int, confidence: float, union: bool) -> float:
    """The confidence of each radius; refuse, before any work, radii at which n copies can prove nothing."""
    check_sigma(sigma)
    if not radii:
        raise InputError("give at least one radius to certify")
    if not 0 < confidence < 1:
        raise InputError(f"confidence must lie in (0, 1), got {confidence}")
    each = 1 - (1 - confidence) / len(radii) if union else confidence
    for radius in radii:
        least = smallest_samples(radius, sigma, confidence=each)
        if n < least:
            raise InputError(
                f"{either(f'n = {n} noisy copies', f'--samples {n}')} cannot prove anything at radius {radius:g} "
                f"with sigma = {sigma:g} and confidence {each:g}; take {either('n', '--samples')} >= {least}, a larger "
                "sigma or a smaller radius"
            )
    return each


@torch.no_grad()
def noisy_accuracies(
    model: nn.Module,
    triggers: TriggerSet,
    *,
    sigma: float,
    n: int,
    seed: int = 0,
    start: int = 0,
    watch: Callable[[int, int], None] | None = None,
    show: bool = False,
) -> Tensor:
    """How many triggers each noisy copy of the weights gets right, int64, shape (n - start,), in the order drawn.

    The noise of copy i depends only on `seed` and i: work that stopped at copy `start` can go on there. `watch` is
    told (i, right answers) after each copy.
    """
    check_sigma(sigma)
    if not 0 <= start < n:
        raise InputError(f"start must lie in 0 to n - 1 = {n - 1}, got {start}")
    check_watermarked(model, triggers)
    seeds, generator = Noise.for_batch(seed, n).bits(()).tolist(), torch.Generator()
    found = []
    with progress(show, f"noisy copies, sigma {sigma:g}", n - start) as advance:
        for i in range(start, n):
            weights = noisy_weights(model, sigma, generator.manual_seed(seeds[i]))
            right = 0
            for x, y in zip(triggers.x.split(_CHUNK), triggers.y.split(_CHUNK), strict=True):
                logits = functional_call(model, weights, (x,))
                if not bool(logits.isfinite().all()):
                    raise InputError(
                        f"noisy copy {i} of the model returns NaN or infinite logits; take a smaller sigma"
                    )
                right += int((logits.argmax(1) == y).sum())
            found.append(right)
            if watch is not None:
                watch(i, right)
            advance()
    return torch.tensor(found)


def trigger_accuracy(model: nn.Module, triggers: TriggerSet) -> float:
    """Share of the triggers that the model answers with their secret labels: what a black-box test sees."""
    check_model(model)
    logits = check_logits(model, triggers.x, _CHUNK)
    check_labels(triggers.y, len(triggers), logits.shape[1])
    return int((logits.argmax(1) == triggers.y).sum()) / len(triggers)


def check_watermarked(model: nn.Module, triggers: TriggerSet) -> None:
    """Refuse a model without weights, in training mode, elsewhere than the triggers, or with other classes."""
    check_model(model)
    if next(model.parameters(), None) is None:
        raise InputError("the model has no parameters: there is nothing that noise could be put on")
    check_place(model, triggers.x)
    logits = check_logits(model, triggers.x, _CHUNK)
    if logits.shape[1] != triggers.classes:
        raise InputError(f"the model has {logits.shape[1]} classes, the trigger set was made for {triggers.classes}")
