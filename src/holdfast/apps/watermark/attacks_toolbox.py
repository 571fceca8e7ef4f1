"""The usual battery of removal attacks, each in its plainest form.

Distillation as in Bansal et al., "Certified neural network watermarks with randomized smoothing", 2022; the rest is the
list of Lukas et al., "SoK: how robust is image classification deep neural network watermarking?", 2022.

All take (model, x, y, *, epochs, lr, seed, watch) with the attacker's data, and return an attacked copy in eval mode.
Attacks that need no training ignore the options. Numbers that a source leaves open are arguments.
"""

import copy
from collections.abc import Callable
from typing import Unpack

import torch
from torch import Tensor, nn

from holdfast.apps.watermark.adversaries import Targets, Tuning, Watch, fine_tune, train_on
from holdfast.apps.watermark.anatomy import last_layer, matrices, shuffle_chain
from holdfast.apps.watermark.backdoors import neural_cleanse, neural_laundering
from holdfast.attacks.core.ascent import perturb
from holdfast.errors import InputError
from holdfast.random import Noise
from holdfast.threats import Linf

Attack = Callable[..., nn.Module]


def ftal(model: nn.Module, x: Tensor, y: Tensor, **how: Unpack[Tuning]) -> nn.Module:
    """Fine-tune all layers."""
    return train_on(_copy(model), x, y, **how)


def ftll(model: nn.Module, x: Tensor, y: Tensor, **how: Unpack[Tuning]) -> nn.Module:
    """Fine-tune the last layer."""
    model = _copy(model)
    return train_on(model, x, y, **how, layer=last_layer(model))


def rtal(model: nn.Module, x: Tensor, y: Tensor, **how: Unpack[Tuning]) -> nn.Module:
    """Draw the last layer anew, train all layers."""
    return train_on(_reset_last(model, how["seed"]), x, y, **how)


def rtll(model: nn.Module, x: Tensor, y: Tensor, **how: Unpack[Tuning]) -> nn.Module:
    """Draw the last layer anew, train only this layer."""
    model = _reset_last(model, how["seed"])
    return train_on(model, x, y, **how, layer=last_layer(model))


def adversarial_training(
    model: nn.Module, x: Tensor, y: Tensor, *, eps: float = 8 / 255, steps: int = 5, **how: Unpack[Tuning]
) -> nn.Module:
    """Fine-tune on PGD examples within linf `eps`."""
    threat = Linf(eps)

    def change(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        noise = Noise.for_batch(how["seed"], len(x), x.device)
        return perturb(model, x, y, threat, noise=noise, steps=steps, step_size=2.5 * eps / steps)

    return train_on(_copy(model), x, y, **how, change=change)


def quantise(model: nn.Module, x: Tensor, y: Tensor, *, bits: int = 4, **how: Unpack[Tuning]) -> nn.Module:
    """Fine-tune, then round the weights of each layer to 2^bits values between its least and its largest."""
    if bits < 1:
        raise InputError(f"bits must be at least 1, got {bits}")
    model = train_on(_copy(model), x, y, **how)
    with torch.no_grad():
        for weight in matrices(model):
            low, high = weight.double().min(), weight.double().max()
            step = (high - low) / (2**bits - 1)
            if float(step) > 0:
                weight.copy_(low + ((weight.double() - low) / step).round() * step)
    how["watch"](model)
    return model


def shuffle_features(
    model: nn.Module, x: Tensor, y: Tensor, *, epochs: int, lr: float, seed: int, watch: Watch
) -> nn.Module:
    """Put the hidden units of each layer into another order, consistently: the same function with other weights."""
    model = shuffle_chain(_copy(model), seed)
    watch(model)
    return model


def prune(
    model: nn.Module, x: Tensor, y: Tensor, *, epochs: int, lr: float, seed: int, watch: Watch, share: float = 0.5
) -> nn.Module:
    """Set the `share` of smallest weights to 0, all layers together."""
    if not 0 <= share <= 1:
        raise InputError(f"share must lie in [0, 1], got {share}")
    model = _copy(model)
    weights = matrices(model)
    size = torch.cat([w.detach().abs().flatten() for w in weights])
    keep = torch.ones_like(size, dtype=torch.bool)
    keep[size.argsort()[: round(share * len(size))]] = False
    with torch.no_grad():
        for weight, mask in zip(weights, keep.split([w.numel() for w in weights]), strict=True):
            weight.mul_(mask.view_as(weight))
    watch(model)
    return model


def shift(model: nn.Module, x: Tensor, y: Tensor, *, scale: float = 1.0, **how: Unpack[Tuning]) -> nn.Module:
    """Add to each filter a random number, `scale` times the filter's standard deviation, then fine-tune."""
    model, generator = _copy(model), torch.Generator().manual_seed(how["seed"])
    with torch.no_grad():
        for weight in matrices(model):
            rows = weight.flatten(1)
            spread = rows.std(1, unbiased=False)
            amount = scale * spread * torch.randn(len(rows), generator=generator).to(spread)
            weight.add_(amount.view(-1, *[1] * (weight.ndim - 1)))
    return train_on(model, x, y, **how)


def distil(targets: Targets, *, weight_decay: float = 0.0) -> Attack:
    """Distillation: `fine_tune` with the answers of the stolen model, and weight decay in the first fifth of epochs."""

    def attack(model: nn.Module, x: Tensor, y: Tensor, **how: Unpack[Tuning]) -> nn.Module:
        first = -(-how["epochs"] // 5)
        return fine_tune(model, x, targets=targets, weight_decay=weight_decay, decay_epochs=first, **how)

    return attack


TOOLBOX: dict[str, Attack] = {
    "ftal": ftal,
    "ftll": ftll,
    "rtal": rtal,
    "rtll": rtll,
    "hard-label": distil("hard"),
    "soft-label": distil("soft"),
    "hard-label-reg": distil("hard", weight_decay=1e-2),
    "adversarial-training": adversarial_training,
    "neural-cleanse": neural_cleanse,
    "neural-laundering": neural_laundering,
    "quantisation": quantise,
    "feature-shuffling": shuffle_features,
    "pruning": prune,
    "shifting": shift,
}
"""By name; see the top of this file for what they take."""


def _copy(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).eval().requires_grad_(True)


def _reset_last(model: nn.Module, seed: int) -> nn.Module:
    """A copy with the last layer drawn from a normal distribution of the spread that it had, biases 0."""
    model, generator = _copy(model), torch.Generator().manual_seed(seed)
    layer = last_layer(model)
    with torch.no_grad():
        weight = layer.weight
        weight.copy_(torch.randn(weight.shape, generator=generator).to(weight) * weight.std())
        if layer.bias is not None:
            layer.bias.zero_()
    return model
