"""The gradient of a loss with respect to the input: fast on a CPU, and not fooled by the commonest masks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from holdfast.attacks.losses import Loss
from holdfast.errors import InputError

# Functions that are constant almost everywhere. Their gradient is zero, which says nothing about where to go.
_STEPS: dict[Any, Callable[..., Tensor]] = {
    getattr(place, name): getattr(torch, name)
    for name in ("round", "floor", "ceil", "trunc", "sign")
    for place in (torch, Tensor)
}
_SOFTMAXES = (F.softmax, torch.softmax, Tensor.softmax)


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """No gradients for the parameters inside: the backward pass then computes the input's gradient alone."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


class _FoldedConvolution(torch.autograd.Function):
    """conv2d with constant weights; the gradient for its input is a matrix product and a fold."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any) -> Tensor:
        return F.conv2d(x, weight, bias, stride, padding, dilation)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _, stride, padding, dilation = inputs
        ctx.save_for_backward(weight)
        ctx.shape, ctx.geometry = x.shape, (weight.shape[-2:], dilation, padding, stride)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        columns = weight.flatten(1).T @ gradients[0].flatten(2)
        # All inputs as channels of one: `fold` has a fixed cost for each input, none for each channel.
        folded = F.fold(columns.reshape(1, -1, columns.shape[-1]), ctx.shape[-2:], *ctx.geometry)
        return folded.view(ctx.shape), None, None, None, None, None


def _conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    constant = not weight.requires_grad and (bias is None or not bias.requires_grad)
    by_onednn = input.device.type == "cpu" and input.dtype == torch.float32
    # The columns of the product then take little more memory than the layer's output, and the fold does not lose what
    # the product gains; with a stride it has less to do.
    strided = stride not in (1, (1, 1), [1, 1])
    thin = weight.shape[1] <= 4 and weight[0].numel() <= len(weight) * (3 if strided else 1)
    plain = input.ndim == 4 and groups == 1 and not isinstance(padding, str)
    if input.requires_grad and constant and by_onednn and thin and plain:
        folded: Tensor = _FoldedConvolution.apply(input, weight, bias, stride, padding, dilation)  # type: ignore[no-untyped-call]
        return folded
    return F.conv2d(input, weight, bias, stride, padding, dilation, groups)


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
        if torch.compiler.is_compiling():  # the compiler has kernels of its own
            return func(*args, **kwargs)
        if func is torch.conv2d:
            return _conv2d(*args, **kwargs)
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
        (gradient,) = torch.autograd.grad(values.sum(), x)
    # NaN says nothing about where to go, and would carry an iterate out of every set.
    return torch.nan_to_num(gradient, nan=0.0, posinf=0.0, neginf=0.0), values.detach(), logits.detach()


def logits_of(model: nn.Module, x: Tensor) -> Tensor:
    """The model's logits (B, K) with the gradients that attacks need; those before a final softmax."""
    with _ForAttacks() as mode:
        output = model(x)
    logits: Tensor = mode.logits_of(output)
    return logits


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
