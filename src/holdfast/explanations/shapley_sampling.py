"""Shapley values by sampling: the mean effect of each value over random orders; computed by Captum."""

import torch
from torch import Tensor, nn

from holdfast.explanations.core.baselines import Baseline, make_baseline, name_of
from holdfast.explanations.core.captum import answer, in_chunks, load_captum
from holdfast.explanations.core.cells import cells
from holdfast.explanations.core.quantity import Setting, value
from holdfast.registry import Explainer
from holdfast.results import Explanation
from holdfast.utils.options import Count


@Explainer(
    "shapley-sampling",
    summary="mean effect of each value over random orders; without gradients; through Captum",
    reference="Castro, Gomez and Tejada, Polynomial calculation of the Shapley value based on sampling, 2009",
    package="captum",
)
def shapley_sampling(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    setting: Setting,
    *,
    samples: Count = 25,
    cell: Count = 1,
    baseline: Baseline | Tensor = "black",
) -> Explanation:
    """A(x)_j = mean over random orders of what f_y gains when j joins the values before it; the rest is at baseline.

    The values add up to f_y(x) - f_y(b). Costly: samples times the number of features passes.

    Args:
        samples: random orders.
        cell: images: pixels of a square of this side, over all channels, are one feature and share its value equally.
        baseline: as for `integrated-gradients`.
    """
    b, of, mask = make_baseline(baseline, x, setting), value(setting.quantity), cells(x, cell)

    def one(x: Tensor, b: Tensor, y: Tensor) -> Tensor:
        tool = load_captum().ShapleyValueSampling(lambda points: of(model(points), y.repeat(len(points) // len(y))))
        at_once = max(1, setting.chunk // len(x))
        result: Tensor = tool.attribute(x, b, feature_mask=mask, n_samples=samples, perturbations_per_eval=at_once)
        return result / torch.bincount(mask.flatten())[mask]

    with torch.no_grad():
        attribution = in_chunks(x, b, y, setting, one)
    features = int(mask.max()) + 1
    how = f"{samples} orders of {features} features from {name_of(baseline)}"
    return answer(model, x, b, y, setting, attribution, how, samples * features, complete=True)
