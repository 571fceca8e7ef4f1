"""Second-order statistics: targets from the correlation of the outputs."""

from functools import partial

import pytest
import torch
from hypothesis import given
from torch.nn.functional import cross_entropy

from contexts import make_context
from holdfast import Linf
from holdfast.training.context import Parts
from holdfast.training.objectives.at import at
from holdfast.training.regularizers.s2o import correlation_targets, s2o
from regularizer_tasks import OBJECTIVES, batches, make_model


@pytest.fixture
def batch():
    torch.manual_seed(2)
    x = torch.rand(6, 4, dtype=torch.float64)
    return x, (x + 0.2 * torch.randn_like(x)).clamp(0, 1), torch.arange(6) % 3


def random_logits(shape):
    classes, count, seed = shape
    return 5 * torch.randn(count, classes, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@given(batches)
def test_correlation_targets_are_distributions_with_a_fifth_on_the_label(shape):
    targets = correlation_targets(random_logits(shape))
    classes = shape[0]
    assert targets.shape == (classes, classes)
    assert (targets >= 0).all()
    assert torch.allclose(targets.sum(1), torch.ones(classes, dtype=torch.float64))
    assert torch.allclose(targets.diagonal(), torch.full((classes,), 0.2, dtype=torch.float64))


@given(batches)
def test_correlation_targets_follow_a_permutation_of_the_classes(shape):
    logits = random_logits(shape)
    order = torch.randperm(shape[0], generator=torch.Generator().manual_seed(shape[2]))
    permuted = correlation_targets(logits[:, order])
    assert torch.allclose(permuted, correlation_targets(logits)[order][:, order])


def test_correlation_targets_by_hand():
    """M = [[5, 1, 2], [1, 2, 1], [2, 1, 1]]; the first row of -|M| above its least is (0, 4, 3), and so on."""
    targets = correlation_targets(torch.tensor([[2.0, 1.0, 1.0], [-1.0, 1.0, 0.0]]).double())
    expected = torch.tensor([[0.2, 0.8 * 4 / 7, 0.8 * 3 / 7], [0.4, 0.2, 0.4], [0.0, 0.8, 0.2]]).double()
    assert torch.allclose(targets, expected)
    alike = correlation_targets(torch.zeros(3, 4))
    assert torch.allclose(alike, torch.full((4, 4), 0.8 / 3) + (0.2 - 0.8 / 3) * torch.eye(4))


def soft_loss(logits, y):
    with torch.no_grad():
        target = correlation_targets(logits)[y]
    entropy = torch.where(target > 0, target * target.clamp(min=1e-300).log(), 0.0)
    return (entropy - target * logits.log_softmax(1)).sum(1).mean()


@pytest.mark.parametrize("name", ["at", "trades", "standard"])
def test_s2o_replaces_a_share_of_the_fit_and_leaves_the_rest(batch, name):
    """(1 - w) fit + w s2o + rest, s2o the mean over the outputs at x and at x'; no gradient through the targets."""
    x, x_adv, y = batch
    model = make_model()
    parts = Parts(attack=lambda *_: x_adv, regularizers={"s2o": partial(s2o, weight=0.3)})
    loss, metrics = OBJECTIVES[name](model, x, y, make_context(x, Linf(0.1), parts))
    z, z_adv = model(x), model(x if name == "standard" else x_adv)
    rest = 0.0
    if name == "trades":
        rest = 6 * (z.softmax(1) * (z.log_softmax(1) - z_adv.log_softmax(1))).sum(1).mean()
    fitted = cross_entropy(z if name == "trades" else z_adv, y)
    value = (soft_loss(z, y) + soft_loss(z_adv, y)) / 2
    expected = 0.7 * fitted + 0.3 * value + rest
    assert loss.item() == pytest.approx(expected.item())
    assert metrics["s2o_value"].item() == pytest.approx(value.item())
    for a, b in zip(*(torch.autograd.grad(v, list(model.parameters())) for v in (loss, expected)), strict=True):
        assert torch.allclose(a, b, atol=1e-9)


def test_frobenius_form_of_s2o(batch):
    x, x_adv, y = batch
    model = make_model()
    parts = Parts(attack=lambda *_: x_adv, regularizers={"s2o": partial(s2o, weight=0.3, form="frobenius")})
    loss, _ = at(model, x, y, make_context(x, Linf(0.1), parts))
    norms = []
    for point in (x, x_adv):
        z = model(point) - model(point).mean(0)
        norms.append(sum(torch.outer(row, row) for row in z).div(len(z)).square().sum().sqrt())
    assert loss.item() == pytest.approx((cross_entropy(model(x_adv), y) + 0.3 * sum(norms) / 2).item())
