"""Carlini and Wagner: close to the closed form on linear models, Adam against the library's."""

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.attacks.core.losses import margin
from holdfast.attacks.cw import _adam, cw_nearest
from holdfast.errors import InputError
from holdfast.explanations.core.exact_boundary import exact_boundary


def linear(size=6):
    model = nn.Linear(size, 2).double().eval()
    model.weight.data *= 4
    model.bias.data = -0.5 * model.weight.data.sum(1)  # all classes meet in the middle of the range
    x = 0.3 + 0.4 * torch.rand(8, size, dtype=torch.float64)
    return model, x, model(x).argmax(1).detach()


@pytest.mark.parametrize(("norm", "q"), [("l2", 2), ("linf", 1)])
def test_close_to_the_distance_of_a_linear_boundary(norm, q):
    model, x, y = linear()
    w = (model.weight[1] - model.weight[0]).detach()
    truth = -margin(model(x), y).detach() / torch.linalg.vector_norm(w, q)
    near = truth < 0.2
    assert int(near.sum()) >= 3
    found = cw_nearest(model, x, y, norm, lr=0.02, relative=None, polish=0)
    assert bool((found.distance >= truth - 1e-9).all())
    assert torch.allclose(found.distance[near], truth[near], rtol=0.1, atol=2e-3)


SCALES = (1, 0.3, 0.1, 0.03)


def classes_that_meet(seed, features=6, classes=4):
    """A linear model whose classes meet in the middle of clouds of points, 30 at each scale: (model, x, y)."""
    torch.manual_seed(seed)
    model = nn.Linear(features, classes).double().eval()
    model.bias.data = -0.5 * model.weight.data.sum(1)
    x = torch.cat([0.5 + scale * 0.2 * (torch.rand(30, features, dtype=torch.float64) - 0.5) for scale in SCALES])
    return model, x, model(x).argmax(1).detach()


def linear_distance(model, x, y, q):
    """To the nearest plane z_j = z_y, in the norm dual to q; no plane is out of reach of the range here."""
    z, w = model(x).detach(), model.weight.detach()
    size = torch.linalg.vector_norm(w[y][:, None] - w, q, dim=2)
    far = (z.gather(1, y[:, None]) - z) / size.clamp(min=1e-300)
    return far.scatter(1, y[:, None], torch.inf).amin(1)


@pytest.mark.parametrize(("norm", "q"), [("l2", 2), ("linf", 1)])
def test_the_default_finds_the_distance_of_linear_models_at_every_scale(norm, q):
    ratios, distances = [], []
    for seed in range(3):
        model, x, y = classes_that_meet(seed)
        distances.append(linear_distance(model, x, y, q))
        ratios.append(cw_nearest(model, x, y, norm).distance / distances[-1])
    ratio, distance = (torch.cat(parts).view(3, len(SCALES), 30) for parts in (ratios, distances))
    assert float(distance[:, 0].median() / distance[:, -1].median()) > 20
    assert bool((ratio >= 1 - 1e-9).all())
    assert bool((ratio.median(2).values <= 1.01).all())
    assert float(ratio.max()) <= 1.05


def trained_network(seed):
    """A small ReLU network on points of four classes, in float64."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 4)).double()
    x, centres = torch.rand(600, 5).double(), torch.rand(12, 5).double()
    y = torch.cdist(x, centres).argmin(1) % 4
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(300):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval()


def test_the_default_comes_close_to_the_exact_boundary_of_trained_networks():
    ratios = []
    for seed in range(3):
        model = trained_network(seed)
        x = torch.rand(40, 5).double()
        found = cw_nearest(model, x, model(x).argmax(1), "l2")
        ratios.append(found.distance / exact_boundary(model, x)[1])
    ratio = torch.cat(ratios)
    assert bool(torch.isfinite(ratio).all())
    assert bool((ratio >= 1 - 1e-6).all())
    assert float(ratio.median()) <= 1.001
    assert float((ratio <= 1.05).double().mean()) >= 0.8  # the others have settled at another piece of the boundary


def as_published(model, x, y, *, steps, lr, rounds, c):
    """Minimises |x_adv - x|^2 + c max(z_y - max z_j, 0), one input at a time, with the optimiser of the library."""
    best = torch.inf
    lower, upper = 0.0, torch.inf
    for _ in range(rounds):
        u = torch.atanh((2 * x - 1) * (1 - 1e-6)).requires_grad_(True)
        optimizer, success = torch.optim.Adam([u], lr=lr), False
        for _ in range(steps):
            x_adv = (1 + torch.tanh(u)) / 2
            z = model(x_adv[None])[0]
            gap = z[y] - torch.cat([z[:y], z[y + 1 :]]).max()
            if gap < 0:
                success, best = True, min(best, float((x_adv - x).detach().norm()))
            optimizer.zero_grad()
            ((x_adv - x).square().sum() + c * gap.clamp(min=0)).backward()
            optimizer.step()
        lower, upper = (lower, c) if success else (c, upper)
        c = 10 * c if upper == torch.inf else (lower + upper) / 2
    return best


def test_the_published_attack_is_reached_by_options():
    model = trained_network(0)
    x = 0.1 + 0.8 * torch.rand(3, 5).double()
    y = model(x).argmax(1)
    how = {"steps": 40, "lr": 0.01, "rounds": 4, "c": 0.1}
    found = cw_nearest(model, x, y, "l2", **how, relative=None, polish=0)
    expected = [as_published(model, x[i], int(y[i]), **how) for i in range(3)]
    assert torch.isfinite(found.distance).any()
    assert found.distance.tolist() == pytest.approx(expected, rel=1e-4)
    assert bool((cw_nearest(model, x, y, "l2", **how).distance < found.distance).any())


def test_adam_equals_the_one_of_the_library():
    u = torch.randn(3, 4, dtype=torch.float64)
    theirs = u.clone().requires_grad_(True)
    optimiser = torch.optim.Adam([theirs], lr=0.1)
    m, v = torch.zeros_like(u), torch.zeros_like(u)
    for step in range(5):
        optimiser.zero_grad()
        theirs.square().sum().backward()
        optimiser.step()
        move, m, v = _adam(2 * u, m, v, step, 0.1)
        u = u + move
        assert torch.allclose(u, theirs.detach(), atol=1e-6)


class Counted(nn.Module):
    """Counts the inputs that pass, and the gradients that come back."""

    def __init__(self, model):
        super().__init__()
        self.model, self.inputs, self.gradients = model, 0, 0

    def forward(self, x):
        self.inputs += len(x)
        if x.requires_grad:
            x.register_hook(lambda g: setattr(self, "gradients", self.gradients + len(g)))
        return self.model(x)


@pytest.mark.parametrize("polish", [0, 2])
@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_counts_are_exact(norm, polish):
    torch.manual_seed(0)
    model, x, y = linear()
    counted = Counted(model).eval()
    found = cw_nearest(counted, x, y, norm, steps=10, rounds=3, polish=polish)
    assert found.gradients.tolist() == [3 * 10 + polish] * 8  # one class to project towards
    if polish == 0:
        assert found.queries.tolist() == [1 + 3 * 10] * 8
    assert int(found.queries.sum()) == counted.inputs
    assert int(found.gradients.sum()) == counted.gradients


def test_values_at_the_ends_of_the_range_can_move():
    model = nn.Linear(3, 2).double().eval()
    model.weight.data = torch.tensor([[-4.0, 0.0, 0.0], [4.0, 0.0, 0.0]], dtype=torch.float64)
    model.bias.data = torch.tensor([2.0, -2.0], dtype=torch.float64)
    x = torch.tensor([[0.0, 1.0, 0.0]], dtype=torch.float64)
    for norm in ("l2", "linf"):
        found = cw_nearest(model, x, torch.tensor([0]), norm)
        assert float(found.distance) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(
    "options",
    [
        {"steps": 0},
        {"rounds": 0},
        {"lr": 0.0},
        {"c": 0.0},
        {"kappa": -1.0},
        {"relative": 0.0},
        {"polish": -1},
        {"targets": 0},
    ],
)
def test_bad_options_are_refused(options):
    model, x, y = linear()
    with pytest.raises(InputError, match=f"'{next(iter(options))}' .*: expected"):
        hf.attack(model, x, y, hf.L2(0.1), "cw", **options)


class Watched(nn.Module):
    """A smooth model that remembers the points it was asked for."""

    def __init__(self):
        super().__init__()
        self.points = []

    def forward(self, x):
        self.points.append(x.detach().clone())
        u, v = x[:, 0], x[:, 1]
        return torch.stack([2 - 3 * u, u * v + v.square(), 0.5 + 0 * u], 1)


@pytest.mark.parametrize("kappa", [0.0, 1.0])
def test_the_steps_for_l2_are_those_of_adam_on_the_published_objective(kappa):
    """min over u of |x_adv - x|^2 + c max(z_y - max_{j != y} z_j, -kappa), x_adv = (1 + tanh u) / 2."""
    model, c, lr, steps = Watched().eval(), 4.0, 0.3, 12
    x, y = torch.tensor([[0.2, 0.6], [0.35, 0.8]], dtype=torch.float64), torch.tensor([0, 0])
    cw_nearest(model, x, y, "l2", steps=steps, lr=lr, rounds=1, c=c, kappa=kappa)
    seen = model.points[1 : 1 + steps]  # the first look is at x
    u = torch.atanh((2 * x - 1) * (1 - 1e-6)).requires_grad_(True)
    adam = torch.optim.Adam([u], lr=lr)
    crossed = 0
    for point in seen:
        x_adv = (1 + torch.tanh(u)) / 2
        assert torch.allclose(point, x_adv.detach(), atol=1e-7)
        z = model(x_adv)
        crossed += int((z[:, 1:].amax(1) > z[:, 0]).sum())
        hinge = (z[:, 0] - z[:, 1:].amax(1)).clamp(min=-kappa)
        (u.grad,) = torch.autograd.grad(((x_adv - x).square().sum(1) + c * hinge).sum(), u)
        adam.step()
    assert crossed > 2
