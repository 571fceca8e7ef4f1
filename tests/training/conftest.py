"""A toy problem that trains in milliseconds: is the left or the right half of a 5x4 image brighter?"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from holdfast import registry
from holdfast.data import Dataset, Split


def toy_split(count: int, seed: int) -> Split:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 1, 5, 4, generator=generator) * 0.5
    y = torch.arange(count) % 2
    x[y == 0, :, :, :2] += 0.4
    x[y == 1, :, :, 2:] += 0.4
    return Split(x, y)


@pytest.fixture
def toy_data() -> Dataset:
    return Dataset("toy", toy_split(70, 0), toy_split(20, 1), ("left", "right"))


@pytest.fixture
def make_toy_model() -> Callable[..., nn.Module]:
    """Dropout and batch norm on purpose: one draws from the global generator, the other keeps running statistics."""

    def make(outputs: int = 2) -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(
            nn.Flatten(), nn.Linear(20, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, outputs)
        )

    return make


@pytest.fixture
def toy_recipe() -> dict[str, Any]:
    return {
        "threat": "linf:0.05",
        "epochs": 4,
        "batch_size": 16,
        "validation": 0.2,
        "objective": {"name": "at"},
        "attack": {"name": "pgd", "steps": 2},
        "optimizer": {"name": "sgd", "lr": 0.1},
        "evaluate": {"attack_steps": 2},
    }


@pytest.fixture
def add_objective() -> Iterator[Callable[..., None]]:
    """Registers an objective for one test."""
    names: list[str] = []

    def add(name: str, function: Callable[..., Any], threats: tuple[str, ...] = ()) -> None:
        registry.Objective(name, summary="for a test", reference="none", threats=threats)(function)
        names.append(name)

    yield add
    for name in names:
        registry._METHODS["train"].pop(name)
