"""What a sample of profiles says about an auction: revenue, regret and rationality, with their confidence."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from holdfast.apps.auctions.mechanism import Mechanism, check_outcome, violation
from holdfast.apps.auctions.regret import Regret
from holdfast.certificates.smoothing.percentile import order_ranks
from holdfast.errors import SoundnessError
from holdfast.utils.intervals import mean_interval

CONFIDENCE = 0.99


@dataclass(frozen=True)
class Statement:
    """Figures of an auction over profiles of values.

    Attributes:
        profiles: how many.
        revenue: mean of all payments.  revenue_kept: the same when payments that violate rationality are set to 0.
        found: mean over profiles and bidders of what the best lies gain.  proved: the mean of the upper ends.
        spread: standard deviation of the upper ends.  largest: largest upper end.
        empirical: mean of what gradient ascent gains; None if it was not run.
        ratio: empirical over proved.
        mean_above: with `confidence`, an upper bound of the expected regret over the distribution (Hoeffding).
        bernstein_above: the same by the empirical Bernstein bound, which gains from a small variance.
        quantile_above: with `confidence`, no bidder has more than this regret in nine of ten profiles; None for too
            few profiles.
        violations: share of bidders that pay more than what they get is worth to them.
        violation_mean: mean of what they pay too much.  violation_largest: the most.
        confidence: of each of the three statements by itself.
        seconds: CPU time of the certificate for each profile.
        tolerance: upper ends within this distance of the best lie, unless time ran out.
    """

    profiles: int
    revenue: float
    revenue_kept: float
    found: float
    proved: float
    spread: float
    largest: float
    empirical: float | None
    ratio: float | None
    mean_above: float
    bernstein_above: float
    quantile_above: float | None
    violations: float
    violation_mean: float
    violation_largest: float
    confidence: float
    seconds: float
    tolerance: float

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@torch.no_grad()
def describe_auction(
    mechanism: Mechanism,
    values: Tensor,
    regret: Regret,
    *,
    tolerance: float,
    confidence: float = CONFIDENCE,
    gains: Tensor | None = None,
) -> Statement:
    """Figures of a mechanism on true values (B, n, k) whose regret is enclosed.

    Hoeffding's bound needs a range. Utilities are at most k high, the truthful ones at least 0 in a rational mechanism
    and at least -k high where payments are at most k high.

    Args:
        mechanism: the auction.
        values: true values.
        regret: of these values.
        tolerance: the one it was certified with.
        confidence: of each statement over the distribution.
        gains: what `best_misreports` gains on these values, (B, n), if it was run.

    Raises:
        SoundnessError: a gain exceeds its upper end.
    """
    if gains is not None and bool((gains > regret.proved).any()):
        at = int((gains - regret.proved).argmax())
        raise SoundnessError(
            f"gradient ascent gains {float(gains.flatten()[at]):.9g} where at most "
            f"{float(regret.proved.flatten()[at]):.9g} is proved. This is a bug in Holdfast: please report it with "
            "the mechanism."
        )
    outcome = check_outcome(mechanism, values)
    over = violation(outcome, values)
    over = over.where(over > 64 * torch.finfo(values.dtype).eps * mechanism.items * mechanism.support.high, 0.0)
    kept = outcome.payment.double().where(over == 0, 0.0)
    worst = regret.proved.amax(1)  # profiles are independent, the bidders of one are not
    most = mechanism.items * mechanism.support.high * (1 if mechanism.rational else 2)
    empirical = None if gains is None else float(gains.mean())
    proved = float(regret.proved.mean())
    above = _mean_above(regret.proved.mean(1).clamp(0, most), most, 1 - confidence)
    rank = order_ranks(len(worst), 0.0, 1.0, p=0.9, confidence=confidence)[1]
    return Statement(
        len(values),
        float(outcome.payment.double().sum(1).mean()),
        float(kept.sum(1).mean()),
        float(regret.found.mean()),
        proved,
        float(regret.proved.std(correction=0)),
        float(regret.proved.max()),
        empirical,
        None if empirical is None or proved == 0 else empirical / proved,
        *above,
        None if rank is None else float(worst.sort().values[rank - 1]),
        float((over > 0).double().mean()),
        float(over.mean()),
        float(over.max()),
        confidence,
        regret.seconds / len(values),
        tolerance,
    )


def _mean_above(samples: Tensor, most: float, alpha: float) -> tuple[float, float]:
    """Upper bounds of the mean of a quantity in [0, most], by Hoeffding and by Bernstein; one sample says nothing."""
    if len(samples) < 2:
        return most, most
    hoeffding = mean_interval(samples, 0.0, most, alpha, interval="hoeffding")[1]
    return float(hoeffding), float(mean_interval(samples, 0.0, most, alpha, interval="bernstein")[1])
