"""Edge-popup: keep random weights as they are, and learn which of them to use."""

from torch import nn

from holdfast.models.masked import masked
from holdfast.models.masked.mask import Transform
from holdfast.models.masked.random_weights import Weights
from holdfast.registry import Part
from holdfast.utils.options import Fraction, Positive, Share, Unit


@Part(
    "edge-popup",
    part="prune",
    summary="learn a mask over random weights that are never trained",
    reference="Liu et al., Robust binary models by pruning randomly-initialized networks, 2022",
)
def edge_popup(
    model: nn.Module,
    seed: int,
    *,
    rate: Fraction = 0.99,
    gamma: Unit = 0.1,
    cap: Share = 1.0,
    weights: Weights = "binary",
    score_scale: Positive | None = None,
    transform: Transform = "abs",
    last_batch_norm: bool = True,
) -> nn.Module:
    """The model with fixed weights and learned scores; see `holdfast.models.masked.masked` for the options."""
    return masked(
        model,
        rate=rate,
        gamma=gamma,
        cap=cap,
        weights=weights,
        score_scale=score_scale,
        transform=transform,
        last_batch_norm=last_batch_norm,
        seed=seed,
    )
