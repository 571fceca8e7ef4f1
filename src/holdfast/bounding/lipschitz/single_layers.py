"""What a single layer does to l2 distances: slopes of activations, overlap of pools, and affine layers merged into one.

Scalings go into the weights of the layer beside them, and the skip of a linear residual block into its kernel: the norm
of the one operator is never larger than the product or the sum of the norms of the parts.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from holdfast.bounding.graph import ops
from holdfast.bounding.graph.ops import Affine, Node, Shape
from holdfast.bounding.lipschitz.spectral import linear_part
from holdfast.errors import UnsupportedError

SLOPES: dict[str, Callable[[float], float]] = {
    **{
        kind: lambda parameter: 1.0
        for kind in ("relu", "leaky_relu", "tanh", "arctan", "relu6", "softsign", "hardtanh", "celu", "softplus")
    },
    "sigmoid": lambda parameter: 0.25,
    "hardsigmoid": lambda parameter: 1 / 6 + 1e-15,
    "elu": lambda alpha: max(1.0, alpha),
    "selu": lambda parameter: 1.75809935,  # scale * alpha, 1.0507... * 1.67326..., rounded up
}
"""The largest slope of each activation, by its kind, as a function of its parameter."""


MONOTONE = ("relu", "leaky_relu", "tanh", "arctan", "sigmoid")
"""Activations with slopes between 0 and 1, if the parameter is."""
MIRRORED = 1e-3
"""x + B f(A x) is taken for a step down a potential if B is as close to -A^T S, relative to its size. Rounding keeps
weights that are computed so much closer; all others are not close at all."""

FALL = 1e-6
"""A function that falls somewhere has no Lipschitz constant. Softplus may fall by so much, times 1 / beta, which counts
as rounding: with the default threshold of torch it falls by 2e-9."""


def refusal(node: Node, what: str) -> UnsupportedError:
    """The error for a layer without a constant."""
    return UnsupportedError(
        f"layer '{node.name}': no Lipschitz constant is known for {what}, and none is assumed. Use ReLU, leaky ReLU, "
        "MinMax, sigmoid, tanh, linear, convolution, batch norm, pooling, additions or concatenations instead."
    )


def activation_slope(node: Node, op: ops.Activation) -> float:
    """Lipschitz constant of an activation, or the refusal of one that has none."""
    if op.kind not in SLOPES:
        raise refusal(node, f"the activation '{op.kind}'")
    if op.error * abs(op.parameter) > FALL:
        raise refusal(node, f"softplus with a threshold at which it falls by {op.error:.2g}")
    return SLOPES[op.kind](op.parameter)


def overlap(op: ops.MaxPool, out_shape: Shape) -> int:
    """How many windows share a value, at most: the square of the constant of max pooling.

    |max_S x - max_S y| <= ||(x - y)_S||, and the sum of the squares over all windows counts no value more often.
    """
    count = 1
    for axis in range(2):
        # Tap a of window i reads i stride + a dilation, so the taps that meet one value agree modulo the stride.
        taps = Counter((a * op.dilation[axis]) % op.stride[axis] for a in range(op.kernel[axis]))
        count *= min(max(taps.values()), out_shape[1 + axis])
    return count


def in_double(op: Affine) -> Affine:
    """The linear part in float64, without gradient."""
    match linear_part(op):
        case ops.Linear() | ops.Conv() as part:
            return replace(part, weight=part.weight.detach().double())
        case ops.Scale() as part:
            return replace(part, factor=part.factor.detach().double())
        case part:
            return part


def merge_affine(first: Affine, then: Affine) -> Affine | None:
    """x -> then(first(x)) as one operator, where a scaling can be put into the weights beside it; else None."""
    match first, then:
        case ops.Scale(), ops.Scale():
            return replace(first, factor=first.factor * then.factor)
        case ops.Conv(), ops.Scale():
            factor = _per_channel(then.factor, (first.weight.shape[0], 1, 1))
            return None if factor is None else replace(first, weight=first.weight * factor.view(-1, 1, 1, 1))
        case ops.Linear(), ops.Scale():
            factor = _per_channel(then.factor, (first.weight.shape[0],))
            return None if factor is None else replace(first, weight=first.weight * factor[:, None])
        case ops.Scale(), ops.Conv():
            factor = _per_channel(first.factor, (then.in_shape[0], 1, 1))
            if factor is None:
                return None
            weight = then.weight.unflatten(0, (then.groups, -1)) * factor.view(then.groups, 1, -1, 1, 1)
            return replace(then, weight=weight.flatten(0, 1))
        case ops.Scale(), ops.Linear():
            factor = _per_channel(first.factor, (then.weight.shape[1],))
            return None if factor is None else replace(then, weight=then.weight * factor)
    return None


def _per_channel(factor: Tensor, shape: Shape) -> Tensor | None:
    """One factor for each channel, (C,), if the factor is one number or has that shape."""
    if factor.numel() == 1:
        return factor.reshape(1).expand(shape[0])
    return factor.flatten() if factor.shape == shape else None


def plus_identity(op: Affine) -> Affine | None:
    """I + A as an operator of the kind of A; None where it is not one."""
    match op:
        case ops.Scale():
            return replace(op, factor=op.factor + 1)
        case ops.Linear() if op.weight.shape[0] == op.weight.shape[1]:
            return replace(op, weight=op.weight + torch.eye(len(op.weight)).to(op.weight))
        case ops.Conv() if op.weight.shape[0] == op.in_shape[0] and op.stride == (1, 1):
            # The tap that reads the place it writes to: a dilation = padding.
            row, column = (op.padding[i] // op.dilation[i] for i in range(2))
            kept = all(
                2 * op.padding[i] == op.dilation[i] * (op.weight.shape[2 + i] - 1)
                and op.padding[i] % op.dilation[i] == 0
                for i in range(2)
            )
            if not kept:
                return None
            channels = torch.arange(len(op.weight), device=op.weight.device)
            centre = torch.zeros_like(op.weight)
            centre[channels, channels % op.weight.shape[1], row, column] = 1
            return replace(op, weight=op.weight + centre)
    return None


def step_down(first: Affine, then: Affine) -> tuple[Affine, Tensor] | None:
    """(S^(1/2) A, a bound of ||E||) for B = E - A^T S with S diagonal, >= 0, and a small E; None where B is not so.

    With an activation f of slopes D between 0 and 1, the Jacobian of x + B f(A x + a) is I - A^T S D A + E D A. The
    first two terms are symmetric with eigenvalues between 1 - ||S^(1/2) A||^2 and 1, so the norm of the whole is at
    most max(1, ||S^(1/2) A||^2 - 1) + ||E|| ||A||.
    """
    match first, then:
        case ops.Linear(), ops.Linear() if first.weight.shape == then.weight.T.shape:
            mirrored = then.weight.T
        case ops.Conv(), ops.Conv() if _reads_back(first, then):
            mirrored = then.weight.flip(2, 3).transpose(0, 1)
        case _:
            return None
    a, b = first.weight.flatten(1), mirrored.flatten(1)
    tiny = torch.finfo(a.dtype).tiny
    s = (-(a * b).sum(1) / a.square().sum(1).clamp(min=tiny)).clamp(min=tiny)[:, None]
    apart = (b + s * a).detach()
    if not bool(apart.norm() <= MIRRORED * b.norm()):
        return None
    rounding = 8 * torch.finfo(a.dtype).eps * _tap_norms(mirrored.detach())
    half = replace(first, weight=(s.sqrt() * a).view_as(first.weight))
    return half, _tap_norms(apart.view_as(mirrored)) + rounding


def _reads_back(first: ops.Conv, then: ops.Conv) -> bool:
    """Whether `then` has the taps of the transpose of `first`, without stride and groups."""
    out, inputs, *kernel = first.weight.shape
    if then.weight.shape != (inputs, out, *kernel) or first.groups != 1 or then.groups != 1:
        return False
    if not first.stride == then.stride == (1, 1) or first.dilation != then.dilation:
        return False
    reach = [first.dilation[i] * (kernel[i] - 1) for i in range(2)]
    sizes = tuple(first.in_shape[1 + i] + 2 * first.padding[i] - reach[i] for i in range(2))
    return then.in_shape[1:] == sizes and all(then.padding[i] == reach[i] - first.padding[i] for i in range(2))


def _tap_norms(weight: Tensor) -> Tensor:
    """At least the norm of a matrix or of a convolution without a stride: a sum of Frobenius norms over its taps."""
    taps = weight.flatten(2) if weight.ndim > 2 else weight[..., None]
    norms: Tensor = torch.linalg.vector_norm(taps, dim=(0, 1))
    return norms.sum()
