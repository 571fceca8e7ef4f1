"""Our own ensemble: cheap attacks first, stronger ones only on what is left."""

from torch import Tensor, nn

from holdfast.attacks.pgd import BALLS, pgd
from holdfast.attacks.stages import run_stages
from holdfast.random import Noise
from holdfast.registry import register
from holdfast.results import AttackResult
from holdfast.threats import Threat


@register(
    "attack",
    "cascade",
    summary="PGD on the cross-entropy, then with restarts on the margin, on survivors only",
    guarantee="upper bound",
    threats=BALLS,
    reference="Holdfast; PGD by Madry et al., 2018; margin loss by Carlini and Wagner, 2017",
)
def cascade(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    *,
    noise: Noise | None = None,
    steps: int = 40,
    restarts: int = 3,
) -> AttackResult:
    """PGD on two losses in turn.

    The cross-entropy finds most examples at once; the margin does not saturate where the model is very sure.

    Args:
        model: from (B, ...) to logits (B, K), in eval mode.
        x: inputs, shape (B, ...).  y: labels, shape (B,).
        threat: an Lp ball.
        noise: source of the random starts.
        steps: gradient steps of each run.
        restarts: runs on the margin loss.
    """

    def cross_entropy(x: Tensor, y: Tensor, noise: Noise) -> AttackResult:
        return pgd(model, x, y, threat, noise=noise.fork(0), steps=steps)

    def margin(x: Tensor, y: Tensor, noise: Noise) -> AttackResult:
        return pgd(model, x, y, threat, noise=noise.fork(1), steps=steps, restarts=restarts, loss="margin")

    return run_stages(x, y, noise or Noise.for_batch(0, len(x), x.device), [cross_entropy, margin])
