"""The layers that torch does not have: normalisation of the input, arctangent; and activations by name."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.errors import InputError, did_you_mean


class Normalize(nn.Module):
    """(x - mean) / std, as the first layer of a model, so that a radius always means pixels.

    Args:
        mean: one number for all values, or one per channel (per feature for flat inputs).
        std: as `mean`; every entry > 0.
        flat: the inputs have shape (B, D), not (B, C, H, W).

    The buffers `mean` and `std` have the shape that broadcasts against one input: (), (C, 1, 1) or (D,).

    >>> Normalize(0.5, 0.25)(torch.tensor([[0.5, 1.0]]))
    tensor([[0., 2.]])
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: float | Sequence[float], std: float | Sequence[float], *, flat: bool = False) -> None:
        super().__init__()
        values = {"mean": _as_vector("mean", mean), "std": _as_vector("std", std)}
        if any(value <= 0 for value in values["std"]):
            raise InputError(f"every std of Normalize must be > 0, got {std}")
        for name, value in values.items():
            if len(value) == 1:
                shaped = torch.tensor(value[0])
            else:
                shaped = torch.tensor(value).view(-1) if flat else torch.tensor(value).view(-1, 1, 1)
            self.register_buffer(name, shaped)

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std


def _as_vector(name: str, value: float | Sequence[float]) -> list[float]:
    try:
        vector = [float(value)] if isinstance(value, int | float) else [float(v) for v in value]
    except (TypeError, ValueError):
        raise InputError(f"{name} of Normalize must be a number or a list of numbers, got {value!r}") from None
    if not vector or not all(abs(v) < float("inf") for v in vector):
        raise InputError(f"{name} of Normalize must hold at least one number, all finite, got {value!r}")
    return vector


class Arctan(nn.Module):
    """The arctangent, elementwise: a bounded, smooth activation."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.atan(x)


class _SortPairs(torch.autograd.Function):
    """MinMax with a gradient that goes back to where each value came from; autograd's for `amax` looks for ties."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        first, second = x.unflatten(1, (-1, 2)).unbind(2)
        return torch.stack([torch.maximum(first, second), torch.minimum(first, second)], 2).flatten(1, 2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        first, second = inputs[0].unflatten(1, (-1, 2)).unbind(2)
        ctx.save_for_backward((first < second).to(output.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (swapped,) = ctx.saved_tensors
        first, second = gradients[0].unflatten(1, (-1, 2)).unbind(2)
        return torch.stack([torch.lerp(first, second, swapped), torch.lerp(second, first, swapped)], 2).flatten(1, 2)


def sort_pairs(x: Tensor) -> Tensor:
    """(B, C, ...) with C even: channels (2i, 2i+1) become (max, min)."""
    if not torch.is_grad_enabled():
        return _SortPairs.forward(x)
    pairs: Tensor = _SortPairs.apply(x)  # type: ignore[no-untyped-call]
    return pairs


class MinMax(nn.Module):
    """A layer that sorts pairs of channels: (2i, 2i+1) becomes (max, min); the number of channels must be even.

    It keeps the norm of gradients, unlike ReLU (Anil, Lucas and Grosse, "Sorting out Lipschitz function approximation",
    2019).
    """

    def forward(self, x: Tensor) -> Tensor:
        return sort_pairs(x)


_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "arctan": Arctan,
    "leaky_relu": nn.LeakyReLU,
    "minmax": MinMax,
    "relu": nn.ReLU,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
}


def make_activation(name: str) -> nn.Module:
    """A new activation layer: arctan, leaky_relu (slope 0.01), minmax, relu, sigmoid or tanh."""
    if name not in _ACTIVATIONS:
        raise InputError(f"unknown activation '{name}'. " + did_you_mean(str(name), _ACTIVATIONS))
    return _ACTIVATIONS[name]()
