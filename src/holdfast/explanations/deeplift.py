"""DeepLIFT: differences from a baseline, passed back through each layer; computed by Captum."""

import copy

from torch import Tensor, nn

from holdfast.explanations.core.baselines import Baseline, make_baseline, name_of
from holdfast.explanations.core.captum import answer, in_chunks, load_captum, need_logit
from holdfast.explanations.core.quantity import Setting
from holdfast.registry import Explainer
from holdfast.results import Explanation


@Explainer(
    "deeplift",
    summary="differences from a baseline passed back through each layer; through Captum",
    reference="Shrikumar, Greenside and Kundaje, Learning important features through propagating activation "
    "differences, 2017",
    package="captum",
)
def deeplift(
    model: nn.Module, x: Tensor, y: Tensor, setting: Setting, *, baseline: Baseline | Tensor = "black"
) -> Explanation:
    """A(x) by the rescale rule: each nonlinearity passes back the ratio of its output's change to its input's.

    The values add up to z_y(x) - z_y(b), in one backward pass. Two networks that compute the same function may get
    different answers.

    Args:
        baseline: as for `integrated-gradients`.
    """
    need_logit(setting, "deeplift")
    tool, b = load_captum().DeepLift(copy.deepcopy(model)), make_baseline(baseline, x, setting)
    attribution = in_chunks(x, b, y, setting, lambda x, b, y: tool.attribute(x, b, target=y))
    how = f"changes from {name_of(baseline)}"
    return answer(model, x, b, y, setting, attribution, how, 1, complete=True)
