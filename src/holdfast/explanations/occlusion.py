"""Occlusion: how far the answer falls when a window is blotted out; computed by Captum."""

import math

import torch
from torch import Tensor, nn

from holdfast.errors import InputError
from holdfast.explanations.core.baselines import Baseline, make_baseline, name_of
from holdfast.explanations.core.captum import answer, in_chunks, load_captum
from holdfast.explanations.core.quantity import Setting, value
from holdfast.registry import Explainer
from holdfast.results import Explanation
from holdfast.utils.options import Count


@Explainer(
    "occlusion",
    summary="how far the answer falls when a window is blotted out; without gradients; through Captum",
    reference="Zeiler and Fergus, Visualizing and understanding convolutional networks, 2014",
    package="captum",
)
def occlusion(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    setting: Setting,
    *,
    window: Count = 4,
    stride: Count | None = None,
    baseline: Baseline | Tensor = "black",
) -> Explanation:
    """A(x)_j = mean of f_y(x) - f_y(x with the window replaced) over the windows that hold j.

    Args:
        window: side of the square, in pixels, over all channels; of inputs that are not images, the number of values.
        stride: distance of two windows; the window itself if none is given.
        baseline: what fills the window, as for `integrated-gradients`.
    """
    step = window if stride is None else stride
    if step > window:
        raise InputError(f"occlusion needs stride <= window, got {step} and {window}")
    b, of = make_baseline(baseline, x, setting), value(setting.quantity)
    sides = [min(window, side) for side in x.shape[1:]]
    steps = [min(step, side) for side in sides]
    if x.ndim == 4:
        sides[0] = steps[0] = x.shape[1]

    def one(x: Tensor, b: Tensor, y: Tensor) -> Tensor:
        tool = load_captum().Occlusion(lambda points: of(model(points), y.repeat(len(points) // len(y))))
        result: Tensor = tool.attribute(x, tuple(sides), strides=tuple(steps), baselines=b)
        return result

    with torch.no_grad():
        attribution = in_chunks(x, b, y, setting, one)
    places = [-(-(side - size) // move) + 1 for side, size, move in zip(x.shape[1:], sides, steps, strict=True)]
    how = f"windows of {window} filled with {name_of(baseline)}"
    return answer(model, x, b, y, setting, attribution, how, math.prod(places) + 1, complete=False)
