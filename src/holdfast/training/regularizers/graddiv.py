"""GradDiv: spread the directions of the input gradients of a random network, so that averaging them tells less.

With g_i the gradient of the cross-entropy for the input under draw i, v_i = g_i / |g_i|, i = 1 ... n, the penalty is
the mean over the batch of a measure of how much the v_i agree (`holdfast.utils.directions`). It has gradients through
the g_i: the network is differentiated twice.
"""

from collections.abc import Callable
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from holdfast.attacks.core.chance import is_stochastic
from holdfast.errors import InputError
from holdfast.registry import Part
from holdfast.training.context import Metrics
from holdfast.training.step import Taken
from holdfast.utils.directions import Formula, mean_resultant_length, r_dpp, r_kappa, r_max, r_mean, r_smoothmax, unit
from holdfast.utils.options import Fraction, NotNegative, Positive, Rule, Unit

_REFERENCE = "Lee et al., GradDiv: adversarial robustness of randomized neural networks, 2022"
Draws = Annotated[int, Rule(">= 2", lambda value: value >= 2)]
Point = Literal["loss", "clean"]


def ramp(progress: float, warm_up: float, ramp_up: float) -> float:
    """Factor on the weight at this fraction of the run: 0 during the warm-up, then linear up to 1.

    >>> [round(ramp(p, 0.05, 0.2), 3) for p in (0.04, 0.05, 0.15, 0.25, 1.0)]
    [0.0, 0.0, 0.5, 1.0, 1.0]
    """
    if progress < warm_up or ramp_up == 0:
        return float(progress >= warm_up)
    return min(1.0, (progress - warm_up) / ramp_up)


def gradient_directions(taken: Taken, samples: int, at: Point) -> Tensor:
    """v_i of fresh draws at the point of the loss, or at the clean input, shape (B, n, p), with gradients."""
    point = (taken.x_adv if at == "loss" else taken.x).detach().requires_grad_(True)
    found = []
    for _ in range(samples):
        loss = cross_entropy(taken.at(point).logits, taken.views.y, reduction="sum")
        found.append(torch.autograd.grad(loss, point, create_graph=True)[0].flatten(1))
    return unit(torch.stack(found, 1))


def _check_model(model: nn.Module, x: Tensor, *, samples: int, weight: float, **_: object) -> None:
    """Refuse a model without randomness, whose gradients are all the same."""
    if weight > 0 and not is_stochastic(model, x):
        raise InputError(
            "the model does not draw random numbers, so that all draws have the same gradient; give "
            "model.name = 'adv-bnn' or 'rse', with the architecture as model.of"
        )


def _check_volume(model: nn.Module, x: Tensor, *, samples: int, weight: float, **_: object) -> None:
    _check_model(model, x, samples=samples, weight=weight)
    if samples > x[0].numel():
        raise InputError(f"{samples} gradients of {x[0].numel()} values span no volume; take fewer samples")


def _penalty(
    taken: Taken, weight: float, samples: int, warm_up: float, ramp_up: float, at: Point, r: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Metrics]:
    factor = weight * ramp(taken.context.progress, warm_up, ramp_up)
    if factor == 0:  # the host method, at its own cost; the history of a run has the same columns in every epoch
        zero = taken.terms.fit.new_zeros(())
        return zero, {"value": zero, "resultant": zero} if weight > 0 else {}
    v = gradient_directions(taken, samples, at)
    value = r(v).mean()
    return factor * value, {"value": value, "resultant": mean_resultant_length(v.detach()).mean()}


@Part(
    "graddiv-kappa",
    part="regularizers",
    summary="random networks: concentration kappa of the input gradients over draws, divided by their dimension",
    reference=_REFERENCE,
    check_model=_check_model,
)
def graddiv_kappa(
    taken: Taken,
    *,
    weight: NotNegative = 1.0,
    samples: Draws = 3,
    warm_up: Fraction = 0.05,
    ramp_up: Unit = 1 / 3,
    at: Point = "loss",
    formula: Formula = "banerjee",
) -> tuple[Tensor, Metrics]:
    """weight * mean of kappa / p, the von Mises-Fisher concentration of the directions; the stiffest of the three.

    Args:
        weight: lambda of the paper; 1 for MNIST and, with RSE, for CIFAR-10.
        samples: draws n, each with a gradient that is differentiated again.
        warm_up: share of the run during which the weight is 0.
        ramp_up: share of the run after it during which the weight rises linearly.
        at: where the gradients are taken: at the point of the loss (adversarial for Adv-BNN, clean for RSE), or at
            the clean input.
        formula: of the estimate: Banerjee's, or as printed in Lee's thesis.
    """
    return _penalty(taken, weight, samples, warm_up, ramp_up, at, lambda v: r_kappa(v, formula))


_MEASURES: dict[str, Callable[[Tensor], Tensor]] = {"mean": r_mean, "max": r_max, "smoothmax": r_smoothmax}


@Part(
    "graddiv-mean",
    part="regularizers",
    summary="random networks: mean, largest or softly largest cosine between the input gradients of two draws",
    reference=_REFERENCE,
    check_model=_check_model,
)
def graddiv_mean(
    taken: Taken,
    *,
    weight: NotNegative = 0.7,
    samples: Draws = 3,
    warm_up: Fraction = 0.05,
    ramp_up: Unit = 1 / 3,
    at: Point = "loss",
    form: Literal["mean", "max", "smoothmax"] = "mean",
) -> tuple[Tensor, Metrics]:
    """weight * mean of R_mean, R_max or R_smoothmax; arguments as for `graddiv-kappa`. Published: 0.7 for STL-10."""
    return _penalty(taken, weight, samples, warm_up, ramp_up, at, _MEASURES[form])


@Part(
    "graddiv-dpp",
    part="regularizers",
    summary="random networks: -log of the squared volume that the input gradients of the draws span",
    reference=_REFERENCE,
    check_model=_check_volume,
)
def graddiv_dpp(
    taken: Taken,
    *,
    weight: NotNegative = 1.0,
    samples: Draws = 3,
    warm_up: Fraction = 0.05,
    ramp_up: Unit = 1 / 3,
    at: Point = "loss",
    jitter: Positive = 1e-6,
) -> tuple[Tensor, Metrics]:
    """weight * mean of R_DPP; other arguments as for `graddiv-kappa`. Published: 1 for CIFAR-10.

    Args:
        jitter: added to the diagonal of the cosines, so that equal directions have a finite penalty.
    """
    return _penalty(taken, weight, samples, warm_up, ramp_up, at, lambda v: r_dpp(v, jitter))
