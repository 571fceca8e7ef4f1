"""What the outputs are compared with: softened or learned targets, and a weight for each example."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from holdfast.errors import InputError
from holdfast.registry import Part
from holdfast.training.context import Context
from holdfast.training.outputs import Output
from holdfast.training.step import Target
from holdfast.utils.options import Epochs, Fraction, Unit

_STATE = "target"


def _labels(adv: Output, y: Tensor) -> Tensor:
    return one_hot(y, adv.logits.shape[1]).to(adv.logits.dtype)


def _moving(probability: Tensor, labels: Tensor, context: Context, memory: float, start: int) -> Tensor:
    """t <- memory t + (1 - memory) probability from the epoch `start` on, (B, K); t starts at the label."""
    state = context.state
    if _STATE not in state:
        state[_STATE] = labels.new_full((context.count, labels.shape[1]), torch.nan)
    old = state[_STATE][context.index]
    old = torch.where(old.isnan(), labels, old)
    new = old if context.epoch < start else memory * old + (1 - memory) * probability
    state[_STATE][context.index] = new
    return new


@Part(
    "smooth",
    part="targets",
    summary="label smoothing",
    reference="Szegedy et al., Rethinking the Inception architecture for computer vision, 2016",
)
@torch.no_grad()
def smooth(clean: Output | None, adv: Output, y: Tensor, context: Context, *, amount: Fraction = 0.1) -> Target:
    """(1 - amount) one-hot + amount / K."""
    return Target((1 - amount) * _labels(adv, y) + amount / adv.logits.shape[1])


@Part(
    "self-adaptive",
    part="targets",
    summary="targets that move towards the model's own output; uncertain examples weigh less",
    reference="Huang, Zhang and Zhang, Self-adaptive training: beyond empirical risk minimization, 2020",
)
@torch.no_grad()
def self_adaptive(
    clean: Output | None, adv: Output, y: Tensor, context: Context, *, momentum: Unit = 0.9, start: Epochs = 90
) -> Target:
    """t <- momentum t + (1 - momentum) softmax(z(x)), from the epoch `start` on; weight max_k t_k on the fit.

    The output is that at the clean input where the objective looks at it, else at x'. Momentum 1 keeps the labels.
    """
    output = adv if clean is None else clean
    target = _moving(output.logits.softmax(1), _labels(adv, y), context, momentum, start)
    return Target(target, target.amax(1))


@Part(
    "adaptive",
    part="targets",
    summary="targets between the label and a moving average of the adversarial output; optional reweighting",
    reference="Liu et al., On the impact of hard adversarial instances on overfitting in adversarial training, 2021",
)
@torch.no_grad()
def adaptive(
    clean: Output | None,
    adv: Output,
    y: Tensor,
    context: Context,
    *,
    rho: Unit = 0.9,
    beta: Unit = 0.1,
    reweight: bool = False,
    start: Epochs = 5,
) -> Target:
    """beta one-hot + (1 - beta) t, with t <- rho t + (1 - rho) softmax(z(x')); before the epoch `start` the labels.

    t starts at the label. With `reweight` each example has the probability of its label at x' as its weight.
    """
    if context.epoch < start:
        return Target(y)
    probability, labels = adv.logits.softmax(1), _labels(adv, y)
    weight = probability.gather(1, y[:, None])[:, 0] if reweight else None
    if beta == 1:
        return Target(y, weight, weigh_all=True)
    return Target(beta * labels + (1 - beta) * _moving(probability, labels, context, rho, start), weight, True)


def _check_attack(recipe: Any, **_: Any) -> None:
    if recipe.attack is None or recipe.attack.name != "pgd":
        attack = "none" if recipe.attack is None else f"'{recipe.attack.name}'"
        raise InputError(f"targets.name: 'geometry' counts the steps of the attack 'pgd', but attack.name is {attack}")


@Part(
    "geometry",
    part="targets",
    check_recipe=_check_attack,
    summary="more weight for examples that few steps break; overfits to the attack, for comparison",
    reference="Zhang et al., Geometry-aware instance-reweighted adversarial training, 2021",
)
@torch.no_grad()
def geometry(
    clean: Output | None, adv: Output, y: Tensor, context: Context, *, shift: float = -1.0, start: Epochs = 60
) -> Target:
    """Weight (1 + tanh(shift + 5 (1 - 2 kappa))) / 2, kappa the share of the steps of PGD until x' is misclassified.

    It emphasises hard examples, and adaptive attacks break what it gains.
    """
    kappa = context.notes["kappa"]  # of the attack `pgd`; recipes with another one are refused
    if context.epoch < start:
        return Target(y)
    return Target(y, (1 + torch.tanh(shift + 5 * (1 - 2 * kappa))) / 2, weigh_all=True)
