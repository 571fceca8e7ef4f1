"""Alignment of input gradients."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cosine_similarity, cross_entropy

from contexts import make_context
from holdfast import L2, Linf
from holdfast.training.context import Parts
from holdfast.training.objectives.standard import standard
from holdfast.training.regularizers.grad_align import grad_align
from regularizer_tasks import make_model


@pytest.fixture
def batch():
    torch.manual_seed(2)
    x = torch.rand(6, 4, dtype=torch.float64)
    return x, (x + 0.2 * torch.randn_like(x)).clamp(0, 1), torch.arange(6) % 3


@pytest.mark.parametrize("threat", [Linf(0.3), L2(0.5)])
def test_gradients_of_a_linear_model_of_two_classes_are_aligned(threat):
    torch.manual_seed(0)
    model = nn.Linear(4, 2).double()
    x, y = torch.rand(6, 4, dtype=torch.float64), torch.arange(6) % 2
    parts = Parts(regularizers={"grad-align": grad_align})
    loss, metrics = standard(model, x, y, make_context(x, threat, parts))
    assert metrics["grad-align_misaligned"].item() == pytest.approx(0, abs=1e-12)
    assert loss.item() == pytest.approx(cross_entropy(model(x), y).item())


def misaligned(model, x, y, moved):
    found = []
    for i in range(len(x)):
        point = torch.stack([x[i], moved[i]]).requires_grad_(True)
        loss = cross_entropy(model(point), y[i].repeat(2), reduction="sum")
        found.append(1 - cosine_similarity(*torch.autograd.grad(loss, point, create_graph=True)[0], dim=0))
    return torch.stack(found).mean()


def test_alignment_by_hand_and_its_gradient_by_finite_differences(batch):
    x, _, y = batch
    model = make_model()

    def penalty():
        parts = Parts(regularizers={"grad-align": partial(grad_align, weight=0.7)})
        context = make_context(x, Linf(0.4), parts)
        return standard(model, x, y, context)[0] - standard(model, x, y, make_context(x, Linf(0.1)))[0]

    moved = Linf(0.4).random_start(x, make_context(x, Linf(0.1)).noise.fork(1))
    expected = 0.7 * misaligned(model, x, y, moved)
    assert expected > 1e-4
    assert penalty().item() == pytest.approx(expected.item(), rel=1e-6)
    (gradient,) = torch.autograd.grad(penalty(), model[0].weight)
    for place in ((0, 0), (3, 2), (7, 3)):
        values = []
        for shift in (1e-5, -2e-5, 1e-5):
            with torch.no_grad():
                model[0].weight[place] += shift
            values.append(penalty().item())
        assert gradient[place].item() == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-4, abs=1e-9)
