"""Gaussian mixtures: training on harder examples gives a larger robust error, the more so for larger budgets.

Component i has weight p_i and draws x ~ N(y r_i eta, I) with |eta| = 1; a small r_i is hard. A linear classifier is
trained, by interpolation of the least norm, on N < M points of component l: X = r_l y eta^T + Q (Liu 2022, Section
4.3.2).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.stats import norm

from holdfast.analyze.theory.conditions import require

Array = npt.NDArray[np.float64]


def robust_error(w: Array, eta: Array, r: float, eps: float) -> float:
    """Share of a component that an l2 budget eps breaks: Psi(r w.eta / |w| - eps), Psi(a) = P(Z > a) (Lemma 4.3)."""
    return float(norm.sf(r * (w @ eta) / np.linalg.norm(w) - eps))


def interpolate(x: Array, y: Array) -> Array:
    """The shortest w with x w = y: X^T (X X^T)^-1 y, shape (M,)."""
    require(x.shape[0] < x.shape[1], "Lemma 4.4", "more inputs than examples")
    return np.asarray(x.T @ np.linalg.solve(x @ x.T, y))


@dataclass(frozen=True)
class Alignment:
    """How well interpolation finds eta, as a function of the strength r of the component: g(r) = w.eta / |w|.

    g(r)^2 = C_1 - 1 / (C_2 r^2 + C_3) with C_1 = (s k + v^2) / s, C_2 = (s k + v^2) / k, C_3 = (2 v r + 1) / k and
    k = |eta|^2 - t, where U = Q Q^T, d = Q eta, s = y U^-1 y, t = d U^-1 d, v = y U^-1 d (Theorem 4.5).
    """

    s: float
    t: float
    v: float

    @classmethod
    def of(cls, noise: Array, eta: Array, y: Array) -> "Alignment":
        """From the noise Q (N, M), the direction eta (M,) and the labels y (N,)."""
        require(bool(np.isclose(np.linalg.norm(eta), 1)), "Theorem 4.5", "|eta| = 1")
        require(noise.shape[0] < noise.shape[1], "Theorem 4.5", "more inputs than examples")
        d = noise @ eta
        by_y, by_d = np.linalg.solve(noise @ noise.T, np.stack([y, d], 1)).T
        return cls(float(y @ by_y), float(d @ by_d), float(y @ by_d))

    def __call__(self, r: float) -> float:
        """g(r); needs r above `increasing_from`, where w.eta > 0 and g increases."""
        require(r > self.increasing_from, "Theorem 4.5", f"r > {self.increasing_from:.4g}, else g may fall with r")
        k = 1 - self.t
        top = self.s * k + self.v**2
        return float(np.sqrt(top / self.s - 1 / (top / k * r**2 + (2 * self.v * r + 1) / k)))

    @property
    def increasing_from(self) -> float:
        """r from which on g increases: -v / (s (1 - t) + v^2), below 0 where v >= 0; the thesis leaves this out."""
        return -self.v / (self.s * (1 - self.t) + self.v**2)


def mixture_error(weights: Array, strengths: Array, alignment: float, eps: float) -> float:
    """Robust error over all components: sum of p_i Psi(r_i g - eps) for a classifier with w.eta / |w| = g."""
    require(bool(np.isclose(weights.sum(), 1)), "Theorem 4.5", "weights that sum to 1")
    return float(weights @ norm.sf(strengths * alignment - eps))


def cost_of_hardness(weights: Array, strengths: Array, hard: float, easy: float, eps: float) -> float:
    """Robust error after training on a hard component minus after an easy one, for alignments g(hard) < g(easy).

    It grows with eps as long as all r_i g - eps are positive (Corollary 4.2), which is checked.
    """
    require(hard <= easy, "Corollary 4.2", "an alignment on hard examples that is at most the one on easy examples")
    require(bool((strengths * hard - eps > 0).all()), "Corollary 4.2", "r_i g - eps > 0 for every component")
    return mixture_error(weights, strengths, hard, eps) - mixture_error(weights, strengths, easy, eps)
