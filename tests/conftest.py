"""Small networks and settings that the tests share."""

import os

import pytest
import torch
from hypothesis import settings
from nets import tiny_nets

settings.register_profile("repo", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("repo")


@pytest.fixture(autouse=True)
def _one_seed(monkeypatch, tmp_path):
    torch.manual_seed(0)
    monkeypatch.setenv("HOLDFAST_CACHE", os.fspath(tmp_path / "cache"))


@pytest.fixture(scope="session", autouse=True)
def _threads():
    torch.set_num_threads(1)  # the networks are tiny, and the tests run in parallel processes


@pytest.fixture(params=list(tiny_nets()))
def net(request):
    """Each of the tiny networks in turn: (model, shape of one input)."""
    return tiny_nets()[request.param]
