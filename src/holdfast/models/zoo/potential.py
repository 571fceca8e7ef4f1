"""Layers that step down a convex potential: no step can stretch a distance, whatever the weights.

With an activation f of slopes between 0 and 1, x - W^T S f(W x + b) is a step down the gradient of a convex function
of x. Its Jacobian is I - W^T S D W, with D diagonal and between 0 and 1; it is symmetric, with eigenvalues between
1 - ||S^(1/2) W||^2 and 1, so that the layer is 1-Lipschitz if S is diagonal, not negative, and ||S^(1/2) W||^2 <= 2:

    cpl    S = 2 / ||W||^2              Meunier, Delattre, Araujo and Allauzen, "A dynamical system perspective for
                                        Lipschitz neural networks", 2022 (convex potential layer)
    sll    S_ii = 2 / sum_j |W W^T|_ij q_j / q_i, q > 0 learnt
                                        Araujo, Havens, Delattre, Allauzen and Hu, "A unified algebraic perspective on
                                        Lipschitz neural networks", 2023 (SDP-based Lipschitz layer)

For SLL, S^-1 - W W^T / 2 is symmetric and, scaled by q on both sides, diagonally dominant, hence positive semidefinite.

A convolution is such a matrix on an unbounded map; the layer as built reads and returns a part of the map, so W is a
submatrix, with a norm that is not larger. There W W^T is a correlation of the kernel with itself, and for CPL

    ||W||^4 = ||(W W^T)^2|| <= max_i sum_j |(W W^T)^2|_ij,

which needs no iteration and depends on nothing but the weights.
"""

import math

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from holdfast.errors import InputError
from holdfast.models.catalog import Shape
from holdfast.models.catalog import add_architecture as add
from holdfast.models.zoo.aol import SMALLEST, AOLConv2d, AOLLinear
from holdfast.models.zoo.liresnet import NormalizedLinear
from holdfast.models.zoo.plain import Conv, check_conv, need_image, need_room
from holdfast.utils.options import Count


def correlations(weight: Tensor) -> Tensor:
    """W W^T for a matrix (h, n), or a kernel (h, c, k, k) on an unbounded map: (h, h) or (h, h, 2k - 1, 2k - 1)."""
    return weight @ weight.T if weight.ndim == 2 else F.conv2d(weight, weight, padding=weight.shape[-1] - 1)


def cpl_scale(weight: Tensor) -> Tensor:
    """S of CPL for a matrix (h, n) or a kernel (h, c, k, k), odd k: (h,), the same number everywhere."""
    if weight.ndim == 2:
        square = torch.linalg.matrix_norm(weight, 2).square()
    else:
        square = _row_sums(correlations(correlations(weight))).sum(1).max().sqrt()
    inverse: Tensor = 1 / square.clamp(min=SMALLEST)
    return (2 * inverse).expand(len(weight))


def sll_scale(weight: Tensor, log_q: Tensor) -> Tensor:
    """S of SLL for a matrix (h, n) or a kernel (h, c, k, k), odd k, and the logarithms of q (h,): (h,)."""
    q = log_q.exp()
    return 2 * (_row_sums(correlations(weight)) @ q / q).clamp(min=SMALLEST).reciprocal()


def _row_sums(products: Tensor) -> Tensor:
    """Absolute values, added up over all shifts: (h, h, ...) -> (h, h)."""
    return products.abs() if products.ndim == 2 else products.abs().sum((2, 3))


# For torch.fx: these depend only on weights, and are called, not looked into.
fx.wrap("cpl_scale")
fx.wrap("sll_scale")


class PotentialLinear(nn.Module):
    """x - W^T S relu(W x + b), (B, n) -> (B, n); see the top of this file.

    Args:
        features: n.
        sll: S of SLL, with `log_q` learnt; else of CPL.

    >>> layer = PotentialLinear(4, sll=True)
    >>> jacobian = torch.autograd.functional.jacobian(lambda x: layer(x[None])[0], torch.rand(4))
    >>> bool(torch.linalg.matrix_norm(jacobian, 2) <= 1 + 1e-6)
    True
    """

    def __init__(self, features: int, *, sll: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.orthogonal_(torch.empty(features, features)))
        self.bias = nn.Parameter(torch.zeros(features))
        self.log_q = nn.Parameter(torch.zeros(features)) if sll else None

    def extra_repr(self) -> str:
        return f"{len(self.bias)}, sll={self.log_q is not None}"

    def forward(self, x: Tensor) -> Tensor:
        scale = cpl_scale(self.weight) if self.log_q is None else sll_scale(self.weight, self.log_q)
        inner = torch.relu(F.linear(x, self.weight, self.bias))
        return x + F.linear(inner, -(scale[:, None] * self.weight).T)


class PotentialConv2d(nn.Module):
    """x - W^T S relu(W x + b) with a padded convolution W, (B, c, H, W) -> (B, c, H, W); see the top of this file.

    Args:
        channels: c.
        kernel: size of the square kernel, odd.
        sll: S of SLL, with `log_q` learnt; else of CPL.
    """

    def __init__(self, channels: int, kernel: int = 3, *, sll: bool) -> None:
        super().__init__()
        if kernel < 1 or kernel % 2 == 0:
            raise InputError(f"the kernel must be odd, got {kernel}")
        self.weight = nn.Parameter(torch.empty(channels, channels, kernel, kernel))
        nn.init.normal_(self.weight, std=1 / (kernel * math.sqrt(channels)))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.log_q = nn.Parameter(torch.zeros(channels)) if sll else None

    def extra_repr(self) -> str:
        return f"{len(self.bias)}, kernel={self.weight.shape[-1]}, sll={self.log_q is not None}"

    def forward(self, x: Tensor) -> Tensor:
        scale = cpl_scale(self.weight) if self.log_q is None else sll_scale(self.weight, self.log_q)
        padding = self.weight.shape[-1] // 2
        inner = torch.relu(F.conv2d(x, self.weight, self.bias, padding=padding))
        back = -(scale[:, None, None, None] * self.weight).flip(2, 3).transpose(0, 1)
        return x + F.conv2d(inner, back, padding=padding)


def _potential_cnn(
    input_shape: Shape, classes: int, layers: tuple[Conv, ...], hidden: tuple[int, ...], depth: int, sll: bool
) -> nn.Sequential:
    channels, height, width = need_image(input_shape)
    modules: list[nn.Module] = []
    for index, layer in enumerate(layers):
        out, kernel, stride, padding = check_conv(layer)
        modules.append(AOLConv2d(channels, out, kernel, stride, padding))
        modules += [PotentialConv2d(out, sll=sll) for _ in range(depth)]
        channels = out
        height, width = ((size + 2 * padding - kernel) // stride + 1 for size in (height, width))
        need_room(input_shape, height, width, f"layer {index} ({layer})")
    modules.append(nn.Flatten())
    features = channels * height * width
    for size in hidden:
        modules.append(AOLLinear(features, size))
        modules += [PotentialLinear(size, sll=sll) for _ in range(depth)]
        features = size
    return nn.Sequential(*modules, NormalizedLinear(features, classes))


def cpl_cnn(
    input_shape: Shape,
    classes: int,
    *,
    layers: tuple[Conv, ...] = ((16, 4, 2, 1), (32, 4, 2, 1)),
    hidden: tuple[Count, ...] = (100,),
    depth: Count = 2,
) -> nn.Sequential:
    """AOL layers that change the size, each with `depth` CPL layers after it; logits with rows of norm one.

    Everything before the logits has a Lipschitz constant of at most 1, whatever the weights.

    Args:
        layers: convolutions (channels, kernel size, stride, padding).
        hidden: widths of the dense layers before the last.
        depth: layers that step down a potential, after each convolution and each dense layer.
    """
    return _potential_cnn(input_shape, classes, layers, hidden, depth, sll=False)


def sll_cnn(
    input_shape: Shape,
    classes: int,
    *,
    layers: tuple[Conv, ...] = ((16, 4, 2, 1), (32, 4, 2, 1)),
    hidden: tuple[Count, ...] = (100,),
    depth: Count = 2,
) -> nn.Sequential:
    """`cpl_cnn` with SLL layers; options as there."""
    return _potential_cnn(input_shape, classes, layers, hidden, depth, sll=True)


_CPL = "Meunier et al., A dynamical system perspective for Lipschitz neural networks, 2022"
_SLL = "Araujo et al., A unified algebraic perspective on Lipschitz neural networks, 2023"

add("cnn-cpl", cpl_cnn, "AOL and CPL layers: no layer stretches a distance", _CPL)
add("cnn-sll", sll_cnn, "AOL and SLL layers: no layer stretches a distance", _SLL)
