"""Grad-CAM: where in the image the channels of a convolution that speak for the class are active."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.attacks.core.gradients import frozen
from holdfast.errors import InputError, UnsupportedError, did_you_mean
from holdfast.explanations.core.answers import describe, without_error
from holdfast.explanations.core.quantity import Setting, value
from holdfast.registry import Explainer
from holdfast.results import Explanation


@Explainer(
    "grad-cam",
    summary="active channels of the last convolution, weighted by their mean gradient; coarse",
    reference="Selvaraju et al., Grad-CAM: visual explanations from deep networks via gradient-based localization, "
    "2017",
)
def grad_cam(model: nn.Module, x: Tensor, y: Tensor, setting: Setting, *, layer: str | None = None) -> Explanation:
    """A(x) = max(sum over channels k of alpha_k a_k, 0), enlarged to the image; alpha_k = mean of df_y / da_k.

    a is the output of a convolution. It shows places, not pixels, is never negative, and promises no completeness. The
    channels of the input share the map equally; shape of x.

    Args:
        layer: name of a module with an output (B, C, H, W), as in `model.named_modules()`; the last convolution if none
            is given.
    """
    if x.ndim != 4:
        raise InputError(f"grad-cam needs images (B, C, H, W), got inputs of shape {tuple(x.shape)}")
    name = layer or _last_convolution(model)
    parts = zip(x.split(setting.chunk), y.split(setting.chunk), strict=True)
    maps, values = zip(*(_one_chunk(model, name, x_part, y_part, setting) for x_part, y_part in parts), strict=True)
    cam = F.interpolate(torch.cat(maps), x.shape[2:], mode="bilinear", align_corners=False)
    attribution = (cam / x.shape[1]).expand_as(x).contiguous()
    return without_error(attribution, torch.cat(values), None, describe(y, setting, f"activations of '{name}'"), 1)


def _last_convolution(model: nn.Module) -> str:
    names: list[str] = [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d)]
    if not names:
        raise UnsupportedError("grad-cam needs a convolution, and the model has none; use 'saliency' or 'big'")
    return names[-1]


def _one_chunk(model: nn.Module, name: str, x: Tensor, y: Tensor, setting: Setting) -> tuple[Tensor, Tensor]:
    """The map before it is enlarged, (B, 1, h, w), and the values explained, (B,)."""
    modules = dict(model.named_modules())
    if name not in modules:
        raise InputError(f"the model has no module '{name}'. " + did_you_mean(name, (n for n in modules if n)))
    outputs: list[Tensor] = []
    handle = modules[name].register_forward_hook(lambda module, args, output: outputs.append(output))
    try:
        # The input asks for gradients although they are not used: with frozen parameters nothing else would.
        with frozen(model), torch.enable_grad():
            logits = model(x.detach().requires_grad_(True))
            if not outputs or not isinstance(outputs[-1], Tensor) or outputs[-1].ndim != 4:
                raise InputError(f"the module '{name}' gives no output (B, C, H, W); name a convolution")
            values = value(setting.quantity)(logits, y)
            (gradient,) = torch.autograd.grad(values.sum(), outputs[-1])
    finally:
        handle.remove()
    alpha = gradient.mean((2, 3), keepdim=True)
    return (alpha * outputs[-1].detach()).sum(1, keepdim=True).clamp(min=0), values.detach()
