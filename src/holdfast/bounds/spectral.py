"""The l2 operator norm of one affine operation: a proven upper bound for certificates, a fast estimate for training.

The proof needs no converged iteration. For a matrix T with the Gram matrix G = T T^*, the norm is at most sqrt(mu) if
and only if mu I - G is positive semidefinite, and a Cholesky factorisation that runs to its end shows that it is, up to
a rounding error with a known bound. An iteration only *guesses* mu. A convolution is too large for one matrix, but it
is part of one that falls apart into small blocks (`_blocks`).
"""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from holdfast.bounds.ops import Affine, Average, Conv, Linear, Scale, Shape
from holdfast.bounds.rounding import unit
from holdfast.errors import InputError, UnsupportedError
from holdfast.random import Noise

LARGEST = 2**24
"""Entries of the largest block that is built, 256 MB: finer blocks than that are left out."""
U = unit(torch.float64)


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
    """The shape of one input, as small as the norm needs it: a dense layer acts on the last axis alone."""
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


def start_vector(op: Affine, like: Tensor, *, seed: int = 0) -> Tensor:
    """A random unit vector of the domain of `op`, with the dtype and device of `like`."""
    noise = Noise.for_batch(seed, 1, like.device).normal(domain(op), like.dtype)[0]
    return _unit(noise, noise)


def power_iteration(op: Affine, v: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Power iteration from v: (sigma, u, v) with sigma = <u, A v>, never above the norm.

    u (*out) and v (*in) are constants; sigma carries the gradient u v^T to the weights, which is that of the norm once
    u and v have converged. It comes from below: a certificate must not use it.

    Args:
        op: the operation; its bias plays no part.
        v: unit vector to start from, `start_vector` or that of the last call (a warm start), shape `domain(op)`.
        steps: how often to apply A^T A.
    """
    op = linear_part(op)
    with torch.no_grad():
        u = op.apply(v[None])
        u = _unit(u, u)
        for _ in range(steps):
            v = _unit(op.transpose(u), v[None])[0]
            u = _unit(op.apply(v[None]), u)
    return (u * op.apply(v[None])).sum(), u[0], v


def _unit(x: Tensor, otherwise: Tensor) -> Tensor:
    """x / |x|; where x = 0 the direction is kept, or else no division would ever leave zero again."""
    norm: Tensor = torch.linalg.vector_norm(x)
    return x / norm if norm > 0 else otherwise


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
            return _conv_bound(replace(op, weight=op.weight.detach().double(), bias=None), tight)
        case Scale():
            _check_finite(op.factor)
            return float(op.factor.detach().double().abs().max()) if op.factor.numel() else 0.0
        case Average():
            return _positive_bound(op)
    raise _no_norm(op)


def _check_finite(weight: Tensor) -> None:
    if not bool((weight.abs() < 1e100).all()):  # also refuses NaN; squares must not overflow
        raise InputError("a layer has weights that are not finite, or beyond 1e100: its norm has no bound")


def _dense_bound(weight: Tensor) -> float:
    """The weights are given exactly, so only the Gram matrix is rounded."""
    _check_finite(weight)
    if not bool(weight.any()):
        return 0.0
    size = float(weight.square().sum())
    return _proved(_gram(weight[None]), 4 * U * (max(weight.shape) + 8) * size)


def _gram(blocks: Tensor) -> Tensor:
    """T T^* or T^* T, whichever is smaller; (..., m, n) -> (..., k, k)."""
    blocks = blocks if blocks.shape[-2] <= blocks.shape[-1] else blocks.mT
    return blocks @ blocks.mH


def _lanczos(multiply: Callable[[Tensor], Tensor], v: Tensor, steps: int) -> float:
    """Largest Ritz value of symmetric matrices from unit vectors v (F, n): a guess, from below up to rounding."""
    diagonal, beside = [], []
    last, beta = torch.zeros_like(v), v.new_zeros(len(v), 1).real
    for _ in range(steps):
        w = multiply(v) - beta * last
        alpha = (v.conj() * w).sum(1, keepdim=True).real
        w = w - alpha * v
        beta = torch.linalg.vector_norm(w, dim=1, keepdim=True)
        last, v = v, w / beta.clamp(min=1e-300)
        diagonal.append(alpha[:, 0])
        beside.append(beta[:, 0])
    triangle = torch.diag_embed(torch.stack(beside[:-1], 1), -1) if steps > 1 else 0.0  # eigvalsh reads the lower half
    return float(torch.linalg.eigvalsh(torch.diag_embed(torch.stack(diagonal, 1)) + triangle).max())


def _guess(grams: Tensor) -> float:
    """About the largest eigenvalue of all the matrices (F, n, n)."""
    count, n, _ = grams.shape
    start = Noise.for_batch(0, 1, grams.device).normal((n,), torch.float64)
    start = (start / torch.linalg.vector_norm(start)).to(grams.dtype).expand(count, n)
    return _lanczos(lambda v: (grams @ v[..., None])[..., 0], start, min(n, 30))


def _proved(grams: Tensor, error: float) -> float:
    """The square root of a proven bound of all eigenvalues of matrices within `error` of `grams` (F, n, n) in norm.

    The guess is raised until Cholesky confirms it. A factorisation in floating point that runs to its end is exact for
    a matrix that differs from mu I - G by at most gamma(4 n + 8) times its trace in norm (Higham, "Accuracy and
    stability of numerical algorithms", 2002, theorem 10.3; the factor 4 is for complex numbers), and the trace is at
    most n mu. So every eigenvalue of G is at most mu + 8 u (n + 2) n mu; the last term is for underflow.
    """
    n = grams.shape[-1]
    identity = torch.eye(n, dtype=grams.dtype, device=grams.device)
    guess, slack = max(_guess(grams), 1e-290), 1e-6
    while not _positive_definite(guess * (1 + slack) * identity, grams):
        slack *= 3
    mu = guess * (1 + slack)
    return math.sqrt(mu + 8 * U * (n + 2) * n * mu + error + 1e-290) * (1 + 8 * U)


def _positive_definite(shift: Tensor, matrices: Tensor) -> bool:
    chunk = max(1, LARGEST // (4 * shift.numel()))
    parts = (matrices[i : i + chunk] for i in range(0, len(matrices), chunk))
    return all(not bool(torch.linalg.cholesky_ex(shift - part)[1].any()) for part in parts)


def _conv_bound(op: Conv, tight: float) -> float:
    """Fourier blocks first; where these are not tight, exact along one axis of the map, then along both."""
    _check_finite(op.weight)
    if not op.weight.numel() or not bool(op.weight.any()):
        return 0.0
    start = start_vector(op, op.weight).flatten()[None]
    lower = math.sqrt(
        max(0.0, _lanczos(lambda v: op.transpose(op.apply(v.view(-1, *op.in_shape))).flatten(1), start, 30))
    )
    rows, columns = op.in_shape[1:]
    best = math.inf
    for exact in ((False, False), (rows <= columns, rows > columns), (True, True)):
        if _block_size(op, exact) > LARGEST and best < math.inf:
            break
        row_twists, column_twists = ((0.0,) if e else (0.0, 0.5) for e in exact)
        candidates = (_blocks(op, exact, twist) for twist in product(row_twists, column_twists))
        best = min(best, _proved(*min(candidates, key=lambda blocks: _guess(blocks[0]))))
        if best <= tight * lower:
            break
    return best


def _blocks(op: Conv, exact: tuple[bool, bool], twist: tuple[float, float]) -> tuple[Tensor, float]:
    """Gram matrices of blocks T_f whose largest norm is at least that of the convolution (proof: docs/lipschitz.md).

    T_f[(o, i, j), (c, s, t)] = sum_ab w[o, c, a, b] X_f[i, s, a] Y_f[j, t, b], with X and Y from `_frame`. Along an
    exact axis the block holds the convolution as it is; along the others it holds one frequency of a torus.

    Returns:
        The matrices (F, n, n), and how far rounding can have moved each of them in norm.
    """
    frames = [_frame(op, axis, exact[axis], twist[axis]) for axis in range(2)]
    # Real kernels: the block of a frequency and that of its negative are conjugates, so half of one axis is enough.
    axis = int(exact[0])
    frames[axis] = frames[axis][: len(frames[axis]) // 2 + 1]
    groups = op.weight.unflatten(0, (op.groups, -1))
    step = max(1, LARGEST // (_block_size(op, exact) * op.groups * len(frames[1])))
    parts = [_gram(_assemble(groups, part, frames[1])).flatten(0, 2) for part in frames[0].split(step)]
    # Each entry is a sum of kh kw products with phases, whose angle (up to 2 pi taps) is off by a few units: its error
    # is relative to the sum of |w|. The norm of an error in T or G is at most that of the same bound entry by entry.
    absolute = _assemble(groups.abs(), frames[0][:1].abs(), frames[1][:1].abs())
    taps = sum(op.dilation[i] * (op.weight.shape[2 + i] - 1) for i in range(2))
    entry = 4 * U * (op.terms + 32 * taps + 32)
    relative = 2 * entry + entry**2 + 4 * U * (sum(absolute.shape) + 8)
    return torch.cat(parts), relative * float(absolute.square().sum((-2, -1)).max())


def _assemble(weight: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Blocks (F, G, groups, out, in) from weights (groups, o, c, kh, kw) and frames (F, i, s, kh), (G, j, t, kw)."""
    dtype = torch.promote_types(rows.dtype, columns.dtype)
    blocks = torch.einsum("zocab,fisa,gjtb->fgzoijcst", weight.to(dtype), rows.to(dtype), columns.to(dtype))
    return blocks.flatten(6, 8).flatten(3, 5)


def _sizes(op: Conv, axis: int) -> tuple[int, int, int]:
    """Along one axis: values in, values out, places on the torus for each value out."""
    n, stride, reach = op.in_shape[1 + axis], op.stride[axis], op.dilation[axis] * (op.weight.shape[2 + axis] - 1)
    m = (n + 2 * op.padding[axis] - reach - 1) // stride + 1
    # So long that nothing wraps around, neither of A x nor (enough as well) of A^T y.
    torus = min(n, stride * (m - 1) + 1) + reach
    return n, m, -(-torus // stride)


def _block_size(op: Conv, exact: tuple[bool, bool]) -> int:
    size = op.weight.shape[0] // op.groups * op.weight.shape[1]
    for axis in range(2):
        n, m, _ = _sizes(op, axis)
        size *= n * m if exact[axis] else op.stride[axis]
    return size


def _frame(op: Conv, axis: int, exact: bool, twist: float) -> Tensor:
    """How the taps of the kernel enter a block along one axis, (F, out, in, taps).

    Exact: one block, 1 where tap a takes input i stride + a dilation - padding to output i. Else for each frequency f
    of the subsampled torus the frequencies that it stands for (aliases), exp(i theta a) / sqrt(stride).
    """
    n, m, places = _sizes(op, axis)
    stride, device = op.stride[axis], op.weight.device
    taps = torch.arange(op.weight.shape[2 + axis], device=device) * op.dilation[axis]
    if exact:
        source = torch.arange(m, device=device)[:, None] * stride + taps - op.padding[axis]
        return (source[:, None] == torch.arange(n, device=device)[:, None]).double()[None]
    frequency = torch.arange(places, device=device)[:, None] + places * torch.arange(stride, device=device) + twist
    angle = (frequency.double() * (2 * math.pi / (places * stride)))[..., None] * taps
    return torch.polar(torch.full_like(angle, stride**-0.5), angle)[:, None]


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
