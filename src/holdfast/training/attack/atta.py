"""ATTA: one step from the perturbation that the last epoch left.

Perturbations live in the frame of the padded training images, so that crops and flips of an image see the same one.
They may be kept at a lower resolution, which bounds the memory of large images (Liu et al., "Robust binary models by
pruning randomly-initialized networks", 2022): means over cells are kept, and every pixel of a cell reads its mean. Both
ways stay inside an linf ball; in the other norms what is read is projected.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, interpolate

from holdfast.attacks.core.ascent import BALLS, steepest
from holdfast.attacks.core.losses import Loss
from holdfast.registry import Part
from holdfast.threats import per_input
from holdfast.training.attack.pgd import Mode, gradient_at
from holdfast.training.context import Context
from holdfast.utils.options import Count, Epochs, Positive

Size = Callable[[Tensor], Tensor | float]
"""The length of a step, from the gradients (B, ...)."""
_CACHE, _DRAWN = "delta", "drawn"


def shrink(frame: Tensor, resolution: int | None) -> Tensor:
    """Frames (B, C, H, W) as they are kept: means over cells, so that no side is longer than `resolution`."""
    if resolution is None or frame.ndim != 4:
        return frame
    return adaptive_avg_pool2d(frame, (min(resolution, frame.shape[2]), min(resolution, frame.shape[3])))


def enlarge(kept: Tensor, size: list[int]) -> Tensor:
    """Kept frames at their full size (C, H, W) again: every pixel gets the value of its cell."""
    return kept if list(kept.shape[1:]) == size else interpolate(kept, size[1:], mode="nearest-exact")


def _read(x: Tensor, context: Context, reset_every: int, resolution: int | None) -> tuple[Tensor, Tensor]:
    """The cached frames of the batch, and the points x + delta that they stand for; a random start the first time."""
    state, transform = context.state, context.transform
    margin = transform.margin if x.ndim == 4 else 0
    size = [*x.shape[1:2], *(n + 2 * margin for n in x.shape[2:])] if margin else list(x.shape[1:])
    if _CACHE not in state:
        kept = shrink(torch.zeros(1, *size, dtype=x.dtype, device=x.device), resolution).shape[1:]
        state[_CACHE] = torch.zeros(context.count, *kept, dtype=x.dtype, device=x.device)
        state[_DRAWN] = torch.zeros(context.count, dtype=torch.int64, device=x.device)
    frame = enlarge(state[_CACHE][context.index], size)
    # For each example by itself: beside additional data, an epoch may see an example twice or not at all.
    turn = 1 + (context.epoch // reset_every if reset_every else 0)
    fresh = state[_DRAWN][context.index] != turn
    if bool(fresh.any()):
        centre = torch.full_like(frame, (context.threat.low + context.threat.high) / 2)
        random = context.threat.random_start(centre, context.noise) - centre
        frame = torch.where(per_input(fresh, x), random, frame)
        state[_DRAWN][context.index] = turn
    return frame, context.threat.project(x + transform.read(frame), x)


def cached_step(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    loss: Loss,
    context: Context,
    size: Size,
    *,
    reset_every: int,
    resolution: int | None,
    mode: Mode,
) -> Tensor:
    """One step from the cached perturbation of each example, which then becomes the cached one; shape of x."""
    threat = context.threat
    frame, start = _read(x, context, reset_every, resolution)
    gradient = gradient_at(model, start, y, loss, mode)
    x_adv = threat.project(start + size(gradient) * steepest(threat, gradient, start, 0.01), x)
    written = context.transform.write(x_adv - x, frame)
    context.state[_CACHE][context.index] = shrink(written, resolution)
    return x_adv


@Part(
    "atta",
    part="attack",
    summary="one step from the perturbation that the last epoch left",
    reference="Zheng et al., Efficient adversarial training with transferable adversarial examples, 2020",
    threats=BALLS,
    single_step=True,
)
def atta(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    loss: Loss,
    context: Context,
    *,
    step: Positive = 0.5,  # in units of the budget; 4/255 at 8/255
    reset_every: Epochs = 0,  # epochs after which all perturbations are drawn anew; 0 for never
    resolution: Count | None = None,  # longest side of a perturbation as it is kept; None for the image's own
    mode: Mode = "eval",
) -> Tensor:
    """project(x + delta_i + step * budget * steepest(gradient)), which becomes delta_i; shape of x."""
    size = step * context.threat.budget
    return cached_step(
        *(model, x, y, loss, context, lambda gradient: size), reset_every=reset_every, resolution=resolution, mode=mode
    )
