"""How fast the gradient of a loss of linear bounds can change: tight bounds with steep lines train on a rough loss.

A linear bound of logit m is max over x' of g_m(theta).x' + b_m(theta) (Lee 2021, Proposition 3.3.1).
"""

import numpy as np
import numpy.typing as npt

from holdfast.analyze.theory.conditions import require

Array = npt.NDArray[np.float64]


def gradient_change_of_bounds(
    eps: float, size: float, slope: Array, slope_change: Array, lipschitz: Array, distance: float
) -> float:
    """Bound of the change of the gradient of the loss between two weights.

    mean over examples of max over m of 2 eps |grad g_m| + M |grad g_m(2) - grad g_m(1)| + L_m |theta_2 - theta_1|.
    For interval bounds g = 0, so only the last term is left.

    Args:
        eps: budget.
        size: M, bound of |x'| over the whole ball, not of |x| as the thesis writes.
        slope: |grad g_m| at the first weights, (B, K).
        slope_change: |grad g_m(theta_2) - grad g_m(theta_1)|, (B, K).
        lipschitz: L_m, (B, K) or (K,).
        distance: |theta_2 - theta_1|.
    """
    require(min(eps, size, distance) >= 0, "Proposition 3.3.1", "sizes of at least 0")
    return float((2 * eps * slope + size * slope_change + lipschitz * distance).max(1).mean())
