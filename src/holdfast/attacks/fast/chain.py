"""A chain of layers, called layer by layer; and its gradient for the input, written out.

Nobody else sees the values between the layers of an `nn.Sequential`: they may be overwritten, and lie in memory as
suits the next layer. And on small networks a backward pass by autograd costs as much as some layers.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.attacks.fast.thin import conv2d, conv2d_gradient
from holdfast.utils.reference import is_reference

Back = Callable[[Tensor], Tensor]
"""From the gradient for the output of a layer to the gradient for its input."""
Step = tuple[Tensor, Back]
"""The output of a layer, and its way back."""

# Layers that no mask of the gradient hides in, and that take maps with channels last.
_PLAIN = frozenset(
    {nn.Linear, nn.Flatten, nn.Identity, nn.Dropout, nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh}
    | {nn.Sigmoid, nn.BatchNorm1d, nn.BatchNorm2d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d}
)


def is_chain(model: nn.Module) -> bool:
    """True if the layers of the model can be called one by one; False in the reference mode and under autocast."""
    if is_reference() or torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return False
    return type(model) is nn.Sequential and len(model) > 0 and not _hooked(model)


def is_plain(model: nn.Module) -> bool:
    """True if it is a chain of layers whose way back `forward` knows."""
    return is_chain(model) and all(kind in _PLAIN or kind is nn.Conv2d for kind in _kinds(model))


def forward(model: Any, x: Tensor, mode: AbstractContextManager[Any], tape: list[Back] | None = None) -> Tensor:
    """The output of a chain, whose layers of unknown kinds are called inside `mode`.

    With a `tape`, for plain chains and under `torch.no_grad`, the ways back of all layers are added to it.
    """
    x, layers, kinds = well_laid_out(model, x), tuple(model), _kinds(model)
    before: type[nn.Module] = nn.Module
    as_maps = False
    for i, (layer, kind) in enumerate(zip(layers, kinds, strict=True)):
        back: Back | None = None
        if as_maps:
            (x, back), as_maps = _dense_on_maps(layer, x), False
        elif kind is nn.ReLU:
            x, back = _relu(x, fresh=before in (nn.Conv2d, nn.Linear))
        elif kind is nn.Flatten and kinds[i + 1 : i + 2] == [nn.Linear] and _better_as_maps(layer, layers[i + 1], x):
            as_maps = True
        elif kind is nn.Flatten:
            x, back = _flatten(layer, x)
        elif kind is nn.Conv2d:
            x, back = _convolve(layer, x)
        elif kind is nn.Linear:
            x, back = F.linear(x, layer.weight, layer.bias), layer.weight.__rmatmul__
        elif kind in _PLAIN and tape is not None:
            x, back = _by_autograd(layer, x)
        elif kind in _PLAIN:
            x = layer(x)
        else:
            with mode:
                x = layer(x)
        if tape is not None and back is not None:
            tape.append(back)
        before = kind
    return x


def _relu(x: Tensor, *, fresh: bool) -> Step:
    y = x.relu_() if fresh else x.relu()  # saves a map, of which large ones cost a way to the memory and back
    return y, lambda g: torch.ops.aten.threshold_backward(g, y, 0)


def _flatten(layer: Any, x: Tensor) -> Step:
    # A gradient that lies otherwise than its map is slow to use.
    lay_out = _channels_last if x.ndim == 4 and not x.is_contiguous() else None
    if lay_out is not None and x.requires_grad:
        x.register_hook(lay_out)
    shape = x.shape
    return layer(x), lambda g: g.reshape(shape) if lay_out is None else lay_out(g.reshape(shape))


def _convolve(layer: Any, x: Tensor) -> Step:
    weight, geometry = layer.weight, (layer.stride, layer.padding, layer.dilation, layer.groups)
    if x.ndim == 4 and x.stride(1) == 1 < x.shape[1]:
        weight = _channels_last(weight)  # once, also for the way back; oneDNN takes longer to lay out weights itself
    return conv2d(x, weight, layer.bias, *geometry), lambda g: conv2d_gradient(g, x, weight, *geometry)


def _better_as_maps(flatten: Any, dense: Any, x: Tensor) -> bool:
    """True if it takes less to reorder the weights of a dense layer than its inputs, maps with channels last, twice."""
    whole = (flatten.start_dim, flatten.end_dim) == (1, -1) and x.ndim == 4 and not x.is_contiguous()
    return bool(whole and x.stride(1) == 1 < x.shape[1] and dense.out_features < 2 * len(x))


def _dense_on_maps(layer: Any, x: Tensor) -> Step:
    """The dense layer on maps (B, C, H, W) with channels last, which need not be moved to be flattened."""
    weight = layer.weight.unflatten(1, x.shape[1:]).permute(0, 2, 3, 1).flatten(1)
    maps = x.permute(0, 2, 3, 1)
    return F.linear(maps.flatten(1), weight, layer.bias), lambda g: (g @ weight).view(maps.shape).permute(0, 3, 1, 2)


def _by_autograd(layer: nn.Module, x: Tensor) -> Step:
    with torch.enable_grad():
        inner = x.detach().requires_grad_(True)
        y = layer(inner)
    return y.detach(), lambda g: torch.autograd.grad(y, inner, g)[0]


def _hooked(module: nn.Module) -> bool:
    """True if a call of the module does more than its class says."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(hooks) or "forward" in module.__dict__


def _kinds(model: Any) -> list[type[nn.Module]]:
    """Type of each layer, or `nn.Module` if it has hooks or options that the fast path does not handle."""
    return [nn.Module if _hooked(layer) or _odd(layer) else type(layer) for layer in model]


def _odd(layer: nn.Module) -> bool:
    return type(layer) is nn.Conv2d and (layer.padding_mode != "zeros" or isinstance(layer.padding, str))


def well_laid_out(model: nn.Module, x: Tensor) -> Tensor:
    """The images x in the order of memory in which the model is fastest: with channels last, oneDNN copies fewer maps.

    An attack that steps from image to image does well to start from this.
    """
    if not is_chain(model):
        return x
    first, *others = model.children()
    better = (
        isinstance(first, nn.Conv2d)
        and 1 < first.in_channels <= 4  # with one channel, both orders are the same
        and x.ndim == 4
        and x.device.type == "cpu"
        and x.dtype == torch.float32
        # It is strided gradients that gain; without them, the copy where the maps are flattened costs as much.
        and (first.out_channels >= 32 or any(isinstance(m, nn.Conv2d) and max(m.stride) > 1 for m in others))
        and is_plain(model)
    )
    return _channels_last(x) if better else x


def laid_out_as(x: Tensor, gradient: Tensor) -> Tensor:
    """The gradient in the order of memory of x."""
    apart = x.ndim == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
    return _channels_last(gradient) if apart else gradient.contiguous()


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)
