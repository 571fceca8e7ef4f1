"""Boxes of the largest volume: closed forms on linear classifiers, proofs on networks, the 2-D example."""

import pytest
import torch
from nets import tiny_nets
from torch import nn

import holdfast as hf
from holdfast.certificates.nonuniform import nonuniform


def linear(classes=2, size=6):
    torch.manual_seed(3)
    model = nn.Linear(size, classes).double().eval()
    x = torch.rand(5, size).double()
    return model, x, model(x).argmax(1)


def margin(model, x, y):
    logits = model(x).detach()
    return (logits.gather(1, y[:, None]) - logits.gather(1, 1 - y[:, None]))[:, 0]


@pytest.mark.parametrize("elide", [True, False])
def test_two_class_linear_classifier_has_the_closed_form(elide):
    """eps_i = m / (n a_i), uniform m / |a|_1, ratio mean(a) / geomean(a): a = |w_y - w_j|, or |w_y| + |w_j|."""
    model, x, y = linear()
    first, second = model.weight.detach()
    a = (first - second).abs() if elide else first.abs() + second.abs()
    found = nonuniform(model, x, y, hf.Linf(0.0), elide=elide, steps=200)
    m = margin(model, x, y)
    assert torch.allclose(found.uniform, m / a.sum(), rtol=2e-3)
    assert torch.allclose(found.radius, m[:, None] / (6 * a), rtol=2e-2)
    assert torch.allclose(found.ratio, (a.mean() / a.log().mean().exp()).expand(5), rtol=5e-3)
    assert torch.allclose(found.log_volume, found.radius.log().mean(1))
    assert bool(found.certified.all())


def test_a_coefficient_of_zero_does_not_stop_the_search():
    model, x, y = linear()
    with torch.no_grad():
        model.weight[:, 2] = 0.0
    found = nonuniform(model, x, y, hf.Linf(0.0))
    assert bool(found.certified.all())
    assert bool((found.radius.argmax(1) == 2).all())
    assert bool(found.radius.isfinite().all())


def test_every_half_width_is_at_least_the_threat():
    model, x, y = linear()
    a = (model.weight[0] - model.weight[1]).abs().detach()
    eps = float(0.9 * (margin(model, x, y) / a.sum()).sort().values[1])
    found = nonuniform(model, x, y, hf.Linf(eps))
    assert found.certified.sum() == 4
    assert bool((found.radius[found.certified] >= eps).all())
    assert bool((found.radius[~found.certified] == 0).all())
    assert found.ratio[~found.certified].item() == 1
    assert found.log_volume[~found.certified].item() == -torch.inf
    assert found.margin[~found.certified].item() < 0
    free = nonuniform(model, x, y, hf.Linf(0.0))
    assert bool((found.log_volume <= free.log_volume + 1e-2).all())


@pytest.mark.parametrize("name", ["mlp", "smooth", "cnn"])
def test_boxes_of_networks_are_proved_larger_than_uniform_and_hold(name):
    model, shape = tiny_nets()[name]
    x = torch.rand(6, *shape)
    y = model(x).argmax(1)
    found = nonuniform(model, x, y, hf.Linf(0.0), steps=40)
    assert bool(found.certified.all())
    assert bool((found.margin > 0).all())
    assert bool((found.ratio > 1.01).all())
    box = hf.Box(found.radius * 0.999, True, low=-9, high=9)
    assert bool(hf.certify(model, x, y, box, "fastlin").certified.all())
    side = hf.Box(0.999 * found.uniform.view(-1, *[1] * len(shape)).expand_as(x), True, low=-9, high=9)
    assert bool(hf.certify(model, x, y, side, "fastlin").certified.all())
    # Signed gradient steps in units of the box, from random corners: nothing inside may change the class.
    for seed in range(5):
        g = torch.Generator().manual_seed(seed)
        point = x + found.radius * (2 * torch.randint(0, 2, x.shape, generator=g) - 1)
        for _ in range(10):
            point = point.detach().requires_grad_()
            logits = model(point)
            top = logits.scatter(1, y[:, None], -torch.inf).amax(1)
            (grad,) = torch.autograd.grad((top - logits.gather(1, y[:, None])[:, 0]).sum(), [point])
            point = (point + 0.5 * found.radius * grad.sign()).detach()
            point = torch.minimum(torch.maximum(point, x - found.radius), x + found.radius)
            assert bool((model(point).argmax(1) == y).all())


@pytest.mark.parametrize("options", [{"slopes": "adaptive"}, {"hidden": False}, {"elide": False}], ids=str)
def test_other_bounds_prove_their_boxes_too(options):
    model, shape = tiny_nets()["mlp"]
    x = torch.rand(4, *shape)
    found = nonuniform(model, x, model(x).argmax(1), hf.Linf(0.0), steps=20, **options)
    assert bool(found.certified.all())
    assert bool((found.ratio >= 1).all())


def test_without_steps_the_box_is_uniform():
    model, x, y = linear()
    found = nonuniform(model, x, y, hf.Linf(0.0), steps=0)
    assert torch.allclose(found.ratio, torch.ones(5).double(), atol=5e-3)


def test_a_dense_grid_in_every_box_of_the_plane_has_one_class():
    """Brute force on the plane: nearest of ten seeds, two hidden layers of ten."""
    seeds, x = 2 * torch.rand(10, 2) - 1, 2 * torch.rand(2000, 2) - 1
    y = torch.cdist(x, seeds).argmin(1)
    model = nn.Sequential(nn.Linear(2, 10), nn.ReLU(), nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(300):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    some = x[:20]
    label = model.eval()(some).argmax(1)
    found = nonuniform(model, some, label, hf.Linf(0.0, low=-1, high=1))
    assert bool(found.certified.all())
    assert bool((found.ratio >= 1).all())
    assert found.ratio.mean() > 1.01
    steps = torch.linspace(-1, 1, 41)
    grid = torch.cartesian_prod(steps, steps)
    points = some[:, None] + found.radius[:, None] * grid
    assert bool((model(points.flatten(0, 1)).argmax(1).view(20, -1) == label[:, None]).all())
    # Much larger boxes of the same shape do meet another class: the grid can tell.
    points = some[:, None] + 5 * found.radius[:, None] * grid
    assert not bool((model(points.flatten(0, 1)).argmax(1).view(20, -1) == label[:, None]).all(1).any())


def test_wrong_inputs_have_no_box():
    model, x, y = linear()
    found = nonuniform(model, x, 1 - y, hf.Linf(0.0))
    assert not bool(found.certified.any())
    assert bool((found.radius == 0).all())


def test_as_a_certificate():
    model, shape = tiny_nets()["mlp"]
    x = torch.rand(12, *shape)
    y = model(x).argmax(1)
    threat = hf.Linf(0.04)
    ours = hf.certify(model, x, y, threat, "nonuniform", steps=5)
    theirs = hf.certify(model, x, y, threat, "fastlin")
    assert 0 < int(theirs.certified.sum()) < 12
    assert torch.equal(ours.certified, theirs.certified)
    assert bool((ours.radius[ours.certified] >= 0.04).all())
    assert bool((ours.radius[~ours.certified] == 0).all())
    assert ours.by == tuple("nonuniform" if c else "" for c in theirs.certified)
    with pytest.raises(hf.UnsupportedError, match="does not handle the threat 'l2:"):
        hf.certify(model, x, y, hf.L2(0.1), "nonuniform")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": -1}, "'steps'.*expected an integer >= 0, got -1"),
        ({"penalty": 0.0}, "'penalty'.*expected a number > 0, got 0.0"),
    ],
)
def test_bad_options_are_refused(options, message):
    model, x, y = linear()
    with pytest.raises(hf.InputError, match=message):
        nonuniform(model, x, y, hf.Linf(0.0), **options)
