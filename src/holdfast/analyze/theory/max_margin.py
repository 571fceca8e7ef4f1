"""Adversarial logistic regression ends at the direction of the largest margin: the hardest examples decide.

With an l2 budget and labels absorbed into x, gradient descent on sum log(1 + exp(-(w.x_i - eps |w|))) goes in the
direction of w_hat = argmin |w| with w.x_i >= 1 (Liu 2022, Theorem 4.4).
"""

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls
from scipy.special import expit

from holdfast.analyze.theory.conditions import require

Array = npt.NDArray[np.float64]


def max_margin(x: Array) -> Array:
    """w_hat (M,): the shortest w with w.x_i >= 1 for all rows of x (N, M).

    A least-distance problem, solved by non-negative least squares (Lawson and Hanson, "Solving least squares problems",
    1974, Chapter 23).
    """
    system = np.vstack([x.T, np.ones(len(x))])
    target = np.append(np.zeros(x.shape[1]), 1.0)
    residual = system @ nnls(system, target, maxiter=50 * len(x))[0] - target
    require(bool(abs(residual[-1]) > 1e-10), "Theorem 4.4", "data that a hyperplane through 0 separates")
    w = -residual[:-1] / residual[-1]
    require(bool((x @ w >= 1 - 1e-6).all()), "Theorem 4.4", "data that a hyperplane through 0 separates")
    return np.asarray(w)


def adversarial_max_margin(x: Array, eps: float) -> Array:
    """The shortest w with w.x_i - eps |w| >= 1: w_hat / (1 - eps |w_hat|), collinear with it (Lemma 4.2).

    Lemma 4.2 in one line: 1 / |w_hat| = 1 / |w_hat'| + eps.
    """
    w = max_margin(x)
    size = float(np.linalg.norm(w))
    require(eps * size < 1, "Lemma 4.2", f"data that are separable under the budget: eps < {1 / size:.4g}")
    return np.asarray(w / (1 - eps * size))


def step_limit(x: Array) -> float:
    """The largest step of gradient descent that Theorem 4.4 allows: 2 over the squared largest singular value."""
    return float(2 / np.linalg.norm(x, 2) ** 2)


def descend(x: Array, eps: float, steps: int, *, normalised: bool = True) -> Array:
    """The direction (M,) after gradient descent from the mean of x; steps are normalised by the loss, which is faster.

    Plain steps approach the limit only with the logarithm of their number.
    """
    w, rate = x.mean(0), step_limit(x) / 2
    for _ in range(steps):
        size = float(np.linalg.norm(w))
        pull = expit(-(x @ w - eps * size))
        g = -pull @ (x - eps * w / size)
        w = w - rate * g / (pull.sum() if normalised else 1.0)
    return np.asarray(w / np.linalg.norm(w))
