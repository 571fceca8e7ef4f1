"""Adversarial training: the loss at the worst input that projected gradient ascent finds."""

from typing import Literal

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from holdfast.attacks.pgd import BALLS, perturb
from holdfast.errors import InputError
from holdfast.registry import register
from holdfast.train.context import Context, Metrics, in_mode


@register(
    "train",
    "at",
    summary="adversarial training: cross-entropy at the inputs that PGD finds",
    reference="Madry et al., Towards deep learning models resistant to adversarial attacks, 2018",
    threats=BALLS,
)
def adversarial(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    context: Context,
    *,
    steps: int = 10,
    step_size: float | None = None,
    random_start: bool = True,
    attack_mode: Literal["eval", "train"] = "eval",
) -> tuple[Tensor, Metrics]:
    """Mean of max over x' in the threat set of -log softmax(z(x'))_y, the maximum by PGD.

    Args:
        model: from (B, ...) to logits (B, K).
        x: inputs, shape (B, ...).  y: labels, shape (B,).
        context: of this step.
        steps: gradient steps of the attack.
        step_size: in the threat's own unit; 2.5 * budget / steps of the scheduled budget if none is given.
        random_start: start at a random point of the set instead of x.
        attack_mode: mode of the model while it is attacked. In "train" batch norm uses the statistics of the attacked
            batch and updates its running ones at every step of the attack, as the first public code did.
    """
    if steps < 1:
        raise InputError(f"objective.steps: expected an integer >= 1, got {steps}")
    threat = context.threat
    size = 2.5 * threat.budget / steps if step_size is None else step_size
    with in_mode(model, attack_mode == "train"):
        x_adv = perturb(
            model, x, y, threat, noise=context.noise, steps=steps, step_size=size, random_start=random_start
        )
    logits = model(x_adv)
    return cross_entropy(logits, y), {"accuracy": (logits.argmax(1) == y).float().mean()}
