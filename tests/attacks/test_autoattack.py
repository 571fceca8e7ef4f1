"""The ensemble: its order, who works on what, and that it is as strong as its members."""

import pytest
import torch
from nets import tiny_nets
from torch import nn

import holdfast as hf
from holdfast.attacks import autoattack
from holdfast.errors import InputError
from holdfast.random import Noise
from holdfast.results import AttackResult

MEMBERS = {
    "standard": ["apgd-ce", "apgd-t", "fab-t", "square"],
    "plus": ["apgd-ce", "apgd-dlr", "fab", "square", "apgd-t", "fab-t"],
    "rand": ["apgd-ce", "apgd-dlr"],
}


def task(batch=16):
    model, shape = tiny_nets()["cnn"]
    x = torch.rand(batch, *shape, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        model[-1].bias -= model(x).mean(0)
        return model, x, model(x).argmax(1)


def test_the_published_members_in_their_order_with_their_budgets():
    versions = autoattack.VERSIONS
    assert {v: [f.__name__.replace("_", "-") for f, _ in members] for v, members in versions.items()} == MEMBERS
    assert [options for _, options in versions["standard"]] == [{}] * 4
    assert [options.get("restarts", 1) for _, options in versions["plus"]] == [5, 5, 5, 1, 1, 1]
    assert [options["samples"] for _, options in versions["rand"]] == [20, 20]


def test_each_member_gets_the_survivors_alone_and_signs_what_it_breaks(monkeypatch):
    """Three members that each break the first two inputs they see."""
    seen = []

    def member(name):
        def attack(model, x, y, threat, *, noise):
            seen.append((name, noise.index.tolist()))
            success = torch.arange(len(x)) < 2
            by = tuple(name if s else "" for s in success.tolist())
            return AttackResult(x, success, by, torch.ones_like(y), torch.full_like(y, 2))

        return attack

    monkeypatch.setattr(autoattack, "VERSIONS", {"standard": [(member(name), {}) for name in "abc"]})
    model, x, y = task(5)
    result = autoattack.autoattack(model, x, y, hf.Linf(0.1))
    assert seen == [("a", [0, 1, 2, 3, 4]), ("b", [2, 3, 4]), ("c", [4])]
    assert result.by == ("a", "a", "b", "b", "c")
    assert result.gradients.tolist() == [1, 1, 2, 2, 3]
    assert result.queries.tolist() == [2, 2, 4, 4, 6]


@pytest.mark.usefixtures("short_autoattack")
@pytest.mark.parametrize("threat", [hf.Linf(0.05), hf.L2(0.15), hf.L1(0.4)], ids=str)
@pytest.mark.parametrize("version", ["standard", "plus"])
def test_the_ensemble_breaks_what_each_member_does(version, threat):
    model, x, y = task()
    result = hf.attack(model, x, y, threat, "autoattack", version=version)
    assert set(result.by) <= {*MEMBERS[version], ""}
    assert torch.equal(model(result.x_adv).argmax(1) != y, result.success)
    # With the noise that the ensemble gives to it, each member breaks nothing that the ensemble does not.
    for number, (function, options) in enumerate(autoattack.VERSIONS[version]):
        noise = Noise.for_batch(0, len(x)).fork(number)
        alone = function(model, x, y, threat, noise=noise, **options)
        assert not bool((alone.success & ~result.success).any())


@pytest.mark.usefixtures("short_autoattack")
@pytest.mark.parametrize("classes", [2, 3, 5, 10, 100])
def test_exact_on_linear_models_of_few_and_many_classes(classes):
    """On a linear model the worst case of each other class is known, and the nearest one decides."""
    model = nn.Linear(6, classes).eval()
    x = 0.3 + 0.4 * torch.rand(12, 6)
    y = model(x).argmax(1).detach()
    threat = hf.Linf(0.05)
    with torch.no_grad():
        z = model(x)
        gap = z.gather(1, y[:, None]) - z
        reach = 0.05 * (model.weight[y][:, None] - model.weight[None]).abs().sum(2)
        worst = (reach - gap).scatter(1, y[:, None], -torch.inf).amax(1)
    success = hf.attack(model, x, y, threat, "autoattack").success
    assert not bool((success & (worst < 0)).any())
    assert bool(success[worst > 0.02].all())


@pytest.mark.usefixtures("short_autoattack")
def test_the_version_for_random_models():
    class Noisy(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, x):
            return self.model(x + 0.02 * torch.randn_like(x))

    model, x, y = task()
    noisy = Noisy(model).eval()
    result = hf.attack(noisy, x, y, hf.Linf(0.15), "autoattack", version="rand")
    assert set(result.by) <= {*MEMBERS["rand"], "clean", ""}
    attacked = torch.tensor([by in MEMBERS["rand"] for by in result.by])
    assert bool(attacked.any())
    assert bool((model(result.x_adv).argmax(1) != y)[attacked].float().mean() > 0.7), "the noise is small"
    assert bool((result.queries[attacked] > autoattack.VOTES).all())
    with pytest.raises(InputError, match="version='rand'"):
        hf.attack(noisy, x, y, hf.Linf(0.15), "autoattack")


def test_an_unknown_version_is_refused():
    model, x, y = task(2)
    with pytest.raises(InputError, match="Did you mean 'standard'"):
        hf.attack(model, x, y, hf.Linf(0.1), "autoattack", version="standart")
