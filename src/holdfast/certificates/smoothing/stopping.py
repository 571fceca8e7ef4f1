"""When to stop sampling: a probability p is looked at as its sample grows, until each question "is p > t?" is settled.

At look j, with n_j samples of which k_j are hits, p is at least L_j, the Clopper-Pearson bound at alpha_j. The looks
are fixed beforehand and their alphas sum to alpha, so all L_j hold at once with probability 1 - alpha, and it does no
harm to stop at any of them (docs/smoothing.md, "Adaptive sampling").

- p > t is proved once some L_j > t.
- It is given up once it will hardly be proved later: with U_j >= p at confidence 1 - b_j, the chance that the last look
  still reaches the hits that it needs is at most b_j even for p = U_j. Nothing is claimed then, so nothing can be
  wrong; an input loses a proof that the last look would have given with probability 2 sum b_j at most.
"""

from dataclasses import dataclass

import numpy as np
import torch
from scipy import special
from torch import Tensor

from holdfast.utils.intervals import Looks, binomial_lower, binomial_upper

GIVE_UP = 0.02
"""Sum of the b_j, which are in proportion to the alpha_j. Only an input near the limit may lose its proof to it: in
simulations less than 0.1 points of certified accuracy."""


@dataclass(frozen=True, eq=False)
class Stopping:
    """A sequential test of p > t for each t of `targets`."""

    looks: Looks  # when to look, and at which alpha
    targets: Tensor  # (G,) float64; none of them: sample to the cap
    needed: Tensor  # (G,) hits that the last look needs for each target; cap + 1 where no number of hits will do

    @property
    def cap(self) -> int:
        """Most samples."""
        return self.looks.sizes[-1]

    def next_look(self, drawn: Tensor) -> Tensor:
        """Size of the first look that is larger than `drawn` (B,), or the cap."""
        sizes = torch.tensor(self.looks.sizes, device=drawn.device)
        return sizes[torch.searchsorted(sizes, drawn, right=True).clamp(max=len(sizes) - 1)]

    def lower(self, hits: Tensor, drawn: Tensor) -> Tensor:
        """L_j (B,) where `drawn` is the size of a look; 0 between looks, where nothing may be claimed."""
        at_look, alpha = self._alpha(drawn)
        return torch.where(at_look, binomial_lower(hits, drawn, alpha), 0.0)

    def undecided(self, hits: Tensor, drawn: Tensor, lower: Tensor) -> Tensor:
        """(B,) bool: there are samples left, and a target that is neither proved by `lower` nor given up."""
        going = drawn < self.cap
        if len(self.targets) == 0:
            return going
        at_look, alpha = self._alpha(drawn)
        proved = lower[:, None] > self.targets
        missing, left = self.needed - hits[:, None], (self.cap - drawn)[:, None]
        doubt = alpha * (GIVE_UP / sum(self.looks.alphas))
        most = binomial_upper(hits, drawn.clamp(min=1), doubt)[:, None]
        hopeless = (_tail(missing, left, most) <= doubt[:, None]) & at_look[:, None]
        # Before the first look only what no sample can prove is hopeless.
        hopeless |= missing > left
        return going & ~(proved | hopeless).all(1)

    def left(self, hits: Tensor, drawn: Tensor, lower: Tensor) -> Tensor:
        """Samples that each input will likely still take, (B,) int64; an estimate for progress bars, no bound."""
        share = ((hits + 1) / (drawn + 2))[:, None]
        # Some t is told from p by about z^2 p (1 - p) / (p - t)^2 samples, with z near 4 for the usual alphas.
        likely = 16 * share * (1 - share) / (share - self.targets).square().clamp(min=1e-12)
        likely = torch.where(lower[:, None] > self.targets, 0.0, likely) if len(self.targets) else share + self.cap
        total = likely.amax(1).clamp(max=self.cap).long()
        more = torch.minimum(torch.maximum(total, self.next_look(drawn)), torch.full_like(total, self.cap)) - drawn
        return torch.where(self.undecided(hits, drawn, lower), more, 0)

    def _alpha(self, drawn: Tensor) -> tuple[Tensor, Tensor]:
        """Whether `drawn` is the size of a look, and that look's alpha; (B,) each."""
        sizes = torch.tensor(self.looks.sizes, device=drawn.device)
        alphas = torch.tensor(self.looks.alphas, dtype=torch.float64, device=drawn.device)
        look = torch.searchsorted(sizes, drawn).clamp(max=len(sizes) - 1)
        return sizes[look] == drawn, alphas[look]


def stopping(looks: Looks, targets: Tensor) -> Stopping:
    """The test with these looks of p > t for each t of `targets` (G,)."""
    targets = targets.double()
    low, high = torch.zeros_like(targets, dtype=torch.int64), torch.full_like(targets, looks.sizes[-1] + 1).long()
    # Bisection for the fewest hits whose bound is above the target; the bound grows with the hits.
    while bool((high - low > 1).any()):
        middle = (low + high) // 2
        enough = binomial_lower(middle, looks.sizes[-1], looks.alphas[-1]) > targets
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    return Stopping(looks, targets, high)


def _tail(missing: Tensor, left: Tensor, p: Tensor) -> Tensor:
    """P[Bin(left, p) >= missing], float64."""
    k, n, q = (t.cpu().double().numpy() for t in torch.broadcast_tensors(missing, left, p))
    with np.errstate(all="ignore"):
        tail = special.betainc(k, n - k + 1, q)
    tail = np.where(k <= 0, 1.0, np.where(k > n, 0.0, tail))
    return torch.as_tensor(tail).to(p.device)
