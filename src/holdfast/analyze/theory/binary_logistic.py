"""Binary logistic regression under attack: the loss gets more curved as the budget grows (Liu 2022, Theorem 4.1).

With labels ±1, |w|_q = 1 and s_i = y_i w.x_i - eps, the adversarial loss is mean log(1 + exp(-s_i)). Its derivatives
treat eps |w|_q as the constant eps: they are taken on the sphere |w|_q = 1, not of the loss in free w.
"""

import numpy as np
import numpy.typing as npt
from scipy.special import expit

from holdfast.analyze.theory.conditions import require

Array = npt.NDArray[np.float64]


def scores(w: Array, x: Array, y: Array, eps: float) -> Array:
    """s_i = y_i w.x_i - eps: margins under attack, (N,), for w (M,), x (N, M), y (N,) of ±1."""
    return np.asarray(y * (x @ w) - eps)


def loss(w: Array, x: Array, y: Array, eps: float) -> float:
    """Mean adversarial loss."""
    return float(np.logaddexp(0.0, -scores(w, x, y, eps)).mean())


def gradient(w: Array, x: Array, y: Array, eps: float) -> Array:
    """Gradient of `loss` in w with the offset eps fixed, (M,)."""
    return np.asarray(-(y * expit(-scores(w, x, y, eps))) @ x / len(x))


def hessian(w: Array, x: Array, y: Array, eps: float) -> Array:
    """Hessian of `loss` in w with the offset eps fixed, (M, M): mean of e^s / (1 + e^s)^2 x x^T."""
    s = scores(w, x, y, eps)
    weight = expit(s) * expit(-s)
    return np.asarray((x * weight[:, None]).T @ x / len(x))


def curvature_gap(w: Array, x: Array, y: Array, small: float, large: float) -> float:
    """Least curvature that the larger budget adds in any direction; at least 0 by Theorem 4.1.

    The theorem needs data that w separates under the larger budget, since e^s / (1 + e^s)^2 falls only for s > 0.
    """
    require(0 <= small <= large, "Theorem 4.1", "0 <= small <= large")
    require(bool((scores(w, x, y, large) > 0).all()), "Theorem 4.1", "data that w separates under the larger budget")
    return float(np.linalg.eigvalsh(hessian(w, x, y, large) - hessian(w, x, y, small))[0])
