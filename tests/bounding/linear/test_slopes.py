"""Rules for the lower slopes: sound whatever they give, as the paper defines them, better than random if optimised."""

from itertools import pairwise

import pytest
import torch
from nets import tiny_nets
from torch import nn
from torch.nn.functional import cross_entropy

import holdfast as hf
from holdfast.bounding.core.region import region
from holdfast.bounding.graph.trace import trace
from holdfast.bounding.linear import relaxation as linear
from holdfast.bounding.linear.slopes import (
    bernoulli_slopes,
    chord_slopes,
    optimised_slopes,
    random_slopes,
)
from holdfast.certificates.slope_step import fingerprint, one_step_margins
from holdfast.errors import InputError
from holdfast.random import Noise

NETS = ["mlp", "cnn", "residual"]


def relaxed(model, x, threat=None, hidden=False):
    r = region(threat or hf.Linf(0.08), x, sound=False)
    return linear.relaxation(trace(model, x), r, slopes="adaptive", hidden=hidden, sound=False)


def rules(r, y):
    noise = Noise.for_batch(0, len(y))
    return {
        "chord": chord_slopes(r),
        "random": random_slopes(r, noise=noise),
        "bernoulli": bernoulli_slopes(r, 0.5, 0.7, noise=noise),
        "one step": optimised_slopes(r, y, noise=noise),
        "steps": optimised_slopes(r, y, noise=noise, steps=4, step_size=0.1),
    }


def deep(inputs=6, width=24, classes=3):
    torch.manual_seed(5)
    sizes = [inputs, width, width, width]
    layers = [m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, classes)).eval()


@pytest.mark.parametrize("name", NETS)
def test_margins_with_any_slopes_are_sound(name):
    model, shape = tiny_nets()[name]
    x = torch.rand(1, *shape)
    y = model(x).argmax(1)
    points = hf.Linf(0.08).random_start(x.expand(10_000, *shape), Noise.for_batch(0, 10_000))
    logits = model(points)
    margins = logits[:, y] - logits
    r = relaxed(model, x)
    for name_, slopes in rules(r, y).items():
        assert bool((margins >= linear.margin_bounds(r, y, slopes) - 1e-5).all()), name_


@pytest.mark.parametrize("name", NETS)
def test_slopes_are_in_range_and_exact_on_stable_neurons(name):
    model, shape = tiny_nets()[name]
    x = torch.rand(4, *shape)
    r, y = relaxed(model, x), torch.tensor([0, 1, 2, 0])
    for slopes in rules(r, y).values():
        assert slopes
        for i, slope in slopes.items():
            node = r.graph.nodes[i]
            low, high = r.intervals[node.inputs[0]]
            assert slope.shape == (4, 1, *node.shape)
            assert not slope.requires_grad
            assert bool(((slope >= node.op.parameter) & (slope <= 1)).all())
            assert bool((slope[:, 0][low >= 0] == 1).all())
            assert torch.allclose(slope[:, 0][high <= 0], torch.tensor(node.op.parameter))


def test_chord_slopes_equal_parallel_lines_on_interval_bounds():
    model, shape = tiny_nets()["mlp"]
    x, y = torch.rand(4, *shape), torch.tensor([0, 1, 2, 0])
    r = relaxed(model, x)
    parallel = linear.relaxation(r.graph, r.region, slopes="parallel", hidden=False, sound=False)
    assert torch.allclose(linear.margin_bounds(r, y, chord_slopes(r)), linear.margin_bounds(parallel, y), atol=1e-6)


def test_the_variant_0_1_is_crown_ibp_exactly():
    model = deep()
    x, y = torch.rand(4, 6), torch.tensor([0, 1, 2, 0])
    r = relaxed(model, x)
    slopes = bernoulli_slopes(r, 0.0, 1.0, noise=Noise.for_batch(0, 4))
    for i, slope in slopes.items():
        low, high = r.intervals[r.graph.nodes[i].inputs[0]]
        differ = slope[:, 0] != r.lines[i].lower_slope
        assert bool((low[differ] == -high[differ]).all()), "a tie may go either way"
    assert torch.allclose(linear.margin_bounds(r, y, slopes), linear.margin_bounds(r, y), atol=1e-6)


def test_bernoulli_frequencies():
    model = deep(width=200)
    x = torch.rand(20, 6)
    r = relaxed(model, x, hf.Linf(0.3))
    low, high = (torch.cat([r.intervals[i][side].flatten() for i in (1, 3, 5)]) for side in (0, 1))
    slopes = bernoulli_slopes(r, 0.25, 0.75, noise=Noise.for_batch(0, 20))
    drawn = torch.cat([slope.flatten() for slope in slopes.values()])
    free = (low < 0) & (high > 0)
    left, right = free & (-low > high), free & (-low <= high)
    assert abs(float(drawn[left].mean()) - 0.25) < 0.03
    assert abs(float(drawn[right].mean()) - 0.75) < 0.03


def test_a_step_improves_the_loss_and_makes_slopes_binary():
    model = deep()
    x = torch.rand(40, 6)
    y = model(x).argmax(1)
    r, noise = relaxed(model, x, hf.Linf(0.05)), Noise.for_batch(0, 40)
    start, moved = random_slopes(r, noise=noise), optimised_slopes(r, y, noise=noise)

    def loss(slopes):
        return cross_entropy(-linear.margin_bounds(r, y, slopes), y)

    assert loss(moved) < loss(start)
    free = {i: slope.clone().requires_grad_() for i, slope in start.items()}
    total = cross_entropy(-linear.margin_bounds(r, y, free), y, reduction="sum")
    gradients = torch.autograd.grad(total, list(free.values()))
    for (i, slope), gradient in zip(moved.items(), gradients, strict=True):
        low, high = r.intervals[r.graph.nodes[i].inputs[0]]
        pushed = ((low < 0) & (high > 0))[:, None] & (gradient != 0)
        assert bool(pushed.any())
        assert bool(((slope[pushed] == 0) | (slope[pushed] == 1)).all())
        kept = ((low < 0) & (high > 0))[:, None] & (gradient == 0)
        assert torch.equal(slope[kept], start[i][kept])


def test_more_steps_lower_the_loss_on_average():
    model = deep()
    x = torch.rand(40, 6)
    y = model(x).argmax(1)
    r, noise = relaxed(model, x, hf.Linf(0.05)), Noise.for_batch(0, 40)
    losses = [cross_entropy(-linear.margin_bounds(r, y, random_slopes(r, noise=noise)), y)]
    for steps in (1, 3, 7):
        slopes = optimised_slopes(r, y, noise=noise, steps=steps, step_size=0.1)
        losses.append(cross_entropy(-linear.margin_bounds(r, y, slopes), y))
    assert all(b < a for a, b in pairwise(losses))


def test_one_hidden_layer_pushes_every_slope_that_matters_to_zero():
    """There the coefficients of the margin are fixed, and a lower slope multiplies l < 0 at the worst input."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(1, 30), nn.ReLU(), nn.Linear(30, 2)).eval()
    with torch.no_grad():
        model[0].weight.abs_()
        model[0].bias.copy_(-0.5 * model[0].weight[:, 0])  # every neuron changes sign at 1/2
        model[2].weight[0] = 1.0
        model[2].weight[1] = 0.0
    x, y = torch.full((1, 1), 0.5), torch.tensor([0])
    r = relaxed(model, x, hf.Linf(0.2))
    (slope,) = optimised_slopes(r, y, noise=Noise.for_batch(0, 1)).values()
    assert bool((slope == 0).all())


def test_slopes_belong_to_the_input_and_the_seed():
    model, shape = tiny_nets()["cnn"]
    x, y = torch.rand(4, *shape), torch.tensor([0, 1, 2, 3])
    noise = Noise.for_batch(0, 4)
    whole = optimised_slopes(relaxed(model, x), y, noise=noise)
    part = optimised_slopes(relaxed(model, x[2:]), y[2:], noise=noise[2:])
    for i in whole:
        assert torch.allclose(whole[i][2:], part[i], atol=1e-6)
    other = random_slopes(relaxed(model, x), noise=Noise.for_batch(1, 4))
    assert any(bool((other[i] != s).any()) for i, s in random_slopes(relaxed(model, x), noise=noise).items())


def test_the_second_pass_carries_gradients_but_the_slopes_do_not():
    model = deep().double()
    x, y = torch.rand(2, 6, dtype=torch.float64), torch.tensor([0, 1])
    weight = model[2].weight
    r = relaxed(model, x, hf.Linf(0.05))
    slopes = optimised_slopes(r, y, noise=Noise.for_batch(0, 2))
    (gradient,) = torch.autograd.grad(linear.margin_bounds(r, y, slopes).sum(), [weight])
    start = weight.detach().clone()
    for i, j in ((0, 0), (3, 5), (10, 2)):
        ends = []
        for sign in (1, -1):
            with torch.no_grad():
                weight.copy_(start)
                weight[i, j] += sign * 1e-6
                ends.append(linear.margin_bounds(relaxed(model, x, hf.Linf(0.05)), y, slopes).sum())
        assert abs(float(gradient[i, j] - (ends[0] - ends[1]) / 2e-6)) < 1e-5


def test_stable_networks_leave_nothing_to_choose():
    model = deep()
    x, y = torch.rand(3, 6), torch.tensor([0, 1, 2])
    r = relaxed(model, x, hf.Linf(0.0))
    assert torch.allclose(
        linear.margin_bounds(r, y, optimised_slopes(r, y, noise=Noise.for_batch(0, 3))),
        linear.margin_bounds(r, y),
        atol=1e-6,
    )
    affine = nn.Linear(6, 3).eval()
    assert optimised_slopes(relaxed(affine, x), y, noise=Noise.for_batch(0, 3)) == {}


def test_bad_options_are_refused():
    r, y, noise = relaxed(deep(), torch.rand(1, 6)), torch.tensor([0]), Noise.for_batch(0, 1)
    with pytest.raises(InputError, match=r"p=1\.5"):
        bernoulli_slopes(r, 1.5, 0.0, noise=noise)
    with pytest.raises(InputError, match="steps=0"):
        optimised_slopes(r, y, noise=noise, steps=0)


@pytest.mark.parametrize("threat", [hf.Linf(0.03), hf.L2(0.05), hf.L1(0.1), hf.Patch(1, 2)], ids=str)
def test_the_certificate_does_not_depend_on_the_batch_and_is_not_broken(threat):
    model, shape = tiny_nets()["cnn"]
    x = torch.rand(9, *shape)
    y = model(x).argmax(1)
    whole, pieces = (hf.certify(model, x, y, threat, "slope-step", chunk=chunk) for chunk in (256, 2))
    assert torch.allclose(whole.margin, pieces.margin, atol=1e-5)
    assert set(whole.by) <= {"", "slope-step"}
    for draw in range(20):
        broken = model(threat.random_start(x, Noise.for_batch(draw, 9))).argmax(1) != y
        if threat.name != "patch":
            broken |= hf.attack(model, x, y, threat, "pgd", steps=5, seed=draw).success
        assert not bool((broken & whole.certified).any())
    plain = hf.certify(model, x, y, threat, "slope-step", sound=False)
    assert bool((plain.margin >= whole.margin - 1e-6).all())


def test_certificate_options_change_the_bound_and_stay_sound():
    model = deep()
    x = torch.rand(8, 6)
    y = model(x).argmax(1)
    one, seven, other = (
        hf.certify(model, x, y, hf.Linf(0.05), "slope-step", **options).margin
        for options in ({}, {"steps": 7, "step_size": 0.1}, {"seed": 1})
    )
    assert not torch.equal(one, seven)
    assert not torch.equal(one, other)
    worst = hf.Linf(0.05).random_start(x.repeat(500, 1), Noise.for_batch(0, 4000))
    logits = model(worst).view(500, 8, 3)
    margins = logits.gather(2, y.expand(500, 8)[..., None]) - logits
    margins = margins.scatter(2, y.expand(500, 8)[..., None], torch.inf).amin((0, 2))
    for bound in (one, seven, other):
        assert bool((bound <= margins).all())


def test_one_step_margins_train():
    model = deep()
    x, y = torch.rand(3, 6), torch.tensor([0, 1, 2])
    r = region(hf.Linf(0.05), x, sound=False)
    noise = Noise.for_batch(0, 3)
    margins = one_step_margins(trace(model, x), r, y, noise=noise, steps=1, step_size=2.0, sound=False)
    gradients = torch.autograd.grad(cross_entropy(-margins, y), list(model.parameters()))
    assert all(bool(torch.isfinite(g).all()) for g in gradients)
    assert bool((gradients[0] != 0).any())


def test_a_fingerprint_depends_on_the_values_alone():
    x = torch.rand(5, 2, 3)
    marks = fingerprint(x)
    assert torch.equal(marks[2:4], fingerprint(x[2:4]))
    assert marks.unique().numel() == 5
    moved = x.clone()
    moved[0, 0, 0], moved[0, 0, 1] = x[0, 0, 1], x[0, 0, 0]
    assert fingerprint(moved)[0] != marks[0]
