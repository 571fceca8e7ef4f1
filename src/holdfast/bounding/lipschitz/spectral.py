"""The l2 operator norm of one affine operation: a proven upper bound for certificates, a fast estimate for training.

The proof needs no converged iteration. For a matrix T with the Gram matrix G = T T^*, the norm is at most sqrt(mu) if
and only if mu I - G is positive semidefinite, and a Cholesky factorisation that runs to its end shows that it is, up to
a rounding error with a known bound. An iteration only *guesses* mu. A convolution is too large for one matrix, but it
is part of one that falls apart into small blocks (spectral_conv.py).
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from holdfast.bounding.graph.ops import Affine, Average, Conv, Linear, Scale, Shape
from holdfast.bounding.lipschitz.spectral_conv import conv_bound
from holdfast.bounding.lipschitz.spectral_estimate import VECTORS, fits, fourier_norm, subspace_norm, vectors_shape
from holdfast.bounding.lipschitz.spectral_proof import U, check_finite, gram, proved, random_unit, unit_vector
from holdfast.errors import UnsupportedError


def linear_part(op: Affine) -> Affine:
    """A x without the b of A x + b."""
    match op:
        case Linear() | Conv():
            return replace(op, bias=None)
        case Scale():
            return replace(op, shift=torch.zeros_like(op.shift), shift_terms=torch.zeros_like(op.shift_terms))
        case Average():
            return op
    raise _no_norm(op)


def domain(op: Affine) -> Shape:
    """The shape of one input, as small as the norm needs it: a dense layer acts only on the last axis."""
    match op:
        case Linear():
            return (int(op.weight.shape[1]),)
        case Conv() | Average():
            return op.in_shape
        case Scale():
            return tuple(op.factor.shape)
    raise _no_norm(op)


def _no_norm(op: Affine) -> UnsupportedError:
    return UnsupportedError(
        f"there is no rule for the l2 norm of {type(op).__name__}; use Linear, Conv or Scale instead"
    )


def power_iteration(op: Affine, v: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Power iteration from v: (sigma, u, v) with sigma = <u, A v>, never above the norm.

    u (*out) and v (*in) are constants; sigma carries the gradient u v^T to the weights, the gradient of the norm once
    u and v have converged. It comes from below: a certificate must not use it.

    Args:
        op: the operation; its bias plays no part.
        v: unit vector to start from, random or from the last call (a warm start), shape `domain(op)`.
        steps: how often to apply A^T A.
    """
    op = linear_part(op)
    with torch.no_grad():
        u = op.apply(v[None])
        u = unit_vector(u, u)
        for _ in range(steps):
            v = unit_vector(op.transpose(u), v[None])[0]
            u = unit_vector(op.apply(v[None]), u)
    return (u * op.apply(v[None])).sum(), u[0], v


def norm_estimate(op: Affine, v: Tensor | None, like: Tensor, *, steps: int, first: int) -> tuple[Tensor, Tensor]:
    """An estimate of the norm with the gradient of the weights, and the vectors that make the next one better.

    Of a convolution, the norm on the torus that the proof starts from; else from below (spectral_estimate.py).

    Args:
        op: the operation; its bias plays no part.
        v: vectors of the last call; None, or vectors for an operation of another size, start afresh.
        like: the dtype and device to work with.
        steps: steps of power iteration, and `first` where it starts afresh.
    """

    def start(shape: Shape) -> tuple[Tensor, int]:
        return (v.to(like), steps) if v is not None and v.shape == shape else (random_unit(shape, like), first)

    if isinstance(op, Linear):
        rows, columns = op.weight.shape
        return subspace_norm(op.weight, *start((columns, min(VECTORS, rows, columns))))
    if isinstance(op, Conv) and fits(op):
        return fourier_norm(op, *start(vectors_shape(op)))
    sigma, _, v = power_iteration(op, *start(domain(op)))
    return sigma, v


@torch.no_grad()
def norm_bound(op: Affine, *, tight: float = 1.01) -> float:
    """A proven upper bound of the l2 norm of the operation as it stands: with its padding, stride, groups, dilation.

    Exact for scalings, within 0.1 % of the norm for dense layers and pooling. For convolutions within `tight` and the
    error of a lower bound, unless the finer blocks would not fit into memory (small maps with very many channels).

    Args:
        op: the operation; its bias plays no part.
        tight: a bound of a convolution within this factor of a lower bound is good enough; else finer blocks are
            tried, which take longer.

    Raises:
        InputError: the weights are not finite.
    """
    match op:
        case Linear():
            return _dense_bound(op.weight.detach().double())
        case Conv():
            return conv_bound(replace(op, weight=op.weight.detach().double(), bias=None), tight)
        case Scale():
            check_finite(op.factor)
            return float(op.factor.detach().double().abs().max()) if op.factor.numel() else 0.0
        case Average():
            return _positive_bound(op)
    raise _no_norm(op)


def _dense_bound(weight: Tensor) -> float:
    """The weights are given exactly, so only the Gram matrix is rounded."""
    check_finite(weight)
    if not bool(weight.any()):
        return 0.0
    size = float(weight.square().sum())
    return proved(gram(weight[None]), 4 * U * (max(weight.shape) + 8) * size)


def _positive_bound(op: Average) -> float:
    """For matrices B = A^T A >= 0 and any v > 0 the largest eigenvalue is at most max_i (B v)_i / v_i.

    (Collatz and Wielandt; Horn and Johnson, "Matrix analysis", 2012, section 8.1.) A power iterate makes it tight. All
    terms are positive, so that rounding is relative: gamma(2 terms + pixels of the transpose) at most.
    """
    v = torch.ones(1, *op.in_shape, dtype=torch.float64)
    for _ in range(100):
        image = op.transpose(op.apply(v))
        if not bool(image.any()):
            return 0.0
        v = image / image.max() + 1e-12  # values that no window reaches stay positive
    ratio = float((op.transpose(op.apply(v)) / v).max())
    return math.sqrt(ratio * (1 + 8 * U * (2 * op.terms + v.numel() + 8)))
