"""Norms of single operators: the bounds against the SVD of the materialised operator, the estimates against both."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from holdfast.bounding.graph.ops import Affine, Average, Conv, Linear, Scale
from holdfast.bounding.graph.rules import average
from holdfast.bounding.lipschitz import spectral_conv, spectral_proof
from holdfast.bounding.lipschitz.spectral import domain, linear_part, norm_bound, power_iteration
from holdfast.bounding.lipschitz.spectral_proof import random_unit
from holdfast.errors import InputError, UnsupportedError


def matrix(op):
    """The operator without its bias, column by column, in float64."""
    shape = domain(op)
    units = torch.eye(math.prod(shape), dtype=torch.float64).view(-1, *shape)
    if isinstance(op, Conv):
        columns = F.conv2d(units, op.weight.double(), None, op.stride, op.padding, op.dilation, op.groups)
    elif isinstance(op, Linear):
        columns = units @ op.weight.double().T
    else:
        columns = op.apply(units)
    return columns.flatten(1).T


def svd(op):
    return float(torch.linalg.matrix_norm(matrix(op), 2))


def conv(weight, shape, *, stride=1, padding=0, dilation=1, groups=1):
    return Conv(weight, None, (stride, stride), (padding, padding), (dilation, dilation), groups, shape)


KERNELS = {"normal": torch.randn, "positive": torch.rand, "constant": torch.ones}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("channels", "size", "options"),
    [
        ((3, 3), 3, {"padding": 1}),
        ((2, 3), 3, {}),
        ((4, 2), 4, {"stride": 2, "padding": 1}),
        ((2, 2), 5, {"padding": 2}),
        ((2, 2), 5, {"padding": 1}),
        ((3, 2), 3, {"padding": 2, "dilation": 2}),
        ((4, 4), 3, {"padding": 1, "groups": 2}),
        ((4, 4), 3, {"padding": 1, "groups": 4}),
        ((2, 3), 4, {"stride": 4}),
        ((2, 2), 2, {"stride": 3}),
        ((2, 2), 3, {"stride": 3, "dilation": 2, "padding": 4}),
        ((3, 2), 1, {"padding": 2}),
    ],
)
def test_convolutions_are_bounded_within_two_percent_of_the_svd(kernel, channels, size, options):
    out, into = channels
    weight = KERNELS[kernel](out, into // options.get("groups", 1), size, size)
    op = conv(weight, (into, 9, 12), **options)
    truth = svd(op)
    assert 1 <= norm_bound(op) / truth <= 1.02
    assert 1 <= norm_bound(op, tight=math.inf) / truth <= 1.6  # the cheapest blocks hold as well


@settings(max_examples=25)
@given(
    st.integers(0, 10**6),
    st.tuples(st.integers(3, 9), st.integers(3, 9)),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(0, 3), st.integers(0, 3)),
    st.tuples(st.integers(1, 2), st.integers(1, 2)),
    st.integers(1, 2),
)
def test_any_geometry(seed, size, kernel, stride, padding, dilation, groups):
    assume(all(size[i] + 2 * padding[i] > dilation[i] * (kernel[i] - 1) for i in range(2)))
    torch.manual_seed(seed)
    op = Conv(torch.randn(2 * groups, 2, *kernel), None, stride, padding, dilation, groups, (2 * groups, *size))
    truth = svd(op)
    assert truth <= norm_bound(op) <= 1.02 * truth + 1e-30


@pytest.mark.parametrize("twist", [(0.0, 0.0), (0.5, 0.0), (0.5, 0.5)])
@pytest.mark.parametrize("exact", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("options", [{"padding": 1}, {"stride": 2, "padding": 1}, {"dilation": 2}, {"groups": 2}])
def test_each_kind_of_blocks_bounds_the_norm_by_itself(exact, twist, options):
    op = conv(torch.randn(4, 4 // options.get("groups", 1), 3, 3).double(), (4, 7, 6), **options)
    truth = svd(op)
    grams, error = spectral_conv.blocks(op, exact, twist)
    assert error < 1e-10 * truth**2
    largest = float(torch.linalg.eigvalsh(grams).max()) ** 0.5
    assert largest >= truth * (1 - 1e-12)
    assert largest <= truth * (1 + 1e-12 if exact == (True, True) else 1.6)
    assert spectral_proof.proved(grams, error) >= largest


def test_blocks_that_are_too_large_are_left_out_and_the_bound_holds(monkeypatch):
    op = conv(torch.ones(2, 2, 5, 5), (2, 8, 8), padding=2)
    tight, truth = norm_bound(op), svd(op)
    monkeypatch.setattr(spectral_conv, "LARGEST", 100)
    loose = norm_bound(op)
    assert truth <= tight < 1.001 * truth
    assert 1.01 * truth < loose < 1.3 * truth


@pytest.mark.parametrize("shape", [(5, 20), (20, 5), (1, 7), (64, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dense_layers_are_exact(shape, dtype):
    op = Linear(torch.randn(shape, dtype=dtype), torch.randn(shape[0], dtype=dtype))
    assert 1 <= norm_bound(op) / svd(op) <= 1.001


@pytest.mark.parametrize("factor", [0.0, 0.02, 0.999])
def test_a_guess_that_is_too_low_is_not_believed(monkeypatch, factor):
    layers = [Linear(torch.randn(12, 9), None), conv(torch.randn(3, 2, 3, 3), (2, 6, 5), padding=1)]
    guess = spectral_proof.guess
    monkeypatch.setattr(spectral_proof, "guess", lambda grams: factor * guess(grams))
    for op in layers:
        assert 1 <= norm_bound(op) / svd(op) <= 2


def test_zero_tiny_and_broken_weights():
    assert norm_bound(Linear(torch.zeros(3, 4), None)) == 0
    assert norm_bound(conv(torch.zeros(2, 2, 3, 3), (2, 6, 6))) == 0
    assert 1e-30 <= norm_bound(Linear(torch.eye(3) * 1e-30, None)) <= 1.001e-30 + 1e-36
    assert norm_bound(Linear(torch.eye(3).double() * 1e-170, None)) >= 1e-170
    for bad in (torch.nan, torch.inf, 1e200):
        broken = torch.full((2, 2, 3, 3), bad, dtype=torch.float64)
        for op in (Linear(broken[0, 0], None), conv(broken, (2, 6, 6)), Scale(broken, broken, broken)):
            with pytest.raises(InputError, match="not finite"):
                norm_bound(op)


@pytest.mark.parametrize(
    "function",
    [
        lambda v: F.avg_pool2d(v, 2),
        lambda v: F.avg_pool2d(v, 3, 1, 1),
        lambda v: F.avg_pool2d(v, 3, 2, ceil_mode=True),
        lambda v: F.adaptive_avg_pool2d(v, (3, 2)),
        lambda v: v.mean((1, 2)),
        lambda v: F.pad(v, (1, 2, 0, 1)),
        lambda v: F.avg_pool2d(v, 2, 3),
    ],
)
def test_pooling_and_padding(function):
    op = average(function, torch.zeros(1, 2, 8, 7), 9)
    assert 1 <= norm_bound(op) / svd(op) <= 1.001


def test_average_pooling_without_overlap_is_one_over_its_side():
    assert norm_bound(average(lambda v: F.avg_pool2d(v, 3), torch.zeros(1, 2, 9, 9), 9)) == pytest.approx(1 / 3)


def test_scalings():
    factor = torch.tensor([0.5, -3.0, 1.0]).view(-1, 1, 1)
    assert norm_bound(Scale(factor, factor, factor)) == 3.0


def test_other_operators_are_refused():
    class Other(Affine):
        apply = apply_abs = transpose = bias_dot = bias_abs = terms = None

    for function in (norm_bound, domain, linear_part):
        with pytest.raises(UnsupportedError, match="Other"):
            function(Other())


OPERATORS = {
    "dense": lambda: Linear(torch.randn(8, 5).double(), torch.randn(8).double()),
    "conv": lambda: Conv(
        torch.randn(3, 1, 3, 2).double(), torch.randn(3).double(), (2, 1), (1, 0), (1, 2), 1, (1, 6, 7)
    ),
    "average": lambda: average(lambda v: F.avg_pool2d(v, 3, 2), torch.zeros(1, 1, 8, 7), 9),
}


@pytest.mark.parametrize("kind", OPERATORS)
def test_power_iteration_climbs_to_the_norm_from_below(kind):
    op = OPERATORS[kind]()
    truth, v = svd(op), random_unit(domain(op), torch.zeros((), dtype=torch.float64))
    found = []
    for steps in (0, 1, 2, 5, 300):
        sigma, u, w = power_iteration(op, v, steps)
        assert w.shape == domain(op)
        assert float(u.norm()) == pytest.approx(1)
        assert float(w.norm()) == pytest.approx(1)
        found.append(float(sigma))
    assert found == sorted(found)
    assert found[0] < truth
    assert found[-1] == pytest.approx(truth, rel=1e-3)
    assert all(value <= norm_bound(op) for value in found)


@pytest.mark.parametrize("kind", ["dense", "conv"])
def test_the_gradient_of_the_estimate_is_that_of_the_norm(kind):
    op = OPERATORS[kind]()
    op.weight.requires_grad_()
    sigma, u, v = power_iteration(op, random_unit(domain(op), op.weight), 2000)
    estimate = torch.autograd.grad(sigma, op.weight)[0]
    exact = torch.autograd.grad(torch.linalg.matrix_norm(matrix(op), 2), op.weight)[0]
    assert torch.allclose(estimate, exact, atol=1e-6)
    assert not u.requires_grad
    assert not v.requires_grad


def test_a_warm_start_needs_one_step():
    op = Linear(torch.randn(50, 60), None)
    truth, v = svd(op), random_unit(domain(op), op.weight)
    assert float(power_iteration(op, v, 1)[0]) < 0.95 * truth
    for _ in range(200):
        sigma, _, v = power_iteration(op, v, 1)
    assert float(sigma) == pytest.approx(truth, rel=0.01)


def test_power_iteration_on_a_zero_layer_can_start_again():
    op = Linear(torch.zeros(4, 3), None)
    sigma, u, v = power_iteration(op, random_unit(domain(op), op.weight), 3)
    assert float(sigma) == 0
    assert bool(torch.isfinite(u).all())
    assert float(power_iteration(Linear(torch.eye(4, 3), None), v, 1)[0]) == pytest.approx(1)


@pytest.mark.parametrize("kind", OPERATORS)
def test_the_adjoint_identity(kind):
    op = linear_part(OPERATORS[kind]())
    x = torch.randn(2, *domain(op), dtype=torch.float64)
    y = torch.randn_like(op.apply(x))
    assert torch.allclose((op.apply(x) * y).sum(), (x * op.transpose(y)).sum())
    assert isinstance(op, Average) or float(op.apply(torch.zeros_like(x)).abs().max()) == 0
