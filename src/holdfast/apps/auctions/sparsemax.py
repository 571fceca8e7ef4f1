"""Sparsemax: the Euclidean projection onto the simplex, and its exact interval bounds.

sparsemax(x) = argmin_z |x - z|^2 with sum_i z_i = 1 and z >= 0 (Martins and Astudillo, From softmax to sparsemax: a
sparse model of attention and multi-label classification, 2016). It is piecewise linear, so that it can be bounded and
encoded exactly, which softmax cannot.
"""

import torch
from torch import Tensor

from holdfast.bounding.core.rounding import gamma, unit


def sparsemax(x: Tensor, dim: int = -1) -> Tensor:
    """Project onto the simplex along `dim`: z = max(x - tau, 0) with tau such that z sums to 1.

    With x sorted downwards, kappa = max {k: 1 + k x_(k) > x_(1) + ... + x_(k)} and
    tau = (x_(1) + ... + x_(kappa) - 1) / kappa.

    >>> sparsemax(torch.tensor([1.0, 0.5, -2.0])).tolist()
    [0.75, 0.25, 0.0]
    """
    x = x.movedim(dim, -1)
    ordered = x.sort(-1, descending=True).values
    k = torch.arange(1, x.shape[-1] + 1, dtype=x.dtype, device=x.device)
    sums = ordered.cumsum(-1)
    kappa = (1 + k * ordered > sums).sum(-1, keepdim=True).clamp(min=1)
    tau = (sums.gather(-1, kappa - 1) - 1) / kappa
    return (x - tau).clamp(min=0).movedim(-1, dim)


def sparsemax_bounds(lower: Tensor, upper: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Exact range of every entry of sparsemax(x) along the last axis, for x in [lower, upper], float64.

    z_i grows with x_i and falls with every other x_j, so its largest value is at (upper_i, lower_-i). Both ends are
    moved outward by what rounding in `dtype` can do.
    """
    lower, upper = lower.double(), upper.double()
    size = lower.shape[-1]
    own = torch.eye(size, dtype=torch.bool, device=lower.device)

    def ends(at: Tensor, others: Tensor) -> Tensor:
        rows = torch.where(own, at[..., None, :], others[..., None, :])
        return sparsemax(rows).diagonal(dim1=-2, dim2=-1)

    slack = sparsemax_error(torch.maximum(lower.abs(), upper.abs()).amax(-1, keepdim=True), size, dtype)
    return (ends(lower, upper) - slack).clamp(min=0), ends(upper, lower) + slack


def sparsemax_error(largest: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """How far sparsemax of K = `size` scores up to m = `largest`, computed in `dtype`, can be off.

    With gamma for sums of K terms: tau, a mean over the support, is off by gamma (1 + m), and x - tau by 2 u (1 + 2 m)
    more. c_k = 1 + k x_(k) - (x_(1) + ... + x_(k)) falls with k and is off by gamma (1 + 2 k m), so that kappa is wrong
    only by rows with |c_k| below that; each of them moves tau by |c_k| / (k (k - 1)). All together at most
    gamma (1 + 2 m) (3 + 1/1 + ... + 1/(K - 1)); twice that, for the arithmetic of this bound.
    """
    harmonic = sum(1 / k for k in range(1, size))
    return 2 * (gamma(size, dtype) + unit(dtype)) * (1 + 2 * largest.double()) * (3 + harmonic)
