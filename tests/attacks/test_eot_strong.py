"""EOT beyond the published form: Auto-PGD, queries, and the minimum over many settings."""

import math

import pytest
import torch
from nets import Whole, tiny_nets
from torch import nn

import holdfast as hf
from holdfast.attacks.core.chance import mean_prediction, seeded
from holdfast.attacks.core.losses import cross_entropy, dlr, margin
from holdfast.attacks.eot import Sampling, expected_gradient
from holdfast.attacks.eot_grid import Setting, eot_grid_of, published, stronger, weaker_with_more_draws
from holdfast.attacks.eot_square import FreshMean


class Noisy(nn.Module):
    """A linear model whose weights are drawn for each batch."""

    def __init__(self, std=0.5, inputs=12, classes=3):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.std = nn.Linear(inputs, classes).double(), std

    def forward(self, x):
        return nn.functional.linear(
            x.flatten(1), self.layer.weight + self.std * torch.randn_like(self.layer.weight), self.layer.bias
        )


def task(count=20, **options):
    model = Noisy(**options).eval()
    x = torch.rand(count, 1, 3, 4, dtype=torch.float64)
    return model, x, (x.flatten(1) @ model.layer.weight.T + model.layer.bias).argmax(1)


@pytest.mark.parametrize("threat", [hf.Linf(0.1), hf.L2(0.3)])
def test_auto_pgd_without_randomness_reaches_what_auto_pgd_reaches(threat):
    model, shape = tiny_nets()["mlp"]
    model, x = model.double(), torch.rand(30, *shape, dtype=torch.float64)
    y = model(x).argmax(1)
    plain = hf.attack(model, x, y, threat, "apgd-ce", steps=30)
    eot = hf.attack(model, x, y, threat, "eot-apgd", steps=30, samples=2, votes=3)
    assert abs(int(plain.success.sum()) - int(eot.success.sum())) <= 1
    assert 0 < int(eot.success.sum()) < 30
    # On a linear model the corner that all gradients point to is the worst point.
    linear = nn.Linear(6, 2).double().eval()
    x = torch.rand(10, 6, dtype=torch.float64) * 0.4 + 0.3
    y = linear(x).argmax(1)
    found = hf.attack(linear, x, y, hf.Linf(0.1), "eot-apgd", steps=10, samples=1, votes=1)
    sign = (linear.weight[1 - y] - linear.weight[y]).detach().sign()
    missed = ~found.success
    assert torch.allclose(found.x_adv[missed], (x + 0.1 * sign)[missed], atol=1e-9)


@pytest.mark.parametrize("loss", ["ce", "dlr", "margin"])
def test_auto_pgd_raises_the_expected_loss_of_a_random_model(loss):
    model, x, y = task(std=0.2)
    found = hf.attack(model, x, y, hf.Linf(0.15), "eot-apgd", samples=10, steps=12, loss=loss)
    before, after = (cross_entropy(mean_prediction(model, z, 400, 9), y).mean() for z in (x, found.x_adv))
    assert float(after) > float(before) + 0.05
    assert not found.success.all()
    with pytest.raises(hf.InputError, match="loss='ce'"):
        hf.attack(model, x, y, hf.Linf(0.1), "eot-apgd", loss="dlr", average="outputs")


def test_other_losses_are_averaged_too():
    model, x, y = task(4)
    with seeded(3, x.device):
        gradient, value, _ = expected_gradient(model, x, y, Sampling(5, loss=margin))
    leaf = x.clone().requires_grad_(True)
    with seeded(3, x.device):
        expected = torch.stack([margin(model(leaf), y) for _ in range(5)]).mean(0)
    expected.sum().backward()
    assert torch.allclose(gradient, leaf.grad)
    assert torch.allclose(value, expected.detach())
    with pytest.raises(hf.InputError, match="cross-entropy of the mean softmax"):
        expected_gradient(model, x, y, Sampling(5, "outputs", loss=margin))


def test_the_oracle_answers_each_query_with_new_draws():
    model, x, _ = task(2)
    oracle = FreshMean(model, 3)
    with seeded(1, x.device):
        first, second = oracle(x), oracle(x)
    with seeded(1, x.device):
        mean = torch.stack([model(x).softmax(1) for _ in range(3)]).mean(0)
    assert torch.allclose(first.exp(), mean)
    assert not torch.allclose(first, second)


@pytest.mark.parametrize(
    ("name", "options"), [("eot-square", {"samples": 4}), ("eot-nes", {"probes": 10, "sigma": 0.1})]
)
def test_queries_stay_within_their_budget_and_examples_are_confirmed(name, options):
    model, x, y = task(std=0.08)
    right = mean_prediction(model, x, 20, 0).argmax(1) == y
    x, y = x[right], y[right]
    found = hf.attack(model, x, y, hf.Linf(0.3), name, queries=240, votes=100, **options)
    votes = 100 * (3 if name == "eot-square" else 2)  # one vote for each restart
    assert int(found.queries.max()) <= 240 + 1 + votes  # one look at the clean inputs
    assert bool(found.success.any())
    # Another vote of many draws may differ by a hair, since a search stops near the boundary, but by no more.
    beyond = margin(mean_prediction(model, found.x_adv, 2000, 77), y)
    assert float(beyond[found.success].min()) > -0.1
    assert float(margin(mean_prediction(model, x, 2000, 77), y).mean()) < float(beyond.mean()) - 0.1
    with pytest.raises(hf.InputError, match="queries are too few"):
        hf.attack(model, x, y, hf.Linf(0.3), name, queries=2)


def test_the_grid_takes_the_minimum_and_names_who_broke_what():
    model, x, y = task(30, std=0.2)
    settings = (*published((1, 4), steps=5), Setting("none", "eot-pgd", {"samples": 1, "steps": 1, "step_size": 0.0}))
    found = eot_grid_of(model, x, y, "linf:0.1", settings)
    assert found.names == ("eot-fgsm-4", "eot-pgd-1", "eot-pgd-4", "none")
    assert found.minimum == pytest.approx(float(found.held.double().mean()))
    assert 0 < found.minimum < found.clean
    assert found.minimum <= min(found.confirmed)
    assert all(own <= sure <= found.clean for own, sure in zip(found.accuracy, found.confirmed, strict=True))
    assert all((name == "") == held for name, held in zip(found.by, found.held.tolist(), strict=True))
    assert "eot-fgsm-4" in found.by
    again = eot_grid_of(model, x, y, hf.Linf(0.1), settings)
    assert again.accuracy == found.accuracy
    assert again.by == found.by
    wrong = eot_grid_of(model, x[:2], (y[:2] + 1) % 3, "linf:0.1", settings)
    assert (wrong.clean, wrong.minimum, wrong.by) == (0.0, 0.0, ("clean", "clean"))
    with pytest.raises(hf.InputError, match="a name of its own"):
        eot_grid_of(model, x, y, "linf:0.1", (settings[0], settings[0]))


def test_the_attack_of_all_settings_breaks_no_less_than_the_published_one():
    model, x, y = task(20, std=0.2)
    alone = hf.attack(model, x, y, hf.Linf(0.08), "eot-pgd", samples=5, steps=5, votes=100)
    both = hf.attack(model, x, y, hf.Linf(0.08), "eot-grid", samples=5, steps=6)
    assert int(both.success.sum()) >= int(alone.success.sum()) - 1
    assert set(both.by) <= {"", "clean", *(s.name for s in (*published((1, 5)), *stronger(5, 6)))}


def test_a_deterministic_model_gets_the_same_numbers_in_the_grid():
    model, shape = tiny_nets()["mlp"]
    x = torch.rand(20, *shape)
    y = model(x).argmax(1)
    step = {"steps": 6, "samples": 1}
    grid = eot_grid_of(model, x, y, hf.Linf(0.1), (Setting("pgd", "eot-pgd", step),))
    plain = hf.attack(Whole(model).eval(), x, y, hf.Linf(0.1), "eot-pgd", **step)
    assert grid.accuracy[0] == pytest.approx(1 - float(plain.success.double().mean()))
    assert grid.minimum == grid.accuracy[0]


def test_accuracy_that_rises_with_the_draws_is_noticed():
    assert weaker_with_more_draws({1: 0.5, 10: 0.4, 20: 0.6}, 1000) == [(10, 20)]
    assert weaker_with_more_draws({1: 0.5, 10: 0.51}, 100) == []


def auto_pgd_by_hand(model, loss, x, y, eps, steps):
    """The best point of Auto-PGD on one input (1, ...) in an Linf ball, as the paper has it."""

    def at(point):
        leaf = point.clone().requires_grad_(True)
        value = loss(model(leaf), y)
        return torch.autograd.grad(value.sum(), leaf)[0], float(value.detach())

    def project(point):
        return torch.clamp(torch.clamp(point, x - eps, x + eps), 0, 1)

    p, gap, marks = 0.22, 0.22, []
    while p <= 1 + 1e-9:
        marks.append(math.ceil(p * steps - 1e-9))
        gap = max(gap - 0.03, 0.06)
        p += gap
    marks = sorted(set(marks))
    size, halved, last, best_before, number = 2 * eps, True, 0, -math.inf, 0
    points, gradients, values = [x], [], []
    halvings = 0
    before, now = x, x
    for step in range(steps + 1):
        gradient, value = at(now)
        points.append(now)
        gradients.append(gradient)
        values.append(value)
        best = max(range(len(values)), key=lambda i: (values[i], -i))
        if step == steps:
            break
        if step in marks:
            rises = sum(values[i + 1] > values[i] for i in range(last, step))
            stuck = not halved and values[best] <= best_before
            halved = rises <= 0.75 * (step - last) or stuck
            if halved:
                size, now, gradient, halvings = size / 2, points[1 + best], gradients[best], halvings + 1
            best_before, last = values[best], step
        z = project(now + size * gradient.sign())
        if step > 0:
            z = project(now + 0.75 * (z - now) + 0.25 * (now - before))
        before, now, number = now, z, number + 1
    return points[1 + best], halvings


@pytest.mark.parametrize("loss", ["ce", "dlr", "margin"])
def test_auto_pgd_takes_the_steps_of_the_paper(loss):
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4)).double().eval()
    with torch.no_grad():
        model[0].weight *= 6  # curved: the step size has to be halved
    x = torch.rand(10, 6, dtype=torch.float64)
    y = model(x).argmax(1)
    found = hf.attack(model, x, y, hf.Linf(0.2), "eot-apgd", steps=25, samples=2, votes=1, loss=loss)
    function = {"ce": cross_entropy, "dlr": dlr, "margin": margin}[loss]
    rows = [auto_pgd_by_hand(model, function, x[i : i + 1], y[i : i + 1], 0.2, 25) for i in range(10)]
    assert torch.allclose(found.x_adv, torch.cat([point for point, _ in rows]), atol=1e-9)
    assert max(halvings for _, halvings in rows) >= 3
