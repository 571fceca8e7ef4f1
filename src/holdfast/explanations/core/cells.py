"""Squares of an image that count as one feature."""

import torch
from torch import Tensor

from holdfast.errors import InputError


def cells(x: Tensor, cell: int) -> Tensor:
    """Number of the feature of each value, shape of x[:1], int64; squares of side `cell`, over all channels."""
    if cell == 1:
        return torch.arange(x[0].numel(), device=x.device).view_as(x[:1])
    if x.ndim != 4:
        raise InputError(f"cells are for images (B, C, H, W), got inputs of shape {tuple(x.shape)}; leave out cell=")
    rows, columns = (torch.arange(side, device=x.device) // cell for side in x.shape[2:])
    grid = rows[:, None] * (int(columns[-1]) + 1) + columns
    return grid.expand_as(x[:1]).contiguous()
