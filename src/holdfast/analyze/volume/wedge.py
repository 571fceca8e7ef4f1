"""The wedge: two classes along a "Λ" with a vertical margin, the smallest problem with fits that generalise badly.

Class 1 lies on y = -|x|, class 0 a margin of 0.25 above it, x uniform on [-1, 1] (Chiang et al., "Loss landscapes are
all you need", 2023, section 7.3 of the thesis of P. Chiang, figure 7.1).
"""

import torch
from torch import Tensor, nn

from holdfast.data import Split
from holdfast.random import Noise

MARGIN = 0.25
TRAIN, TEST = 11, 5


def wedge_points(count: int, *, seed: int = 0, margin: float = MARGIN) -> Split:
    """Points of the wedge, x (count, 2) and y (count,); the classes take turns.

    >>> points = wedge_points(4)
    >>> points.y.tolist(), (points.x[:, 1] + points.x[:, 0].abs()).round(decimals=4).tolist()
    ([0, 1, 0, 1], [0.25, 0.0, 0.25, 0.0])
    """
    y = torch.arange(count) % 2
    across = 2 * Noise.for_batch(seed, count).uniform(()) - 1
    return Split(torch.stack([across, margin * (1 - y) - across.abs()], 1), y)


def wedge_task(*, seed: int = 0, train: int = TRAIN, test: int = TEST) -> tuple[Split, Split]:
    """Training and test points; they share no point."""
    points = wedge_points(train + test, seed=seed)
    return points[:train], points[train:]


def one_hidden_layer(units: int, *, hidden_bias: bool = False) -> nn.Sequential:
    """The perceptron of the toys: 2 inputs, `units` ReLUs, 2 logits."""
    return nn.Sequential(nn.Linear(2, units, bias=hidden_bias), nn.ReLU(), nn.Linear(units, 2)).eval()


def accuracy_of(logits: Tensor, y: Tensor) -> Tensor:
    """Share of the points that each network classifies right, (M,), of logits (M, B, K)."""
    return (logits.argmax(2) == y).double().mean(1)
