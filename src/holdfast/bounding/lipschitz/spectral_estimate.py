"""The norm of a layer for training: an estimate with gradients that keeps up with weights that move.

Trained for small Lipschitz constants, layers have flat spectra, and power iteration with one vector crawls: it lags
behind the weights by several percent in each layer. Two cures:

- A dense layer has several vectors, and the best combination of them counts (subspace iteration). They take hardly
  longer than one, as the weights have to be read once for all of them.
- A convolution has one for each of its Fourier blocks T_f (spectral_conv.py), small matrices, one for each frequency f
  of a torus. The largest of their norms is the norm on the torus: never below the norm as padded, and the one
  that the proof starts from.
"""

from functools import lru_cache

import torch
from torch import Tensor

from holdfast.bounding.graph.ops import Conv, Shape
from holdfast.bounding.lipschitz.spectral_conv import frame

VECTORS = 16
"""Of a dense layer."""
SMALLEST, LARGEST = 12, 1 << 23
"""Rows and columns of a map: on a smaller one, the edges make the norm as padded more than a percent less than that on
the torus. And numbers in all blocks of one layer: beyond that, whole maps take less memory."""
TWIST = 0.5  # Frequencies half a step off: none is its own negative, so that half of one axis stands for all.


def subspace_norm(weight: Tensor, v: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """The norm of a matrix (o, n), from below and with its gradient, and the vectors (n, k) to go on from.

    Args:
        weight: the matrix.
        v: vectors (n, k), random or from the last call.
        steps: how often to apply W^T W.
    """
    with torch.no_grad():
        for _ in range(steps):
            v = torch.linalg.qr(weight.T @ (weight @ v)).Q
        v = torch.linalg.qr(v).Q
        moved = weight @ v
        # Weights that are not finite make an estimate that is not; `eigh` would raise.
        top = v @ torch.linalg.eigh(torch.nan_to_num(moved.T @ moved)).eigenvectors[:, -1]
    return torch.linalg.vector_norm(weight @ top), v


def fits(op: Conv) -> bool:
    """Whether blocks are close to the convolution as padded, and few and small enough."""
    if min(op.in_shape[1:]) < SMALLEST:
        return False
    return _phases_of(op)[..., 0].numel() * op.weight[..., 0, 0].numel() <= LARGEST


def vectors_shape(op: Conv) -> Shape:
    """Of the left vectors of all blocks, as real numbers: (F, groups, out / groups, 2)."""
    return (len(_phases_of(op)), op.groups, op.weight.shape[0] // op.groups, 2)


def fourier_norm(op: Conv, u: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """The largest norm of a block, with the gradient of the weights, and the left vectors to go on from.

    u_f <- T_f T_f^* u_f, where T_f stands beside its aliases a: T_f^* u is (v_fa) with v_fa = T_fa^* u_f.

    Args:
        op: the convolution; its bias plays no part.
        u: left vectors of `vectors_shape`, random or from the last call.
        steps: steps of power iteration.
    """
    phases = _phases_of(op)
    f, a, _ = phases.shape
    z, c = op.groups, op.weight.shape[1]
    kernels = op.weight.unflatten(0, (z, -1)).flatten(3)  # (groups, o, c, taps)
    with torch.no_grad():
        taps = kernels.movedim(3, 0).flatten(1)
        parts = torch.view_as_real(phases).movedim(3, 0).flatten(0, 2) @ taps
        t = torch.complex(*parts.view(2, f * a * z, -1, c).unbind(0))
        left = torch.view_as_complex(u.contiguous())
        for _ in range(steps + 1):
            v = left.conj()[:, None].expand(f, a, z, -1).reshape(f * a * z, 1, -1) @ t  # the conjugate of T^* u
            new = (t @ v.conj().mT).view(f, a, z, -1).sum(1)
            size = torch.linalg.vector_norm(new, dim=2, keepdim=True)
            left = torch.where(size > 0, new / size, left)
        frequency, group = divmod(int(size.argmax()), z)
    block = torch.einsum("at,oct->aoc", phases[frequency], kernels[group].to(phases.dtype))
    sigma = torch.linalg.vector_norm(torch.einsum("o,aoc->ac", left[frequency, group].conj(), block))
    return sigma, torch.view_as_real(left)


def _phases_of(op: Conv) -> Tensor:
    weight = op.weight
    return _phases(op.in_shape, op.stride, op.padding, op.dilation, weight.shape[2:], weight.dtype, weight.device)


@lru_cache(maxsize=256)
def _phases(
    in_shape: Shape,
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    kernel: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """How the taps enter the block of a frequency and an alias, (F, aliases, taps), complex: T_fa = sum_t w_t e_fat."""
    op = Conv(torch.empty(1, 1, *kernel, device=device), None, stride, padding, dilation, 1, in_shape)
    rows, columns = (frame(op, axis, False, TWIST)[:, 0] for axis in range(2))  # (F, aliases, taps) along one axis
    rows = rows[: len(rows) // 2 + 1]
    both = torch.einsum("fsa,gtb->fgstab", rows, columns)
    return both.flatten(4).flatten(2, 3).flatten(0, 1).to(dtype.to_complex())
