"""Small networks and settings that the tests share."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from nets import QUICK_ATTACKS, tiny_nets

from holdfast.attacks import autoattack

SLOW = (
    "analyze",
    "explanations",
    "testing",
    "certificates/complete",
    "bounding/lipschitz",
    "soundness",
    "audits",
    "serve",
    "runs",
    "cli",
    "apps",
    "training/recipe",
    "training/test_loop.py",
    "training/test_workers.py",
    "training/test_outside_files.py",
    "training/test_muon.py",
    "models/test_real_models.py",
    "models/test_models_hostile.py",
    "models/onnx",
    "certificates/complete",
    "bounding/linear/test_branches.py",
    "explanations/evaluate",
    "explanations/core/test_boundary.py",
    "attacks/core/test_indicators.py",
    "attacks/test_cascade.py",
    "attacks/test_cw.py",
    "attacks/test_substitute.py",
    "bounding/lipschitz/test_spectral_estimate.py",
    "testing",
    "test_docs.py",
    "test_earlier_files.py",
    "test_examples.py",
    "test_reproducible_files.py",
)
"""Folders and files of tests/ that `make quick` leaves out: processes, browsers, whole runs, every pair of methods."""

settings.register_profile("repo", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("repo")


def pytest_collection_modifyitems(items):
    """Mark as slow the tests of `SLOW`, and every set of parameters of a test but its first one."""
    here, seen = Path(__file__).parent, set()
    for item in items:
        path = os.fspath(item.path.relative_to(here)) if item.path.is_relative_to(here) else ""
        test = item.nodeid.partition("[")[0]
        if path.startswith(SLOW) or (test in seen and "[" in item.nodeid):
            item.add_marker(pytest.mark.slow)
        seen.add(test)


@pytest.fixture(autouse=True)
def _one_seed(monkeypatch, tmp_path):
    torch.manual_seed(0)
    monkeypatch.setenv("HOLDFAST_CACHE", os.fspath(tmp_path / "cache"))


@pytest.fixture(scope="session", autouse=True)
def _threads():
    torch.set_num_threads(1)  # the networks are tiny, and the tests run in parallel processes
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start


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
