"""Orthogonal and 1-Lipschitz layers of torch and of other libraries: the constant is proved from the weights in use."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import holdfast as hf
from holdfast.bounding.graph.trace import trace, trace_batch
from holdfast.bounding.lipschitz.constants import lipschitz_bound, lipschitz_estimate
from holdfast.errors import UnsupportedError
from holdfast.models.layers import MinMax


def body_norm(layer, shape):
    """The norm of the layer's linear part as it runs, by an SVD in float64 of its float32 answers."""
    units = torch.cat([torch.eye(torch.Size(shape).numel()), torch.zeros(1, torch.Size(shape).numel())])
    with torch.no_grad():
        out = layer(units.view(-1, *shape)).double().flatten(1)
    return float(torch.linalg.matrix_norm(out[:-1] - out[-1], 2))


def proved_constant(layer, shape):
    """The constant of the layer itself, from the bound of a network that begins with it."""
    layer.eval()
    features = layer(torch.rand(2, *shape)).flatten(1).shape[1]
    model = nn.Sequential(layer, nn.ReLU(), nn.Flatten(), nn.Linear(features, 3)).eval()
    return float(lipschitz_bound(trace(model, torch.rand(2, *shape))).body)


def check_layer(layer, shape, most):
    proved, true = proved_constant(layer, shape), body_norm(layer, shape)
    assert true * (1 - 1e-5) <= proved <= min(1.02 * true, most)


def check_certificate(model, shape):
    x = torch.rand(20, *shape)
    y = model(x).argmax(1)
    result = hf.certify(model, x, y, hf.L2(0.02), "gloro")
    assert bool(result.certified.any())
    far = hf.attack(model, x, y, hf.L2(float(result.radius.max()) * 0.999), "pgd", steps=10).success
    assert not bool((far & (result.radius >= result.radius.max())).any())


class Symmetric(nn.Module):
    """W -> W + W^T: a parametrisation of our own."""

    def forward(self, weight):
        return weight + weight.T


@pytest.mark.parametrize("trivialization", ["matrix_exp", "cayley", "householder"])
@pytest.mark.parametrize("shape", [(6, 6), (6, 3), (3, 6)])
def test_orthogonal_dense_layers_of_torch(trivialization, shape):
    options = {"orthogonal_map": trivialization}
    if trivialization == "cayley":
        options["use_trivialization"] = False
    layer = parametrizations.orthogonal(nn.Linear(*shape), **options)
    check_layer(layer, shape[:1], 1 + 1e-5)


@pytest.mark.parametrize("wrap", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_other_parametrisations_of_torch_are_measured_not_believed(wrap):
    # spectral_norm takes the weights of a convolution for a matrix: its norm as an operator is above 1.
    layer = wrap(nn.Conv2d(2, 4, 3, padding=1))
    check_layer(layer, (2, 6, 5), 3.0)
    if wrap is parametrizations.spectral_norm:
        assert proved_constant(layer, (2, 6, 5)) > 1.05


def test_any_parametrisation_counts_as_it_is_now():
    layer = nn.Linear(5, 5)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    for _ in range(2):
        check_layer(layer, (5,), 100.0)
        with torch.no_grad():
            layer.parametrizations.weight.original.mul_(3)


def test_training_and_certificates_follow_parametrised_weights():
    torch.manual_seed(0)
    first = parametrizations.orthogonal(nn.Linear(6, 8))
    model = nn.Sequential(first, MinMax(), nn.Linear(8, 3))
    x = torch.rand(4, 6)
    for _ in range(2):
        graph, logits = trace_batch(model, x)
        assert torch.allclose(logits, model(x), atol=1e-6)
        bound, _ = lipschitz_estimate(graph, {}, steps=5)
        (bound.pairs.sum() + logits.square().sum()).backward()
        original = first.parametrizations.weight.original
        assert bool(original.grad.any())
        with torch.no_grad():
            original -= original.grad
    check_certificate(model.eval(), (6,))
    radius = hf.certify(model, x, model(x).argmax(1), hf.L2(0.1), "gloro").radius
    parametrize.remove_parametrizations(first, "weight")
    folded = hf.certify(model, x, model(x).argmax(1), hf.L2(0.1), "gloro").radius
    assert torch.allclose(radius, folded, rtol=1e-4)


def test_orthogonium():
    pytest.importorskip("orthogonium")
    from orthogonium.layers.conv.adaptiveSOC import AdaptiveSOCConv2d
    from orthogonium.layers.conv.AOC import AdaptiveOrthoConv2d
    from orthogonium.layers.conv.AOL import AOLConv2D
    from orthogonium.layers.linear import OrthoLinear, UnitNormLinear

    zeros = {"padding_mode": "zeros"}
    for kernel, stride in ((3, 1), (3, 2), (4, 2), (2, 2)):
        layer = AdaptiveOrthoConv2d(2, 4, kernel_size=kernel, stride=stride, padding=(kernel - 1) // 2, **zeros)
        check_layer(layer, (2, 8, 8), 1 + 1e-4)
    check_layer(AOLConv2D(2, 4, kernel_size=3, padding=1, **zeros), (2, 8, 8), 1 + 1e-4)
    check_layer(AdaptiveSOCConv2d(2, 4, kernel_size=3, padding=1, **zeros), (2, 8, 8), 1.02)  # a series, cut off
    check_layer(OrthoLinear(6, 4), (6,), 1 + 1e-4)
    model = nn.Sequential(
        AdaptiveOrthoConv2d(1, 8, kernel_size=4, stride=2, padding=1, **zeros),
        MinMax(),
        nn.Flatten(),
        OrthoLinear(128, 16),
        MinMax(),
        UnitNormLinear(16, 3),
    ).eval()
    assert float(lipschitz_bound(trace(model, torch.rand(1, 1, 8, 8))).body) <= 1 + 1e-4
    check_certificate(model, (1, 8, 8))
    circular = AdaptiveOrthoConv2d(2, 4, kernel_size=3, padding=1, padding_mode="circular")
    with pytest.raises(UnsupportedError, match="padding_mode='circular'"):
        trace(nn.Sequential(circular).eval(), torch.rand(1, 2, 8, 8))


def test_torchlip():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torchlip = pytest.importorskip("deel.torchlip")
    for layer in (torchlip.SpectralLinear(6, 4), torchlip.FrobeniusLinear(6, 4)):
        check_layer(layer, (6,), 1 + 1e-4)
    for kind in (torchlip.SpectralConv2d, torchlip.FrobeniusConv2d):
        check_layer(kind(2, 4, 3, padding=1, padding_mode="zeros"), (2, 8, 8), 1 + 1e-4)
    model = nn.Sequential(
        torchlip.SpectralConv2d(1, 4, 3, padding=1, padding_mode="zeros"),
        MinMax(),
        torchlip.ScaledAvgPool2d(2),
        nn.Flatten(),
        torchlip.SpectralLinear(64, 8),
        MinMax(),
        torchlip.FrobeniusLinear(8, 3, disjoint_neurons=True),
    ).eval()
    assert float(lipschitz_bound(trace(model, torch.rand(1, 1, 8, 8))).body) <= 1 + 1e-4
    check_certificate(model, (1, 8, 8))
