"""Losses along directions, and perturbations that turn with the weights."""

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.analyze.landscape.attacked import Adversary
from holdfast.analyze.landscape.surface import perturbation_similarity, surface
from holdfast.analyze.landscape.weight_directions import filter_direction, moved, random_direction
from holdfast.errors import InputError


@pytest.fixture
def task():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(18, 2)).eval()
    return model, torch.rand(10, 1, 3, 4), torch.randint(2, (10,))


def test_every_filter_of_a_direction_has_the_norm_of_the_models(task):
    model = task[0]
    parts = filter_direction(model, 1).split([p.numel() for p in model.parameters()])
    for part, p in zip(parts, model.parameters(), strict=True):
        if p.ndim == 1:
            assert not bool(part.any())
        else:
            torch.testing.assert_close(part.view_as(p).flatten(1).norm(dim=1), p.detach().flatten(1).norm(dim=1))
    assert torch.equal(filter_direction(model, 1), filter_direction(model, 1))
    assert not torch.equal(filter_direction(model, 1), filter_direction(model, 2))
    assert float(random_direction(model, 0).norm()) == pytest.approx(1)


def test_the_loss_at_zero_is_the_models_and_elsewhere_the_moved_models(task):
    model, x, y = task
    adversary = Adversary(hf.Linf(0.1), steps=10)
    v = torch.stack([filter_direction(model, seed) for seed in (1, 2)])
    found = surface(model, x, y, adversary, v, [(0.0, 0.0), (2.0, -1.5)])
    assert float(found[0]) == pytest.approx(adversary.loss(model, x, y), rel=1e-6)
    there = moved(model, 2.0 * v[0] - 1.5 * v[1])
    assert float(found[1]) == pytest.approx(adversary.loss(there, x, y), rel=1e-6)
    frozen = nn.functional.cross_entropy(there(adversary.perturb(model, x, y)), y)
    assert float(found[1]) > float(frozen)  # the attack is renewed
    with pytest.raises(InputError, match=r"shape \(D, "):
        surface(model, x, y, adversary, v[:, 1:], [(0.0, 0.0)])


def test_perturbations_agree_at_zero_and_part_where_a_linear_model_flips(task):
    """Of a linear model the sign of w_1 - w_0 decides: the cosine counts the signs that theta ± a v share."""
    _, x, y = task
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 2)).eval()
    x = 0.3 + 0.4 * x
    v = random_direction(model, 0)
    adversary = Adversary(hf.Linf(0.1), steps=5)
    sizes = (0.0, 0.5, 1.0)
    found = perturbation_similarity(model, x, y, adversary, v, sizes)
    assert float(found[0]) == pytest.approx(1)
    w, step = (flat[:24].view(2, 12) for flat in (torch.cat([p.flatten() for p in model.parameters()]).detach(), v))
    for a, cosine in zip(sizes, found.tolist(), strict=True):
        signs = [((w[1] - w[0]) + side * a * (step[1] - step[0])).sign() for side in (1, -1)]
        assert cosine == pytest.approx(float((signs[0] * signs[1]).mean()), abs=1e-6)
    assert float(found[-1]) < 1


def test_an_adversary_without_a_budget_moves_nothing(task):
    model, x, y = task
    with pytest.raises(InputError, match="moves no input"):
        perturbation_similarity(model, x, y, Adversary(hf.Linf(0.0)), random_direction(model, 0), [0.1])
