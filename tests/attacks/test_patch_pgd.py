"""patch-pgd: the closed form on linear models, all locations, nothing outside the window."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nets import tiny_nets
from torch import nn

import holdfast as hf
from holdfast.attacks.core.losses import margin
from holdfast.attacks.patch_pgd import apply_patch, first_order_gain, patch_pgd
from holdfast.errors import InputError
from holdfast.random import Noise

QUICK = {"steps": 25, "step_size": 0.1}


def linear(shape, classes=2, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    layer = nn.Linear(shape[0] * shape[1] * shape[2], classes).to(dtype)
    layer.weight.data = torch.randn(layer.weight.shape, dtype=dtype, generator=generator)
    layer.bias.data = torch.zeros(classes, dtype=dtype)
    return nn.Sequential(nn.Flatten(), layer).eval()


def images(count, shape, dtype=torch.float64, seed=1):
    return torch.rand(count, *shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def centred(name, count):
    """A tiny network whose classes are equally likely at random images, in float64, and such images."""
    model, shape = tiny_nets()[name]
    x = images(count, shape)
    logits = model.double()(x).detach()
    shift = nn.Linear(logits.shape[1], logits.shape[1]).double()
    shift.weight.data, shift.bias.data = torch.eye(logits.shape[1], dtype=torch.float64), -logits.mean(0)
    model = nn.Sequential(model, shift).eval()
    return model, x, model(x).argmax(1)


def largest_margin(model, x, y, threat):
    """The worst case of a linear model, location by location, class by class, pixel by pixel."""
    weight, worst = model[1].weight.data, torch.full((len(x),), -torch.inf, dtype=x.dtype)
    for i in range(len(x)):
        for j in range(len(weight)):
            if j == y[i]:
                continue
            w = (weight[j] - weight[y[i]]).view_as(x[i])
            start = (w * x[i]).sum()
            gain = torch.where(w > 0, w * (threat.high - x[i]), w * (threat.low - x[i])).sum(0)
            for top in range(x.shape[2] - threat.height + 1):
                for left in range(x.shape[3] - threat.width + 1):
                    window = gain[top : top + threat.height, left : left + threat.width].sum()
                    worst[i] = torch.maximum(worst[i], start + window)
    return worst


@pytest.mark.parametrize("locations", ["ranked", "all", "random"])
def test_exact_on_a_linear_model_of_two_classes(locations):
    shape, threat = (2, 6, 5), hf.Patch(2, 3)
    model, x = linear(shape), images(30, shape)
    y = model(x).argmax(1)
    worst = largest_margin(model, x, y, threat)
    result = patch_pgd(model, x, y, threat, locations=locations, restarts=15, **QUICK)
    assert torch.equal(result.success, worst > 0)
    assert 0 < int(result.success.sum()) < 30
    left = ~result.success
    reached = margin(model(result.x_adv[left]), y[left])
    assert torch.allclose(reached, worst[left], atol=1e-9)


def test_the_ascent_alone_is_exact_at_one_location():
    """A patch of the image's size has one location; the probes are not what finds the optimum."""
    shape, threat = (1, 3, 4), hf.Patch(3, 4, low=-1.0, high=2.0)
    model, x = linear(shape), 3 * images(20, shape) - 1
    y = model(x).argmax(1)
    result = patch_pgd(model, x, y, threat, locations="random", **QUICK)
    assert torch.equal(result.success, largest_margin(model, x, y, threat) > 0)


@pytest.mark.parametrize("classes", [3, 5, 10])
def test_never_better_than_the_worst_case(classes):
    shape, threat = (1, 5, 6), hf.Patch(2, 2)
    model, x = linear(shape, classes), images(25, shape)
    y = model(x).argmax(1)
    worst = largest_margin(model, x, y, threat)
    result = patch_pgd(model, x, y, threat, restarts=20, **QUICK)
    assert not bool((result.success & (worst <= 0)).any())
    assert int(result.success.sum()) >= 0.9 * int((worst > 0).sum()) > 0
    assert bool((margin(model(result.x_adv), y) <= worst + 1e-9).all())


def test_the_last_row_and_column_are_tried():
    """Only a patch at the lower right corner breaks this model."""
    model = linear((1, 6, 5))
    weight = torch.zeros(2, 6, 5, dtype=torch.float64)
    weight[1, 5, 4] = 1.0
    model[1].weight.data, model[1].bias.data = weight.flatten(1), torch.tensor([0.5, 0.0], dtype=torch.float64)
    x, y = torch.zeros(3, 1, 6, 5, dtype=torch.float64), torch.zeros(3, dtype=torch.long)
    for locations in ("random", "ranked", "corners", "all"):
        result = patch_pgd(model, x, y, hf.Patch(1, 1), locations=locations, restarts=30, **QUICK)
        assert bool(result.success.all()), locations
        assert bool((result.x_adv[:, 0, 5, 4] > 0.5).all())


def test_corners_are_the_four_corners():
    model, shape = tiny_nets()["cnn"]
    x = images(6, shape, torch.float32)
    y = model(x).argmax(1)
    result = patch_pgd(model, x, y, hf.Patch(2, 2), locations="corners", **QUICK)
    changed = (result.x_adv != x).any(1)
    inner = changed[:, 2:-2].any() | changed[:, :, 2:-2].any()
    assert bool(changed.any())
    assert not bool(inner)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 99))
def test_apply_patch_is_idempotent_and_leaves_the_rest(height, width, seed):
    x, p = images(3, (2, 5, 4), seed=seed), images(3, (2, 5, 4), seed=seed + 1)
    threat = hf.Patch(height, width)
    places = threat.locations((2, 5, 4))
    mask = threat.masks(places[Noise.for_batch(seed, 3).integers(len(places))], (2, 5, 4))
    once = apply_patch(x, p, mask)
    assert torch.equal(apply_patch(once, p, mask), once)
    assert torch.equal(once[~mask.expand_as(x)], x[~mask.expand_as(x)])
    assert torch.equal(once[mask.expand_as(x)], p[mask.expand_as(x)])
    assert bool(threat.contains(once, x).all())


def test_first_order_gain_by_hand():
    threat, g = hf.Patch(1, 2), torch.tensor([[[[1.0, -2.0, 3.0]]]])
    x = torch.tensor([[[[0.25, 0.5, 1.0]]]])
    assert first_order_gain(threat, g, x).tolist() == [[0.75 + 1.0, 1.0 + 0.0]]


@pytest.mark.parametrize("name", ["cnn", "pooled", "residual"])
def test_more_steps_and_more_locations_break_no_less(name):
    model, x, y = centred(name, 16)
    threat, broken = hf.Patch(2, 2), []
    for locations, steps, restarts in [("random", 3, 2), ("random", 12, 2), ("random", 12, 9), ("random", 12, 20)]:
        result = patch_pgd(model, x, y, threat, locations=locations, steps=steps, restarts=restarts, together=3)
        assert bool(threat.contains(result.x_adv, x).all())
        broken.append(result.success)
    for few, many in itertools.pairwise(broken):
        assert not bool((few & ~many).any())
    assert bool(broken[-1].any())


@pytest.mark.parametrize("locations", ["ranked", "random"])
@pytest.mark.parametrize("name", ["cnn", "residual"])
def test_the_answer_does_not_depend_on_the_batch(name, locations):
    model, x, y = centred(name, 14)
    options = {"steps": 6, "restarts": 10, "locations": locations, "together": 4, "probes": 7}
    noise, threat = Noise.for_batch(3, 14), hf.Patch(1, 1)
    whole = patch_pgd(model, x, y, threat, noise=noise, **options)
    assert 0 < int(whole.success.sum()) < 14
    for rows in [torch.tensor([i]) for i in range(14)] + [torch.randperm(14)]:
        part = patch_pgd(model, x[rows], y[rows], threat, noise=noise[rows], **options)
        assert torch.allclose(part.x_adv, whole.x_adv[rows], atol=1e-9)
        assert torch.equal(part.success, whole.success[rows])
        assert torch.equal(part.gradients, whole.gradients[rows])
        assert torch.equal(part.queries, whole.queries[rows])


def test_counts_are_exact():
    model, x = linear((1, 4, 4)), torch.zeros(2, 1, 4, 4, dtype=torch.float64)
    model[1].weight.data.zero_()
    model[1].weight.data[0] = 1e-3
    model[1].bias.data = torch.tensor([5.0, 0.0], dtype=torch.float64)
    y = torch.zeros(2, dtype=torch.long)
    result = patch_pgd(model, x, y, hf.Patch(2, 2), steps=5, restarts=4, probes=3, together=3)
    assert not bool(result.success.any())
    assert result.gradients.tolist() == [1 + 4 * 5] * 2
    assert result.queries.tolist() == [1 + 3 * 3 + 4 * 6] * 2
    result = patch_pgd(model, x, 1 - y, hf.Patch(2, 2), steps=5)
    assert result.by == ("patch-pgd",) * 2
    assert result.gradients.tolist() == [1, 1]


class Flat(nn.Module):
    """Class 1 only where the first pixel is above 0.9, and without a gradient below that."""

    def forward(self, x):
        return torch.stack([torch.ones(len(x)), 1e3 * (x[:, 0, 0, 0] - 0.9).relu()], 1)


def test_more_restarts_than_places_go_around_again_from_new_patches():
    x, y = torch.zeros(8, 1, 3, 3), torch.zeros(8, dtype=torch.long)
    threat, options = hf.Patch(3, 3), {"steps": 1, "locations": "random"}  # one place
    few, many = (patch_pgd(Flat(), x, y, threat, restarts=n, **options) for n in (1, 90))
    assert few.gradients.tolist() == [1] * 8
    assert int(few.success.sum()) < 8
    assert bool(many.success.all())


def test_bad_options_are_refused():
    model, shape = tiny_nets()["cnn"]
    x, y = images(2, shape, torch.float32), torch.zeros(2, dtype=torch.long)
    with pytest.raises(InputError, match="expected an integer >= 1, got 0"):
        hf.attack(model, x, y, hf.Patch(2, 2), "patch-pgd", steps=0)
    with pytest.raises(InputError, match="Did you mean 'corners'"):
        hf.attack(model, x, y, hf.Patch(2, 2), "patch-pgd", locations="corner")
    with pytest.raises(InputError, match="images of shape"):
        patch_pgd(model, x.flatten(1), y, hf.Patch(2, 2))
    with pytest.raises(InputError, match="does not fit"):
        patch_pgd(model, x, y, hf.Patch(8, 2))
    with pytest.raises(InputError, match="patches"):
        patch_pgd(model, x, y, hf.Linf(0.1))
