import itertools

import torch
from nets import tiny_nets
from torch import nn

import holdfast as hf
from holdfast.bounding import interval
from holdfast.bounding.graph.trace import trace


def test_patches_equal_a_loop_over_locations():
    model, shape = tiny_nets()["cnn"]
    x = torch.rand(3, *shape)
    y = model(x).argmax(1)
    patch = hf.Patch(2, 1)
    ours = hf.certify(model, x, y, patch, "ibp", sound=False, chunk_boxes=7).margin
    graph, worst = trace(model, x), torch.full((3,), torch.inf)
    for row, column in itertools.product(range(7 - 1), range(5)):
        lower, upper = x.clone(), x.clone()
        lower[:, :, row : row + 2, column], upper[:, :, row : row + 2, column] = 0, 1
        margins = interval.margin_bounds(graph, lower, upper, y, sound=False).scatter(1, y[:, None], torch.inf)
        worst = torch.minimum(worst, margins.amin(1))
    assert torch.allclose(ours, worst, atol=1e-5)
    union = hf.bounds(model, x, patch, "ibp", chunk=7)
    assert bool((union.lower <= model(x)).all())
    assert bool((union.upper >= model(x)).all())


def test_a_smaller_patch_is_certified_at_least_as_well():
    model, shape = tiny_nets()["pooled"]
    x = torch.rand(4, *shape)
    y = model(x).argmax(1)
    small, large = (hf.certify(model, x, y, patch, "ibp").margin for patch in (hf.Patch(1, 1), hf.Patch(2, 2)))
    assert bool((small >= large - 1e-6).all())


def test_one_pixel_patches_on_a_grid_of_values():
    """Exhaustive: no value of any one pixel, of 21 levels, breaks a certified input."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(9, 6), nn.ReLU(), nn.Linear(6, 2)).eval()
    x = torch.rand(60, 1, 3, 3)
    with torch.no_grad():
        gap = model(x).diff(dim=1).median()
        model[3].bias[0] += gap  # about half of the inputs in each class, and some near the boundary
    y = model(x).argmax(1)
    result = hf.certify(model, x, y, hf.Patch(1, 1), "ibp")
    assert bool(result.certified.any())
    assert not bool(result.certified.all())
    for pixel, value in itertools.product(range(9), torch.linspace(0, 1, 21)):
        changed = x.flatten(1).clone()
        changed[:, pixel] = value
        broken = model(changed.view_as(x)).argmax(1) != y
        assert not bool((broken & result.certified).any())


def test_wrong_inputs_and_ties_are_not_certified():
    model = nn.Linear(2, 2).eval()
    model.weight.data, model.bias.data = torch.eye(2), torch.zeros(2)
    x = torch.tensor([[0.5, 0.5], [0.2, 0.8], [0.8, 0.2]])
    result = hf.certify(model, x, torch.tensor([0, 0, 0]), hf.Linf(0.0), "ibp")
    assert result.certified.tolist() == [False, False, True]
    assert result.by == ("", "", "ibp")
    assert result.alpha == 0.0
    assert result.radius is None


def test_radius_box_of_zero_equals_the_clean_margin():
    model, shape = tiny_nets()["mlp"]
    x = torch.rand(5, *shape)
    y = model(x).argmax(1)
    result = hf.certify(model, x, y, hf.Box(torch.zeros(shape)), "ibp")
    top = model(x).topk(2, 1).values
    assert torch.allclose(result.margin, top[:, 0] - top[:, 1], atol=1e-4)
    assert bool(result.certified.all())


def test_a_radius_for_each_input_equals_one_by_one():
    model, shape = tiny_nets()["mlp"]
    x, radius = torch.rand(7, *shape), 0.1 * torch.rand(7, *shape)
    y = model(x).argmax(1)
    for method in ("ibp", "crown", "auto"):
        whole = hf.certify(model, x, y, hf.Box(radius, batched=True), method, chunk=3)
        for i in range(7):
            one = hf.certify(model, x[i : i + 1], y[i : i + 1], hf.Box(radius[i]), method)
            if method != "auto":  # which may stop earlier where it can tell that there is nothing to prove
                assert torch.allclose(whole.margin[i], one.margin[0], atol=1e-5)
            assert bool(whole.certified[i]) == bool(one.certified[0])
