"""Networks for certificates by Lipschitz constants: LiResNet, the networks of its depth study, and plain stacks.

The constant of a network is a product over its layers, and tight only if every layer's constant is. MinMax keeps the
norm of gradients, and orthogonal weights start with the norm one in all directions. A residual branch with an
activation would cost 1 + K_branch; a block of LiResNet is linear: skip and branch are one convolution with one norm.
`resnet-minmax` has the branch with an activation, and `convnet-minmax` no skip at all: with everything else equal, they
show what the linear block is worth at each depth.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from holdfast.errors import InputError
from holdfast.models.catalog import Shape
from holdfast.models.catalog import add_architecture as add
from holdfast.models.layers import MinMax
from holdfast.models.zoo.plain import Layer, cnn, need_image
from holdfast.utils.options import Count, Even


class LinearResidual(nn.Module):
    """x + scale * beta * conv(x) with a 3x3 convolution, computed as one convolution.

    Args:
        channels: in and out.
        scale: factor of the branch; 1 / sqrt(number of blocks).
    """

    def __init__(self, channels: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(torch.randn(channels, channels, 3, 3) / (9 * channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.beta = nn.Parameter(torch.ones(channels))

    def extra_repr(self) -> str:
        return f"{len(self.bias)}, scale={self.scale}"

    def forward(self, x: Tensor) -> Tensor:
        gain = self.scale * self.beta
        identity = F.pad(torch.diag_embed(torch.ones_like(gain))[..., None, None], (1, 1, 1, 1))
        return F.conv2d(x, identity + gain[:, None, None, None] * self.weight, gain * self.bias, padding=1)


class NonlinearResidual(nn.Module):
    """x + beta * conv(minmax(conv(x))) with 3x3 convolutions; beta, one factor for each channel, starts at zero.

    The block starts as the identity. Its Lipschitz constant is only known to be at most 1 + ||beta conv|| ||conv||.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = _orthogonal(nn.Conv2d(channels, channels, 3, padding=1))
        self.minmax = MinMax()
        self.weight = nn.Parameter(nn.init.orthogonal_(torch.empty(channels, channels, 3, 3)))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.beta = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.minmax(self.first(x))
        return x + F.conv2d(inner, self.beta[:, None, None, None] * self.weight, self.beta * self.bias, padding=1)


class OrthogonalLinear(nn.Module):
    """Weights of a dense layer that start orthogonal; what `forward` makes of them is up to the layers below."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.orthogonal_(torch.empty(outputs, inputs)))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]}, {self.weight.shape[0]}"


class NormalizedLinear(OrthogonalLinear):
    """Dense layer with rows of norm one: the size of the weights cannot be traded against margins."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, F.normalize(self.weight, dim=1), self.bias)


def liresnet(
    input_shape: Shape,
    classes: int,
    *,
    depth: Count = 6,
    width: Even = 128,
    neck: Even = 2048,
    stem: tuple[int, ...] = (5, 2, 2),
) -> nn.Sequential:
    """Stem, `depth` linear residual blocks, a 4x4 convolution and a dense layer, normalised logits; MinMax everywhere.

    Args:
        depth: number of blocks.
        width: channels of the blocks.
        neck: width of the dense layer; 2048 in the tables of the thesis, 512 in an earlier version.
        stem: kernel size, stride and padding of the first convolution: (5, 2, 2) for 32x32 images, (7, 4, 3) for 64x64
            and (14, 14, 0) for 224x224, which all give maps of 16x16.
    """
    blocks = [LinearResidual(width, 1 / math.sqrt(depth)) for _ in range(depth)]
    return _between(input_shape, classes, blocks, width, neck, stem)


def resnet_minmax(
    input_shape: Shape,
    classes: int,
    *,
    depth: Count = 6,
    width: Even = 128,
    neck: Even = 2048,
    stem: tuple[int, ...] = (5, 2, 2),
) -> nn.Sequential:
    """`liresnet` with `NonlinearResidual` blocks; options as there."""
    return _between(input_shape, classes, [NonlinearResidual(width) for _ in range(depth)], width, neck, stem)


def convnet_minmax(
    input_shape: Shape,
    classes: int,
    *,
    depth: Count = 6,
    width: Even = 128,
    neck: Even = 2048,
    stem: tuple[int, ...] = (5, 2, 2),
) -> nn.Sequential:
    """`liresnet` with a 3x3 convolution in place of each block, without a skip; options as there."""
    blocks = [_orthogonal(nn.Conv2d(width, width, 3, padding=1)) for _ in range(depth)]
    return _between(input_shape, classes, blocks, width, neck, stem)


def _between(
    input_shape: Shape, classes: int, blocks: Sequence[nn.Module], width: int, neck: int, stem: tuple[int, ...]
) -> nn.Sequential:
    """The blocks, each with MinMax after it, between the stem and the head of LiResNet."""
    channels, height, image_width = need_image(input_shape)
    if len(stem) != 3 or min(stem[:2]) < 1 or stem[2] < 0:
        raise InputError(f"stem must be (kernel size, stride, padding), got {stem!r}")
    kernel, stride, padding = stem
    rows, columns = (((size + 2 * padding - kernel) // stride + 1) // 4 for size in (height, image_width))
    if min(rows, columns) < 1:
        raise InputError(
            f"input_shape {tuple(input_shape)} is too small: less than 4x4 is left after the stem {stem!r}"
        )
    modules: list[nn.Module] = [_orthogonal(nn.Conv2d(channels, width, kernel, stride, padding)), MinMax()]
    for block in blocks:
        modules += [block, MinMax()]
    modules += [_orthogonal(nn.Conv2d(width, 2 * width, 4, 4)), MinMax(), nn.Flatten()]
    modules += [_orthogonal(nn.Linear(2 * width * rows * columns, neck)), MinMax(), NormalizedLinear(neck, classes)]
    return nn.Sequential(*modules)


def minmax_cnn(
    input_shape: Shape, classes: int, *, layers: tuple[Layer, ...] = (), hidden: tuple[Even, ...] = (100,)
) -> nn.Sequential:
    """`cnn` with MinMax and orthogonal weights; options as there, widths even."""
    if any(layer[0] % 2 for layer in layers if not isinstance(layer, str)):
        raise InputError(f"MinMax sorts pairs: all channels must be even, got {layers!r}")
    model = cnn(input_shape, classes, layers=layers, hidden=hidden, activation="minmax")
    for module in model:
        _orthogonal(module)
    return model


def _orthogonal(module: nn.Module) -> nn.Module:
    if isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.orthogonal_(module.weight)
        nn.init.zeros_(module.bias)  # type: ignore[arg-type]
    return module


_HU = "Hu et al., Unlocking deterministic robustness certification on ImageNet, 2023"
_LEINO = "Leino, Wang and Fredrikson, Globally robust neural networks, 2021"
_CIFAR, _TINY = (3, 32, 32), (3, 64, 64)
_DOWN = ((32, 3, 1, 1), (32, 4, 2, 1), (64, 3, 1, 1), (64, 4, 2, 1))
_SIX = ((32, 3, 1, 1), *_DOWN[:2], (64, 3, 1, 1), *_DOWN[2:])
_EIGHT_1 = ((64, 3, 1, 1), (64, 3, 1, 1), (64, 4, 2, 1), (128, 3, 1, 1), (128, 3, 1, 1), (128, 4, 2, 1))
_EIGHT = (*_EIGHT_1, (256, 3, 1, 1), (256, 4, 2, 1))

add("liresnet", liresnet, "linear residual blocks with MinMax; choose depth, width and neck", _HU, input_shape=_CIFAR)
add("liresnet-l18w256", liresnet, "LiResNet, 18 blocks of 256", _HU, input_shape=_CIFAR, depth=18, width=256)
add("resnet-minmax", resnet_minmax, "liresnet with MinMax inside its branches, for comparison", _HU, input_shape=_CIFAR)
add("convnet-minmax", convnet_minmax, "liresnet without its skips, for comparison", _HU, input_shape=_CIFAR)
add("2c2f-minmax", minmax_cnn, "2c2f with MinMax", _LEINO, layers=((16, 4, 2, 1), (32, 4, 2, 1)))
add("4c3f-minmax", minmax_cnn, "4c3f with MinMax", _LEINO, layers=_DOWN, hidden=(512, 512))
add("6c2f-minmax", minmax_cnn, "6c2f with MinMax", _LEINO, layers=_SIX, hidden=(512,), input_shape=_CIFAR)
add(
    "8c2f-minmax",
    minmax_cnn,
    "8c2f with MinMax and padded convolutions, for Tiny ImageNet",
    _LEINO,
    layers=_EIGHT,
    hidden=(256,),
    input_shape=_TINY,
    classes=200,
)
