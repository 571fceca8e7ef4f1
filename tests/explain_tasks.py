"""Small tasks for tests of explanations."""

import torch
from torch import nn

from holdfast.explanations import BoundarySearch

QUICK_SEARCH = BoundarySearch(budgets=(0.5, 4.0), steps=2, starts=1, refine=3, attacks=("deepfool",))


def linear(features=6, classes=4):
    return nn.Linear(features, classes).double().eval()


def middle(count, features=6):
    """Points so far from the edge of the range that it plays no part."""
    return 0.4 + 0.2 * torch.rand(count, features, dtype=torch.float64)
