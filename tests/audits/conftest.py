"""One thread: the models here are so small that a second one costs more than it brings. Short probes of the attack."""

from importlib import import_module

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _short_probes(monkeypatch):
    trust = import_module("holdfast.attacks.core.indicators")
    for name, cost in (("STEPS", 4), ("POINTS", 4), ("QUERIES", 10)):
        monkeypatch.setattr(trust, name, cost)
