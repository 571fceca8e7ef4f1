"""Lipschitz constants around each input: against Jacobians sampled in the ball, closed forms and the global ones."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import tiny_nets
from torch import nn

import holdfast as hf
from holdfast.bounding.core.region import region
from holdfast.bounding.graph.ops import Activation, Average, Conv, Graph, Linear, Node, Scale
from holdfast.bounding.graph.trace import trace
from holdfast.bounding.lipschitz import local as module
from holdfast.bounding.lipschitz.constants import lipschitz_bound
from holdfast.bounding.lipschitz.local import local_lipschitz, local_slope, masked_norm
from holdfast.bounding.lipschitz.spectral import norm_bound
from holdfast.bounding.lipschitz.spectral_proof import proved, proved_each
from holdfast.errors import UnsupportedError
from holdfast.models import Normalize
from holdfast.models.layers import MinMax
from holdfast.models.zoo.liresnet import LinearResidual
from holdfast.random import Noise


def nets():
    torch.manual_seed(2)
    own = nn.Sequential(
        Normalize(0.5, 0.5),
        nn.Conv2d(1, 4, 3, padding=1),
        MinMax(),
        LinearResidual(4, 1.0),
        nn.LeakyReLU(0.1),
        nn.Flatten(),
        nn.Linear(144, 6),
        nn.ReLU(),
        nn.Linear(6, 3),
    )
    return {**tiny_nets(), "own": (own.eval(), (1, 6, 6))}


def jacobians(model, points):
    """Slopes of all logits at points (B, ...), in float64: (B, K, n)."""
    model.double()
    points = points.double().requires_grad_()
    slopes = [torch.autograd.grad(model(points)[:, k].sum(), points)[0] for k in range(model(points).shape[1])]
    model.float()
    return torch.stack(slopes, 1).flatten(2)


@pytest.mark.parametrize("name", nets())
@pytest.mark.parametrize("threat", [hf.L2(0.02), hf.L2(0.4), hf.Linf(0.03)], ids=str)
def test_no_slope_in_the_ball_beats_it_and_it_is_never_above_the_global_one(name, threat):
    model, shape = nets()[name]
    x = torch.rand(5, *shape)
    y = model(x).argmax(1)
    graph = trace(model, x)
    local = local_lipschitz(graph, region(threat, x, sound=True)).pairs(y)
    everywhere = lipschitz_bound(graph).pairs[y]
    assert bool((local <= everywhere * (1 + 1e-8)).all())
    steepest = torch.zeros_like(local)
    for draw in range(15):
        slopes = jacobians(model, threat.random_start(x, Noise.for_batch(draw, 5)))
        steepest = torch.maximum(steepest, (slopes[torch.arange(5), y][:, None] - slopes).norm(dim=2))
    assert bool((steepest <= local * (1 + 1e-9)).all())
    assert bool((local.gather(1, y[:, None]) == 0).all())
    if name in ("mlp", "cnn", "own") and threat.budget < 0.03:
        assert float(local.sum()) < 0.9 * float(everywhere.sum())


def test_neurons_that_stay_off_drop_out_of_both_layers():
    first, last = torch.randn(6, 4), torch.randn(3, 6)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).eval()
    model[0].weight.data, model[2].weight.data = first, last
    # Far to both sides of zero, so that all over the ball the first two are off and the others on.
    model[0].bias.data = torch.tensor([-50.0, -50.0, 50.0, 50.0, 50.0, 50.0])
    x = torch.rand(2, 4)
    found = local_lipschitz(trace(model, x), region(hf.L2(0.5), x, sound=True))
    assert found.live.tolist() == [[False, False, True, True, True, True]] * 2
    assert found.body.tolist() == pytest.approx([float(torch.linalg.matrix_norm(first[2:], 2))] * 2, rel=1e-4)
    gaps = (last[1] - last)[:, 2:].norm(dim=1) * found.body[0]
    assert torch.allclose(found.pairs(torch.ones(2, dtype=torch.long))[0], gaps.double(), rtol=1e-5)


def test_a_network_that_is_constant_in_the_ball_has_the_constant_zero():
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).eval()
    model[0].bias.data.fill_(-50.0)
    x = torch.rand(2, 4)
    pairs = local_lipschitz(trace(model, x), region(hf.L2(0.5), x, sound=True)).pairs(torch.zeros(2, dtype=torch.long))
    assert bool((pairs == 0).all())


@settings(max_examples=15)
@given(st.integers(0, 10**6), st.integers(1, 2), st.integers(0, 1), st.booleans())
def test_norms_with_rows_and_columns_left_out(seed, stride, padding, smooth):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(3, 2, 3, 3, generator=generator, dtype=torch.float64)
    op = Conv(weight, None, (stride, stride), (padding, padding), (1, 1), 1, (2, 5, 4))
    matrix = op.apply(torch.eye(40, dtype=torch.float64).view(-1, 2, 5, 4))
    rows = torch.rand(4, *matrix.shape[1:], generator=generator, dtype=torch.float64)
    rows = rows if smooth else (rows < 0.6).double()
    columns = torch.rand(4, 2, 5, 4, generator=generator) < 0.6
    full = torch.tensor(norm_bound(op))
    found = masked_norm(op, full, rows, columns)
    truth = torch.linalg.matrix_norm(rows.flatten(1)[:, None] * matrix.flatten(1) * columns.flatten(1)[:, :, None], 2)
    assert bool((found >= truth * (1 - 1e-12)).all())
    assert bool((found <= truth * 1.001 + 1e-12).all())
    dense = Linear(matrix.flatten(1).T.contiguous(), None)
    assert torch.allclose(found, masked_norm(dense, full, rows.flatten(1), columns.flatten(1)), rtol=1e-6)


def test_layers_too_large_to_write_out_keep_their_norm(monkeypatch):
    op = Conv(torch.randn(3, 2, 3, 3), None, (1, 1), (1, 1), (1, 1), 1, (2, 5, 4))
    full, columns = torch.tensor(norm_bound(op)), torch.rand(4, 2, 5, 4) < 0.5
    assert bool((masked_norm(op, full, None, columns) < 0.999 * full).all())
    monkeypatch.setattr(module, "LARGEST_MATRIX", 100)
    assert torch.equal(masked_norm(op, full, None, columns), full.expand(4).double())
    pool = Average(lambda v: v.mean(3), (2, 5, 4), 4)
    assert torch.equal(masked_norm(pool, full, None, columns), full.expand(4).double())
    scale = Scale(torch.rand(2, 1, 1), torch.zeros(2, 1, 1), torch.zeros(2, 1, 1))
    halves = torch.full((4, 2, 5, 4), 0.5, dtype=torch.float64)
    assert torch.allclose(masked_norm(scale, full, halves, columns), full.expand(4).double() / 2)


@pytest.mark.parametrize(
    ("kind", "function", "parameter"),
    [
        ("relu", torch.relu, 0.0),
        ("leaky_relu", lambda v: nn.functional.leaky_relu(v, 0.2), 0.2),
        ("tanh", torch.tanh, 0.0),
        ("sigmoid", torch.sigmoid, 0.0),
        ("softplus", nn.functional.softplus, 1.0),
    ],
)
def test_slopes_hold_between_the_ends(kind, function, parameter):
    lower = torch.randn(300, dtype=torch.float64) * 4
    upper = lower + torch.rand(300, dtype=torch.float64) * 4
    op = Activation(kind, function, parameter)
    found = local_slope(Node(op, (0,), "act", (300,)), op, lower, upper)
    points = torch.linspace(0, 1, 101, dtype=torch.float64)[:, None] * (upper - lower) + lower
    slopes = ((function(points).diff(dim=0)) / points.diff(dim=0)).amax(0)
    assert bool((slopes <= found + 1e-9).all())
    if kind != "softplus":  # which keeps its largest slope
        assert bool((found <= torch.where(found == found.max(), 1.0, slopes * 1.2 + 1e-3)).all())


@pytest.mark.parametrize("count", [0, 1, 7])
def test_each_matrix_is_proved_by_itself(count):
    matrices = torch.randn(count, 6, 9, dtype=torch.float64) * torch.logspace(-3, 3, count)[:, None, None]
    grams = matrices @ matrices.mT
    found = proved_each(grams, torch.zeros(count, dtype=torch.float64))
    truth = torch.linalg.matrix_norm(matrices, 2)
    assert bool((found >= truth).all())
    assert bool((found <= 1.001 * truth).all())
    if count:
        assert proved(grams, 0.0) == pytest.approx(float(found.max()), rel=1e-3)


def test_unknown_layers_are_refused():
    x = torch.rand(2, 3)
    gelu = Node(Activation("gelu", nn.functional.gelu), (1,), "smooth", (4,))
    graph = Graph((*trace(nn.Linear(3, 4).eval(), x).nodes, gelu))
    with pytest.raises(UnsupportedError, match="layer 'smooth': no Lipschitz constant is known"):
        local_lipschitz(graph, region(hf.L2(0.1), x, sound=True))
