"""One gradient step for each batch: as cheap as twice plain training, and prone to catastrophic overfitting."""

from torch import Tensor, nn

from holdfast.attacks.core.ascent import BALLS, perturb
from holdfast.attacks.core.losses import Loss
from holdfast.registry import Part
from holdfast.training.attack.pgd import Mode, gradient_at
from holdfast.training.context import Context, Precision, in_bfloat16, in_mode
from holdfast.utils.options import NotNegative, Positive


def _step(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    loss: Loss,
    context: Context,
    start: Tensor,
    *,
    size: float,
    mode: Mode,
    precision: Precision,
) -> Tensor:
    threat, noise = context.threat, context.noise
    with in_mode(model, mode == "train"), in_bfloat16(x, precision):
        return perturb(model, x, y, threat, noise=noise, steps=1, step_size=size, loss=loss, start=start)


@Part(
    "fgsm",
    part="attack",
    summary="inner maximum by one step of the full budget from the input itself",
    reference="Goodfellow, Shlens and Szegedy, Explaining and harnessing adversarial examples, 2015",
    threats=BALLS,
    single_step=True,
)
def fgsm(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    loss: Loss,
    context: Context,
    *,
    step: Positive = 1.0,
    mode: Mode = "eval",
    precision: Precision = "full",
) -> Tensor:
    """project(x + step * budget * steepest(gradient)), shape of x; see `pgd` for the arguments."""
    size = step * context.threat.budget
    return _step(model, x, y, loss, context, x, size=size, mode=mode, precision=precision)


@Part(
    "fgsm-rs",
    part="attack",
    summary="inner maximum by one step from a random start",
    reference="Wong, Rice and Kolter, Fast is better than free: revisiting adversarial training, 2020",
    threats=BALLS,
    single_step=True,
)
def fgsm_rs(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    loss: Loss,
    context: Context,
    *,
    step: Positive = 1.25,
    mode: Mode = "eval",
    precision: Precision = "full",
) -> Tensor:
    """One step of `step` times the budget from a random point of the set, projected; shape of x."""
    start = context.threat.random_start(x, context.noise)
    size = step * context.threat.budget
    return _step(model, x, y, loss, context, start, size=size, mode=mode, precision=precision)


@Part(
    "n-fgsm",
    part="attack",
    summary="inner maximum by one step from a noisy input, the noise kept and not projected",
    reference="de Jorge et al., Make some noise: reliable and efficient single-step adversarial training, 2022",
    threats=("linf",),
    single_step=True,
)
def n_fgsm(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    loss: Loss,
    context: Context,
    *,
    step: Positive = 1.0,
    noise: NotNegative = 2.0,
    mode: Mode = "eval",
) -> Tensor:
    """x + u + step * eps * sign(gradient at x + u), u uniform in [-noise * eps, noise * eps], in the valid range.

    The result may lie outside the threat set, up to (noise + step) * eps from x: that is the method.
    """
    threat = context.threat
    u = (2 * context.noise.uniform(x.shape[1:], x.dtype) - 1) * (noise * threat.budget)
    start = threat.clip(x + u)
    return threat.clip(start + step * threat.budget * gradient_at(model, start, y, loss, mode).sign())
