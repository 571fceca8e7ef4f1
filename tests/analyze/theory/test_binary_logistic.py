"""Curvature of logistic regression under attack grows with the budget, as long as the data stay separable."""

import numpy as np
import pytest
import torch

from holdfast.analyze.theory.binary_logistic import curvature_gap, gradient, hessian, loss
from holdfast.errors import InputError


def separable(seed, count=12, size=5, margin=0.5):
    rng = np.random.default_rng(seed)
    w = rng.standard_normal(size)
    w /= np.linalg.norm(w)
    x, y = rng.standard_normal((count, size)), rng.choice([-1.0, 1.0], count)
    x += ((margin - np.minimum(y * (x @ w), margin)) * y)[:, None] * w  # every margin is at least `margin`
    return w, x, y


@pytest.mark.parametrize("eps", [0.0, 0.2])
def test_the_derivatives_are_those_of_the_loss_with_a_fixed_offset(eps):
    w, x, y = separable(0)

    def value(v):
        return torch.nn.functional.softplus(-(torch.tensor(y) * (torch.tensor(x) @ v) - eps)).mean()

    at = torch.tensor(w, requires_grad=True)
    assert loss(w, x, y, eps) == pytest.approx(float(value(at.detach())), abs=1e-12)
    np.testing.assert_allclose(gradient(w, x, y, eps), torch.autograd.grad(value(at), at)[0].numpy(), atol=1e-12)
    dense = torch.autograd.functional.hessian(value, at.detach()).numpy()
    np.testing.assert_allclose(hessian(w, x, y, eps), dense, atol=1e-12)


def test_a_larger_budget_is_more_curved_in_every_direction():
    for seed in range(20):
        w, x, y = separable(seed)
        assert curvature_gap(w, x, y, 0.1, 0.4) >= -1e-12
        spectra = [np.linalg.eigvalsh(hessian(w, x, y, eps)) for eps in (0.0, 0.2, 0.4)]
        assert (np.diff(spectra, axis=0) >= -1e-12).all()


def test_without_separability_the_theorem_can_fail_and_is_refused():
    w, x, y = separable(1)
    y = -y
    assert np.linalg.eigvalsh(hessian(w, x, y, 0.4) - hessian(w, x, y, 0.0))[0] < -1e-3
    with pytest.raises(InputError, match="separates under the larger budget"):
        curvature_gap(w, x, y, 0.0, 0.4)
