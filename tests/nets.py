"""Networks and short options that the tests share; most are in `holdfast.testing`."""

import torch
from torch import nn

import holdfast as hf
from holdfast.models import Normalize
from holdfast.models.layers import MinMax
from holdfast.models.zoo.liresnet import liresnet, minmax_cnn
from holdfast.models.zoo.potential import sll_cnn
from holdfast.testing.networks import Residual, draw_nets, settle
from holdfast.testing.subject import short_options

__all__ = ["QUICK", "QUICK_ATTACKS", "Residual", "Whole", "lipschitz_nets", "settle", "tiny_nets"]


def tiny_nets() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    """Name -> (network in eval mode, shape of one input); what a test draws next follows from them."""
    torch.manual_seed(1)
    return draw_nets()


QUICK = {method.name: short_options(method) for kind in ("bounds", "certify") for method in hf.methods(kind)}
"""Options that make the costly certificates fast enough for tests that run all of them."""

QUICK_ATTACKS = {method.name: short_options(method) for method in hf.methods("attack")}
"""Options that make each attack short; AutoAttack has none, but a fixture, `short_autoattack`."""


class Whole(nn.Module):
    """The same model, but no `Sequential`: its gradient comes from autograd."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x)


def lipschitz_nets():
    """Random networks made for Lipschitz bounds, and all tiny ones, in eval mode, with the shape of their inputs."""
    torch.manual_seed(1)
    mlp = nn.Sequential(nn.Linear(6, 8), MinMax(), nn.Linear(8, 8), MinMax(), nn.Linear(8, 4)).eval()
    blocks = liresnet((1, 8, 8), 3, depth=2, width=4, neck=6, stem=(3, 1, 1)).eval()
    body = minmax_cnn((1, 8, 8), 3, layers=((4, 4, 2, 1),), hidden=(6,))
    front = nn.Sequential(Normalize([0.5], [0.25]), body).eval()
    down = sll_cnn((1, 8, 8), 3, layers=((4, 4, 2, 1),), hidden=(6,), depth=1).eval()
    made = {"minmax": (mlp, (6,)), "liresnet": (blocks, (1, 8, 8)), "normalised": (front, (1, 8, 8))}
    return {**made, "potential": (down, (1, 8, 8)), **tiny_nets()}
