"""Locality at every level against the definition, level by level, and the area under the curve."""

import pytest
import torch

from holdfast.errors import InputError
from holdfast.explanations.evaluate.locality import scores
from holdfast.explanations.evaluate.locality_curve import locality_curve


def slow_area(a, m):
    """One attribution (n,) and mask (n,): precision and recall at every different positive level, one by one."""
    area = before = 0.0
    for rho in sorted({v for v in a.tolist() if v > 0}, reverse=True):
        kept = a >= rho
        precision = float((a * kept * m).sum() / (a * kept).sum())
        recall = float((a * kept * m).sum() / (a.abs() * m).sum())
        area, before = area + precision * (recall - before), recall
    return area


def test_the_area_level_by_level_with_ties():
    torch.manual_seed(0)
    a = (3 * torch.randn(20, 1, 4, 5)).round().double() / 3
    m = torch.rand(20, 4, 5) > 0.5
    found = locality_curve(a, m)
    for i in range(20):
        wanted = slow_area(a[i].flatten(), m[i].flatten().double())
        assert float(found.average_precision[i]) == pytest.approx(wanted, abs=1e-12)


def test_at_level_zero_the_curve_ends_at_the_scores():
    torch.manual_seed(1)
    a, m = torch.randn(6, 3, 5, 4), torch.rand(6, 5, 4) > 0.4
    found, at_zero = locality_curve(a, m), scores(a, m)
    last = (~torch.isnan(found.level)).sum(1, keepdim=True) - 1
    torch.testing.assert_close(found.precision.gather(1, last)[:, 0], at_zero.precision)
    torch.testing.assert_close(found.recall.gather(1, last)[:, 0], at_zero.recall)
    assert bool((found.average_precision <= at_zero.recall + 1e-6).all())
    scaled = locality_curve(7 * a, m).average_precision
    torch.testing.assert_close(scaled, found.average_precision)


def test_the_perfect_and_the_useless_attribution():
    m = torch.zeros(1, 4, 4, dtype=torch.bool)
    m[0, 1:3, 1:3] = True
    inside = m[:, None].float()
    assert locality_curve(inside, m).average_precision.tolist() == [1.0]
    assert locality_curve(1 - inside, m).average_precision.isnan().tolist() == [True]  # nothing inside
    assert locality_curve(-inside, m).average_precision.isnan().tolist() == [True]
    with pytest.raises(InputError, match="masks"):
        locality_curve(inside, m[:, :3])
