"""Layer-wise relevance propagation, computed by Captum."""

import copy
import importlib

from torch import Tensor, nn

from holdfast.explanations.core.captum import answer, in_chunks, load_captum, need_logit
from holdfast.explanations.core.quantity import Setting
from holdfast.models.layers import Normalize
from holdfast.registry import Explainer
from holdfast.results import Explanation


@Explainer(
    "lrp",
    summary="relevance passed back layer by layer; through Captum",
    reference="Bach et al., On pixel-wise explanations for non-linear classifier decisions by layer-wise relevance "
    "propagation, 2015",
    package="captum",
)
def lrp(model: nn.Module, x: Tensor, y: Tensor, setting: Setting) -> Explanation:
    """A(x) by Captum's default rule, epsilon, for each layer.

    Biases keep a share of the relevance, so the values need not add up to anything.
    """
    need_logit(setting, "lrp")
    attr, network = load_captum(), copy.deepcopy(model)
    for module in network.modules():
        # Layers that only reshape or normalise have no rule in Captum; epsilon passes all relevance through them.
        if isinstance(module, nn.Flatten | nn.Unflatten | nn.Identity | Normalize):
            module.rule = importlib.import_module("captum.attr._utils.lrp_rules").EpsilonRule()
    tool = attr.LRP(network)
    attribution = in_chunks(x, x, y, setting, lambda x, b, y: tool.attribute(x.requires_grad_(), target=y))
    return answer(model, x, x, y, setting, attribution, "relevance", 1, complete=False)
