"""How much of the cube of weights a set of networks fills, with an exact interval.

k hits in N guesses estimate the volume, as a share of [-1, 1]^P, by k / N with the interval of Clopper and Pearson; no
hit leaves the upper end, about 3.7 / N two-sided at 95 % (3 / N one-sided). Guessing until the k-th hit is another
experiment: there (k - 1) / (N - 1) is unbiased (Haldane, "On a method of estimating frequencies", 1945) and the
interval is exact with N - 1 guesses and k - 1 hits at its upper end.

1 / N at the first hit, as in Chiang et al. (2023), is no estimate of the volume p: its mean is p ln(1/p) / (1 - p),
nine times too large at p = 1e-4.
"""

from dataclasses import dataclass

import torch

from holdfast.errors import InputError
from holdfast.utils.intervals import CONFIDENCE, binomial_lower, binomial_upper


@dataclass(frozen=True)
class Volume:
    """An estimate of a volume and its interval.

    Attributes:
        share: unbiased estimate; 0 after a single hit of a search that stopped there, which only the interval tells.
        low, high: ends of the interval.
        hits, guesses: what was counted.
        until: whether guessing stopped at the last hit.
    """

    share: float
    low: float
    high: float
    hits: int
    guesses: int
    until: bool = False

    def __str__(self) -> str:
        how = "until hit" if self.until else "hits in"
        return f"{self.share:.2g} ({self.low:.2g} to {self.high:.2g}; {self.hits:,} {how} {self.guesses:,} guesses)"


def volume(hits: int, guesses: int, *, until: bool = False, confidence: float = CONFIDENCE) -> Volume:
    """Estimate a volume from hits among guesses.

    Args:
        hits: guesses inside the set.  guesses: all of them.
        until: guessing went on until that many hits were there; otherwise the number of guesses was fixed before.
        confidence: of the two-sided interval.

    >>> print(volume(0, 10_000_000))
    0 (0 to 3.7e-07; 0 hits in 10,000,000 guesses)
    """
    if not 0 <= hits <= guesses or guesses < 1 or (until and hits < 1):
        raise InputError(f"expected 0 <= hits <= guesses, at least one guess, got {hits} hits in {guesses} guesses")
    tail = (1 - confidence) / 2
    low = float(binomial_lower(torch.tensor(hits), guesses, tail))
    if not until:
        return Volume(hits / guesses, low, float(binomial_upper(torch.tensor(hits), guesses, tail)), hits, guesses)
    if guesses == 1:
        return Volume(1.0, low, 1.0, hits, guesses, True)
    high = float(binomial_upper(torch.tensor(hits - 1), guesses - 1, tail))
    return Volume((hits - 1) / (guesses - 1), low, high, hits, guesses, True)
