"""Attention that a processor differentiates faster than torch's own: the same values up to rounding."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.utils.reference import is_reference


def attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Tensor:
    """softmax(q k' / sqrt(d)) v in three steps: torch's kernel for a processor has no fast way back in bfloat16.

    Args:
        q, k, v: queries, keys and values, (B, heads, N, d).
        rest, options: as torch's `scaled_dot_product_attention` has them; where one is used, torch computes.
    """
    used = any(isinstance(option, Tensor) or option for option in (*rest, *options.values()))
    if used or is_reference() or q.device.type != "cpu" or q.dtype != torch.bfloat16:
        return F.scaled_dot_product_attention(q, k, v, *rest, **options)
    weights = torch.softmax((q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2), -1)
    return weights.to(v.dtype) @ v
