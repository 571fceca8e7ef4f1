"""R+FGSM, I-FGSM and MI-FGSM: their formulas, written out, and the worst case of linear models."""

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.attacks.core.losses import cross_entropy, margin
from holdfast.attacks.fgsm import i_fgsm, mi_fgsm, r_fgsm
from holdfast.errors import InputError
from holdfast.random import Noise

ATTACKS = {"r-fgsm": r_fgsm, "i-fgsm": i_fgsm, "mi-fgsm": mi_fgsm}
BALLS = [hf.Linf(0.05), hf.L2(0.15), hf.L1(0.4), hf.Box(torch.linspace(0, 0.1, 12).view(3, 4))]


def task(classes=3, count=24, dtype=torch.float64):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, classes)).to(dtype).eval()
    x = torch.rand(count, 3, 4, dtype=dtype)
    with torch.no_grad():  # several classes, and inputs near their boundaries
        model[-1].bias -= model(x).mean(0)
    return model, x, model(x).argmax(1).detach()


def linear():
    torch.manual_seed(1)
    model = nn.Linear(9, 2).double().eval()
    x = 0.4 + 0.2 * torch.rand(30, 9, dtype=torch.float64)  # far from the ends of the range: no clipping
    return model, x, model(x).argmax(1).detach()


def gradient_of(model, x, y):
    x = x.clone().requires_grad_(True)
    return torch.autograd.grad(cross_entropy(model(x), y).sum(), x)[0]


def held_task(threat, attack, **options):
    """Inputs that the attack does not break: their trajectory is never cut short."""
    model, x, y = task()
    held = ~attack(model, x, y, threat, **options).success
    assert int(held.sum()) >= 5
    return model, x[held], y[held]


def test_the_steps_of_mi_fgsm_are_those_of_the_paper():
    threat = hf.Linf(0.01)
    model, x, y = held_task(threat, mi_fgsm, steps=5)
    g, x_adv, iterates = torch.zeros_like(x), x, [x]
    for _ in range(5):
        gradient = gradient_of(model, x_adv, y)
        g = 1.0 * g + gradient / gradient.abs().mean((1, 2), keepdim=True)
        x_adv = (x_adv + 0.002 * g.sign()).clamp(0, 1)
        iterates.append(x_adv)
    losses = torch.stack([cross_entropy(model(point), y) for point in iterates])
    expected = torch.stack(iterates)[losses.argmax(0), torch.arange(len(x))]
    assert torch.allclose(mi_fgsm(model, x, y, threat, steps=5).x_adv, expected, atol=1e-12)


def test_mi_fgsm_for_l2_steps_along_the_unit_vector():
    threat = hf.L2(0.02)
    model, x, y = held_task(threat, mi_fgsm, steps=2)
    first = gradient_of(model, x, y)
    middle = (x + 0.01 * first / first.flatten(1).norm(dim=1)[:, None, None]).clamp(0, 1)
    second = gradient_of(model, middle, y)
    g = first / first.abs().sum((1, 2), keepdim=True) + second / second.abs().sum((1, 2), keepdim=True)
    last = threat.project(middle + 0.01 * g / g.flatten(1).norm(dim=1)[:, None, None], x)
    result = mi_fgsm(model, x, y, threat, steps=2)
    rose = cross_entropy(model(last), y) > cross_entropy(model(middle), y)
    assert int(rose.sum()) > 3
    assert torch.allclose(result.x_adv[rose], last[rose], atol=1e-12)


class Steep(nn.Module):
    """Logits (4 u^2 + v, 10): the cross-entropy of class 1 has gradients whose size grows without end."""

    def forward(self, x):
        return torch.stack([4 * x[:, 0] ** 2 + x[:, 1], torch.full_like(x[:, 0], 10.0)], 1)


@pytest.mark.parametrize("decay", [0.0, 0.3, 1.0])
def test_each_gradient_counts_with_norm_one_and_fades_by_the_decay(decay):
    threat, model = hf.L2(3.0, low=-5.0, high=5.0), Steep().eval()
    x, y = torch.tensor([[0.2, 0.9], [0.1, -0.5]], dtype=torch.float64), torch.tensor([1, 1])
    g, x_adv, sizes = torch.zeros_like(x), x, []
    for _ in range(3):
        gradient = gradient_of(model, x_adv, y)
        sizes.append(gradient.abs().sum(1, keepdim=True))
        g = decay * g + gradient / sizes[-1]
        x_adv = x_adv + 0.3 * g / g.norm(dim=1, keepdim=True)
    assert bool((sizes[2] > 3 * sizes[0]).all())
    result = mi_fgsm(model, x, y, threat, steps=3, step_size=0.3, decay=decay)
    assert not bool(result.success.any())
    assert torch.allclose(result.x_adv, x_adv, atol=1e-12)


def test_momentum_remembers_and_i_fgsm_does_not():
    threat = hf.Linf(0.02)
    model, x, y = task()
    plain = i_fgsm(model, x, y, threat, steps=6, step_size=0.02)
    forgetful = mi_fgsm(model, x, y, threat, steps=6, step_size=0.02, decay=0.0)
    assert torch.equal(plain.x_adv, forgetful.x_adv)
    x_adv = x + 0.02 / 10 * gradient_of(model, x, y).sign()
    once = i_fgsm(model, x, y, threat, steps=1, step_size=0.002)
    assert torch.allclose(once.x_adv, x_adv.clamp(0, 1), atol=1e-12)


def test_r_fgsm_is_a_random_sign_step_and_a_gradient_step():
    threat = hf.Linf(0.01)
    model, x, y = task()
    noise = Noise.for_batch(4, len(x))
    middle = (x + 0.005 * noise.normal((3, 4), torch.float64).sign()).clamp(0, 1)
    end = (middle + 0.005 * gradient_of(model, middle, y).sign()).clamp(0, 1)
    result = r_fgsm(model, x, y, threat, noise=noise)
    held = ~result.success & (cross_entropy(model(end), y) > cross_entropy(model(middle), y))
    assert int(held.sum()) > 10
    assert torch.allclose(result.x_adv[held], end[held], atol=1e-12)
    other = r_fgsm(model, x, y, threat, noise=Noise.for_batch(5, len(x)))
    assert not torch.equal(other.x_adv, result.x_adv)
    without = r_fgsm(model, x, y, threat, random_share=0.0)
    assert torch.allclose(without.x_adv, hf.attack(model, x, y, threat, "fgsm").x_adv)


@pytest.mark.parametrize("threat", [hf.Linf(0.05), hf.L2(0.1), hf.L1(0.2)], ids=str)
@pytest.mark.parametrize("name", ["i-fgsm", "mi-fgsm"])
def test_the_exact_worst_case_of_a_linear_model(name, threat):
    model, x, y = linear()
    w = (model.weight[1] - model.weight[0]).detach() * (1 - 2 * y[:, None])
    worst = margin(model(x), y) + threat.eps * threat.dual_norm(w)
    result = ATTACKS[name](model, x, y, threat, loss="margin")
    held = ~result.success
    assert torch.equal(result.success, worst > 0)
    assert bool(held.any())
    assert torch.allclose(margin(model(result.x_adv), y)[held], worst[held], atol=1e-9)


@pytest.mark.parametrize("threat", BALLS, ids=str)
@pytest.mark.parametrize("name", ATTACKS)
def test_the_answer_for_an_input_does_not_depend_on_the_batch(name, threat):
    model, x, y = task()
    noise = Noise(2, torch.arange(len(x)) + 50)
    whole = ATTACKS[name](model, x, y, threat, noise=noise)
    assert 0 < int(whole.success.sum()) < len(x)
    order = torch.arange(len(x)).flip(0)
    turned = ATTACKS[name](model, x[order], y[order], threat, noise=noise[order])
    assert torch.allclose(turned.x_adv[order], whole.x_adv, atol=1e-12)
    for i in range(0, len(x), 5):
        alone = ATTACKS[name](model, x[i : i + 1], y[i : i + 1], threat, noise=noise[i : i + 1])
        assert torch.allclose(alone.x_adv[0], whole.x_adv[i], atol=1e-12)
        assert alone.by[0] == whole.by[i] == (name if whole.success[i] else "")
        assert int(alone.queries[0]) == int(whole.queries[i])


@pytest.mark.parametrize("threat", BALLS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("classes", [2, 10])
@pytest.mark.parametrize("name", ATTACKS)
def test_points_lie_in_the_set_and_successes_are_misclassified(name, classes, dtype, threat):
    model, x, y = task(classes, dtype=dtype)
    result = ATTACKS[name](model, x, y, threat)
    assert result.x_adv.dtype == dtype
    assert bool(threat.contains(result.x_adv, x).all())
    assert torch.equal(model(result.x_adv).argmax(1) != y, result.success)


@pytest.mark.parametrize(("name", "steps"), [("r-fgsm", 1), ("i-fgsm", 10), ("mi-fgsm", 10)])
def test_counts_are_exact(name, steps):
    model, x, y = task()
    seen = []
    handle = model.register_forward_hook(lambda *call: seen.append((len(call[2]), call[2].requires_grad)))
    result = ATTACKS[name](model, x, y, hf.Linf(1e-5))
    handle.remove()
    assert not bool(result.success.any())
    assert result.gradients.tolist() == [steps] * len(x)
    assert result.queries.tolist() == [steps + 1] * len(x)
    assert sum(size for size, _ in seen) == int(result.queries.sum())
    assert sum(size for size, with_gradient in seen if with_gradient) == int(result.gradients.sum())


@pytest.mark.parametrize("threat", [hf.Linf(0.0), hf.L2(0.0), hf.L1(0.0)], ids=str)
@pytest.mark.parametrize("name", ATTACKS)
def test_no_budget_no_change(name, threat):
    model, x, y = task()
    result = ATTACKS[name](model, x, y, threat)
    assert not bool(result.success.any())
    assert torch.equal(result.x_adv, x)


@pytest.mark.parametrize("name", ATTACKS)
def test_a_final_softmax_is_seen_through(name):
    model, x, y = task()
    plain = ATTACKS[name](model, x, y, hf.Linf(0.02))
    masked = ATTACKS[name](nn.Sequential(model, nn.Softmax(1)).eval(), x, y, hf.Linf(0.02))
    assert not bool(plain.success.all())
    assert torch.equal(plain.x_adv, masked.x_adv)


@pytest.mark.parametrize(
    ("name", "option", "message"),
    [
        ("i-fgsm", {"steps": 0}, "expected an integer >= 1, got 0"),
        ("mi-fgsm", {"steps": 0}, "expected an integer >= 1, got 0"),
        ("mi-fgsm", {"decay": -0.5}, "expected a number >= 0, got -0.5"),
        ("r-fgsm", {"random_share": 1.5}, "between 0 and 1, got 1.5"),
    ],
)
def test_bad_options_are_refused(name, option, message):
    model, x, y = task()
    with pytest.raises(InputError, match=message):
        hf.attack(model, x, y, hf.Linf(0.1), name, **option)
