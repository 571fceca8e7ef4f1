"""Pictures of random networks: well-formed, and every value is where it belongs."""

import re
from xml.etree import ElementTree

import pytest
import torch

from holdfast.analyze.draws import DrawsCurve
from holdfast.analyze.plots.random_charts import (
    density_svg,
    draws_svg,
    gradient_plane_svg,
    kernel_density,
    matrices_svg,
    proxy_svg,
)
from holdfast.analyze.proxy_gradient import ProxyStudy
from holdfast.errors import InputError


def test_matrices_are_greys_from_low_to_high():
    svg = matrices_svg({"cosines <1>": torch.tensor([[1.0, -1.0], [0.0, 5.0]])}, title="T", low=-1.0)
    ElementTree.fromstring(svg)
    assert re.findall(r'fill="rgb\((\d+),', svg) == ["0", "255", "128", "0"]
    assert "cosines &lt;1&gt;: mean 1.25" in svg
    with pytest.raises(InputError, match="square matrix"):
        matrices_svg({"m": torch.ones(2, 3)}, title="T")
    with pytest.raises(InputError, match="finite"):
        matrices_svg({"m": torch.full((2, 2), torch.nan)}, title="T")


def test_the_plane_has_a_point_for_each_gradient_and_arrows_of_the_resultant_length():
    first = torch.tensor([[1.0, 0, 0], [1.0, 0, 0]])
    second = torch.tensor([[0, 1.0, 0.1], [0, 1.0, -0.1], [0, 1.0, 0]])
    svg = gradient_plane_svg({"a": first, "b": second})
    ElementTree.fromstring(svg)
    assert svg.count('fill-opacity="0.45"') == 5
    assert "a: resultant length 1.000" in svg
    assert 'x2="350.0" y2="220.0"' in svg  # one unit to the right of the middle
    with pytest.raises(InputError, match="two models"):
        gradient_plane_svg({"a": first})


def test_a_density_has_mass_one():
    values = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    xs = torch.linspace(-8, 8, 2001, dtype=torch.float64)
    density = kernel_density(values, xs, 0.3)
    assert float(torch.trapezoid(density, xs)) == pytest.approx(1, abs=1e-6)
    assert float(torch.trapezoid(density * xs, xs)) == pytest.approx(float(values.mean()), abs=1e-6)
    svg = density_svg({"kappa": values, "other": values + 1}, title="T", x_label="kappa")
    ElementTree.fromstring(svg)
    assert svg.count("<polyline") == 2
    with pytest.raises(InputError, match="that differ"):
        density_svg({"same": torch.ones(5)}, title="T", x_label="x")


def test_curves_of_accuracy_and_of_proxies():
    svg = draws_svg({"eot": DrawsCurve((1, 10), (0.5, 0.4))})
    ElementTree.fromstring(svg)
    assert svg.count("<polyline") == 1
    with pytest.raises(InputError, match="numbers >= 1"):
        draws_svg({"eot": DrawsCurve((0,), (0.5,))})
    study = ProxyStudy((0.0, 90.0), torch.tensor([[2.0, 4.0], [0.0, 0.0]]), (0.1, 0.9))
    svg = proxy_svg({"l2": study})
    ElementTree.fromstring(svg)
    assert study.relative == [1.0, 0.0]
    assert svg.count("<polyline") == 3  # rise, accuracy, and the cosine
