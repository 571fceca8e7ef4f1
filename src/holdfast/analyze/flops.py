"""How many floating-point operations a network takes, dense, sparse or with binary weights: counted layer by layer.

The model is a block of convolution, batch norm and ReLU with n = r_in r_out c^2 weights, of which the share d is kept,
and maps of s^2 pixels in r_out channels (a dense layer has s = 1). Binary weights need no products:

    pass                   full precision                        binary
    forward, training      2 d n s^2 + 11 s^2 r_out              d n s^2 + 11 s^2 r_out
    forward, evaluation    2 d n s^2 +  4 s^2 r_out              d n s^2 +  4 s^2 r_out
    backward               4 d n s^2 +  4 s^2 r_out + n        3 d n s^2 +  4 s^2 r_out

(Liu, "Towards verifiable, generalizable and efficient robust deep neural networks", 2022.) Operations are counted, not
timed: dense kernels multiply zeros as fast as other numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from holdfast.errors import InputError
from holdfast.models.masked import patterns
from holdfast.training.context import in_mode
from holdfast.utils.options import Fraction, convert


@dataclass(frozen=True)
class LayerFlops:
    """One dense or convolution layer.

    Attributes:
        name: of the layer in the model.
        weights: n, with the pruned ones.
        channels: r_out.
        pixels: s^2, of a map at its output.
        density: d, share of the weights that are kept.
    """

    name: str
    weights: int
    channels: int
    pixels: int
    density: float

    def forward(self, *, binary: bool, training: bool) -> float:
        """Operations of a pass forward for one input."""
        products = (1 if binary else 2) * self.density * self.weights * self.pixels
        return products + (11 if training else 4) * self.pixels * self.channels

    def backward(self, *, binary: bool) -> float:
        """Operations of a pass backward for one input."""
        products = (3 if binary else 4) * self.density * self.weights * self.pixels
        return products + 4 * self.pixels * self.channels + (0 if binary else self.weights)


@dataclass(frozen=True)
class Saved:
    """Share of the operations that binary weights save against full precision at the same mask, between 0 and 1."""

    forward_training: float
    forward_evaluation: float
    backward: float
    step: float  # forward in training and backward


def layer_flops(
    model: nn.Module, input_shape: Sequence[int], *, rate: Fraction | None = None, dense: bool = True
) -> list[LayerFlops]:
    """The layers of the model in the order in which they are first used.

    Args:
        model: in eval mode or not; it is left as it came.
        input_shape: shape of one input, such as (3, 32, 32).
        rate: prune every layer at this rate, instead of by the zeros and masks that the model has.
        dense: count dense layers too; the published model counts convolutions.
    """
    kept = None if rate is None else 1 - convert(rate, Fraction, "rate")
    masks = patterns(model)
    pixels = _pixels(model, tuple(input_shape), list(masks))
    found = []
    for name, count in pixels.items():
        layer = model.get_submodule(name)
        if not dense and not isinstance(layer, _ConvNd):
            continue
        mask = masks[name]
        density = float(mask.float().mean()) if kept is None else kept
        found.append(LayerFlops(name, mask.numel(), mask.shape[0], count, density))
    return found


def saved(layers: Sequence[LayerFlops]) -> Saved:
    """What binary weights save, over all layers."""
    if not layers:
        raise InputError("there are no layers to count")

    def share(full: float, binary: float) -> float:
        return 1 - binary / full

    totals = {
        kind: (
            sum(layer.forward(binary=kind, training=True) for layer in layers),
            sum(layer.forward(binary=kind, training=False) for layer in layers),
            sum(layer.backward(binary=kind) for layer in layers),
        )
        for kind in (False, True)
    }
    (train, test, back), (binary_train, binary_test, binary_back) = totals[False], totals[True]
    return Saved(
        share(train, binary_train),
        share(test, binary_test),
        share(back, binary_back),
        share(train + back, binary_train + binary_back),
    )


def _pixels(model: nn.Module, input_shape: tuple[int, ...], names: list[str]) -> dict[str, int]:
    """Pixels of a map at the output of each layer, found by a pass of one input; hooks are removed again."""
    seen: dict[str, int] = {}

    def note(name: str, module: nn.Module, inputs: object, output: Tensor) -> None:
        seen.setdefault(name, output[0, 0].numel() if output.ndim > 2 else 1)

    handles = [model.get_submodule(name).register_forward_hook(partial(note, name)) for name in names]
    like = next(model.parameters())
    try:
        with torch.no_grad(), in_mode(model, False):
            model(torch.zeros((1, *input_shape), dtype=like.dtype, device=like.device))
    finally:
        for handle in handles:
            handle.remove()
    return seen
