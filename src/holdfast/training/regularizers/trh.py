"""The trace of the Hessian of the loss with respect to the weights: what a PAC-Bayes bound asks to keep small."""

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from holdfast.errors import InputError
from holdfast.registry import Part, get_objective
from holdfast.training.context import Metrics, in_mode
from holdfast.training.curvature import trace_hutchinson, trace_relu
from holdfast.training.outputs import forward, top_layer
from holdfast.training.step import Taken, Terms, mean_loss
from holdfast.utils.options import Count, NotNegative

# Steps of the schedule "multistep": the share of the run before which a factor holds.
_MULTISTEP = ((0.1, 0.01), (0.5, 0.1))


def ramp(schedule: str, progress: float) -> float:
    """Factor on the weight at this fraction of the run: too much curvature penalty early on leads to a plateau.

    >>> [ramp("multistep", p) for p in (0.05, 0.1, 0.5)]
    [0.01, 0.1, 1.0]
    """
    if schedule == "linear":
        return progress
    return next((factor for end, factor in _MULTISTEP if schedule == "multistep" and progress < end), 1.0)


def _check_recipe(recipe: Any, *, network: str, estimator: str, **_: Any) -> None:
    name = recipe.objective.name
    objective = get_objective(name)
    if objective.random:
        raise InputError(
            f"regularizers.trh: '{name}' draws weights or activations in every pass, and a curvature belongs to one "
            "function only; leave it out"
        )
    if objective.bounded and network == "top":
        raise InputError(
            f"regularizers.trh.network: for 'top' the curvature of the objective must be known, and that of '{name}' "
            "is not; 'full' takes the curvature of the cross-entropy at the inputs"
        )
    pairs = objective.pairs is not None and objective.pairs(**recipe.objective.options)
    if pairs and network == "full" and estimator == "exact":
        raise InputError(
            f"regularizers.trh.estimator: 'exact' is for the cross-entropy at x', and '{name}' also looks at x; "
            "take 'hutchinson', or network = 'top'"
        )


def _check_model(model: nn.Module, x: Tensor, *, network: str, estimator: str, **_: Any) -> str | None:
    if network == "top":
        return top_layer(model, x)
    if estimator == "exact":
        trace_relu(model, x)
    return None


@Part(
    "trh",
    part="regularizers",
    curvature=True,
    check_recipe=_check_recipe,
    check_model=_check_model,
    summary="trace of the Hessian, top layer in closed form or the whole network",
    reference="Wang et al., Improving robust generalization by direct PAC-Bayesian bound minimization, 2023",
)
def trh(
    taken: Taken,
    *,
    weight: NotNegative = 5e-4,  # lambda of the paper; half of the prior's variance in its bound
    schedule: Literal["constant", "linear", "multistep"] = "constant",
    network: Literal["top", "full"] = "top",
    estimator: Literal["exact", "hutchinson"] = "exact",
    samples: Count = 1,  # draws of Hutchinson's estimator
) -> tuple[Tensor, Metrics]:
    """weight * trace of the Hessian of the objective as trained, with respect to the weights.

    The objective has its targets, the weights of its examples and its stopped gradients; x' and these are constants.
    Other regularisers are not part of it.

    Args:
        schedule: of the weight: constant; linear from 0; multistep (1 % until 10 % of the run, 10 % until 50 %).
        network: "top": the closed form of the objective for the linear top layer, at next to no cost. "full": all
            layers; beside an objective that takes the loss of bounds, the trace of the cross-entropy at x.
        estimator: for the full network: the exact form, for the cross-entropy of multi-layer perceptrons with ReLU, or
            Hutchinson's estimator, for any objective and model, noisy and twice differentiated.
    """
    context, views = taken.context, taken.views
    factor = weight * ramp(schedule, context.progress)
    if network == "full":
        trace = _full(taken, estimator, samples)
        return factor * trace, {"trace": trace}
    top = taken.model.get_submodule(context.parts.top or "")
    trace = mean_loss(taken.family.trace(views, top.bias is not None), taken.target)
    with torch.no_grad():
        energy = views.adv.z.square().sum(1).mean()
        impurity = (1 - views.adv.logits.softmax(1).square().sum(1)).mean()
    return factor * trace, {"trace": trace, "features": energy, "impurity": impurity}


def _full(taken: Taken, estimator: str, samples: int) -> Tensor:
    if estimator == "exact":
        if taken.family.clean:
            raise InputError(
                "the exact trace over all layers is for the cross-entropy at x', and this objective also looks at x; "
                'take estimator = "hutchinson", or network = "top"'
            )
        return mean_loss(Terms(trace_relu(taken.model, taken.x_adv, weights=taken.weights)), taken.target)
    at = dict(taken.model.named_parameters()) if taken.weights is None else taken.weights
    parameters = {name: at[name] for name, p in taken.model.named_parameters() if p.requires_grad}

    def loss(weights: dict[str, Tensor]) -> Tensor:
        clean = forward(taken.model, taken.x, weights=weights) if taken.family.clean else None
        views = replace(taken.views, clean=clean, adv=forward(taken.model, taken.x_adv, weights=weights))
        return mean_loss(taken.family.terms(views), taken.target)

    with in_mode(taken.model, False):  # batch norm in training mode would write its statistics under the transform
        return trace_hutchinson(loss, parameters, noise=taken.context.noise, samples=samples, create_graph=True)
