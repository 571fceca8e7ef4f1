"""Selective classification: curves against plain loops, thresholds, outcomes, probes, and the chart."""

import math
import re
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from holdfast.analyze.selective import (
    Outcome,
    outcome,
    probes,
    rejecting,
    rejection_rates,
    risk_coverage,
    risk_coverage_svg,
)
from holdfast.errors import InputError
from holdfast.models.zoo.centroid import Centroid, CentroidNet, acceptance, with_rejection


@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=25))
@settings(max_examples=30)
def test_the_curve_is_that_of_a_loop_over_thresholds(rows):
    score = torch.tensor([float(s) for s, _ in rows])
    correct = torch.tensor([c for _, c in rows])
    curve = risk_coverage(score, correct)
    thresholds = sorted({s for s, _ in rows}, reverse=True)
    assert curve.threshold.tolist() == thresholds
    area, before = 0.0, 0.0
    for i, threshold in enumerate(thresholds):
        kept = [c for s, c in rows if s >= threshold]
        coverage, risk = len(kept) / len(rows), kept.count(False) / len(kept)
        assert float(curve.coverage[i]) == pytest.approx(coverage)
        assert float(curve.risk[i]) == pytest.approx(risk)
        area, before = area + risk * (coverage - before), coverage
    assert curve.area == pytest.approx(area)
    assert float(curve.coverage[-1]) == 1
    assert float(curve.risk[-1]) == pytest.approx(1 - sum(c for _, c in rows) / len(rows))


def test_without_ties_the_area_is_the_mean_of_the_risks():
    score, correct = torch.rand(50), torch.rand(50) > 0.3
    curve = risk_coverage(score, correct)
    assert curve.area == pytest.approx(float(curve.risk.mean()))


def test_an_oracle_has_a_rising_curve_and_the_least_area():
    correct = torch.rand(80) > 0.25
    oracle = risk_coverage(correct.double() + 0.5 * torch.rand(80), correct)
    assert bool((oracle.risk.diff() >= 0).all())
    share = float(correct.double().mean())
    assert oracle.coverage_at(0.0) == pytest.approx(share)
    for seed in range(1, 6):
        score = torch.rand(80, generator=torch.Generator().manual_seed(seed))
        assert risk_coverage(score, correct).area > oracle.area
    reverse = risk_coverage(-correct.double(), correct)
    assert reverse.area > oracle.area


def test_coverage_at_a_risk_takes_the_largest_one():
    score = torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0])
    correct = torch.tensor([False, True, True, True, False])
    curve = risk_coverage(score, correct)
    assert curve.risk.tolist() == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4, 2 / 5])
    assert curve.coverage_at(0.3) == pytest.approx(0.8)
    assert curve.coverage_at(0.4) == 1
    assert curve.coverage_at(0.1) == 0


@pytest.mark.parametrize(("coverage", "threshold"), [(0.1, 5.0), (0.2, 5.0), (0.21, 4.0), (0.8, 2.0), (1.0, 1.0)])
def test_threshold_at_a_coverage(coverage, threshold):
    curve = risk_coverage(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), torch.ones(5, dtype=torch.bool))
    assert curve.threshold_at(coverage) == threshold


def test_eta_for_a_wanted_coverage():
    torch.manual_seed(0)
    net = CentroidNet(nn.Identity(), Centroid(3, 4)).double().eval()
    x = torch.randn(200, 4, dtype=torch.float64)
    score = acceptance(net, x)
    eta = risk_coverage(score, torch.ones(200, dtype=torch.bool)).threshold_at(0.75)
    predict = rejecting(with_rejection(net, eta), net.classes)
    rate = rejection_rates(predict, {"clean": x})["clean"]
    assert rate == pytest.approx(0.25, abs=0.01)  # the input on the threshold may fall on either side


def test_infinite_scores_are_scores():
    curve = risk_coverage(torch.tensor([torch.inf, 0.0]), torch.tensor([True, False]))
    assert curve.risk.tolist() == [0.0, 0.5]


def test_outcomes_add_up():
    y = torch.tensor([0, 1, 2, 0, 1])
    found = outcome(torch.tensor([0, 1, -1, 1, -1]), y)
    assert found == Outcome(0.4, 0.2, 0.4)
    assert found.selective_accuracy == pytest.approx(2 / 3)
    everything = outcome(torch.tensor([0, 1, 2, 0, 0]), y)
    assert everything.selective_accuracy == everything.right == pytest.approx(0.8)
    assert math.isnan(outcome(torch.full((5,), -1), y).selective_accuracy)


@pytest.mark.parametrize("chunk", [1, 7, 256])
def test_rejection_rates_are_counted_over_all_chunks(chunk):
    def predict(x):
        return torch.where(x[:, 0] > 0.5, -1, 0)

    low, high = torch.zeros(20, 2), torch.ones(10, 2)
    groups = {"clean": low, "unseen class": torch.cat([low, high]), "far": high}
    rates = rejection_rates(predict, groups, chunk=chunk)
    assert rates == {"clean": 0.0, "unseen class": pytest.approx(1 / 3), "far": 1.0}


def test_probes_are_in_range_and_reproducible():
    x = torch.rand(12, 1, 5, 4, generator=torch.Generator().manual_seed(0)) * 2 - 1
    found = probes(x, seed=3, low=-1.0, high=1.0)
    assert set(found) == {"noise", "corners", "shuffled"}
    for name, probe in found.items():
        assert probe.shape == x.shape
        assert bool(((probe >= -1) & (probe <= 1)).all())
        assert torch.equal(probe[5:], probes(x, seed=3, low=-1.0, high=1.0)[name][5:])
    assert set(found["corners"].unique().tolist()) == {-1.0, 1.0}
    assert torch.equal(found["shuffled"].flatten(1).sort(1).values, x.flatten(1).sort(1).values)
    assert not torch.equal(found["shuffled"], x)
    assert not torch.equal(found["noise"], probes(x, seed=4, low=-1.0, high=1.0)["noise"])


def test_the_chart_has_a_line_for_each_curve():
    curves = {f"score <{i}>": risk_coverage(torch.rand(20), torch.rand(20) > 0.4) for i in range(4)}
    text = risk_coverage_svg(curves, title="a & b")
    root = ElementTree.fromstring(text)
    lines = root.findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 4
    points = [tuple(map(float, p.split(","))) for p in lines[0].attrib["points"].split()]
    assert len(points) == 40
    assert points == sorted(points, key=lambda p: p[0])
    assert all(0 < a < 640 and 0 < b < 400 for a, b in points)
    assert len(re.findall(r"area 0\.\d{4}", text)) == 8
    perfect = risk_coverage(torch.rand(5), torch.ones(5, dtype=torch.bool))
    assert "nan" not in risk_coverage_svg({"perfect": perfect}).lower()


def test_bad_input_is_refused():
    good = torch.ones(3, dtype=torch.bool)
    with pytest.raises(InputError, match="at least one input"):
        risk_coverage(torch.rand(0), good[:0])
    with pytest.raises(InputError, match="bool"):
        risk_coverage(torch.rand(3), torch.ones(3))
    with pytest.raises(InputError, match="input 1 is NaN"):
        risk_coverage(torch.tensor([1.0, torch.nan, 0.0]), good)
    with pytest.raises(InputError, match="above 0 and at most 1"):
        risk_coverage(torch.rand(3), good).threshold_at(0.0)
    with pytest.raises(InputError, match="group 'far' is empty"):
        rejection_rates(lambda x: x[:, 0].long(), {"near": torch.rand(1, 2), "far": torch.rand(0, 2)})
    with pytest.raises(InputError, match="prediction for each"):
        outcome(torch.zeros(2), torch.zeros(3))
    with pytest.raises(InputError, match="1 to 5 curves"):
        risk_coverage_svg({})
