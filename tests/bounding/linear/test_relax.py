"""Every line is below or above its activation, on grids of many intervals."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.bounding.graph import ops
from holdfast.bounding.linear.relax import chord, relax, unstable
from holdfast.errors import UnsupportedError

ACTIVATIONS = {
    "relu": ops.Activation("relu", torch.relu),
    **{  # slopes that float32 represents, so that float64 can judge
        f"leaky_relu {a}": ops.Activation("leaky_relu", lambda z, a=a: torch.nn.functional.leaky_relu(z, a), a)
        for a in (0.0, 2.0**-7, 0.5, 1.0)
    },
    "sigmoid": ops.Activation("sigmoid", torch.sigmoid),
    "tanh": ops.Activation("tanh", torch.tanh),
    "arctan": ops.Activation("arctan", torch.atan),
}
S_SHAPED = ["sigmoid", "tanh", "arctan"]
MODES = ["adaptive", "parallel"]
DEGENERATE = [
    (0.0, 0.0),
    (-0.0, 0.0),
    (1.5, 1.5),
    (-1.5, -1.5),
    (0.0, 2.0),
    (-2.0, 0.0),
    (-1e-7, 1e-7),
    (-1e-20, 1e-20),
    (-1e-42, 1e-42),
    (0.3, 0.3 + 1e-7),
    (-1e-6, 5.0),
    (-5.0, 1e-6),
    (-50.0, 50.0),
    (-50.0, 1e-3),
    (-1e-3, 50.0),
    (20.0, 40.0),
    (-40.0, -20.0),
    (15.0, 1e4),
    (1e7, 1e8),
    (-1e8, -1e7),
    (-1e9, 1e9),
    (-3.0, 1e9),
]


def intervals(dtype):
    torch.manual_seed(0)
    ends = torch.cat([torch.randn(300, 2) * s for s in (0.1, 1.0, 3.0, 10.0)]).sort(1).values
    low, high = torch.cat([ends.to(dtype), torch.tensor(DEGENERATE, dtype=dtype)]).unbind(1)
    return low, high


def lines_of(op, low, high, mode):
    lines = relax(op, low, high, mode, "layer")
    shift = torch.zeros_like(low) if lines.lower_shift is None else lines.lower_shift
    return lines.lower_slope, shift, lines.upper_slope, lines.upper_shift


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_lines_are_sound_on_a_dense_grid(name, mode, dtype):
    op = ACTIVATIONS[name]
    low, high = intervals(dtype)
    d_low, a_low, d_up, a_up = (t[:, None].double() for t in lines_of(op, low, high, mode))
    steps = torch.cat([torch.linspace(0, 1, 401), torch.logspace(-9, -1, 60), 1 - torch.logspace(-9, -1, 60)]).double()
    z = low[:, None].double() + (high - low)[:, None].double() * steps
    z = torch.minimum(z, high.double()[:, None])
    value = op.function(z)
    rounding = 4 * torch.finfo(torch.float64).eps * (value.abs() + (d_up * z).abs() + (d_low * z).abs())
    rounding = (
        rounding + torch.finfo(dtype).tiny
    )  # subnormal intercepts are covered by the underflow terms of the layers
    assert bool((d_low * z + a_low <= value + rounding).all())
    assert bool((d_up * z + a_up >= value - rounding).all())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [n for n in ACTIVATIONS if "relu" in n])
def test_piecewise_lines_touch_at_the_ends_and_at_zero(name, mode):
    op = ACTIVATIONS[name]
    low, high = torch.tensor([[-2.0, 0.5], [-0.3, 4.0], [1.0, 2.0], [-3.0, -1.0]], dtype=torch.float64).unbind(1)
    d_low, a_low, d_up, a_up = lines_of(op, low, high, mode)
    assert torch.allclose(d_up * low + a_up, op.function(low))
    assert torch.allclose(d_up * high + a_up, op.function(high))
    assert bool((a_low == 0).all())
    stable = ~unstable(op, low, high)
    assert stable.tolist() == [False, False, True, True]
    assert torch.allclose((d_low * low)[stable], op.function(low)[stable])
    assert bool(((d_low >= op.parameter) & (d_low <= 1)).all())
    assert bool((a_up[stable] <= 1e-12).all())


@pytest.mark.parametrize("name", S_SHAPED)
def test_s_shaped_lines_touch_where_they_should(name):
    op = ACTIVATIONS[name]
    low, high = torch.tensor([[0.5, 2.0], [-2.0, -0.5], [-3.0, 4.0], [-1.0, 0.2]], dtype=torch.float64).unbind(1)
    d_low, a_low, d_up, a_up = lines_of(op, low, high, "adaptive")
    below = {end: d_low * z + a_low for end, z in (("low", low), ("high", high))}
    above = {end: d_up * z + a_up for end, z in (("low", low), ("high", high))}
    f_low, f_high = op.function(low), op.function(high)
    close = {"rtol": 0, "atol": 1e-7}
    # concave part: the chord below; convex part: the chord above; across zero: each line starts at one end
    assert torch.allclose(below["low"][0], f_low[0], **close)
    assert torch.allclose(below["high"][0], f_high[0], **close)
    assert torch.allclose(above["low"][1], f_low[1], **close)
    assert torch.allclose(above["high"][1], f_high[1], **close)
    assert torch.allclose(above["low"][2:], f_low[2:], **close)
    assert torch.allclose(below["high"][2:], f_high[2:], **close)
    # the tangent would touch beyond 0.2: the chord
    assert torch.allclose(above["high"][3], f_high[3], **close)
    # and tangents touch the curve somewhere
    z = low[:, None] + (high - low)[:, None] * torch.linspace(0, 1, 100_001, dtype=torch.float64)
    assert bool(((d_up[:, None] * z + a_up[:, None] - op.function(z)).amin(1) < 1e-7).all())
    assert bool(((op.function(z) - d_low[:, None] * z - a_low[:, None]).amin(1) < 1e-7).all())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", S_SHAPED)
def test_mirrored_intervals_have_mirrored_lines(name, mode):
    """a_low(l, u) = -a_up(-u, -l) for the odd functions; for the sigmoid the two add up to one."""
    low, high = (torch.randn(200, 2, dtype=torch.float64) * 3).sort(1).values.unbind(1)
    d_low, a_low, _, _ = lines_of(ACTIVATIONS[name], low, high, mode)
    _, _, d_up, a_up = lines_of(ACTIVATIONS[name], -high, -low, mode)
    assert torch.allclose(d_low, d_up, atol=1e-9)
    assert torch.allclose(a_low + a_up, torch.full_like(low, 1.0 if name == "sigmoid" else 0.0), atol=1e-8)


def test_closed_form_of_the_parallel_lines():
    """Slope of the chord, intercept at the tangent point t with f'(t) = d, or of the chord if t lies outside."""
    low, high = torch.tensor([[-2.0, 3.0]], dtype=torch.float64).unbind(1)
    d = (torch.sigmoid(high) - torch.sigmoid(low)) / (high - low)
    t = torch.log((1 - 2 * d + (1 - 4 * d).sqrt()) / (2 * d))
    assert bool((t > low).all() & (t < high).all())
    d_low, a_low, d_up, a_up = lines_of(ACTIVATIONS["sigmoid"], low, high, "parallel")
    assert torch.allclose(d_low, d)
    assert torch.allclose(d_up, d)
    assert torch.allclose(a_up, torch.sigmoid(t) - d * t, atol=1e-12)
    assert torch.allclose(a_low, torch.sigmoid(-t) + d * t, atol=1e-12)


@given(st.floats(-10, -1e-3), st.floats(1e-3, 10))
def test_the_adaptive_area_of_relu_is_never_larger(low, high):
    low, high = torch.tensor([low], dtype=torch.float64), torch.tensor([high], dtype=torch.float64)
    areas = {}
    for mode in MODES:
        d_low, a_low, d_up, a_up = lines_of(ACTIVATIONS["relu"], low, high, mode)
        gap = [(d_up - d_low) * z + a_up - a_low for z in (low, high)]
        areas[mode] = float((gap[0] + gap[1]) / 2 * (high - low))
    assert areas["adaptive"] <= areas["parallel"] * (1 + 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradients_are_finite(name, mode, dtype):
    low, high = (t.clone().requires_grad_() for t in intervals(dtype))
    total = sum(t.sum() for t in lines_of(ACTIVATIONS[name], low, high, mode))
    for gradient in torch.autograd.grad(total, [low, high], allow_unused=True, materialize_grads=True):
        assert bool(torch.isfinite(gradient).all())


@pytest.mark.parametrize("name", S_SHAPED)
def test_gradients_of_the_parallel_lines_equal_finite_differences(name):
    low = torch.tensor([-2.0, -0.5, 0.4, -3.0], dtype=torch.float64, requires_grad=True)
    high = torch.tensor([3.0, 0.9, 2.0, -1.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: lines_of(ACTIVATIONS[name], a, b, "parallel")[1:], (low, high))


@given(st.floats(0, 1), st.floats(-20, 20), st.floats(0, 20))
def test_the_chord_lies_between_its_two_slopes(slope, low, width):
    low, high = torch.tensor([low]), torch.tensor([low + width])
    value = chord(slope, low, high)
    assert bool((value >= slope * (1 - 1e-6)).all())
    assert bool((value <= 1).all())


def test_an_activation_without_lines_is_refused_by_name():
    with pytest.raises(UnsupportedError, match=r"layer 'act'.*'elu'.*ibp"):
        relax(ops.Activation("elu", torch.nn.functional.elu), torch.zeros(1), torch.ones(1), "adaptive", "act")
