"""One step of training without a run: the context that an objective, an attack or a regulariser is given."""

from typing import Any

import torch
from torch import Tensor

from holdfast.random import Noise
from holdfast.threats import Threat
from holdfast.training.augment import Transform
from holdfast.training.context import Context, Parts


def make_context(
    batch: Tensor | int, threat: Threat | None = None, parts: Parts | None = None, *, seed: int = 0, **fields: Any
) -> Context:
    """The first step on a batch, or on so many inputs; `fields` are those of `Context` that differ from this one's."""
    count = batch if isinstance(batch, int) else len(batch)
    index = torch.arange(count)
    usual: dict[str, Any] = {
        "epoch": 0,
        "step": 0,
        "progress": 0.0,
        "index": index,
        "noise": Noise(seed, index),
        "transform": Transform(),
        "state": {},
        "count": count,
        "optimizer": torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1),
        "adversary": threat,
        "parts": parts or Parts(),
    }
    return Context(**usual | fields)
