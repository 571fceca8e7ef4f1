"""Tiny networks with known shapes, one of each kind of layer."""

import torch
from torch import nn

from holdfast.bounding import Ascent
from holdfast.models import Normalize
from holdfast.models.layers import MinMax
from holdfast.models.zoo.liresnet import liresnet, minmax_cnn


class Residual(nn.Module):
    """Residual, concatenating, normalising network for images of 2 x 7 x 5."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.4, 0.6]).view(1, 2, 1, 1))
        self.conv = nn.Conv2d(2, 4, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.inner = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(8, classes)

    def forward(self, x):
        h = torch.relu(self.norm(self.conv((x - self.mean) / 0.5)))
        h = torch.cat([h + self.inner(h), h - torch.tanh(self.inner(h))], 1)
        return self.head(h.mean((2, 3)).view(x.size(0), -1))


def settle(model: nn.Module) -> nn.Module:
    """Batch norm statistics other than 0 and 1, then eval mode."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.3, 0.3)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
    return model.eval()


def tiny_nets() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    """Name -> (network in eval mode, shape of one input)."""
    torch.manual_seed(1)
    nets = {
        "linear": (nn.Linear(6, 4), (6,)),
        "mlp": (nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)), (6,)),
        "smooth": (nn.Sequential(nn.Linear(5, 12), nn.Sigmoid(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 2)), (5,)),
        "cnn": (
            nn.Sequential(
                nn.Conv2d(2, 4, 3, stride=2, padding=1),
                nn.BatchNorm2d(4),
                nn.LeakyReLU(0.1),
                nn.AvgPool2d(2, ceil_mode=True, padding=1),
                nn.Conv2d(4, 6, 2, bias=False),
                nn.ReLU(),
                nn.Flatten(),
                nn.Dropout(0.5),
                nn.Linear(12, 5),
            ),
            (2, 7, 5),
        ),
        "pooled": (
            nn.Sequential(
                nn.Conv2d(1, 4, 3, padding="same"),
                nn.ReLU(),
                nn.MaxPool2d(2, padding=1),
                nn.AdaptiveAvgPool2d(2),
                nn.Flatten(),
                nn.Linear(16, 3),
            ),
            (1, 6, 5),
        ),
        "residual": (Residual(), (2, 7, 5)),
    }
    return {name: (settle(net), shape) for name, (net, shape) in nets.items()}


QUICK = {"alpha-crown": {"ascent": Ascent(iterations=3)}, "nonuniform": {"steps": 3}, "milp": {"time_limit": 2.0}}
"""Options that make the costly certificates fast enough for tests that run all of them."""

QUICK_ATTACKS = {
    "pgd": {"steps": 5},
    "multi-targeted": {"steps": 4, "targets": 2},
    "apgd-ce": {"steps": 6},
    "apgd-dlr": {"steps": 6},
    "apgd-t": {"steps": 5, "targets": 2},
    "eot-pgd": {"samples": 2, "steps": 4, "votes": 3},
    "eot-fgsm": {"samples": 2, "votes": 3},
    "fab": {"steps": 4},
    "fab-t": {"steps": 4, "targets": 2},
    "square": {"queries": 30},
    "cascade": {"steps": 5, "targets": 2, "queries": 20},
    "i-fgsm": {"steps": 5},
    "mi-fgsm": {"steps": 5},
    "hopskipjump": {"steps": 3, "initial_evaluations": 10, "max_evaluations": 20, "starts": 10},
    "patch-pgd": {"steps": 5, "restarts": 3, "probes": 16, "together": 2, "step_size": 0.2},
    "sparse-pgd": {"steps": 5, "restarts": 2},
    "sparse-rs": {"queries": 30},
    "substitute": {"rounds": 2, "steps": 8, "copies": 4},
    "spsa": {"steps": 4, "samples": 8, "step_size": 0.03},
    "nes": {"steps": 4, "samples": 8},
    "cw": {"steps": 6, "rounds": 2, "c": 0.1},
    "deepfool": {"steps": 5},
    "fmn": {"steps": 8},
    "ddn": {"steps": 8, "epsilon": 0.3, "gamma": 0.2},
}
"""Options that make each attack short; those of one pass have none, AutoAttack has a fixture, `short_autoattack`."""


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
    return {"minmax": (mlp, (6,)), "liresnet": (blocks, (1, 8, 8)), "normalised": (front, (1, 8, 8)), **tiny_nets()}
