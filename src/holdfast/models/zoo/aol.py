"""Almost-orthogonal layers: weights of any value, rescaled so that the layer cannot stretch a distance.

Prach and Lampert, "Almost-orthogonal layers for general-purpose Lipschitz networks", 2022. For every matrix W, and the
diagonal D with

    D_jj = (sum_i |W^T W|_ij)^(-1/2),

the norm of W D is at most 1: D^-2 - W^T W is symmetric and diagonally dominant, hence positive semidefinite. Where the
columns of W are orthogonal, W D keeps all distances; training is drawn to such weights. A W with fewer rows than
columns cannot have orthogonal columns, but rows: there D W is taken, with W W^T, for which the same holds.

A convolution that reads an unbounded map is such a matrix, and all its rows of one output channel look alike. So do its
columns of one input channel, up to where they stand relative to the stride: with stride s there are s x s kinds of
them, and D has an entry for each. The layer as built reads part of that map, zeros around it, and returns part of the
result: a submatrix, with a norm that is not larger.
"""

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from holdfast.errors import InputError
from holdfast.models.catalog import Shape
from holdfast.models.catalog import add_architecture as add
from holdfast.models.layers import MinMax
from holdfast.models.zoo.liresnet import NormalizedLinear, OrthogonalLinear
from holdfast.models.zoo.plain import Conv, check_conv, need_image, need_room
from holdfast.utils.options import Even

SMALLEST = 1e-12
"""Of the sums under the root: columns of zero stay zero, and their gradients finite. D only gets smaller by it."""


def aol_dense(weight: Tensor) -> Tensor:
    """W D or D W for a matrix W (out, in): its norm is at most 1, up to rounding."""
    if weight.shape[0] < weight.shape[1]:
        return aol_dense(weight.T).T
    return weight * (weight.T @ weight).abs().sum(0).clamp(min=SMALLEST).rsqrt()


def aol_kernel(weight: Tensor, stride: int = 1) -> Tensor:
    """The kernel of W D or D W for that W (out, in, k, k) of a convolution: norm at most 1 with any zero padding.

    Cells of s x s values are read as s^2 channels without a stride, by a kernel P of ceil(k / s) taps along each axis.
    The entries of P^T P and P P^T are the correlations of its channels at all shifts.
    """
    out, channels, k, _ = weight.shape
    s, taps = stride, -(-k // stride)
    padded = F.pad(weight, (0, taps * s - k, 0, taps * s - k))
    cells = padded.view(out, channels, taps, s, taps, s).permute(0, 1, 3, 5, 2, 4).reshape(out, -1, taps, taps)
    wide = out < cells.shape[1]
    kinds = cells if wide else cells.transpose(0, 1)
    correlations = F.conv2d(kinds, kinds, padding=taps - 1)
    scale = correlations.abs().sum((1, 2, 3)).clamp(min=SMALLEST).rsqrt()
    if wide:
        return weight * scale.view(-1, 1, 1, 1)
    return weight * scale.view(channels, s, s).repeat(1, taps, taps)[:, :k, :k]


# For torch.fx: these depend only on weights, and are called, not looked into.
fx.wrap("aol_dense")
fx.wrap("aol_kernel")


class AOLLinear(OrthogonalLinear):
    """Dense layer of norm at most 1, (B, inputs) -> (B, outputs); see the top of this file.

    >>> layer = AOLLinear(3, 2)
    >>> bool(torch.linalg.matrix_norm(aol_dense(layer.weight), 2) <= 1 + 1e-6)
    True
    """

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, aol_dense(self.weight), self.bias)


class AOLConv2d(nn.Module):
    """Convolution of norm at most 1 with zero padding; see the top of this file.

    The weights start with an orthogonal matrix at the s x s taps in the middle and zeros at the others, and so with a
    norm of 1 in as many directions as there can be.

    Args:
        inputs, outputs: channels.
        kernel: size k of the square kernel, at least the stride.
        stride, padding: the same in both directions.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, padding: int = 0) -> None:
        super().__init__()
        if not 1 <= stride <= kernel or padding < 0:
            raise InputError(
                f"an AOL convolution needs 1 <= stride <= kernel and padding >= 0, got kernel {kernel}, stride {stride}"
                f" and padding {padding}; with a larger stride some inputs would not be read at all"
            )
        weight, first = torch.zeros(outputs, inputs, kernel, kernel), (kernel - stride) // 2
        middle = nn.init.orthogonal_(torch.empty(outputs, inputs, stride, stride))
        weight[:, :, first : first + stride, first : first + stride] = middle
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(torch.zeros(outputs))
        self.stride, self.padding = stride, padding

    def extra_repr(self) -> str:
        outputs, inputs, kernel, _ = self.weight.shape
        return f"{inputs}, {outputs}, {kernel}, stride={self.stride}, padding={self.padding}"

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, aol_kernel(self.weight, self.stride), self.bias, self.stride, self.padding)


def aol_cnn(
    input_shape: Shape,
    classes: int,
    *,
    layers: tuple[Conv, ...] = ((16, 4, 2, 1), (32, 4, 2, 1)),
    hidden: tuple[Even, ...] = (100,),
) -> nn.Sequential:
    """AOL convolutions, AOL dense layers, logits with rows of norm one; MinMax after every layer but the last.

    Everything before the logits has a Lipschitz constant of at most 1, whatever the weights: the margin of two classes
    divided by the distance of their rows, at most 2, is a certified radius.

    Args:
        layers: convolutions (channels, kernel size, stride, padding); channels even.
        hidden: widths of the dense layers before the last, even.
    """
    channels, height, width = need_image(input_shape)
    modules: list[nn.Module] = []
    for index, layer in enumerate(layers):
        out, kernel, stride, padding = check_conv(layer)
        if out % 2:
            raise InputError(f"MinMax sorts pairs: all channels must be even, got {out}")
        modules += [AOLConv2d(channels, out, kernel, stride, padding), MinMax()]
        channels = out
        height, width = ((size + 2 * padding - kernel) // stride + 1 for size in (height, width))
        need_room(input_shape, height, width, f"layer {index} ({layer})")
    modules.append(nn.Flatten())
    features = channels * height * width
    for size in hidden:
        modules += [AOLLinear(features, size), MinMax()]
        features = size
    return nn.Sequential(*modules, NormalizedLinear(features, classes))


add(
    *("cnn-aol", aol_cnn, "2c2f with almost-orthogonal layers and MinMax: no layer stretches a distance"),
    "Prach and Lampert, Almost-orthogonal layers for general-purpose Lipschitz networks, 2022",
)
