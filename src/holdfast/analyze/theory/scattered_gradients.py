"""Smoothness under attack: the loss stays Lipschitz, its gradient does not; gradients do not vanish in the end.

L_theta bounds the gradient of the loss in the weights, L_theta_theta and L_theta_x say how fast this gradient changes
with the weights and with the input (Liu 2022, Propositions 4.2, Theorem 4.3).
"""

import numpy as np
import numpy.typing as npt

from holdfast.analyze.theory.conditions import require

Array = npt.NDArray[np.float64]


def gradient_change(l_theta_theta: float, l_theta_x: float, distance: float, eps: float) -> float:
    """Bound of the change of the adversarial gradient between weights `distance` apart: a jump of 2 eps L stays."""
    require(min(l_theta_theta, l_theta_x, distance, eps) >= 0, "Proposition 4.2", "constants of at least 0")
    return l_theta_theta * distance + 2 * eps * l_theta_x


def logistic_constants(x: Array, radius: float, eps: float) -> tuple[float, float, float]:
    """L_theta, L_theta_theta and L_theta_x of logistic regression for inputs x (N, M), |theta| <= radius, l2 budget.

    The gradient is -y x sigma(-y theta.x); its derivatives are at most |x|, |x|^2 / 4 and 1 + |x| |theta| / 4.
    """
    size = float(np.linalg.norm(x, axis=1).max()) + eps
    return size, size**2 / 4, 1 + size * radius / 4


def sketch(theta: Array, eps: float) -> Array:
    """The one-dimensional example at x = 1: max over |delta| <= eps of log(1 + exp(theta (1 + delta)))."""
    return np.asarray(np.logaddexp(0.0, theta + eps * np.abs(theta)))


def sketch_slopes(eps: float) -> tuple[float, float]:
    """Left and right slope of `sketch` at its kink 0; they have different signs, a minimum, where eps > 1."""
    return 0.5 * (1 - eps), 0.5 * (1 + eps)


def gradient_tail(gamma: float) -> float:
    """Bound of P(|gradient| > gamma eps L_theta_x) late in training with SGD, for gamma > 2 (Theorem 4.3, corrected).

    The thesis prints 4 / (gamma^2 - 2 gamma + 4). Its own inequality E[G^2 / 2 - 2 eps L G] <= 0 gives
    4 / (gamma - 2)^2, which says something from gamma = 4 on.
    """
    require(gamma > 2, "Theorem 4.3", "gamma > 2")
    return min(1.0, 4 / (gamma - 2) ** 2)


def gradient_tail_as_printed(gamma: float) -> float:
    """The bound as the thesis prints it, which does not follow; to compare with."""
    require(gamma >= 2, "Theorem 4.3", "gamma >= 2")
    return 4 / (gamma**2 - 2 * gamma + 4)


def tail_scale(eps: float, l_theta_x: float, d_theta_theta: float = 0.0, d_theta_x: float = 0.0) -> float:
    """What gamma multiplies: eps L_theta_x, plus half of the jumps D of losses with kinks (Corollary 4.1)."""
    return eps * l_theta_x + 0.5 * (d_theta_theta + d_theta_x)
