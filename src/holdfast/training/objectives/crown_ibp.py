"""CROWN-IBP: certified training with linear bounds of the margins on interval bounds inside."""

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor, nn

from holdfast.bounding.core.region import BALLS
from holdfast.bounding.linear.relaxation import Relaxation
from holdfast.bounding.linear.slopes import LowerSlopes, bernoulli_slopes, chord_slopes, random_slopes
from holdfast.random import Noise
from holdfast.registry import Objective
from holdfast.training.context import Context, Metrics
from holdfast.training.objectives.core.certified import certified_step, linear_bound, mixed
from holdfast.utils.options import Unit, options_from

Rule = Literal["adaptive", "chord", "random", "bernoulli"]


def slope_rule(rule: Rule, p: float, q: float, noise: Noise) -> Callable[[Relaxation, Tensor], LowerSlopes | None]:
    """The lower slopes of `crown-ibp` by name; None leaves CROWN's own."""
    match rule:
        case "adaptive":
            return lambda r, y: None
        case "chord":
            return lambda r, y: chord_slopes(r)
        case "random":
            return lambda r, y: random_slopes(r, noise=noise)
        case "bernoulli":
            return lambda r, y: bernoulli_slopes(r, p, q, noise=noise)


@Objective(
    "crown-ibp",
    summary="certified training with linear bounds of the margins on interval bounds inside",
    reference="Zhang et al., Towards stable and efficient training of verifiably robust neural networks, 2020",
    threats=BALLS,
    takes=("regularizers",),
    certificate="crown-ibp",
    bounded=True,
)
@options_from(certified_step)
def crown_ibp(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    context: Context,
    *,
    beta_start: Unit = 1.0,
    beta_end: Unit = 0.0,
    slopes: Rule = "adaptive",
    p: Unit = 0.0,
    q: Unit = 1.0,
    **kappa: Any,
) -> tuple[Tensor, Metrics]:
    """As `ibp` with m = (1 - beta) m_interval + beta m_linear.

    Args:
        beta_start, beta_end: share of the linear bound. 1 and 0 as published; 1 and 1 for linear bounds throughout.
        slopes: slope of the line below an unstable ReLU: "adaptive" is CROWN's, "chord" the slope of the line above,
            "random" uniform, "bernoulli" 0 or 1 by chance (Lee et al., "Towards better understanding of training
            certifiably robust models against adversarial examples", 2021).
        p, q: for "bernoulli", the chance of slope 1 where |l| > |u|, and elsewhere. 0 and 1 are CROWN's rule.
    """
    bound = linear_bound(mixed(beta_start, beta_end, context), slope_rule(slopes, p, q, context.noise))
    return certified_step(model, x, y, context, bound, **kappa)
