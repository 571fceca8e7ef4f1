"""Where a path starts: the input that stands for "nothing to see"."""

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.checks import check_inputs
from holdfast.errors import InputError, did_you_mean
from holdfast.explanations.core.quantity import Setting

Baseline = Literal["black", "white", "blurred", "random"]
BASELINES: tuple[Baseline, ...] = get_args(Baseline)


def make_baseline(baseline: Baseline | Tensor, x: Tensor, setting: Setting) -> Tensor:
    """The baseline of each input, shape of x.

    Args:
        baseline: "black" (the low end of the range), "white" (the high end), "blurred" (the image without its details),
            "random" (uniform over the range, one draw for each input), or a tensor: one input, or one for each of x.
        setting: range and random numbers.
    """
    if isinstance(baseline, Tensor):
        return _given(baseline, x, setting)
    if baseline == "black":
        return torch.full_like(x, setting.low)
    if baseline == "white":
        return torch.full_like(x, setting.high)
    if baseline == "blurred":
        return blur(x)
    if baseline == "random":
        return setting.low + (setting.high - setting.low) * setting.noise.uniform(x.shape[1:], x.dtype)
    raise InputError(f"unknown baseline '{baseline}'. " + did_you_mean(str(baseline), BASELINES) + " Or give a tensor.")


def name_of(baseline: Baseline | Tensor) -> str:
    """How the answer names it."""
    return "a given baseline" if isinstance(baseline, Tensor) else baseline


def blur(x: Tensor) -> Tensor:
    """Images (B, C, H, W) under a Gaussian of a tenth of the shorter side, with the edges repeated."""
    if x.ndim != 4:
        raise InputError(f"'blurred' needs images (B, C, H, W), got inputs of shape {tuple(x.shape)}; use 'black'")
    sigma = max(min(x.shape[2:]) / 10, 0.5)
    reach = max(1, round(3 * sigma))
    offsets = torch.arange(-reach, reach + 1, device=x.device, dtype=torch.float64)
    kernel = torch.exp(-0.5 * (offsets / sigma).square())
    kernel = (kernel / kernel.sum()).to(x.dtype)
    images = x.flatten(0, 1)[:, None]
    # One side after the other: a Gaussian is a product.
    images = F.conv2d(F.pad(images, (reach, reach, 0, 0), mode="replicate"), kernel.view(1, 1, 1, -1))
    images = F.conv2d(F.pad(images, (0, 0, reach, reach), mode="replicate"), kernel.view(1, 1, -1, 1))
    # Rounding may leave the range by an ulp.
    return torch.minimum(torch.maximum(images.view_as(x), x.amin()), x.amax())


def _given(baseline: Tensor, x: Tensor, setting: Setting) -> Tensor:
    one = baseline[None] if baseline.shape == x.shape[1:] else baseline
    if one.shape[1:] != x.shape[1:] or len(one) not in (1, len(x)):
        raise InputError(
            f"the baseline must have the shape of one input, {tuple(x.shape[1:])}, or of all, {tuple(x.shape)}, "
            f"got {tuple(baseline.shape)}"
        )
    check_inputs(one, setting.low, setting.high)
    return one.to(x).expand_as(x).detach()
