"""Costs in multiplications, against sums over the layers written out."""

from itertools import pairwise

import pytest
import torch
from nets import tiny_nets
from torch import nn

import holdfast as hf
from holdfast.analyze.products import cost_of_methods, multiplications


def perceptron(*widths):
    torch.manual_seed(0)
    layers = [[nn.Linear(a, b), nn.ReLU()] for a, b in pairwise(widths)]
    return nn.Sequential(*[m for pair in layers for m in pair][:-1]).eval()


def costs(*widths, eps=0.5, count=3):
    model, x = perceptron(*widths), torch.rand(count, widths[0])
    return cost_of_methods(model, x, model(x).argmax(1), hf.Linf(eps))


def test_products_and_convolutions_are_counted_with_their_backward_passes():
    layer, x = nn.Conv2d(2, 3, 3, padding=1, bias=False), torch.rand(1, 2, 5, 5, requires_grad=True)
    forward = 2 * 3 * 9 * 25
    assert multiplications(lambda: layer(x)) == forward
    assert multiplications(lambda: layer(x).sum().backward()) == 3 * forward  # for the input, and for the weights


def test_costs_of_a_perceptron_are_the_sums_over_its_layers():
    widths = (20, 16, 12, 3)
    found, pairs = costs(*widths), list(pairwise(widths))
    products, inputs, classes = sum(a * b for a, b in pairs), widths[0], widths[-1]
    assert found["forward"] == products
    assert found["pgd step"] == 2 * products  # the gradient for the input, not for the weights
    assert found["ibp"] == 2 * products  # a centre and a radius
    # Each hidden layer: `inputs` slopes and the interval through it; then its range, two sums for an end.
    hidden = sum((inputs + 2) * a * b + 4 * inputs * b for a, b in pairs[:-1])
    assert found["forward form"] == hidden + (inputs + 2) * widths[-2] * classes


def test_costs_grow_as_the_table_says():
    """Twice the neurons, twice the layers: the orders of Table 3.4, up to the first and the last layer."""
    small, wide, deep = costs(16, 32, 32, 32, 3), costs(16, 64, 64, 64, 3), costs(16, *[32] * 6, 3)
    for name, power in (("pgd step", 2), ("ibp", 2), ("forward form", 2), ("crown-ibp", 2), ("fastlin", 3)):
        assert 2 ** (power - 0.8) < wide[name] / small[name] < 2 ** (power + 0.2), name
    for name, power in (("pgd step", 1), ("ibp", 1), ("forward form", 1), ("crown-ibp", 1), ("fastlin", 2)):
        assert 2 ** (power - 0.6) < deep[name] / small[name] < 2 ** (power + 1), name
    assert small["ibp"] < small["crown-ibp"] < small["forward form"] < small["fastlin"]


def test_the_forward_form_is_cheaper_where_the_input_is_small_and_dearer_where_it_is_large():
    narrow, broad = costs(4, 64, 64, 64, 3), costs(400, 16, 16, 16, 3)
    assert narrow["forward form"] < narrow["fastlin"]
    assert broad["forward form"] > broad["fastlin"]


def test_stable_neurons_cost_no_rows():
    certain, open_ = costs(10, 32, 32, 32, 3, eps=1e-4), costs(10, 32, 32, 32, 3, eps=0.5)
    assert certain["fastlin"] < open_["fastlin"] / 2
    assert certain["ibp"] == open_["ibp"]


def test_what_has_no_rule_is_left_out_and_other_threats_are_refused():
    model, shape = tiny_nets()["smooth"]
    x = torch.rand(2, *shape)
    found = cost_of_methods(model, x, model(x).argmax(1), hf.L2(0.1))
    assert "mmr" not in found
    assert "crown" in found
    with pytest.raises(hf.InputError, match="balls"):
        cost_of_methods(model, x, model(x).argmax(1), hf.Sparse(1))
