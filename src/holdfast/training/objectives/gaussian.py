"""Training for smoothed classifiers on inputs with Gaussian noise."""

from torch import Tensor, nn

from holdfast.registry import Objective
from holdfast.training.context import Context, Metrics
from holdfast.training.objectives.core.noisy_copies import draw, fit, metrics, noisy_view, outputs
from holdfast.utils.options import Count, Positive


@Objective(
    "gaussian",
    summary="smoothed classifiers: cross-entropy at inputs with Gaussian noise",
    reference="Cohen, Rosenfeld and Kolter, Certified adversarial robustness via randomized smoothing, 2019",
    view=noisy_view,
)
def gaussian(
    model: nn.Module, x: Tensor, y: Tensor, context: Context, *, sigma: Positive = 0.25, samples: Count = 1
) -> tuple[Tensor, Metrics]:
    """Mean of CE(z(x + sigma g), y), g standard normal, over `samples` draws for each input."""
    logits = outputs(model, x, draw(x, context.noise, sigma, samples))
    return fit(logits, y), metrics(logits, y)
