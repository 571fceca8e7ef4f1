"""The loss of a network and of its neighbours that differ in one weight, without evaluating each neighbour whole.

A layer is linear in its own weights: moving one of them by d changes one unit of its output by d times one of its
inputs. Only the layers above it are computed for each neighbour, and these share their weights.
"""

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, linear, unfold

from holdfast.analyze.volume.family import Step
from holdfast.analyze.volume.fitting import Fitting, mean_loss


class Around(Protocol):
    """A point of a search: its loss, whether it fits all samples, and the losses of its neighbours."""

    loss: float
    fits: bool

    def losses(self, index: Tensor, step: Tensor) -> Tensor:
        """Losses (m,) where coordinate index[i] moves by step[i]; both (m,)."""
        ...


class Neighbours:
    """The neighbours of one network in a `Fitting`; an `Around`.

    Args:
        fitting: family and samples.
        point: weights of the network, (P,).
    """

    def __init__(self, fitting: Fitting, point: Tensor) -> None:
        self._fitting, self._point = fitting, point
        self._inputs: list[Tensor] = []
        self._outputs: list[Tensor] = []
        if fitting.family.steps is None:
            logits = fitting.family.logits(point[None], fitting.x)
        else:
            x = fitting.x
            for step in fitting.family.steps:
                self._inputs.append(x)
                x = _apply(step, point, x)
                self._outputs.append(x)
            logits = x[None]
        self.fits = bool((logits.argmax(2) == fitting.y).all())
        self.loss = float(fitting.loss_of(logits, point[None]))
        self._norms = {place.start: float(point[place].norm()) for place in fitting.family.matrices}

    def losses(self, index: Tensor, step: Tensor) -> Tensor:
        """See `Around`."""
        steps = self._fitting.family.steps
        if steps is None:
            moved = self._point.repeat(len(index), 1)
            moved[torch.arange(len(index)), index] += step
            return self._fitting.loss_of(self._fitting.family.logits(moved, self._fitting.x), moved)
        found = torch.empty(len(index), dtype=self._point.dtype, device=self._point.device)
        for number, layer in enumerate(steps):
            for place in (layer.weight, layer.bias):
                if place is None:
                    continue
                inside = (index >= place.start) & (index < place.stop)
                if bool(inside.any()):
                    local, by = index[inside] - place.start, step[inside]
                    logits = self._moved(number, local, by, place is layer.weight)
                    found[inside] = mean_loss(logits / self._scale(place, local, by), self._fitting.y)
        return found

    def _moved(self, number: int, local: Tensor, by: Tensor, is_weight: bool) -> Tensor:
        """Logits (m, B, K) where one weight, or one bias, of layer `number` moves."""
        steps, out = self._fitting.family.steps or (), self._outputs[number]
        samples, units = out.shape[:2]
        if is_weight:
            patches = _patches(steps[number].module, self._inputs[number])
            unit, feature = local // patches.shape[1], local % patches.shape[1]
            change = patches[:, feature].transpose(0, 1) * by[:, None, None]
        else:
            unit, change = local, by[:, None, None].expand(len(by), samples, out[0, 0].numel())
        moved = out.reshape(1, samples, units, -1).repeat(len(local), 1, 1, 1)
        moved[torch.arange(len(local), device=out.device), :, unit] += change
        x = moved.view(-1, *out.shape[1:])
        for layer in steps[number + 1 :]:
            x = _apply(layer, self._point, x)
        return x.view(len(local), samples, -1)

    def _scale(self, place: slice, local: Tensor, by: Tensor) -> Tensor:
        """Product of the scales of the layers after the move, (m, 1, 1)."""
        divisor = self._fitting.divisor
        if divisor is None:
            return torch.ones_like(by)[:, None, None]
        product = torch.ones_like(by)
        for start, norm in self._norms.items():
            moved = torch.full_like(by, norm)
            if start == place.start:
                weight = self._point[place][local]
                moved = (norm**2 + by * (2 * weight + by)).clamp_min(0).sqrt()
            product = product * moved / divisor
        return product.clamp_min(torch.finfo(by.dtype).tiny)[:, None, None]


def _apply(step: Step, point: Tensor, x: Tensor) -> Tensor:
    """One layer with the weights of `point` on a plain batch (B, ...)."""
    if step.weight is None:
        found: Tensor = step.module(x)
        return found
    kernel, bias = step.parameters(point[None])
    one = None if bias is None else bias[0]
    if isinstance(step.module, nn.Conv2d):
        return conv2d(x, kernel[0], one, step.module.stride, step.module.padding)
    return linear(x, kernel[0], one)


def _patches(module: nn.Module, x: Tensor) -> Tensor:
    """What each unit of a layer sees, (B, F, L): L places of a convolution, one of a dense layer."""
    if isinstance(module, nn.Conv2d):
        return unfold(x, module.kernel_size, padding=module.padding, stride=module.stride)  # type: ignore[arg-type]
    return x[:, :, None]
