"""Regret of adversarial training with cached perturbations: when an adaptive step is provably better (Liu 2022, 5.2).

The loss is convex and smooth in the weights, concave and L_x-smooth in each input; one random example a step.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from holdfast.analyze.theory.conditions import require

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Problem:
    """Constants of the problem.

    Attributes:
        gradients: (N,) bounds G_i of the gradient of the loss in each input.
        weight_gradient: G_theta.  weight_distance: D_theta.
        input_distance: D_x, the l_inf diameter of the budget: twice its radius.
        smoothness: L_x.  inputs: M, dimension of an input.
    """

    gradients: Array
    weight_gradient: float
    weight_distance: float
    input_distance: float
    smoothness: float
    inputs: int


def regret_adaptive(problem: Problem, steps: int, beta: float) -> float:
    """Bound of the regret of ATAS, step eta / sqrt(v) (Theorem 5.3, with N in its last term where N^2 is printed)."""
    _check(steps, beta)
    n, m, d = len(problem.gradients), problem.inputs, problem.input_distance
    weights = problem.weight_gradient * problem.weight_distance * np.sqrt(steps)
    inputs = d * problem.gradients.sum() * np.sqrt(m * steps) / (n * (1 - beta) ** 0.25)
    return float(weights + inputs + m * problem.smoothness * d**2 / (2 * n * np.sqrt(1 - beta)))


def regret_constant(problem: Problem, steps: int) -> float:
    """Bound of the regret of ATTA, one step size for all examples (Theorem 5.4)."""
    _check(steps, 0.0)
    n, m, d = len(problem.gradients), problem.inputs, problem.input_distance
    total = np.sqrt((problem.gradients**2).sum())
    weights = problem.weight_gradient * problem.weight_distance * np.sqrt(steps)
    return float(weights + total * d * np.sqrt(m * steps / n) + m * problem.smoothness * d**2 / (2 * n))


def adaptive_over_constant(gradients: Array, beta: float) -> float:
    """Ratio of the terms that grow with the steps: (1 - beta)^(-1/4) mean(G) / sqrt(mean(G^2)).

    The thesis prints the exponent +1/4. Below 1, the adaptive step is provably better: gradients need a long tail.
    """
    _check(1, beta)
    return float((1 - beta) ** -0.25 * gradients.mean() / np.sqrt((gradients**2).mean()))


def _check(steps: int, beta: float) -> None:
    require(steps >= 1, "Theorem 5.3", "at least one step")
    require(0 <= beta < 1, "Theorem 5.3", "0 <= beta < 1")
