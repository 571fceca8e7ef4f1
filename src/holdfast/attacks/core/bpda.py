"""Backward pass differentiable approximation: the true value forwards, the gradient of a stand-in backwards."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import torch
from torch import Tensor, nn

from holdfast.attacks.core.gradients import answer, frozen, leads_somewhere, logits_of, margin_gradient
from holdfast.checks import modules_in
from holdfast.errors import InputError

Transform = Callable[[Tensor], Tensor]
ALIKE = 0.9
"""Share of the inputs on which a part of a model must decide as the model does, and have a gradient."""


class _ValueAndGradient(torch.autograd.Function):
    """The first argument forwards, the gradient to the second one backwards."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, stand_in: Tensor) -> Tensor:
        del ctx, stand_in
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        del ctx
        return None, gradients[0]


class StraightThrough(nn.Module):
    """A preprocessing step with its own value and the gradient of a stand-in; the identity if none is given.

    Put it around a defence that rounds, masks, compresses or cuts the graph, and attack the model behind it:

        >>> defended = nn.Sequential(StraightThrough(lambda x: (x > 0.5).to(x.dtype)), nn.Linear(4, 2)).eval()
        >>> x = torch.rand(3, 4, requires_grad=True)
        >>> defended(x).sum().backward()
        >>> bool((x.grad == defended[1].weight.sum(0)).all())
        True

    Athalye, Carlini and Wagner, "Obfuscated gradients give a false sense of security", 2018.

    Args:
        transform: from (B, ...) to (B, ...), differentiable or not; a module or a function.
        backward: differentiable, from (B, ...) to the shape that `transform` returns, and close to it in value.
    """

    def __init__(self, transform: Transform, *, backward: Transform | None = None) -> None:
        super().__init__()
        self.transform = transform
        self.stand_in = backward

    def forward(self, x: Tensor) -> Tensor:
        """transform(x), shape as the transform gives it."""
        with torch.no_grad():
            value = self.transform(x)
        stand_in = x if self.stand_in is None else self.stand_in(x)
        if value.shape != stand_in.shape:
            raise InputError(
                f"the transform maps the shape {tuple(x.shape)} to {tuple(value.shape)}, its stand-in for the backward "
                f"pass to {tuple(stand_in.shape)}; give backward= a function with the same result shape"
            )
        result: Tensor = _ValueAndGradient.apply(value, stand_in)  # type: ignore[no-untyped-call]
        return result


class Part(nn.Module):
    """The output of one module inside a model, as a model of its own.

    Args:
        inside: a module of it.
        direct: whether `inside` takes the input of the model as it comes. It is then called by itself, since the model
            may switch gradients off around it.
    """

    def __init__(self, model: nn.Module, inside: nn.Module, *, direct: bool) -> None:
        super().__init__()
        self.model, self.inside, self.direct = model, inside, direct
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        """What `inside` returns at its last call, (B, K)."""
        if self.direct:
            return cast(Tensor, self.inside(x))
        outputs: list[Tensor] = []
        handle = self.inside.register_forward_hook(lambda module, given, output: outputs.append(output))
        try:
            with suppress(RuntimeError):  # steps after the part may refuse a tensor that asks for its gradient
                self.model(x)
        finally:
            handle.remove()
        if not outputs:
            raise InputError("the part of the model that is attacked was not reached")
        return outputs[-1]


def decisive_part(model: nn.Module, x: Tensor) -> tuple[Tensor, Part | None]:
    """The model's answer (B, K) and, if that has no useful gradient, a part with gradients and the same decisions.

    A last step that hides the gradient (the one-hot of the largest logit, rounding, `torch.no_grad`) leaves the
    decisions as they were: an attack can follow the logits before it, and let the model judge the result. The part is
    None if the answer has gradients of its own, or if no module inside the model decides as the model does.

    Args:
        x: some inputs, shape (B, ...).
    """
    calls: list[tuple[nn.Module, bool, Tensor]] = []
    leaf = x.detach().requires_grad_(True)

    def note(module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, Tensor):
            calls.append((module, any(value is leaf for value in given), output))

    handles = [module.register_forward_hook(note) for module in modules_in(model)[1:]]
    with torch.enable_grad(), frozen(model):
        try:
            logits = answer(model, leaf)
        finally:
            for handle in handles:
                handle.remove()
        found, label = logits.detach(), logits.argmax(1)
        if _has_gradient(logits, label, leaf):
            return found, None
        for module, direct, output in reversed(calls):
            if output.shape != logits.shape or not output.is_floating_point():
                continue
            if direct and not output.requires_grad:
                output = logits_of(module, leaf)
            if _mostly(output.argmax(1) == label) and _has_gradient(output, label, leaf):
                return found, Part(model, module, direct=direct)
    return found, None


def _has_gradient(logits: Tensor, y: Tensor, x: Tensor) -> bool:
    gradient = margin_gradient(logits, y, x)
    return gradient is not None and _mostly(leads_somewhere(gradient))


def _mostly(hits: Tensor) -> bool:
    return float(hits.double().mean()) >= ALIKE
