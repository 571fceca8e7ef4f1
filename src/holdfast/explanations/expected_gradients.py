"""Expected gradients: integrated gradients averaged over baselines drawn from data."""

import torch
from torch import Tensor, nn

from holdfast.attacks.core.gradients import input_gradient
from holdfast.checks import check_inputs
from holdfast.errors import InputError
from holdfast.explanations.core.answers import describe, finite
from holdfast.explanations.core.paths import completeness_error
from holdfast.explanations.core.quantity import Setting, pieces, value, values_at
from holdfast.registry import Explainer
from holdfast.results import Explanation
from holdfast.utils.options import Count


@Explainer(
    "expected-gradients",
    summary="integrated gradients averaged over baselines drawn from data of your own",
    reference="Erion et al., Improving performance of deep learning models with axiomatic attribution priors and "
    "expected gradients, 2021",
)
def expected_gradients(
    model: nn.Module, x: Tensor, y: Tensor, setting: Setting, *, background: Tensor | None = None, samples: Count = 200
) -> Explanation:
    """A(x) = E over baselines b and t in [0, 1] of (x - b) * gradient of f_y at b + t (x - b), shape of x.

    b is drawn from `background`, and t evenly spread: sample k has its t in the k-th of `samples` intervals. The error
    compares the sum with f_y(x) minus the mean of f_y over the baselines drawn; it falls with the root of `samples`.

    Args:
        background: inputs to draw baselines from, (N, ...); usually a few hundred training inputs.
        samples: for each input.
    """
    if background is None:
        raise InputError("expected-gradients needs background=, a tensor of inputs such as data.train.x[:200]")
    if background.shape[1:] != x.shape[1:]:
        shape = ", ".join(map(str, x.shape[1:]))
        raise InputError(f"expected a background of shape (N, {shape}), got {tuple(background.shape)}")
    check_inputs(background, setting.low, setting.high)
    background, of = background.to(x).detach(), value(setting.quantity)
    attribution, slope, at_b = torch.zeros_like(x), torch.zeros_like(x), x.new_zeros(len(x))
    for part, draws in pieces(len(x), samples, setting.chunk):
        forks = [setting.noise[part].fork(k) for k in range(draws.start, draws.stop)]
        b = background[torch.stack([noise.integers(len(background)) for noise in forks])]
        u = torch.stack([noise.fork(0).uniform((), x.dtype) for noise in forks])
        t = (torch.arange(draws.start, draws.stop, device=x.device)[:, None] + u) / samples
        move, labels = x[part] - b, y[part].repeat(len(b))
        points = b + t.view(*t.shape, *[1] * (x.ndim - 1)) * move
        gradient, _, _ = input_gradient(model, points.flatten(0, 1), labels, of)
        gradient = gradient.view_as(b)
        attribution[part] += (move * gradient).sum(0)
        slope[part] += gradient.sum(0)
        at_b[part] += values_at(model, b.flatten(0, 1), labels, setting).view(len(b), -1).sum(0)
    attribution, slope, at_b = attribution / samples, slope / samples, at_b / samples
    error = completeness_error(attribution.flatten(1).sum(1), values_at(model, x, y, setting), at_b)
    by = describe(y, setting, f"{samples} paths from {len(background)} baselines")
    ok = finite(attribution) & torch.isfinite(error)
    return Explanation(attribution, ok, error, torch.full_like(y, samples), by, slope)
