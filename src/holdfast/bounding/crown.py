"""CROWN: linear bounds with two slopes per neuron, by backward substitution; CROWN-IBP, its cheaper relative."""

from torch import Tensor, nn

from holdfast.bounding.core.logits import linear_logit_bounds
from holdfast.bounding.core.region import REGIONS
from holdfast.registry import Bound
from holdfast.results import Bounds
from holdfast.threats import Threat
from holdfast.utils.options import Count


@Bound(
    "crown",
    summary="linear bounds with two slopes, by backward passes for every layer",
    threats=REGIONS,
    reference="Zhang et al., Efficient neural network robustness certification with general activation functions, 2018",
)
def crown(model: nn.Module, x: Tensor, threat: Threat, *, sound: bool = True, chunk: Count = 64) -> Bounds:
    """Bound the logits by CROWN.

    Args:
        model: from (B, ...) to logits (B, K).  x: inputs, shape (B, ...).
        threat: any.
        sound: account for rounding.
        chunk: boxes in memory at a time, for patches.
    """
    return linear_logit_bounds(model, x, threat, slopes="adaptive", hidden=True, sound=sound, chunk=chunk)


@Bound(
    "crown-ibp",
    summary="intervals for the hidden layers, one backward pass of linear bounds for the logits",
    threats=REGIONS,
    reference="Zhang et al., Towards stable and efficient training of verifiably robust neural networks, 2020",
)
def crown_ibp(model: nn.Module, x: Tensor, threat: Threat, *, sound: bool = True, chunk: Count = 256) -> Bounds:
    """Bound the logits by CROWN-IBP; arguments as for `crown`."""
    return linear_logit_bounds(model, x, threat, slopes="adaptive", hidden=False, sound=sound, chunk=chunk)
