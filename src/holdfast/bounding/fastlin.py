"""Fast-Lin: linear bounds with one slope per neuron, by backward substitution."""

from torch import Tensor, nn

from holdfast.bounding.core.logits import linear_logit_bounds
from holdfast.bounding.core.region import REGIONS
from holdfast.registry import Bound
from holdfast.results import Bounds
from holdfast.threats import Threat
from holdfast.utils.options import Count


@Bound(
    "fastlin",
    summary="linear bounds with one slope per neuron, by backward passes for every layer",
    threats=REGIONS,
    reference="Weng et al., Towards fast computation of certified robustness for ReLU networks, 2018",
)
def fastlin(model: nn.Module, x: Tensor, threat: Threat, *, sound: bool = True, chunk: Count = 64) -> Bounds:
    """Bound the logits by Fast-Lin; arguments as for `crown`."""
    return linear_logit_bounds(model, x, threat, slopes="parallel", hidden=True, sound=sound, chunk=chunk)
