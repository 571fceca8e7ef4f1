"""Multi-class logistic regression under attack: which weights are still good, and when none is better than 0.

For one input x with label y, V_eps are the weights W (K, M) that classify x rightly under every perturbation of norm p
up to eps, and T_eps the weights along whose ray the adversarial loss is smallest at 0 (Liu 2022, Section 4.2.1).
"""

import itertools

import numpy as np
import numpy.typing as npt
from scipy.special import logsumexp

from holdfast.analyze.theory.conditions import require

Array = npt.NDArray[np.float64]
CORNERS = 16
"""Inputs up to which the corners of the budget are enumerated."""


def dual(p: float) -> float:
    """The exponent q with 1 / p + 1 / q = 1.

    >>> dual(2.0), dual(float("inf")), dual(1.0)
    (2.0, 1.0, inf)
    """
    require(p >= 1, "a norm", "p >= 1")
    return np.inf if p == 1 else 1.0 if np.isinf(p) else p / (p - 1)


def differences(weights: Array, y: int) -> Array:
    """w_j - w_y for the other classes, (K - 1, M)."""
    return np.delete(weights - weights[y], y, axis=0)


def in_version_space(weights: Array, x: Array, y: int, eps: float, p: float = np.inf) -> bool:
    """Whether W is in V_eps: (w_j - w_y).x + eps |w_j - w_y|_q <= 0 for all j. V_eps shrinks as eps grows."""
    v = differences(weights, y)
    return bool((v @ x + eps * np.linalg.norm(v, dual(p), axis=1) <= 0).all())


def adversarial_loss(weights: Array, x: Array, y: int, eps: float) -> float:
    """Largest cross-entropy over the cube |delta|_inf <= eps, by its corners; at most log K on V_eps."""
    require(len(x) <= CORNERS, "the enumeration of corners", f"at most {CORNERS} inputs")
    corners = x + eps * np.array(list(itertools.product((-1.0, 1.0), repeat=len(x))))
    z = differences(weights, y) @ corners.T
    return float(logsumexp(np.vstack([np.zeros(z.shape[1]), z]), axis=0).max())


def zero_is_best(weights: Array, x: Array, y: int, eps: float, p: float = np.inf) -> bool:
    """Whether W is in T_eps: no multiple of W has a smaller adversarial loss than the constant classifier.

    W is in T_eps exactly where |s.x| <= eps |s|_q, s the sum of all w_j - w_y: the loss along the ray is convex with
    the one-sided slopes (±s.x + eps |s|_q) / K at 0. The thesis says that there is no closed form.
    """
    s = differences(weights, y).sum(0)
    return bool(abs(s @ x) <= eps * np.linalg.norm(s, dual(p)))


def stuck_budget(x: Array, p: float = np.inf) -> float:
    """The budget |x|_p from which on T_eps holds all weights: the constant classifier is then optimal for x.

    The threshold printed in the thesis depends on the scale of W and diverges along a ray to 0; this one does not.
    """
    return float(np.linalg.norm(x, p))
