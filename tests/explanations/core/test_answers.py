"""Which answers count as usable."""

import torch

from holdfast.explanations.core.answers import without_error


def test_ok_is_false_exactly_where_a_value_or_a_share_is_not_finite():
    largest = torch.finfo(torch.float32).max
    shares = torch.tensor([[1.0, 2.0], [largest, largest], [torch.inf, -torch.inf], [1.0, torch.nan], [1.0, 1.0]])
    values = torch.tensor([0.0, 0.0, 0.0, 0.0, torch.nan])
    result = without_error(shares, values, None, ("",) * 5, 1)
    assert result.ok.tolist() == [True, True, False, False, False]
    assert without_error(shares[:1], values[:1], None, ("",), 1).ok.tolist() == [True]
    assert bool(result.error.isnan().all())
    assert result.gradients.tolist() == [1] * 5
