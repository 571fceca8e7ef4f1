"""Layers that step down a convex potential: no Jacobian has a norm above 1, and the bound of the network knows it."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import holdfast as hf
from holdfast.bounding.graph import ops
from holdfast.bounding.graph.trace import trace, trace_batch
from holdfast.bounding.lipschitz.constants import lipschitz_bound, lipschitz_estimate
from holdfast.bounding.lipschitz.single_layers import step_down
from holdfast.bounding.lipschitz.spectral import norm_bound
from holdfast.errors import InputError
from holdfast.models import load_model, make_model, save_model
from holdfast.models.zoo.potential import PotentialConv2d, PotentialLinear, cpl_scale, sll_cnn, sll_scale


def unrolled(weight, shape):
    """The matrix of a padded convolution, (outputs, inputs), float64."""
    units = torch.eye(torch.Size(shape).numel(), dtype=torch.float64).view(-1, *shape)
    return F.conv2d(units, weight.double(), padding=weight.shape[-1] // 2).flatten(1).T


def norm(matrix):
    return float(torch.linalg.matrix_norm(matrix, 2))


def jacobian(layer, x):
    return torch.autograd.functional.jacobian(lambda z: layer(z[None])[0].flatten(), x).flatten(1)


@settings(max_examples=40)
@given(
    st.integers(0, 10**6),
    st.tuples(st.integers(1, 5), st.integers(1, 4), st.sampled_from([1, 3, 5])),
    st.sampled_from([(0.0, 1.0), (1.0, 1.0), (0.0, 1e-9), (5.0, 1e4)]),
)
def test_the_norm_that_keeps_distances_is_at_most_the_root_of_two(seed, sizes, values):
    generator = torch.Generator().manual_seed(seed)
    hidden, channels, kernel = sizes
    offset, spread = values
    weight = torch.randn(hidden, channels, kernel, kernel, generator=generator, dtype=torch.float64) * spread + offset
    log_q = torch.randn(hidden, generator=generator, dtype=torch.float64)
    for scale in (cpl_scale(weight), sll_scale(weight, log_q)):
        matrix = unrolled(weight * scale.sqrt().view(-1, 1, 1, 1), (channels, 6, 5))
        assert norm(matrix) ** 2 <= 2 * (1 + 1e-9)
    dense = weight.flatten(1)
    for scale in (cpl_scale(dense), sll_scale(dense, log_q)):
        assert norm(scale.sqrt()[:, None] * dense) ** 2 <= 2 * (1 + 1e-9)


def test_scales_are_those_of_the_formulas():
    weight, log_q = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    assert torch.allclose(cpl_scale(weight), 2 / torch.linalg.svdvals(weight)[0].square().expand(5))
    gram, q = weight @ weight.T, log_q.exp()
    by_hand = [2 / sum(abs(gram[i, j]) * q[j] / q[i] for j in range(5)) for i in range(5)]
    assert torch.allclose(sll_scale(weight, log_q), torch.stack(by_hand))
    # On rows that are not correlated both are the same, and exact; a convolution of 1x1 is a matrix.
    orthogonal = 3 * nn.init.orthogonal_(torch.empty(4, 4, dtype=torch.float64))
    for scale in (cpl_scale(orthogonal), sll_scale(orthogonal, log_q[:4]), cpl_scale(orthogonal[..., None, None])):
        assert torch.allclose(scale, torch.full((4,), 2 / 9, dtype=torch.float64))


@pytest.mark.parametrize("sll", [False, True])
def test_jacobians_and_distances(sll):
    torch.manual_seed(0)
    for layer, shape in ((PotentialLinear(7, sll=sll), (7,)), (PotentialConv2d(3, 3, sll=sll), (3, 5, 6))):
        for spread in (0.3, 3.0):
            for parameter in layer.parameters():
                nn.init.normal_(parameter, std=spread)
            x, other = torch.randn(20, *shape), torch.randn(20, *shape)
            assert max(norm(jacobian(layer, z)) for z in x[:8]) <= 1 + 1e-5
            with torch.no_grad():
                ratio = (layer(x) - layer(other)).flatten(1).norm(dim=1) / (x - other).flatten(1).norm(dim=1)
            assert 0.1 < float(ratio.max()) <= 1 + 1e-6


@pytest.mark.parametrize("sll", [False, True])
def test_a_convolution_steps_back_along_its_transpose(sll):
    torch.manual_seed(0)
    layer, x = PotentialConv2d(3, 3, sll=sll).double(), torch.randn(2, 3, 5, 4, dtype=torch.float64)
    nn.init.normal_(layer.bias)
    w = unrolled(layer.weight.detach(), (3, 5, 4))
    scale = cpl_scale(layer.weight) if layer.log_q is None else sll_scale(layer.weight, layer.log_q)
    inner = torch.relu(x.flatten(1) @ w.T + layer.bias.repeat_interleave(20))
    assert torch.allclose(layer(x).flatten(1), x.flatten(1) - (inner * scale.repeat_interleave(20)) @ w)


def exact_constant(a, b):
    """max over 0 <= D <= 1 of ||I + B D A||: the norm is convex in D, so at a corner."""
    corners = itertools.product((0.0, 1.0), repeat=len(a))
    return max(norm(torch.eye(a.shape[1]).double() + b @ torch.diag(torch.tensor(d).double()) @ a) for d in corners)


@pytest.mark.parametrize("size", [0.3, 2.0, 5.0])
@pytest.mark.parametrize("error", [0.0, 1e-4])
def test_the_bound_of_a_step_holds_for_any_scale(size, error):
    torch.manual_seed(0)
    for n in (2, 4):
        a = torch.randn(5, n).double()
        s = torch.rand(5).double()
        s = s * size / norm(s.sqrt()[:, None] * a) ** 2
        b = -a.T * s + error * norm(a.T * s) * torch.randn(n, 5).double() / 5
        half, apart = step_down(ops.Linear(a, None), ops.Linear(b, None))
        proved = max(1.0, norm_bound(half) ** 2 - 1) + float(apart) * norm(a)
        true = exact_constant(a, b)
        assert true <= proved <= max(1.0, true) * 1.002 + 2 * error * norm(a) * norm(b)
    assert exact_constant(a, b) > 3 or size < 5


def test_what_is_no_step_is_not_taken_for_one():
    a = torch.randn(4, 3)
    geometry = ((1, 1), (1, 1), (1, 1), 1, (2, 6, 6))
    w = torch.randn(4, 2, 3, 3)
    back = -w.flip(2, 3).transpose(0, 1)
    for first, then in (
        (ops.Linear(a, None), ops.Linear(a.T, None)),  # a step up
        (ops.Linear(a, None), ops.Linear(-a.T[:, [1, 0, 2, 3]], None)),  # hidden units in another order
        (ops.Linear(a, None), ops.Linear(torch.randn(3, 4), None)),
        (ops.Conv(w, None, *geometry), ops.Conv(-w.transpose(0, 1), None, *geometry[:4], (4, 6, 6))),  # not flipped
        (ops.Conv(w, None, *geometry), ops.Conv(back, None, (1, 1), (2, 2), (1, 1), 1, (4, 6, 6))),  # other padding
        (ops.Conv(w, None, *geometry), ops.Conv(back, None, *geometry[:4], (4, 4, 9))),  # read in another shape
    ):
        assert step_down(first, then) is None
    assert step_down(ops.Conv(w, None, *geometry), ops.Conv(back, None, *geometry[:4], (4, 6, 6))) is not None


@pytest.mark.parametrize("name", ["cnn-cpl", "cnn-sll"])
def test_the_network_is_proved_to_keep_distances_even_when_it_is_run_in_float32(name):
    model = make_model(name, input_shape=(1, 8, 6), classes=3, layers=((4, 4, 2, 1),), hidden=(8,), seed=0).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.7)
    x = torch.rand(3, 1, 8, 6)
    bound = lipschitz_bound(trace(model, x))
    assert float(bound.body) <= 1 + 1e-4
    assert len(bound.steps) == 4
    whole = torch.autograd.functional.jacobian(lambda z: model[:-1](z[None])[0], x[0]).flatten(1)
    assert norm(whole) <= float(bound.body)
    for part in (nn.ReLU(), nn.Tanh()):  # an activation that is not recognised costs 1 + K, and is right
        block = nn.Sequential(Skip(model[1], part), nn.Flatten(), nn.Linear(48, 2)).eval()
        assert float(lipschitz_bound(trace(block, torch.rand(1, 4, 4, 3))).body) <= 1 + 1e-4
    block = nn.Sequential(Skip(model[1], nn.SELU()), nn.Flatten(), nn.Linear(48, 2)).eval()
    assert float(lipschitz_bound(trace(block, torch.rand(1, 4, 4, 3))).body) > 1.1


class Skip(nn.Module):
    """A convolution of the layer, `between`, and the way back."""

    def __init__(self, layer, between):
        super().__init__()
        self.layer, self.between = layer, between

    def forward(self, x):
        weight = self.layer.weight
        scale = 1.9 / weight.square().sum() / 9
        inner = self.between(F.conv2d(x, weight, padding=1))
        return x - F.conv2d(inner, scale * weight.flip(2, 3).transpose(0, 1), padding=1)


def test_certificates_after_training():
    torch.manual_seed(0)
    model = sll_cnn((1, 8, 8), 3, layers=((8, 4, 2, 1),), hidden=(12,), depth=1)
    y = torch.arange(90) % 3
    x = (torch.rand(3, 1, 8, 8)[y] * 0.8 + 0.2 * torch.rand(90, 1, 8, 8)).clamp(0, 1)
    optimizer, state = torch.optim.Adam(model.parameters(), 5e-3), {}
    for _ in range(40):
        graph, logits = trace_batch(model, x)
        bound, state = lipschitz_estimate(graph, state, steps=3)
        optimizer.zero_grad()
        F.cross_entropy(logits + 0.3 * bound.pairs[y], y).backward()
        optimizer.step()
    assert float(bound.body.detach()) <= 1 + 1e-3
    model.eval()
    for method in ("gloro", "lipschitz"):
        result = hf.certify(model, x, y, hf.L2(0.1), method)
        assert float(result.certified.float().mean()) > 0.5
        assert not bool((hf.attack(model, x, y, hf.L2(0.1), "pgd", steps=10).success & result.certified).any())


def test_it_is_in_the_catalogue_and_can_be_saved(tmp_path):
    x = torch.rand(3, 1, 8, 6)
    for name in ("cnn-cpl", "cnn-sll"):
        model = make_model(name, input_shape=(1, 8, 6), classes=3, hidden=(4,), seed=0).eval()
        save_model(model, tmp_path / "model.safetensors")
        assert torch.equal(load_model(tmp_path / "model.safetensors")(x), model(x))
    with pytest.raises(InputError, match="odd"):
        PotentialConv2d(2, 4, sll=True)
    for layer, zero in (
        (PotentialConv2d(2, sll=True), torch.rand(2, 2, 4, 4)),
        (PotentialLinear(3, sll=False), torch.rand(2, 3)),
    ):
        nn.init.zeros_(layer.weight)
        layer(zero).sum().backward()
        assert bool(layer(zero).isfinite().all())
