"""Expected gradients against the formula on linear models."""

import pytest
import torch

import holdfast as hf
from explain_tasks import linear, middle
from holdfast.errors import InputError


def test_expected_gradients_add_up_and_equal_the_formula_on_linear_models():
    model, x = linear(), middle(4)
    y, background = model(x).argmax(1), torch.rand(30, 6, dtype=torch.float64)
    found = hf.explain(model, x, y, "expected-gradients", background=background, samples=300)
    wanted = (x - background.mean(0)) * model.weight.detach()[y]
    assert float((found.attribution - wanted).abs().max()) < 0.1
    assert float(found.error.max()) < 1e-9
    with pytest.raises(InputError, match="needs background="):
        hf.explain(model, x, y, "expected-gradients")
    with pytest.raises(InputError, match=r"background of shape \(N, 6\)"):
        hf.explain(model, x, y, "expected-gradients", background=torch.rand(3, 5))
