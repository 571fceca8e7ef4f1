"""Adversarial gradient integration: the gradient added up along an attack's own path to another class."""

import torch
from torch import Tensor, nn

from holdfast.attacks.core.gradients import input_gradient
from holdfast.attacks.core.losses import likely_targets
from holdfast.attacks.core.minimum_norm import per_input
from holdfast.explanations.core.answers import describe, finite
from holdfast.explanations.core.paths import completeness_error
from holdfast.explanations.core.quantity import Setting, value, values_at
from holdfast.registry import Explainer
from holdfast.results import Explanation
from holdfast.utils.options import Count, Positive


@Explainer(
    "agi",
    summary="the gradient integrated along the paths of attacks that lead to other classes",
    reference="Pan, Li and Zhu, Explaining deep neural network models with adversarial gradient integration, 2021",
)
def agi(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    setting: Setting,
    *,
    classes: Count = 5,
    steps: Count = 30,
    step_size: Positive = 0.01,
) -> Explanation:
    """A(x) = - sum over classes t and steps k of (x_{k+1} - x_k) * gradient of f_y at x_k; shape of x.

    From x the path to class t takes steps of equal size in all values, x_{k+1} = clip(x_k + step_size sign(gradient of
    log softmax(z)_t)), until the model predicts t. The values add up to the sum over t of f_y(x) - f_y(end of path t),
    up to an error of the order of the step, which is reported. Paths may be crooked; `big` goes straight.

    Args:
        classes: the likeliest other classes, one path each.
        steps: at most, on each path.
        step_size: in shares of the range high - low.
    """
    parts = [
        _walk(model, x[rows], y[rows], setting, classes, steps, step_size * (setting.high - setting.low))
        for rows in torch.arange(len(x), device=x.device).split(setting.chunk)
    ]
    attribution, total, change, gradients, arrived = (torch.cat(columns) for columns in zip(*parts, strict=True))
    at_x = values_at(model, x, y, setting)
    error = completeness_error(total, at_x, at_x - change)
    ok = finite(attribution) & (arrived > 0)
    how = tuple(f"{n} paths that reached another class" for n in arrived.tolist())
    by = tuple(a + b for a, b in zip(describe(y, setting, ""), how, strict=True))
    return Explanation(attribution, ok, error, gradients, by)


def _walk(
    model: nn.Module, x: Tensor, y: Tensor, setting: Setting, classes: int, steps: int, size: float
) -> tuple[Tensor, ...]:
    """Attribution, its sum, the change of f_y along all paths, gradients and paths that arrived, for one chunk."""
    of = value(setting.quantity)
    attribution, start = torch.zeros_like(x), values_at(model, x, y, setting)
    change, gradients, arrived = torch.zeros_like(start), torch.zeros_like(y), torch.zeros_like(y)
    with torch.no_grad():
        targets = likely_targets(model(x), y, classes)
    for target in targets.unbind(1):
        x_k, done = x, torch.zeros_like(y, dtype=torch.bool)
        for _ in range(steps):
            step, _, logits = input_gradient(
                model, x_k, target, lambda z, t: z.log_softmax(1).gather(1, t[:, None])[:, 0]
            )
            done = done | (logits.argmax(1) == target)
            if bool(done.all()):
                break
            gradient, _, _ = input_gradient(model, x_k, y, of)
            moved = (x_k + size * step.sign()).clamp(setting.low, setting.high)
            moved = torch.where(per_input(done, x), x_k, moved)
            attribution = attribution - (moved - x_k) * gradient
            gradients = gradients + 2 * ~done
            x_k = moved
        with torch.no_grad():
            arrived = arrived + (model(x_k).argmax(1) == target)
        change = change + start - values_at(model, x_k, y, setting)
    return attribution, attribution.flatten(1).sum(1), change, gradients, arrived
