"""A small network and a batch for certified training."""

import torch
from torch import nn

import holdfast as hf
from holdfast.training.objectives.core.certified import linear_bound

CROWN = linear_bound(1.0, lambda r, y: None)
BASE = {
    "data": "mnist-mini",
    "threat": "linf:0.1",
    "epochs": 2,
    "model": {"name": "mlp", "hidden": [16]},
    "objective": {"name": "ibp"},
    "optimizer": {"name": "adam", "lr": 2e-3},
    "budget": {"name": "smooth", "end": 1},
    "evaluate": {"count": 50, "attack_steps": 2},
}


def net(seed: int = 0, inputs: int = 6, classes: int = 3, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 8), nn.ReLU(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, classes)).to(dtype)


def batch(size: int = 5, inputs: int = 6, classes: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(size, inputs, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, classes, (size,), generator=generator)


def small_data() -> hf.Dataset:
    data = hf.load_data("mnist-mini")
    return hf.Dataset(data.name, data.train[:400], data.test[:50], data.classes)


def interval_net() -> nn.Module:
    """Intervals cover ELU, linear bounds do not."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 8), nn.ELU(), nn.Linear(8, 10))
