"""Norms for training: close to the proven bounds, with the right gradients, also while the weights move."""

from dataclasses import replace

import pytest
import torch

from holdfast.bounding.graph.ops import Conv, Linear
from holdfast.bounding.lipschitz.spectral import norm_bound, norm_estimate
from holdfast.bounding.lipschitz.spectral_conv import blocks
from holdfast.bounding.lipschitz.spectral_estimate import LARGEST, TWIST, fits, fourier_norm, vectors_shape
from holdfast.bounding.lipschitz.spectral_proof import random_unit

GEOMETRIES = {
    "plain": ((6, 4, 3, 3), {"padding": (1, 1)}),
    "stride": ((6, 4, 4, 4), {"stride": (2, 2), "padding": (1, 1)}),
    "uneven": ((5, 3, 2, 3), {"stride": (3, 1), "padding": (0, 2)}),
    "dilation": ((4, 4, 3, 3), {"dilation": (2, 1), "padding": (2, 1)}),
    "groups": ((6, 2, 3, 3), {"padding": (1, 1), "groups": 3}),
    "wide": ((2, 8, 5, 5), {"padding": (2, 2)}),
}
ZERO = torch.zeros((), dtype=torch.float64)


def conv(name, size=14, seed=0):
    shape, options = GEOMETRIES[name]
    groups = options.get("groups", 1)
    weight = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    rest = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1, **options}
    return Conv(weight, None, in_shape=(shape[1] * groups, size, size), **rest)


def by_blocks(op):
    gram, _ = blocks(op, (False, False), (TWIST, TWIST))
    return torch.linalg.eigvalsh(gram).amax().sqrt()


@pytest.mark.parametrize("name", GEOMETRIES)
def test_it_is_the_largest_norm_of_a_block_and_close_to_the_proven_bound(name):
    op = conv(name)
    assert fits(op)
    sigma, u = fourier_norm(op, random_unit(vectors_shape(op), ZERO), 300)
    assert float(sigma) == pytest.approx(float(by_blocks(op)), rel=1e-4)
    assert u.shape == vectors_shape(op)
    large = conv(name, size=28)
    estimate = norm_estimate(large, None, ZERO, steps=300, first=300)[0]
    assert 0.99 < float(estimate) / norm_bound(large, tight=1.0) < 1.03


@pytest.mark.parametrize("name", GEOMETRIES)
def test_the_gradient_is_that_of_the_norm(name):
    op = conv(name)
    weight = op.weight.clone().requires_grad_(True)
    sigma, _ = fourier_norm(replace(op, weight=weight), random_unit(vectors_shape(op), ZERO), 3000)
    sigma.backward()
    step = 1e-5 * torch.randn(weight.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ahead, behind = (by_blocks(replace(op, weight=op.weight + sign * step)) for sign in (1, -1))
    assert float((weight.grad * step).sum()) == pytest.approx(float(ahead - behind) / 2, rel=1e-3)


def test_a_warm_start_follows_weights_that_move_where_whole_maps_lag_behind():
    """Flat spectra: orthogonal 1x1 kernels, and a direction that grows by steps of a percent."""
    torch.manual_seed(0)
    op = conv("plain", size=20)
    centre = torch.zeros(8, 8, 3, 3, dtype=torch.float64)
    centre[:, :, 1, 1] = torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64))[0]
    op = replace(op, weight=centre, in_shape=(8, 20, 20))
    _, v = norm_estimate(op, None, ZERO, steps=50, first=50)
    drift = 0.01 * torch.randn_like(centre)
    for _ in range(30):
        op = replace(op, weight=op.weight + drift)
        sigma, v = norm_estimate(op, v, ZERO, steps=1, first=1)
    assert float(sigma) == pytest.approx(norm_bound(op), rel=0.01)


def test_vectors_of_another_size_are_replaced():
    op = conv("plain")
    sigma, v = norm_estimate(op, torch.ones(3), ZERO, steps=300, first=300)
    assert float(norm_estimate(op, v, ZERO, steps=0, first=0)[0]) == pytest.approx(float(sigma), rel=1e-3)


def test_weights_of_zero_have_the_norm_zero_and_can_start_again():
    op = conv("plain")
    sigma, v = norm_estimate(replace(op, weight=torch.zeros_like(op.weight)), None, ZERO, steps=3, first=3)
    assert float(sigma) == 0
    assert float(norm_estimate(op, v, ZERO, steps=300, first=300)[0]) == pytest.approx(float(by_blocks(op)), rel=1e-3)


def test_what_starts_afresh_takes_the_first_steps():
    layer = Linear(torch.randn(30, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), None)
    for op in (layer, conv("plain"), conv("plain", size=8)):
        exact = norm_estimate(op, None, ZERO, steps=0, first=2000)[0]
        again = norm_estimate(op, torch.ones(3), ZERO, steps=0, first=2000)[0]
        assert float(again) == pytest.approx(float(exact), rel=1e-6)


def test_dense_layers_of_zero_and_without_a_number():
    zero = Linear(torch.zeros(3, 5, dtype=torch.float64), None)
    sigma, v = norm_estimate(zero, None, ZERO, steps=3, first=3)
    assert float(sigma) == 0
    op = Linear(torch.eye(3, 5, dtype=torch.float64), None)
    assert float(norm_estimate(op, v, ZERO, steps=3, first=3)[0]) == pytest.approx(1)
    for value in (torch.nan, torch.inf):  # for the loop to see, which stops with a message
        broken = Linear(torch.full((3, 5), value, dtype=torch.float64), None)
        assert not torch.isfinite(norm_estimate(broken, v, ZERO, steps=1, first=1)[0])


def test_small_maps_and_very_wide_layers_go_another_way():
    assert not fits(conv("plain", size=11))
    op = conv("plain")
    channels = int((LARGEST / 100) ** 0.5) + 1
    assert not fits(replace(op, weight=torch.empty(channels, channels, 3, 3), in_shape=(channels, 14, 14)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtypes_stay(dtype):
    op = conv("stride")
    op = replace(op, weight=op.weight.to(dtype))
    sigma, v = norm_estimate(op, None, torch.zeros((), dtype=dtype), steps=5, first=5)
    assert sigma.dtype == v.dtype == dtype
