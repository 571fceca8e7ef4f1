"""Consistency: training for smoothed classifiers whose predictions agree under the noise."""

from torch import Tensor, nn

from holdfast.registry import Objective
from holdfast.training.context import Context, Metrics
from holdfast.training.objectives.core.noisy_copies import draw, fit, log_mean, metrics, noisy_view, outputs
from holdfast.utils.options import Count, NotNegative, Positive


@Objective(
    "consistency",
    summary="smoothed classifiers: noisy cross-entropy, and predictions that agree under the noise",
    reference="Jeong and Shin, Consistency regularization for certified robustness of smoothed classifiers, 2020",
    view=noisy_view,
)
def consistency(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    context: Context,
    *,
    sigma: Positive = 0.25,
    samples: Count = 2,
    weight: NotNegative = 10.0,
    entropy_weight: NotNegative = 0.5,
) -> tuple[Tensor, Metrics]:
    """Mean of CE(z_i, y) + weight KL(s || s_i) + entropy_weight H(s) over the draws i, letters as in `noisy_copies`.

    The weights are lambda and eta of the paper. A single draw has nothing to agree with.
    """
    logits = outputs(model, x, draw(x, context.noise, sigma, samples))
    log_s = log_mean(logits)
    s = log_s.exp()
    entropy = -(s * log_s).sum(1)
    divergence = -(s[:, None] * logits.log_softmax(2)).sum(2).mean(1) - entropy
    loss = fit(logits, y) + weight * divergence.mean() + entropy_weight * entropy.mean()
    shown = {"divergence": divergence.detach().mean(), "entropy": entropy.detach().mean()}
    return loss, {**metrics(logits, y), **shown}
