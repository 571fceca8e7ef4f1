"""A small network with windows of every kind and inputs for it, for the tests of patches."""

import torch
from torch import Tensor, nn

from holdfast.bounding import interval
from holdfast.bounding.graph.ops import Graph
from holdfast.threats import Patch


def convnet(shape: tuple[int, ...] = (2, 9, 7), classes: int = 4, seed: int = 0) -> nn.Module:
    """Strides, a kernel without padding, batch norm: windows of every kind."""
    torch.manual_seed(seed)
    layers = [
        nn.Conv2d(shape[0], 3, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(3, 4, 4, stride=2, padding=1),
        nn.BatchNorm2d(4),
        nn.Sigmoid(),
        nn.Conv2d(4, 5, (3, 2), stride=(1, 2), padding=(2, 0), groups=1),
        nn.ReLU(),
        nn.Flatten(),
    ]
    features = nn.Sequential(*layers)(torch.zeros(2, *shape)).shape[1]
    return nn.Sequential(*layers, nn.Linear(features, classes))


def task(batch: int = 5, shape: tuple[int, ...] = (2, 9, 7), classes: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random inputs and the labels 0, 1, 2, ..."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(batch, *shape, generator=generator), torch.arange(batch) % classes


def dense_margins(graph: Graph, x: Tensor, y: Tensor, threat: Patch, corners: Tensor, reach: float) -> Tensor:
    """All values of all maps, one placement after the other: (B, L, K)."""
    rows = []
    for top, left in corners.tolist():
        lower, upper = x.clone(), x.clone()
        inside = (slice(None), slice(None), slice(top, top + threat.height), slice(left, left + threat.width))
        lower[inside], upper[inside] = (
            (x - reach)[inside].clamp(min=threat.low),
            (x + reach)[inside].clamp(max=threat.high),
        )
        rows.append(interval.margin_bounds(graph, lower, upper, y, sound=False))
    return torch.stack(rows, 1)
