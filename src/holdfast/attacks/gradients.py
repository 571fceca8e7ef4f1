"""The gradient of a loss with respect to the input: fast on a CPU, and not fooled by the commonest masks."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from holdfast.attacks.losses import Loss
from holdfast.attacks.thin import conv2d
from holdfast.checks import modules_in
from holdfast.errors import InputError

# Functions that are constant almost everywhere. Their gradient is zero, which says nothing about where to go.
_STEPS: dict[Any, Callable[..., Tensor]] = {
    getattr(place, name): getattr(torch, name)
    for name in ("round", "floor", "ceil", "trunc", "sign")
    for place in (torch, Tensor)
}
_SOFTMAXES = (F.softmax, torch.softmax, Tensor.softmax)
_SEEN = frozenset((torch.conv2d, *_STEPS, *_SOFTMAXES))

# Layers that call none of these, and take maps with channels last.
_PLAIN = frozenset(
    {nn.Linear, nn.Flatten, nn.Identity, nn.Dropout, nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh}
    | {nn.Sigmoid, nn.BatchNorm1d, nn.BatchNorm2d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d}
)


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """No gradients for the parameters inside: the backward pass then computes the input's gradient alone."""
    owned = (p for module in modules_in(model) for p in module._parameters.values())
    parameters = [p for p in owned if p is not None and p.requires_grad]
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


class _ForAttacks(TorchFunctionMode):
    """Inside, three kinds of function get another gradient; every value stays the same.

    - Convolutions of one to four channels (grey, RGB): oneDNN works on blocks of eight channels, so that the gradient
      for a grey image costs it eight times what it should.
    - Step functions (round, floor, sign, ...) pass the gradient straight through (Athalye, Carlini and Wagner,
      "Obfuscated gradients give a false sense of security", 2018): the true one is zero.
    - The argument of each softmax is kept, for `logits_of` to find the logits behind a softmax at the model's end.
    """

    def __init__(self) -> None:
        super().__init__()
        self.softmax: tuple[Tensor, Tensor] | None = None
        self.steps = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _SEEN or torch.compiler.is_compiling():  # the compiler has kernels of its own
            return func(*args, **kwargs)
        if func is torch.conv2d:
            return conv2d(*args, **kwargs)
        if func in _STEPS and isinstance(args[0], Tensor) and args[0].requires_grad:
            self.steps = True
            with torch.no_grad():
                shift = _STEPS[func](*args, **kwargs) - args[0]
            return args[0] + shift
        result = func(*args, **kwargs)
        if func in _SOFTMAXES and args:
            self.softmax = (args[0], result)
        return result

    def logits_of(self, output: Tensor) -> Tensor:
        """What the model's last softmax was given if its result is the output, else the output itself."""
        return self.softmax[0] if self.softmax is not None and self.softmax[1] is output else output


def input_gradient(model: nn.Module, x: Tensor, y: Tensor, loss: Loss) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of the loss at x (shape of x), the loss (B,) and the logits (B, K), detached.

    Where the model ends in a softmax, the logits are those before it.
    """
    with torch.enable_grad():
        x = x.detach().requires_grad_(True)
        logits = logits_of(model, x)
        values = loss(logits, y)
        if not values.requires_grad:
            raise InputError(
                "the model's answer has no gradient with respect to its input: it does not depend on it, or a step "
                "such as a cast to integers cuts the graph. Use an attack without gradients: 'square', 'hopskipjump'."
            )
        (gradient,) = torch.autograd.grad(values, x, torch.ones_like(values))
    return _finite(_laid_out_as(x, gradient)), values.detach(), logits.detach()


def _finite(gradient: Tensor) -> Tensor:
    """Zero in place of NaN, which says nothing about where to go and would carry an iterate out of every set."""
    # A sum with NaN or an infinity in it is not finite: on a CPU one quick pass, elsewhere a reason to wait.
    if gradient.device.type == "cpu" and math.isfinite(gradient.sum().item()):
        return gradient
    return torch.nan_to_num(gradient, nan=0.0, posinf=0.0, neginf=0.0)


def logits_of(model: nn.Module, x: Tensor) -> Tensor:
    """The model's logits (B, K) with the gradients that attacks need; those before a final softmax.

    The layers of a `Sequential` are called one by one: those that hold nothing of interest need no mode, which costs
    more than some layers, and nobody else sees the values between them.
    """
    mode = _ForAttacks()
    if type(model) is not nn.Sequential or len(model) == 0 or _hooked(model):
        with mode:
            output = model(x)
        return mode.logits_of(output)
    x, layers, kinds = well_laid_out(model, x), tuple(model), _kinds(model)
    before: type[nn.Module] = nn.Module
    as_maps = False
    for i, (layer, kind) in enumerate(zip(layers, kinds, strict=True)):
        if as_maps:
            x, as_maps = _dense_on_maps(layer, x), False
        elif kind is nn.ReLU and before in (nn.Conv2d, nn.Linear):
            x = x.relu_()  # saves a map, of which large ones cost a way to the memory and back
        elif kind is nn.Flatten and kinds[i + 1 : i + 2] == [nn.Linear] and _better_as_maps(layer, layers[i + 1], x):
            as_maps = True
        elif kind is nn.Conv2d and layer.padding_mode == "zeros":
            x = _convolved(layer, x)
        elif kind in _PLAIN:
            if kind is nn.Flatten and x.requires_grad and x.ndim == 4 and not x.is_contiguous():
                x.register_hook(_channels_last)  # a gradient that lies otherwise than its map is slow to use
            x = layer(x)
        else:
            with mode:
                x = layer(x)
        before = kind
    return mode.logits_of(x)


def _convolved(layer: Any, x: Tensor) -> Tensor:
    weight = layer.weight
    if x.ndim == 4 and x.stride(1) == 1 < x.shape[1]:
        weight = _channels_last(weight)  # once, also for the way back; oneDNN takes longer to lay out weights itself
    return conv2d(x, weight, layer.bias, layer.stride, layer.padding, layer.dilation, layer.groups)


def _better_as_maps(flatten: Any, dense: Any, x: Tensor) -> bool:
    """Whether it takes less to reorder the weights of a dense layer than its inputs, maps with channels last, twice."""
    whole = (flatten.start_dim, flatten.end_dim) == (1, -1) and x.ndim == 4 and not x.is_contiguous()
    return bool(whole and x.stride(1) == 1 < x.shape[1] and dense.out_features < 2 * len(x))


def _dense_on_maps(layer: Any, x: Tensor) -> Tensor:
    """The dense layer on maps (B, C, H, W) with channels last, which need not be moved to be flattened."""
    weight = layer.weight.unflatten(1, x.shape[1:]).permute(0, 2, 3, 1).flatten(1)
    return F.linear(x.permute(0, 2, 3, 1).flatten(1), weight, layer.bias)


def _hooked(module: nn.Module) -> bool:
    """Whether a call of the module does more than its class says."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(hooks) or "forward" in module.__dict__


def _kinds(model: nn.Sequential) -> list[type[nn.Module]]:
    return [nn.Module if _hooked(layer) else type(layer) for layer in model]


def well_laid_out(model: nn.Module, x: Tensor) -> Tensor:
    """The images x in the order of memory in which the model is fastest: with channels last, oneDNN copies fewer maps.

    An attack that steps from image to image does well to start from this.
    """
    if type(model) is not nn.Sequential or len(model) == 0 or _hooked(model):
        return x
    first, *others = model
    better = (
        isinstance(first, nn.Conv2d)
        and 1 < first.in_channels <= 4  # with one channel, both orders are the same
        and x.ndim == 4
        and x.device.type == "cpu"
        and x.dtype == torch.float32
        # It is strided gradients that gain; without them, the copy where the maps are flattened costs as much.
        and (first.out_channels >= 32 or any(isinstance(m, nn.Conv2d) and max(m.stride) > 1 for m in others))
        and all(kind is nn.Conv2d or kind in _PLAIN for kind in _kinds(model))
    )
    return _channels_last(x) if better else x


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _laid_out_as(x: Tensor, gradient: Tensor) -> Tensor:
    apart = x.ndim == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
    return _channels_last(gradient) if apart else gradient.contiguous()


def look(model: nn.Module, x: Tensor, y: Tensor, loss: Loss) -> tuple[Tensor, Tensor]:
    """Loss (B,) and logits (B, K) without the gradient, such that the losses compare with those of `input_gradient`."""
    logits = logits_of(model, x)
    return loss(logits, y), logits


def masks(model: nn.Module, x: Tensor) -> set[str]:
    """Which masks of the gradient the model holds, and these attacks see through: "step" and "softmax"."""
    with torch.enable_grad(), _ForAttacks() as mode:
        output = model(x.detach().requires_grad_(True))
    found = {"step"} if mode.steps else set()
    return found | ({"softmax"} if mode.logits_of(output) is not output else set())
