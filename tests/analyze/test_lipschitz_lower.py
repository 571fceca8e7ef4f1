"""Lower bounds of Lipschitz constants: exact on linear models, never above the proven bounds."""

import pytest
import torch
from nets import tiny_nets
from torch import nn

import holdfast as hf
from holdfast.analyze.lipschitz_lower import global_lower_bound, local_lower_bound, tightness_ratio
from holdfast.bounding.graph.trace import trace
from holdfast.bounding.lipschitz.constants import lipschitz_bound, lipschitz_estimate
from holdfast.errors import InputError
from holdfast.models.layers import MinMax


def bound_of(model, shape):
    return lipschitz_bound(trace(model, torch.rand(1, *shape)))


def of_pair(lower, upper):
    """The upper bound of the margin that each lower bound is about."""
    return upper.pairs[lower.classes[:, 0], lower.classes[:, 1]]


def test_ascent_on_a_linear_model_finds_the_exact_constant():
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).eval()
    lower = global_lower_bound(model, torch.rand(8, 6), torch.rand(8, 6), steps=400, step_size=0.02)
    rows = model[1].weight.detach().double() @ model[0].weight.detach().double()
    exact = torch.cdist(rows, rows)[lower.classes[:, 0], lower.classes[:, 1]]
    assert torch.allclose(lower.value, exact, rtol=1e-3)
    assert bool((lower.value <= exact * (1 + 1e-9)).all())
    single = nn.Linear(6, 3).eval()
    lower = global_lower_bound(single, torch.rand(30, 6), torch.rand(30, 6), steps=300, step_size=0.02)
    # With 30 starts all classes were predicted somewhere, and the steepest margin was found: the bound is exact too.
    assert tightness_ratio(lower, bound_of(single, (6,))) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("name", tiny_nets())
def test_lower_bounds_stay_below_upper_bounds(name):
    model, shape = tiny_nets()[name]
    upper, x = bound_of(model, shape), torch.rand(6, *shape)
    anywhere = global_lower_bound(model, x, x.flip(0) * 0.5, steps=30, step_size=0.05)
    near = local_lower_bound(model, x, hf.L2(0.3), steps=30, step_size=0.05)
    for lower in (anywhere, near):
        assert lower.value.shape == (6,)
        assert bool((lower.value > 0).all())
        assert bool((lower.value <= of_pair(lower, upper)).all())
        assert 0 < tightness_ratio(lower, upper) <= 1


def test_the_value_is_the_quotient_of_the_inputs_that_are_returned():
    model, shape = tiny_nets()["mlp"]
    lower = global_lower_bound(model, torch.rand(5, *shape), torch.rand(5, *shape), steps=20, step_size=0.05)
    with torch.no_grad():
        change = model.double()(lower.x1) - model(lower.x2)
    model.float()
    j, i = lower.classes.unbind(1)
    gap = (change.gather(1, j[:, None]) - change.gather(1, i[:, None]))[:, 0].abs()
    assert torch.allclose(lower.value, gap / (lower.x1 - lower.x2).norm(dim=1), rtol=1e-6)
    assert bool((j != i).all())


def test_more_steps_are_never_worse_and_find_more():
    model, shape = tiny_nets()["mlp"]
    x1, x2 = torch.rand(2, 8, *shape).unbind(0)
    few, many = (global_lower_bound(model, x1, x2, steps=steps, step_size=0.02).value for steps in (0, 60))
    assert bool((many >= few).all())
    assert float(many.mean()) > 1.2 * float(few.mean())


def test_local_pairs_stay_in_the_threat_set_and_keep_the_class_of_the_centre():
    model, shape = tiny_nets()["cnn"]
    x, threat = torch.rand(4, *shape), hf.L2(0.2)
    lower = local_lower_bound(model, x, threat, steps=15, step_size=0.1)
    for point in (lower.x1, lower.x2):
        assert bool(((point - x.double()).flatten(1).norm(dim=1) <= 0.2 * (1 + 1e-9)).all())
        assert bool(((point >= 0) & (point <= 1)).all())
    assert torch.equal(lower.classes[:, 0], model(x).argmax(1))


def test_inputs_that_meet_give_a_finite_value():
    model, shape = tiny_nets()["mlp"]
    x = torch.rand(3, *shape)
    lower = global_lower_bound(model, x, x, steps=3)
    assert bool(torch.isfinite(lower.value).all())


def test_the_ratio_tells_a_tight_bound_from_a_loose_one():
    layers = [nn.Linear(8, 8) for _ in range(3)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight)
    tight = nn.Sequential(layers[0], MinMax(), layers[1], MinMax(), layers[2]).eval()
    # What the first layer stretches the second one shrinks: the product of the norms is 1, the truth about 0.1.
    loose = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)).eval()
    with torch.no_grad():
        for index, weights in ((0, [1.0, 0.1]), (2, [0.1, 1.0]), (4, [1.0, 1.0])):
            loose[index].weight.copy_(torch.diag(torch.tensor(weights)))
    ratios = []
    for model, size in ((tight, 8), (loose, 2)):
        lower = global_lower_bound(model, *torch.rand(2, 20, size).unbind(0), steps=150, step_size=0.02)
        ratios.append(tightness_ratio(lower, bound_of(model, (size,))))
    assert ratios[0] > 0.95
    assert 0.05 < ratios[1] < 0.11


def test_the_seed_decides_and_the_model_is_left_as_it_was():
    model, shape = tiny_nets()["mlp"]
    x, before = torch.rand(3, *shape), [p.clone() for p in model.parameters()]
    first, again, other = (local_lower_bound(model, x, hf.L2(0.1), steps=5, seed=seed).value for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert all(p.requires_grad and p.dtype == torch.float32 for p in model.parameters())


def test_bad_input_is_refused():
    model, shape = tiny_nets()["mlp"]
    x = torch.rand(3, *shape)
    with pytest.raises(InputError, match="same shape"):
        global_lower_bound(model, x, x[:2])
    with pytest.raises(InputError, match="empty batch"):
        global_lower_bound(model, x[:0], x[:0])
    with pytest.raises(InputError, match="training mode"):
        global_lower_bound(nn.Sequential(nn.Linear(6, 2)), x, x)
    with pytest.raises(InputError, match="L2 threat"):
        local_lower_bound(model, x, hf.Linf(0.1))
    lower = global_lower_bound(model, x, x.flip(0), steps=0)
    estimate, _ = lipschitz_estimate(trace(model, x), {})
    with pytest.raises(InputError, match="proven"):
        tightness_ratio(lower, estimate)
