"""Truth on linear models, where the worst case is known in closed form."""

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.attacks.core.gradients import frozen, input_gradient
from holdfast.attacks.core.losses import cross_entropy, get_loss, margin
from holdfast.attacks.pgd import pgd


def linear(classes=2, size=9):
    model = nn.Linear(size, classes).double().eval()
    x = 0.3 + 0.4 * torch.rand(30, size, dtype=torch.float64)  # far from the ends of the range: no clipping
    return model, x, model(x).argmax(1).detach()


@pytest.mark.parametrize("threat", [hf.Linf(0.1), hf.L2(0.2), hf.L1(0.25)], ids=str)
@pytest.mark.parametrize("method", ["fgsm", "pgd"])
def test_the_exact_worst_case_of_a_linear_model(threat, method):
    model, x, y = linear()
    w = (model.weight[1] - model.weight[0]).detach() * (1 - 2 * y[:, None])
    clean = margin(model(x), y)
    worst = clean + threat.eps * threat.dual_norm(w)
    options = {"loss": "margin"} | (
        {"steps": 60, "sparsity": 0.0, "step_size": threat.eps / 4} if method == "pgd" else {}
    )
    result = hf.attack(model, x, y, threat, method, **options)
    assert torch.equal(result.success, worst > 0)
    held = ~result.success
    assert bool(held.any())
    assert bool(result.success.any())
    reached = margin(model(result.x_adv), y)[held]
    assert torch.allclose(reached, worst[held], atol=1e-3 if method == "pgd" else 1e-9)


def test_the_loss_of_the_kept_iterate_is_not_below_the_clean_loss():
    model = nn.Sequential(nn.Linear(9, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
    x = torch.rand(50, 9)
    y = model(x).argmax(1)
    result = pgd(model, x, y, hf.Linf(0.03), random_start=False)
    assert bool((cross_entropy(model(result.x_adv), y) >= cross_entropy(model(x), y) - 1e-6).all())


def test_more_restarts_never_raise_robust_accuracy():
    model = nn.Sequential(nn.Linear(9, 64), nn.ReLU(), nn.Linear(64, 4)).eval()
    x = torch.rand(100, 9)
    y = model(x).argmax(1)
    broken = [pgd(model, x, y, hf.Linf(0.05), steps=3, restarts=r).success for r in (1, 2, 5)]
    assert bool((broken[0] <= broken[1]).all())
    assert bool((broken[1] <= broken[2]).all())


def test_broken_inputs_leave_and_cost_no_more():
    model, x, y = linear()
    result = hf.attack(model, x, y, hf.Linf(0.3), "pgd", steps=40, step_size=0.1)
    assert bool(result.success.all())
    assert int(result.gradients.max()) < 10


def test_the_default_step_is_two_and_a_half_budgets_over_the_steps():
    model = nn.Linear(2, 2).double().eval()
    model.weight.data, model.bias.data = torch.tensor([[0.0, 0.0], [1.0, 1.0]]).double(), torch.zeros(2).double()
    x, y = torch.full((1, 2), 0.41, dtype=torch.float64), torch.tensor([0])
    model.bias.data[1] = -0.82 - 2 * 0.09  # broken from a change of 0.09 on
    for steps, needed in ((10, 5), (20, 9)):  # 4 steps of 0.025 or 8 of 0.0125, and a look at the end of the last
        result = pgd(model, x, y, hf.Linf(0.1), steps=steps, random_start=False)
        assert result.gradients.tolist() == [needed]
        assert bool(result.success.all())


def test_losses_equal_their_formulas():
    logits, y = torch.randn(20, 5, dtype=torch.float64), torch.randint(5, (20,))
    for i in range(20):
        z, c = logits[i], int(y[i])
        others = torch.cat([z[:c], z[c + 1 :]])
        assert torch.isclose(margin(logits, y)[i], others.max() - z[c])
        assert torch.isclose(cross_entropy(logits, y)[i], -torch.log(torch.exp(z)[c] / torch.exp(z).sum()))
    assert get_loss(margin) is margin


def test_freezing_leaves_the_input_gradient_as_it_is():
    model, x, y = linear()
    free = input_gradient(model, x, y, cross_entropy)
    with frozen(model):
        assert not model.weight.requires_grad
        held = input_gradient(model, x, y, cross_entropy)
    assert model.weight.requires_grad
    for a, b in zip(free, held, strict=True):
        assert torch.equal(a, b)
