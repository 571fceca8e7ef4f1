"""How far floating point may stray from real arithmetic.

The model of arithmetic is Higham's ("Accuracy and stability of numerical algorithms", 2002, sections 2.2 and 3.1): each
operation returns the exact result times (1 + d), |d| <= u, plus at most one underflow unit. A sum of n products, added
in any order, with or without fused multiply-add, is off by at most gamma(n) times the sum of their absolute values.
"""

import math

import torch
from torch import Tensor

from holdfast.errors import UnsupportedError, either


def unit(dtype: torch.dtype) -> float:
    """Unit roundoff u: 2^-24 for float32."""
    return torch.finfo(dtype).eps / 2


def gamma(terms: int, dtype: torch.dtype) -> float:
    """n u / (1 - n u), with n enlarged by 8 for the few operations around the sum itself."""
    n_u = (terms + 8) * unit(dtype)
    if n_u > 0.25:
        raise UnsupportedError(
            f"sums of {terms} products in {dtype} have no useful rounding-error bound; convert model and inputs to "
            f"float32 or float64, or pass {either('sound=False', '--option sound=false')}"
        )
    return n_u / (1 - n_u)


def underflow(terms: int, dtype: torch.dtype) -> float:
    """What `terms` underflows can add up to, also where subnormal numbers are flushed to zero."""
    return (terms + 8) * torch.finfo(dtype).tiny


def norm_underflow(terms: int, dtype: torch.dtype) -> float:
    """What a Euclidean norm of `terms` values can lose because their squares underflow."""
    return math.sqrt(underflow(terms, dtype))


def norm_above(v: Tensor) -> Tensor:
    """At least the Euclidean norm of each row of v (B, n), in float64, (B,); 0 for a row of zeros."""
    norm: Tensor = torch.linalg.vector_norm(v.double(), dim=1) * (1 + gamma(v.shape[1], torch.float64))
    return torch.where((v != 0).any(1), norm + norm_underflow(v.shape[1], torch.float64), 0.0)


def below(bounds: Tensor, dtype: torch.dtype) -> Tensor:
    """Lower bounds in float64 in another precision: none is larger, but for underflow, and none becomes positive."""
    lower: Tensor = (bounds - 2 * unit(dtype) * bounds.abs().nan_to_num(posinf=0.0)).to(dtype)
    return lower
