"""Bounding maps, histograms and cosines of half-widths, and the picture of the plane."""

import re
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.analyze.bounding_maps import bounding_map, feature_robustness, similarity
from holdfast.analyze.plots.plane import SIZE, plane_svg
from holdfast.certificates.nonuniform import nonuniform


def test_boxes_of_a_linear_classifier_are_parallel():
    torch.manual_seed(2)
    model = nn.Linear(5, 2).double().eval()
    x = torch.rand(4, 5).double()
    found = nonuniform(model, x, model(x).argmax(1), hf.Linf(0.0))
    assert similarity(found.radius).minimum > 0.999


def test_cosines_of_known_vectors():
    radius = torch.tensor([[1.0, 1.0], [2.0, 2.0], [1e-9, 1.0]])
    found = similarity(radius)
    root = 2**-0.5
    assert found.minimum == pytest.approx(root, abs=1e-6)
    assert found.mean == pytest.approx((1 + 2 * root) / 3, abs=1e-6)
    assert torch.allclose(found.matrix.diagonal(), torch.ones(3).double())
    assert found.matrix.shape == (3, 3)


def test_cosine_of_uniform_vectors_tends_to_three_quarters():
    found = similarity(torch.rand(40, 5000))
    assert found.mean == pytest.approx(0.75, abs=0.005)


def test_maps_are_light_where_the_half_width_is_small():
    radius = torch.ones(2, 3, 4, 5)
    radius[0, 1, 2, 3] = 0.01
    radius[0, :, 0, 0] = 10.0
    light = bounding_map(radius)
    assert light.shape == (2, 4, 5)
    assert light[0, 2, 3] == 1
    assert light[0, 0, 0] == 0
    assert light[0, 1, 1] == pytest.approx(1 / 3)
    assert bool((light[1] == 0).all())


def test_features_are_summed_up_over_the_inputs():
    radius = torch.tensor([[1.0, 0.1, 4.0], [4.0, 0.1, 1.0]])
    found = feature_robustness(radius, bins=4)
    assert torch.allclose(found.typical, torch.tensor([2.0, 0.1, 2.0]))
    assert found.counts.tolist() == [2, 0, 2, 2]
    assert found.edges.shape == (5,)
    assert torch.allclose(found.edges[[0, -1]], torch.tensor([0.1, 4.0]))


def test_histogram_counts_every_value_once():
    radius = torch.rand(7, 2, 3, 3) + 0.01
    assert feature_robustness(radius, bins=9).counts.sum() == radius.numel()
    assert feature_robustness(torch.ones(2, 3), bins=3).counts.sum() == 6


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bounding_map(torch.ones(2, 5)), r"\(B, C, H, W\), got shape \(2, 5\)"),
        (lambda: similarity(torch.ones(1, 5)), "at least 2 inputs, got 1"),
        (lambda: similarity(torch.tensor([[1.0], [0.0]])), "input 1 has half-widths that are not positive"),
        (lambda: feature_robustness(torch.ones(2, 5), bins=0), "bins must be at least 1"),
    ],
)
def test_bad_half_widths_are_refused(call, message):
    with pytest.raises(hf.InputError, match=message):
        call()


def plane():
    """Class 1 right of 0.25, in [-1, 1]^2."""
    model = nn.Linear(2, 2).eval()
    model.weight.data = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    model.bias.data = torch.tensor([0.25, 0.0])
    return model


def test_the_picture_shows_classes_boxes_and_points():
    x = torch.tensor([[-0.5, 0.0], [0.5, 0.5]])
    boxes = {"cube": torch.full((2, 2), 0.1), "box": torch.tensor([[0.1, 0.5], [0.2, 0.25]])}
    text = plane_svg(plane(), x, boxes, low=-1, high=1, cells=8)
    root = ElementTree.fromstring(text)
    rects = [r.attrib for r in root.iter("{http://www.w3.org/2000/svg}rect")]
    fills = [(float(r["x"]), r["fill"]) for r in rects if "fill" in r]
    assert {fill for place, fill in fills if place < 0.62 * SIZE} == {"hsl(0,60%,82%)"}
    assert {fill for place, fill in fills if place > 0.62 * SIZE} == {"hsl(137,60%,82%)"}
    drawn = [r for r in rects if "fill" not in r and "x" in r]
    assert len(drawn) == 4
    wide = [float(drawn[2][key]) for key in ("x", "y", "width", "height")]
    assert wide == pytest.approx([0.2 * SIZE, 0.25 * SIZE, 0.1 * SIZE, 0.5 * SIZE])
    assert len(re.findall("<circle", text)) == 2
    assert text.count("cube") == text.count(">box<") == 2


def test_the_picture_refuses_other_shapes():
    with pytest.raises(hf.InputError, match=r"shape \(B, 2\), got \(1, 3\)"):
        plane_svg(plane(), torch.zeros(1, 3), {})
    with pytest.raises(hf.InputError, match=r"half-widths of shape \(1, 2\)"):
        plane_svg(plane(), torch.zeros(1, 2), {"a": torch.ones(2, 2)})
