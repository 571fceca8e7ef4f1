"""Square Attack against closed forms, a model without gradients, and its own published schedule."""

import math

import pytest
import torch
from nets import tiny_nets
from torch import nn

import holdfast as hf
from holdfast.attacks.core.losses import margin
from holdfast.attacks.square import _bumps, _propose_bump, square, window_size
from holdfast.errors import InputError
from holdfast.random import Noise

THREATS = [hf.Linf(0.1), hf.L2(0.4), hf.L1(1.5)]


class PlainLinear(nn.Module):
    """Linear, with sums that do not depend on the batch to the last bit."""

    def __init__(self, shape, classes, dtype=torch.float64):
        super().__init__()
        self.register_buffer("weight", torch.randn(classes, math.prod(shape)).to(dtype))
        self.eval()

    def forward(self, x):
        return ((x.flatten(1) - 0.5)[:, None] * self.weight).sum(2)


class Rounded(PlainLinear):
    """Its gradient is zero wherever it has one."""

    def forward(self, x):
        return super().forward((x * 10).round() / 10)


class Counted(nn.Module):
    """Counts the inputs that it is asked about."""

    def __init__(self, model):
        super().__init__()
        self.model, self.asked = model, 0

    def forward(self, x):
        self.asked += len(x)
        return self.model(x)


def task(model, count, shape, dtype=torch.float64):
    x = (0.3 + 0.4 * torch.rand(count, *shape)).to(dtype)  # far from the ends of the range: no clipping
    return x, model(x).argmax(1)


def worst_cases(model, x, y, threat):
    """Exact largest z_j - z_y of a linear model over the ball, (B, K); minus infinity for y itself."""
    gaps = model.weight[None] - model.weight[y][:, None]
    reach = torch.stack([threat.dual_norm(gap) for gap in gaps.unbind(1)], 1)
    values = (model(x) - model(x).gather(1, y[:, None])) + threat.eps * reach
    return values.scatter(1, y[:, None], -torch.inf)


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_linf_reaches_the_exact_worst_case_of_a_linear_model(classes):
    """With more than two classes, random search may end at the worst case for another class than the worst."""
    torch.manual_seed(classes)
    shape = (2, 4, 5)
    model, threat = PlainLinear(shape, classes), hf.Linf(0.008)
    x, y = task(model, 12, shape)
    worst = worst_cases(model, x, y, threat)
    result = square(model, x, y, threat, queries=1500)
    held = ~result.success
    assert bool(held.any())
    assert not bool(result.success[worst.amax(1) <= 0].any())
    reached = margin(model(result.x_adv), y)
    assert float((reached[:, None] - worst).abs().amin(1)[held].max()) < 1e-9
    assert classes > 2 or torch.equal(result.success, worst.amax(1) > 0)


@pytest.mark.parametrize(("threat", "share"), [(hf.L2(0.08), 0.7), (hf.L1(0.2), 0.7)], ids=str)
def test_l2_and_l1_come_near_the_worst_case_and_never_pass_it(threat, share):
    torch.manual_seed(0)
    shape = (1, 6, 6)
    model = PlainLinear(shape, 2)
    x, y = task(model, 20, shape)
    clean, worst = margin(model(x), y), worst_cases(model, x, y, threat).amax(1)
    result = square(model, x, y, threat, queries=2000)
    gained = (margin(model(result.x_adv), y) - clean) / (worst - clean)
    assert bool((gained <= 1 + 1e-9).all())
    held = ~result.success
    assert int(held.sum()) > 3
    assert float(gained[held].min()) > share
    assert bool(result.success[clean + share * (worst - clean) > 0].all())
    assert not bool(result.success[worst <= 0].any())


@pytest.mark.parametrize("threat", [hf.Linf(0.2), hf.L2(1.5), hf.L1(8.0)], ids=str)
def test_a_model_without_gradients_is_broken(threat):
    torch.manual_seed(1)
    shape = (1, 6, 6)
    model = Rounded(shape, 3)
    x, y = task(model, 20, shape)
    result = hf.attack(model, x, y, threat, "square", queries=800)
    assert float(result.success.double().mean()) > 0.9
    assert int(result.gradients.sum()) == 0


@pytest.mark.parametrize("threat", [hf.Linf(0.03), hf.L2(0.12), hf.L1(0.2)], ids=str)
@pytest.mark.parametrize("shape", [(3, 6, 5), (12,), (4, 7), (2, 2, 3, 4)], ids=str)
def test_the_answer_does_not_depend_on_the_batch(threat, shape):
    torch.manual_seed(2)
    model = PlainLinear(shape, 4)
    x, y = task(model, 40, shape)
    options = {"queries": 150, "restarts": 2}
    noise = Noise(3, torch.arange(40) * 7)
    whole = square(model, x, y, threat, noise=noise, **options)
    assert 0 < int(whole.success.sum()) < 40
    order = torch.randperm(40)
    mixed = square(model, x[order], y[order], threat, noise=noise[order], **options)
    for i in (0, 5, 17, 39):
        one = slice(i, i + 1)
        alone = square(model, x[one], y[one], threat, noise=noise[one], **options)
        assert torch.equal(alone.x_adv, whole.x_adv[one])
        assert torch.equal(alone.queries, whole.queries[one])
    assert torch.equal(mixed.x_adv, whole.x_adv[order])
    assert torch.equal(mixed.success, whole.success[order])
    assert torch.equal(mixed.queries, whole.queries[order])


@pytest.mark.parametrize("threat", [*THREATS, hf.Linf(0.7), hf.L2(9.0), hf.L1(60.0), hf.Linf(0.3, low=-1.0)], ids=str)
@pytest.mark.parametrize("name", list(tiny_nets()))
def test_points_stay_in_the_set_and_successes_are_misclassified(name, threat):
    torch.manual_seed(3)
    model, shape = tiny_nets()[name]
    x = torch.rand(9, *shape).round(decimals=1)
    y = model(x).argmax(1)
    result = square(model, x, y, threat, queries=60)
    assert bool(threat.contains(result.x_adv, x).all())
    assert torch.equal(model(result.x_adv).argmax(1) != y, result.success)
    assert tuple(name == "square" for name in result.by) == tuple(result.success.tolist())


def test_queries_are_counted_and_capped():
    torch.manual_seed(4)
    shape = (1, 5, 5)
    counted = Counted(PlainLinear(shape, 3)).eval()
    x, y = task(counted.model, 1, shape)
    for eps, queries in ((0.0, 37), (0.02, 1), (0.3, 500)):
        counted.asked = 0
        result = square(counted, x, y, hf.Linf(eps), queries=queries)
        assert counted.asked == int(result.queries)
        assert int(result.queries) == queries or bool(result.success)
        assert int(result.queries) <= queries


def test_broken_inputs_leave():
    torch.manual_seed(5)
    shape = (1, 5, 5)
    counted = Counted(PlainLinear(shape, 3)).eval()
    x, y = task(counted.model, 64, shape)
    result = square(counted, x, y, hf.Linf(0.1), queries=300)
    assert int(result.queries.sum()) <= counted.asked <= int(result.queries.sum()) + 300 * 8


@pytest.mark.parametrize("threat", [hf.Linf(0.0), hf.L2(0.0), hf.L1(0.0)], ids=str)
def test_no_budget_changes_nothing(threat):
    model = PlainLinear((1, 5, 5), 3)
    x, y = task(model, 6, (1, 5, 5))
    y[0] = (y[0] + 1) % 3
    result = square(model, x, y, threat, queries=20)
    assert torch.equal(result.x_adv, x)
    assert result.success.tolist() == [True] + [False] * 5


def test_a_larger_budget_breaks_no_fewer_inputs():
    torch.manual_seed(6)
    shape = (1, 5, 5)
    model = PlainLinear(shape, 3)
    x, y = task(model, 40, shape)
    counts = [int(square(model, x, y, hf.Linf(eps), queries=600).success.sum()) for eps in (0.01, 0.03, 0.1, 0.3)]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


def test_windows_follow_the_published_schedule():
    """Sides for CIFAR-10 images: round(sqrt(p * 32 * 32)), p = 0.8 halved after 10, 50, ... of 10,000 steps."""
    linf = [window_size(step, 10_000, 0.8, hf.Linf(0.1), 32, 32) for step in (0, 10, 11, 51, 201, 501, 1001, 9999)]
    assert linf == [(side, side) for side in (29, 29, 20, 14, 10, 7, 5, 1)]
    assert window_size(6, 5000, 0.8, hf.Linf(0.1), 32, 32) == (20, 20)  # step 12 of 10,000
    assert window_size(9999, 10_000, 0.8, hf.L2(0.1), 32, 32) == (3, 3)
    assert window_size(11, 10_000, 0.8, hf.L2(0.1), 32, 32) == (21, 21)
    assert window_size(0, 5000, 0.8, hf.Linf(0.1), 1, 100) == (1, 80)
    assert window_size(0, 5000, 0.8, hf.L1(0.1), 2, 2) == (2, 2)


@pytest.mark.parametrize("order", [1, 2])
def test_bumps_are_opposite_and_have_norm_one(order):
    for height, width in ((1, 1), (1, 5), (3, 3), (7, 4)):
        bumps = _bumps(height, width, order)
        assert bumps.shape == (2, height, width)
        assert torch.allclose(torch.linalg.vector_norm(bumps, order, dim=(1, 2)), torch.ones(2).double())
    # Upper half one row of 3, centre (0, 1): 1 + 1/4 there, 1/4 beside it; lower half two rows, centre (1, 1).
    expected = torch.tensor([[1.0, 5.0, 1.0], [-1.0, -1.0, -1.0], [-1.0, -5.0, -1.0]]).double()
    expected[0] /= expected[0].norm()
    expected[1:] /= expected[1:].norm()
    assert torch.allclose(_bumps(3, 3, 2)[0], expected / math.sqrt(2))
    assert torch.equal(_bumps(3, 3, 2)[1], _bumps(3, 3, 2)[0].T)


@pytest.mark.parametrize("threat", [hf.L2(0.4), hf.L1(1.5)], ids=str)
def test_a_new_bump_spends_what_is_left_of_the_budget_and_leaves_the_rest_of_the_image(threat):
    """Three by three windows at (0, 0) and (1, 2), which overlap, on images that have spent a part of the budget."""
    torch.manual_seed(0)
    x = torch.full((8, 3, 6, 7), 0.5, dtype=torch.float64)
    delta = torch.randn_like(x)
    share = torch.linspace(0.1, 1, 8, dtype=torch.float64).view(-1, 1, 1, 1)
    best = x + delta * share * threat.eps / threat.distance(delta, torch.zeros_like(x)).view(-1, 1, 1, 1)
    draw = torch.tensor([[0, 0, 1, 2, 0, 1, 0, 1]]).expand(8, -1)  # corners, direction, and a sign for each channel
    new = _propose_bump(threat, x, best, draw, (3, 3))[:]
    outside = torch.ones(6, 7, dtype=torch.bool)
    outside[:3, :3] = outside[1:4, 2:5] = False
    torch.testing.assert_close(new[..., outside], best[..., outside], rtol=0, atol=1e-12)
    torch.testing.assert_close(threat.distance(new, x), x.new_full((8,), threat.eps), rtol=1e-9, atol=0)
    only_second = torch.zeros(6, 7, dtype=torch.bool)
    only_second[1:4, 2:5] = True
    only_second[:3, :3] = False
    assert torch.equal(new[..., only_second], x[..., only_second])


def test_every_pixel_can_be_reached():
    """Only one pixel matters, each in its turn, the last row and column included."""
    x = torch.full((20, 1, 4, 5), 0.5)
    y = torch.zeros(20, dtype=torch.long)

    class Pixel(nn.Module):
        """Pixel i of input i, compared with 0.55: pixels are told apart by a mark in the input."""

        def forward(self, x):
            i = (x < 0.1).flatten(1).byte().argmax(1)
            return torch.stack([x.flatten(1).gather(1, (i[:, None] + 1) % 20)[:, 0], x.new_full((len(x),), 0.45)], 1)

    x.flatten(1)[torch.arange(20), torch.arange(20)] = 0.0
    result = square(Pixel().eval(), x, y, hf.Linf(0.08), queries=400)
    assert bool(result.success.all())


@pytest.mark.parametrize("options", [{"queries": 0}, {"restarts": 0}, {"p_init": 0.0}, {"p_init": 1.5}])
def test_bad_options_are_refused(options):
    model = PlainLinear((1, 5, 5), 3)
    x, y = task(model, 2, (1, 5, 5))
    with pytest.raises(InputError, match=next(iter(options))):
        hf.attack(model, x, y, hf.Linf(0.1), "square", **options)
