"""SmoothAdv: training for smoothed classifiers on inputs that are adversarial for them."""

from torch import Tensor, nn

from holdfast.attacks.core.losses import cross_entropy as attack_loss
from holdfast.registry import Objective
from holdfast.training.context import Context, Metrics
from holdfast.training.objectives.core.noisy_copies import draw, fit, log_mean, metrics, noisy_view, outputs
from holdfast.training.step import attacked
from holdfast.utils.options import Count, Positive


class SoftVote(nn.Module):
    """log s(x), (B, ...) -> (B, K), for fixed noise `shift` (B, m, ...): its cross-entropy is -log s_y."""

    def __init__(self, model: nn.Module, shift: Tensor) -> None:
        super().__init__()
        self.model, self.shift, self.training = model, shift, model.training

    def forward(self, x: Tensor) -> Tensor:
        return log_mean(outputs(self.model, x, self.shift))


@Objective(
    "smoothadv",
    summary="smoothed classifiers: cross-entropy with noise at inputs that are adversarial for the smoothed one",
    reference="Salman et al., Provably robust deep learning via adversarially trained smoothed classifiers, 2019",
    threats=("l2",),
    takes=("attack",),
    view=noisy_view,
)
def smoothadv(
    model: nn.Module, x: Tensor, y: Tensor, context: Context, *, sigma: Positive = 0.25, samples: Count = 2
) -> tuple[Tensor, Metrics]:
    """Mean of CE(z(x' + sigma g), y); the attack of the recipe finds x', which maximises -log s_y for the same g."""
    shift = draw(x, context.noise, sigma, samples)
    x_adv = attacked(SoftVote(model, shift), x, y, context, attack_loss)
    logits = outputs(model, x_adv, shift)
    return fit(logits, y), metrics(logits, y)
