"""Small networks and settings that the tests share."""

import os

import pytest
import torch
from hypothesis import settings
from nets import QUICK_ATTACKS, tiny_nets

from holdfast.attacks import autoattack

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


@pytest.fixture(scope="module")
def short_autoattack():
    """AutoAttack has no budget to set, so its members get the short options of `QUICK_ATTACKS` instead of their own."""

    def short(function, options):
        return QUICK_ATTACKS[function.__name__.replace("_", "-")] | ({"samples": 3} if "samples" in options else {})

    members = {name: [(f, short(f, o)) for f, o in version] for name, version in autoattack.VERSIONS.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autoattack, "VERSIONS", members)
        yield
