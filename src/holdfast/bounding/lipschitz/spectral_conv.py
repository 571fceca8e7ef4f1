"""A proven bound of the l2 norm of a convolution: it is part of an operator that falls apart into small blocks."""

import math
from itertools import product

import torch
from torch import Tensor

from holdfast.bounding.graph.ops import Conv
from holdfast.bounding.lipschitz.spectral_proof import (
    LARGEST,
    U,
    check_finite,
    gram,
    guess,
    lanczos,
    proved,
    random_unit,
)


def conv_bound(op: Conv, tight: float) -> float:
    """Fourier blocks first; where these are not tight, exact along one axis of the map, then along both."""
    check_finite(op.weight)
    if not op.weight.numel() or not bool(op.weight.any()):
        return 0.0
    start = random_unit(op.in_shape, op.weight).flatten()[None]
    ritz = lanczos(lambda v: op.transpose(op.apply(v.view(-1, *op.in_shape))).flatten(1), start, 30)
    lower = math.sqrt(max(0.0, float(ritz)))
    rows, columns = op.in_shape[1:]
    best = math.inf
    for exact in ((False, False), (rows <= columns, rows > columns), (True, True)):
        if _block_size(op, exact) > LARGEST and best < math.inf:
            break
        row_twists, column_twists = ((0.0,) if e else (0.0, 0.5) for e in exact)
        candidates = (blocks(op, exact, twist) for twist in product(row_twists, column_twists))
        best = min(best, proved(*min(candidates, key=lambda found: float(guess(found[0]).max()))))
        if best <= tight * lower:
            break
    return best


def blocks(op: Conv, exact: tuple[bool, bool], twist: tuple[float, float]) -> tuple[Tensor, float]:
    """Gram matrices of blocks T_f whose largest norm is at least the convolution's (proof: docs/lipschitz.md).

    T_f[(o, i, j), (c, s, t)] = sum_ab w[o, c, a, b] X_f[i, s, a] Y_f[j, t, b], with X and Y from `frame`. Along an
    exact axis the block holds the convolution as it is; along the others it holds one frequency of a torus.

    Returns:
        The matrices (F, n, n), and how far rounding can have moved each of them in norm.
    """
    frames = [frame(op, axis, exact[axis], twist[axis]) for axis in range(2)]
    # Real kernels: the blocks of a frequency and of its negative are conjugates, so half of one axis is enough.
    axis = int(exact[0])
    frames[axis] = frames[axis][: len(frames[axis]) // 2 + 1]
    groups = op.weight.unflatten(0, (op.groups, -1))
    step = max(1, LARGEST // (_block_size(op, exact) * op.groups * len(frames[1])))
    parts = [gram(_assemble(groups, part, frames[1])).flatten(0, 2) for part in frames[0].split(step)]
    # Each entry is a sum of kh kw products with phases, whose angle (up to 2 pi taps) is off by a few units: its error
    # is relative to the sum of |w|. The norm of an error in T or G is at most the norm of its bound entry by entry.
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


def frame(op: Conv, axis: int, exact: bool, twist: float) -> Tensor:
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
