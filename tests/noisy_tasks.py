"""A small network and a batch for training under noise."""

import torch
from torch import nn

from holdfast.random import Noise
from holdfast.training.objectives.core.noisy_copies import draw

RECIPE = {
    "threat": "l2:0.2",
    "epochs": 2,
    "batch_size": 16,
    "validation": 0.2,
    "optimizer": {"name": "sgd", "lr": 0.1},
    "evaluate": {"attack_steps": 0},
}


def net(seed=0, inputs=12, classes=4):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 8), nn.ReLU(), nn.Linear(8, classes))


def task(count=5, seed=1):
    torch.manual_seed(seed)
    return torch.rand(count, 1, 3, 4), torch.arange(count) % 4


def noisy_logits(model, x, sigma, samples, seed=0):
    """(B, m, K), one sample after the other."""
    shift = draw(x, Noise(seed, torch.arange(len(x))), sigma, samples)
    return torch.stack([model(x + shift[:, i]) for i in range(samples)], 1)
