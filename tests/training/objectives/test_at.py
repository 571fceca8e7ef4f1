"""Adversarial training on linear models, where the worst case is known."""

from functools import partial

import pytest
import torch
from torch import nn

from contexts import make_context
from holdfast import InputError, Linf, methods
from holdfast.training.attack.pgd import pgd
from holdfast.training.context import Parts
from holdfast.training.objectives.at import at


def pgd_context(count, threat, **options):
    return make_context(count, threat, Parts(attack=partial(pgd, **options)))


@pytest.fixture
def linear():
    """Margin of class 1 over class 0: w.x with w = (2, -1, 0.5)."""
    model = nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.0, 0.0, 0.0], [2.0, -1.0, 0.5]]))
    return model


def test_registered_with_a_reference():
    table = {method.name: method for method in methods("train")}
    assert {"standard", "at"} <= set(table)
    assert "linf" in table["at"].threats
    assert all(method.reference and method.summary for method in table.values())


@pytest.mark.parametrize("random_start", [True, False])
def test_at_reaches_the_exact_worst_case_of_a_linear_model(linear, random_start):
    x, y = 0.3 + 0.4 * torch.rand(6, 3), torch.tensor([0, 1, 1, 0, 1, 0])
    loss, _ = at(linear, x, y, pgd_context(6, Linf(0.1), steps=5, random_start=random_start))
    # Every value moves by 0.1 against the margin: it falls by 0.1 * |w|_1.
    margin = (x @ torch.tensor([2.0, -1.0, 0.5])) * (2 * y - 1) - 0.1 * 3.5
    assert loss.item() == pytest.approx(torch.log1p(torch.exp(-margin)).mean().item(), rel=1e-5)
    loss.backward()
    assert linear.weight.grad is not None
    assert linear.weight.requires_grad


def test_at_step_size_limits_the_reach(linear):
    x, y = torch.full((2, 3), 0.5), torch.tensor([0, 1])
    losses = [
        at(linear, x, y, pgd_context(2, Linf(0.1), steps=2, step_size=size, random_start=False))[0].item()
        for size in (0.01, 0.05)
    ]
    assert losses[0] < losses[1]


def test_at_mode_of_the_attack():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).train()
    x, y = torch.rand(8, 3), torch.arange(8) % 2
    updates = {}
    for mode in ("eval", "train"):
        before = int(model[1].num_batches_tracked)
        at(model, x, y, pgd_context(8, Linf(0.1), steps=3, mode=mode))
        updates[mode] = int(model[1].num_batches_tracked) - before
        assert model.training
        assert model[1].training
    assert updates == {"eval": 1, "train": 4}


def test_at_needs_a_threat(linear):
    x, y = torch.rand(2, 3), torch.tensor([0, 1])
    with pytest.raises(InputError, match="threat: missing"):
        at(linear, x, y, make_context(2))


@pytest.mark.parametrize("divergence_weight", [0.0, 0.5])
def test_passes_in_bfloat16_give_a_loss_and_gradients_of_the_weights_close_to_those_in_full_precision(
    divergence_weight,
):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 4, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 3))
    x, y, gradients = torch.rand(6, 3, 8, 8), torch.arange(6) % 3, []
    for precision in ("full", "bfloat16"):
        context = pgd_context(6, Linf(0.1), steps=2)
        loss, metrics = at(model, x, y, context, divergence_weight=divergence_weight, precision=precision)
        assert loss.dtype == torch.float32
        assert 0 <= float(metrics["accuracy"]) <= 1
        gradients.append(torch.autograd.grad(loss, model.parameters())[0])
    full, half = gradients
    assert half.dtype == torch.float32
    assert not torch.equal(full, half)
    assert torch.cosine_similarity(full.flatten(), half.flatten(), dim=0) > 0.99
