"""MultiTargeted: every class gets its turn, in the order of the clean logits, on the survivors."""

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.attacks.core.ascent import ascend
from holdfast.attacks.core.losses import likely_targets, targeted_margin
from holdfast.attacks.multi_targeted import multi_targeted
from holdfast.errors import InputError
from holdfast.random import Noise

BALLS = [hf.Linf(0.04), hf.L2(0.12), hf.L1(0.3), hf.Box(torch.linspace(0, 0.1, 12).view(3, 4))]


def task(classes=5, count=24, dtype=torch.float64):
    torch.manual_seed(classes)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, classes)).to(dtype).eval()
    x = torch.rand(count, 3, 4, dtype=dtype)
    with torch.no_grad():  # several classes, and inputs near their boundaries
        model[-1].bias -= model(x).mean(0)
    return model, x, model(x).argmax(1).detach()


def test_targets_are_ranked_by_logit_without_the_label():
    logits = torch.tensor([[3.0, 1.0, 2.0, 0.0], [3.0, 1.0, 2.0, 3.0]])
    assert likely_targets(logits, torch.tensor([0, 1])).tolist() == [[2, 1, 3], [0, 3, 2]]
    assert likely_targets(logits, torch.tensor([3, 0]), 2).tolist() == [[0, 2], [3, 2]]
    assert likely_targets(logits[:, :2], torch.tensor([1, 0]), 9).tolist() == [[0], [1]]
    assert likely_targets(logits[:, :1], torch.tensor([0, 0])).shape == (2, 0)


@pytest.mark.parametrize("threat", BALLS, ids=str)
def test_it_breaks_all_that_any_single_target_breaks(threat):
    model, x, y = task()
    noise = Noise(3, torch.arange(len(x)))
    ranked = likely_targets(model(x), y)
    step = {"steps": 10, "step_size": 0.25 * threat.budget}
    union = torch.zeros(len(x), dtype=torch.bool)
    for k in range(4):
        x_start = threat.random_start(x, noise.fork(0))
        single = ascend(
            model, x, y, threat, x_start, loss=targeted_margin, target=ranked[:, k], name="single", **step
        ).success
        union |= single
        some = multi_targeted(model, x, y, threat, noise=noise, targets=k + 1, **step)
        assert torch.equal(some.success, union)
    assert 0 < int(union.sum()) < len(x)
    every = multi_targeted(model, x, y, threat, noise=noise, steps=10)
    assert torch.equal(every.success, union)
    again = multi_targeted(model, x, y, threat, noise=noise, steps=10, restarts=3)
    assert bool((again.success >= union).all())


@pytest.mark.parametrize("classes", [2, 3, 5, 10, 100])
def test_the_exact_answer_for_linear_models(classes):
    torch.manual_seed(classes)
    model = nn.Linear(9, classes).double().eval()
    x = 0.4 + 0.2 * torch.rand(30, 9, dtype=torch.float64)  # far from the ends of the range: no clipping
    with torch.no_grad():
        model.bias -= model(x).mean(0)
    y, eps = model(x).argmax(1), 0.02 if classes < 100 else 0.003
    logits, weight = model(x).detach(), model.weight.detach()
    gain = eps * (weight[None] - weight[y][:, None]).abs().sum(2)
    worst = (logits - logits.gather(1, y[:, None]) + gain).scatter(1, y[:, None], -torch.inf).amax(1)
    result = multi_targeted(model, x, y, hf.Linf(eps), steps=10)
    assert torch.equal(result.success, worst > 0)
    assert 0 < int(result.success.sum()) < 30
    held = ~result.success
    assert result.queries[held].unique().tolist() == [1 + 11 * (classes - 1)]
    assert result.gradients[held].unique().tolist() == [10 * (classes - 1)]


@pytest.mark.parametrize("threat", BALLS, ids=str)
def test_the_answer_for_an_input_does_not_depend_on_the_batch(threat):
    model, x, y = task()
    noise = Noise(2, torch.arange(len(x)) + 50)
    whole = multi_targeted(model, x, y, threat, noise=noise, steps=8, restarts=2)
    assert 0 < int(whole.success.sum()) < len(x)
    order = torch.arange(len(x)).flip(0)
    turned = multi_targeted(model, x[order], y[order], threat, noise=noise[order], steps=8, restarts=2)
    assert torch.allclose(turned.x_adv[order], whole.x_adv, atol=1e-12)
    for i in range(0, len(x), 5):
        one = slice(i, i + 1)
        alone = multi_targeted(model, x[one], y[one], threat, noise=noise[one], steps=8, restarts=2)
        assert torch.allclose(alone.x_adv[0], whole.x_adv[i], atol=1e-12)
        assert alone.by[0] == whole.by[i] == ("multi-targeted" if whole.success[i] else "")
        assert int(alone.queries[0]) == int(whole.queries[i])


@pytest.mark.parametrize("threat", BALLS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_points_lie_in_the_set_and_successes_are_misclassified(dtype, threat):
    model, x, y = task(dtype=dtype)
    result = multi_targeted(model, x, y, threat, steps=8)
    assert result.x_adv.dtype == dtype
    assert bool(threat.contains(result.x_adv, x).all())
    assert torch.equal(model(result.x_adv).argmax(1) != y, result.success)


def test_no_budget_no_change():
    model, x, y = task()
    result = multi_targeted(model, x, y, hf.L2(0.0), steps=3)
    assert not bool(result.success.any())
    assert torch.equal(result.x_adv, x)


@pytest.mark.parametrize("option", [{"steps": 0}, {"restarts": 0}, {"targets": 0}])
def test_bad_options_are_refused(option):
    model, x, y = task()
    with pytest.raises(InputError, match="expected an integer >= 1, got 0"):
        hf.attack(model, x, y, hf.Linf(0.1), "multi-targeted", **option)
