"""Fitting hard examples under attack needs a steep function: a lower bound of the Lipschitz constant.

Labels ±1, outputs in [-1, 1], data a mixture of c-isoperimetric components with label variances sigma_i^2, b weights
(Liu 2022, Theorem 4.6).
"""

import math

from holdfast.analyze.theory.conditions import require


def excess(variance: float, reach: float, error: float) -> float:
    """gamma = sigma_l^2 + h^2 - C: how far below its noise floor the training error C under attack is.

    Args:
        variance: sigma_l^2, variance of the labels given the input: the difficulty of the data.
        reach: h, how far every output can be moved within the budget; grows with the budget.
        error: C, mean squared training error under attack.
    """
    return variance + reach**2 - error


def lipschitz_needed(
    gamma: float,
    *,
    examples: int,
    inputs: int,
    parameters: int,
    isoperimetry: float,
    diameter: float,
    sensitivity: float,
    delta: float,
) -> float:
    """Lipschitz constant that any network with this `excess` gamma has at least, with probability 1 - delta.

    (gamma / 2^7) sqrt(N M / (c (b log(4 W J / gamma) - log(delta / 2 - 2 exp(-N gamma^2 / 2^11)))))

    Args:
        gamma: of `excess`.
        examples: N.  inputs: M, their dimension.  parameters: b.
        isoperimetry: c, constant of the components of the data.
        diameter: W of the set of weights, in the largest entry.
        sensitivity: J, how fast outputs change with the weights, in the largest entry.
        delta: probability that the bound fails.
    """
    theorem = "Theorem 4.6"
    require(gamma > 0, theorem, "a training error below variance + reach^2 (gamma > 0)")
    require(min(examples, inputs, parameters) >= 1 and isoperimetry > 0, theorem, "positive sizes")
    require(4 * diameter * sensitivity > gamma, theorem, "4 W J > gamma")
    rest = delta / 2 - 2 * math.exp(-examples * gamma**2 / 2**11)
    require(
        0 < delta < 1 and rest > 0, theorem, "delta / 2 > 2 exp(-N gamma^2 / 2^11), more examples or a larger delta"
    )
    cover = parameters * math.log(4 * diameter * sensitivity / gamma) - math.log(rest)
    return gamma / 2**7 * math.sqrt(examples * inputs / (isoperimetry * cover))
