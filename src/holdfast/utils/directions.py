"""Directional statistics: how concentrated are n directions in p dimensions?

Vectors have shape (..., n, p), one row for each of the n directions; measures have shape (...). v_i = g_i / |g_i|.
With rho = |mean of v_i|, the mean resultant length, and R_mean the mean cosine of two different directions,
rho^2 = (1 + (n - 1) R_mean) / n: for a fixed n the two, and every estimate of the concentration kappa from rho, rise
and fall together. The functions of tensors have gradients of any order; the Bessel functions are plain float64.
"""

import math
from typing import Literal

import numpy as np
import torch
from scipy.special import ive
from torch import Tensor

from holdfast.errors import InputError

Formula = Literal["banerjee", "thesis"]
_EDGE = 1e-6
"""Distance of a mean resultant length from 0 and 1 below which an estimate of kappa no longer moves."""
_ORDERS = 256
"""Orders above the wanted one from which the recurrence of Bessel ratios starts; the error shrinks at each of them."""


def unit(g: Tensor) -> Tensor:
    """g / |g| along the last axis; zero, with gradient zero, where g is zero."""
    scale = g.detach().abs().amax(-1, keepdim=True)
    alive = scale > 0
    # The direction does not depend on the scale; divided by it, squares neither vanish nor overflow.
    g = torch.where(alive, g, 0.0) / torch.where(alive, scale, 1.0)
    return g / torch.where(alive, g.square().sum(-1, keepdim=True), 1.0).sqrt()


def cosines(v: Tensor) -> Tensor:
    """Cosines between all pairs of unit vectors (..., n, p), shape (..., n, n)."""
    return v @ v.mT


def mean_resultant_length(v: Tensor) -> Tensor:
    """rho = |mean of v_i| of unit vectors (..., n, p): 1 if all agree, 0 if they cancel."""
    return (v.mean(-2).square().sum(-1) + 1e-30).sqrt()


def kappa_from(rho: Tensor, p: int, formula: Formula = "banerjee") -> Tensor:
    """Estimate the concentration of a von Mises-Fisher distribution in p dimensions from rho, shape of rho.

    "banerjee": rho (p - rho^2) / (1 - rho^2) (Banerjee et al., "Clustering on the unit hypersphere using von
    Mises-Fisher distributions", 2005). "thesis": rho (p - rho) / (1 - rho^2), as printed in Lee's thesis (2021), which
    is 14 % too low for p = 2 and the same from some hundred dimensions on.
    """
    rho = rho.clamp(_EDGE, 1 - _EDGE)
    return rho * (p - (rho.square() if formula == "banerjee" else rho)) / (1 - rho.square())


def r_kappa(v: Tensor, formula: Formula = "banerjee") -> Tensor:
    """The estimate of kappa divided by p."""
    return kappa_from(mean_resultant_length(v), v.shape[-1], formula) / v.shape[-1]


def _pairs(v: Tensor) -> Tensor:
    """Cosines of different directions, (..., n (n - 1))."""
    n = v.shape[-2]
    if n < 2:
        raise InputError(f"cosines between directions need at least 2 of them, got {n}")
    return cosines(v)[..., ~torch.eye(n, dtype=torch.bool, device=v.device)]


def r_mean(v: Tensor) -> Tensor:
    """Mean cosine of two different directions, between -1 / (n - 1) and 1."""
    return _pairs(v).mean(-1)


def r_max(v: Tensor) -> Tensor:
    """Largest cosine of two different directions."""
    return _pairs(v).amax(-1)


def r_smoothmax(v: Tensor) -> Tensor:
    """log of the sum over i != j of exp(cos_ij); between R_max and R_max + log(n (n - 1))."""
    return _pairs(v).logsumexp(-1)


def r_dpp(v: Tensor, jitter: float = 0.0) -> Tensor:
    """-log det of the matrix of cosines: 0 if all are orthogonal, infinite if one depends on the others.

    It is -2 log of the volume that the directions span. With a jitter d the matrix is (K + d I) / (1 + d), whose
    determinant and gradient stay finite. Unlike the other measures it does not tell v from -v.
    """
    n, p = v.shape[-2:]
    if n > p:
        raise InputError(f"{n} directions in {p} dimensions depend on each other: their volume is zero; take fewer")
    eye = torch.eye(n, dtype=v.dtype, device=v.device)
    sign, log_det = torch.linalg.slogdet((cosines(v) + jitter * eye) / (1 + jitter))
    return torch.where(sign > 0, -log_det, torch.full_like(log_det, torch.inf))


def _ratios(kappa: float, order: float, count: int) -> np.ndarray:
    """I_{m+1}(kappa) / I_m(kappa) for m = order, order + 1, ..., `count` of them.

    By the recurrence r_m = 1 / (2 (m + 1) / kappa + r_{m+1}), downwards, where it is stable. It starts from the middle
    of the bounds of Amos ("Computation of modified Bessel functions and their ratios", 1974).
    """
    top = order + count + _ORDERS
    r = kappa / (top + 0.5 + math.hypot(top + 1.0, kappa))
    found = np.empty(count)
    for i in range(count + _ORDERS - 1, -1, -1):
        r = 1 / (2 * (order + i + 1) / kappa + r)
        if i < count:
            found[i] = r
    return found


def _check(p: int, kappa: float) -> None:
    if p < 2 or not kappa >= 0 or math.isinf(kappa):
        raise InputError(f"a von Mises-Fisher distribution needs p >= 2 and a finite kappa >= 0, got {p} and {kappa:g}")


def bessel_ratio(kappa: float, p: int) -> float:
    """A_p(kappa) = I_{p/2}(kappa) / I_{p/2-1}(kappa), the mean resultant length of a von Mises-Fisher distribution.

    Stable for any p, where the Bessel functions themselves leave the range of floats.

    >>> round(bessel_ratio(2.0, 3), 6)  # coth(kappa) - 1 / kappa
    0.537315
    """
    _check(p, kappa)
    return 0.0 if kappa == 0 else float(_ratios(kappa, p / 2 - 1, 1)[0])


def kappa_exact(rho: float, p: int) -> float:
    """The kappa with A_p(kappa) = rho, the maximum of the likelihood: Newton steps from Banerjee's estimate.

    A_p' = 1 - A_p^2 - (p - 1) A_p / kappa (Sra, "A short note on parameter approximation for von Mises-Fisher
    distributions", 2012).
    """
    if not 0 <= rho < 1:
        raise InputError(f"a mean resultant length must be at least 0 and below 1, got {rho:g}")
    kappa = rho * (p - rho**2) / (1 - rho**2)
    _check(p, kappa)
    for _ in range(20 if kappa > 0 else 0):
        a = bessel_ratio(kappa, p)
        step = (a - rho) / (1 - a * a - (p - 1) * a / kappa)
        kappa = max(kappa - step, kappa / 2)
        if abs(step) <= 1e-13 * kappa:
            break
    return kappa


def log_normaliser(kappa: float, p: int) -> float:
    """log C_p(kappa), where C_p(kappa) exp(kappa mu.v) is the density on the unit sphere.

    C_p = kappa^(p/2-1) / ((2 pi)^(p/2) I_{p/2-1}(kappa)). log I_{p/2-1} is log I_0 or log I_{1/2} plus the logarithms
    of the ratios between.

    >>> round(log_normaliser(0.0, 3), 6) == round(-math.log(4 * math.pi), 6)
    True
    """
    _check(p, kappa)
    if kappa == 0:
        return math.lgamma(p / 2) - math.log(2) - p / 2 * math.log(math.pi)
    order = p / 2 - 1
    first = 0.5 if p % 2 else 0.0
    log_bessel = math.log(ive(first, kappa)) + kappa
    log_bessel += float(np.log(_ratios(kappa, first, round(order - first))).sum())
    return order * math.log(kappa) - p / 2 * math.log(2 * math.pi) - log_bessel
