"""The gradient of a loss with respect to the input: fast on a CPU, and not fooled by the commonest masks."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from holdfast.attacks.core.losses import Loss, margin
from holdfast.attacks.fast.attention import attention
from holdfast.attacks.fast.chain import Back, forward, is_chain, is_plain, laid_out_as
from holdfast.attacks.fast.lean import Lean
from holdfast.attacks.fast.thin import conv2d
from holdfast.checks import modules_in
from holdfast.errors import InputError

# Functions that are constant almost everywhere. Their gradient is zero, which says nothing about where to go.
_STEPS: dict[Any, Callable[..., Tensor]] = {
    getattr(place, name): getattr(torch, name)
    for name in ("round", "floor", "ceil", "trunc", "sign")
    for place in (torch, Tensor)
}
_SOFTMAXES = (F.softmax, torch.softmax, Tensor.softmax)
_SEEN = frozenset((torch.conv2d, F.scaled_dot_product_attention, *_STEPS, *_SOFTMAXES))


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Switch off the gradients of the parameters inside: the backward pass computes only the input's gradient."""
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
    """Inside, four kinds of function get another gradient; every value stays the same, up to rounding.

    - Convolutions of one to four channels (grey, RGB): oneDNN works on blocks of eight channels, so that the gradient
      for a grey image costs it eight times what it should.
    - Attention in bfloat16: torch's way back takes three to nine times as long as three products.
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
        if func is F.scaled_dot_product_attention:
            return attention(*args, **kwargs)
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


def input_gradient(
    model: nn.Module, x: Tensor, y: Tensor, loss: Loss, slope: Loss | None = None, *, full: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of the loss at x (shape of x), the loss (B,) and the logits (B, K), detached.

    If the model ends in a softmax, the logits are its arguments.

    Args:
        model: from (B, ...) to logits (B, K).
        loss: from logits (B, K) and labels (B,) to (B,).
        slope: from the same to the gradient of the loss for the logits, (B, K), where it is known: autograd takes
            longer than some networks.
        full: in full precision, also for a `Lean` network with gradients in bfloat16.
    """
    if not is_plain(model):
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            logits = logits_of(model, x) if full else logits_of(model, x, y=y)
            gradient, values = _gradient(loss, logits, y, x)
        return _finite(laid_out_as(x, gradient)), values.detach(), logits.detach()
    tape: list[Back] = []
    with torch.no_grad():
        x = x.detach()
        logits = logits_of(model, x, tape)
        if slope is None:
            gradient, values = _gradient(loss, logits.requires_grad_(True), y, logits)
        else:
            values, gradient = loss(logits, y), slope(logits, y)  # the loss checks its arguments
        for back in reversed(tape):
            gradient = back(gradient)
    return _finite(laid_out_as(x, gradient)), values.detach(), logits.detach()


@torch.enable_grad()
def _gradient(loss: Loss, logits: Tensor, y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of the loss for x, on which the logits depend, and the loss (B,)."""
    values = loss(logits, y)
    if not values.requires_grad:
        raise InputError(
            "the model's answer has no gradient with respect to its input: it does not depend on it, or a step such as "
            "a cast to integers cuts the graph. Use an attack without gradients: 'square', 'hopskipjump'."
        )
    (gradient,) = torch.autograd.grad(values, x, torch.ones_like(values))
    return gradient, values


def _finite(gradient: Tensor) -> Tensor:
    """Zero in place of NaN, which says nothing about where to go and would carry an iterate out of every set."""
    # A sum with NaN or an infinity in it is not finite: on a CPU one quick pass, elsewhere a reason to wait.
    if gradient.device.type == "cpu" and math.isfinite(gradient.sum().item()):
        return gradient
    return torch.nan_to_num(gradient, nan=0.0, posinf=0.0, neginf=0.0)


def logits_of(model: nn.Module, x: Tensor, tape: list[Back] | None = None, *, y: Tensor | None = None) -> Tensor:
    """The model's logits (B, K) with the gradients that attacks need, taken before a final softmax.

    The layers of a chain are called one by one, as the mode costs more than some layers; see `chain.forward`, also for
    the tape. If the labels y (B,) are given, `Lean` networks may use bfloat16 where the answer is clearly right.
    """
    if isinstance(model, Lean):
        return logits_of(model.full, x) if y is None else model.logits(x, y, logits_of)
    mode = _ForAttacks()
    if is_chain(model):
        return mode.logits_of(forward(model, x, mode, tape))
    with mode:
        output = model(x)
    return mode.logits_of(output)


def is_late(step: int, steps: int) -> bool:
    """True for the last tenth of the steps, one at least: they are taken in full precision."""
    return step >= steps - max(1, steps // 10)


def look(model: nn.Module, x: Tensor, y: Tensor, loss: Loss) -> tuple[Tensor, Tensor]:
    """Loss (B,) and logits (B, K) as `input_gradient` has them, without the gradient."""
    logits = logits_of(model, x)
    return loss(logits, y), logits


def answer(model: nn.Module, x: Tensor) -> Tensor:
    """The logits of x (B, K), with a graph that leads back to x if there is one.

    A model that cannot take an x which asks for its gradient, such as one that turns it into a NumPy array, is given
    only the values.
    """
    try:
        return logits_of(model, x)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError):
        return logits_of(model, x.detach())


def margin_gradient(logits: Tensor, y: Tensor, x: Tensor) -> Tensor | None:
    """Gradient of the margin of the logits (B, K) for x, on which they depend; None if there is none."""
    if not logits.requires_grad:
        return None
    try:
        (gradient,) = torch.autograd.grad(margin(logits, y).sum(), x, retain_graph=True, allow_unused=True)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # a step without a backward pass
        return None
    return gradient


def leads_somewhere(gradient: Tensor) -> Tensor:
    """Where a gradient (B, ...) is neither zero nor NaN or infinite, (B,) bool."""
    flat = gradient.flatten(1)
    return torch.isfinite(flat).all(1) & (flat != 0).any(1)


def masks(model: nn.Module, x: Tensor) -> set[str]:
    """Which masks of the gradient the model holds, and these attacks see through: "step" and "softmax"."""
    with torch.enable_grad(), _ForAttacks() as mode:
        output = model(x.detach().requires_grad_(True))
    found = {"step"} if mode.steps else set()
    return found | ({"softmax"} if mode.logits_of(output) is not output else set())
