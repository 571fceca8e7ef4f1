"""PAT: a pyramid perturbation for every image, found anew in every step."""

from typing import Literal

import torch
from torch import Tensor, nn

from holdfast.attacks.core.losses import Loss
from holdfast.registry import Objective
from holdfast.training.attack.pgd import Mode, gradient_at
from holdfast.training.context import Context, Metrics
from holdfast.training.objectives.core.pyramid import (
    ascend,
    check_pyramid,
    level_gradients,
    make_pyramid,
    pair_step,
    perturbation,
    radius_at,
    zero_levels,
)
from holdfast.training.step import fit
from holdfast.utils.options import Count, Epochs, NotNegative, Positive, Unit


@Objective(
    "pat",
    summary="clean and shifted accuracy: loss at x and at x plus a pyramid perturbation of each image",
    reference="Herrmann et al., Pyramid adversarial training improves ViT performance, 2022",
    takes=("targets", "regularizers", "perturb_weights"),
    pairs=lambda clean_weight, weight, **_: clean_weight > 0 and weight > 0,
    check_model=check_pyramid,
)
def pat(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    context: Context,
    *,
    steps: Count = 5,
    levels: tuple[Count, ...] | None = None,  # as for `upat`
    multipliers: tuple[Positive, ...] | None = None,
    radius: Positive = 6 / 255,  # of each level, before its multiplier
    step: Positive | None = None,  # in units of the radius; 1 / steps if None
    weight: NotNegative = 1.0,  # lambda, of the loss at x + delta
    clean_weight: NotNegative = 1.0,  # of the loss at x
    start: Literal["zero", "random"] = "zero",
    target: Literal["none", "random"] = "none",  # ascend the loss, or descend towards a random other class
    clip_input: bool = False,  # keep x + delta in the pixel range
    mode: Mode = "eval",  # of the model in the inner maximum
    decay_start: Epochs = 30,
    decay_end: Count | None = None,  # None for a constant radius
    decay_to: Unit = 0.1,
) -> tuple[Tensor, Metrics]:
    """Mean of clean_weight l(x) + weight max over delta of l(x + delta), in steps + 2 passes.

    The maximum is by `steps` steps: delta_s <- project(delta_s + step radius sign(gradient)) at all levels together
    (core/pyramid.py).
    """
    pyramid = make_pyramid(tuple(x.shape[1:]), levels, multipliers)
    size = radius_at(context.epoch, radius, start=decay_start, end=decay_end, final=decay_to)
    found = zero_levels(pyramid, len(x), x)
    if start == "random":
        draws = [context.noise.fork(i).uniform(tuple(level.shape[1:]), x.dtype) for i, level in enumerate(found)]
        found = [size * (2 * drawn - 1) for drawn in draws]
    loss = fit if target == "none" else _towards(context.noise.fork(len(found)).uniform((), torch.float64))
    for _ in range(steps if weight > 0 else 0):
        free = x + perturbation(pyramid, found)
        gradient = gradient_at(model, free.clamp(0, 1) if clip_input else free, y, loss, mode)
        if clip_input:
            gradient = gradient * (free.clamp(0, 1) == free)
        found = ascend(found, level_gradients(pyramid, gradient), (step or 1 / steps) * size, size)
    x_adv = x + perturbation(pyramid, found)
    return pair_step(
        *(model, x, x_adv.clamp(0, 1) if clip_input else x_adv, y, context), clean_weight=clean_weight, weight=weight
    )


def _towards(draw: Tensor) -> Loss:
    """Minus the cross-entropy against a class other than y, which `draw` (B,) in (0, 1) chooses."""

    def loss(logits: Tensor, y: Tensor) -> Tensor:
        others = logits.shape[1] - 1
        return -fit(logits, (y + 1 + (draw * others).long().clamp(max=others - 1)) % (others + 1))

    return loss
