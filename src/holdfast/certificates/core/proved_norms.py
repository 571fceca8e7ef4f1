"""Norms of layers are proved once: a model is certified chunk by chunk, and its weights stay the same."""

import hashlib
from collections import OrderedDict

import torch

from holdfast.bounding.graph.ops import Affine, Conv, Linear
from holdfast.bounding.lipschitz.spectral import norm_bound

LARGEST = 4096
"""How many norms are kept: some hundred models."""
_NORMS: OrderedDict[bytes, float] = OrderedDict()


def cached_norm(op: Affine, *, tight: float = 1.01) -> float:
    """`norm_bound`, remembered for dense layers and convolutions.

    Found again by a hash of the weights and of the geometry, which costs far less than the proof. Where the weights lie
    in memory, or how often torch has seen them change, would not do: writes through `.data` leave no trace, and a proof
    for other weights proves nothing.
    """
    if not isinstance(op, Linear | Conv):
        return norm_bound(op, tight=tight)
    geometry = (op.stride, op.padding, op.dilation, op.groups, op.in_shape) if isinstance(op, Conv) else ()
    text = f"{type(op).__name__} {tuple(op.weight.shape)} {op.weight.dtype} {geometry} {tight}"
    weights = op.weight.detach().cpu().contiguous().view(torch.uint8).numpy().data
    key = hashlib.blake2b(weights, key=hashlib.blake2b(text.encode()).digest()).digest()
    if key in _NORMS:
        _NORMS.move_to_end(key)
        return _NORMS[key]
    _NORMS[key] = norm_bound(op, tight=tight)
    if len(_NORMS) > LARGEST:
        _NORMS.popitem(last=False)
    return _NORMS[key]
