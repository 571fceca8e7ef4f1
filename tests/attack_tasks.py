"""Linear models and images on which the attacks of training are known in closed form."""

import torch
from torch import nn

from holdfast import L1, L2, Box, Linf
from holdfast.registry import get, methods
from holdfast.training.step import fit

W = torch.tensor([2.0, -1.0, 0.5])
EPS = 0.1
ATTACKS = [method.name for method in methods("train") if method.part == "attack"]
NORMS = {"linf": Linf(EPS), "l2": L2(EPS), "l1": L1(EPS), "box": Box(torch.tensor([0.1, 0.05, 0.2]))}


def linear():
    """Margin of class 1 over class 0: W.x."""
    model = nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.stack([torch.zeros(3), W]))
    return model


def run(name, model, x, y, context, **options):
    return get("train", name).function(model, x, y, fit, context, **options)


def with_margin(*margins):
    """Inputs of class 1 with these values of W.x, far from the ends of the valid range."""
    m = torch.tensor(margins)
    return 0.5 + (m - 0.5 * W.sum())[:, None] / W.square().sum() * W, torch.ones(len(m), dtype=torch.int64)


def images(count=6):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(40, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, torch.rand(count, 2, 5, 4), torch.arange(count) % 3
