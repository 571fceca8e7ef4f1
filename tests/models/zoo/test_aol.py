"""Almost-orthogonal layers: the norm of the operator as built is at most 1, whatever the weights; certificates work."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import holdfast as hf
from holdfast.bounding.graph.trace import trace, trace_batch
from holdfast.bounding.lipschitz.constants import lipschitz_bound, lipschitz_estimate
from holdfast.errors import InputError
from holdfast.models import count_parameters, load_model, make_model, save_model
from holdfast.models.zoo.aol import AOLConv2d, AOLLinear, aol_cnn, aol_dense, aol_kernel


def conv_norm(weight, shape, stride, padding):
    """SVD of the whole operator, float64."""
    units = torch.eye(torch.Size(shape).numel(), dtype=torch.float64).view(-1, *shape)
    return float(torch.linalg.matrix_norm(F.conv2d(units, weight.double(), None, stride, padding).flatten(1), 2))


@settings(max_examples=40)
@given(
    st.integers(0, 10**6),
    st.tuples(st.integers(1, 4), st.integers(1, 5)),
    st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(0, 2)),
    st.sampled_from([0.0, 1.0, 1e-9, 1e6]),
)
def test_no_convolution_stretches_a_distance(seed, channels, geometry, offset):
    kernel, stride, padding = geometry
    assume(stride <= kernel)
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(channels[1], channels[0], kernel, kernel, generator=generator, dtype=torch.float64) + offset
    shape = (channels[0], 7, 6)
    assert conv_norm(aol_kernel(weight, stride), shape, stride, padding) <= 1 + 1e-12
    assert conv_norm(aol_kernel(weight.float(), stride), shape, stride, padding) <= 1 + 1e-5


@pytest.mark.parametrize("shape", [(3, 8), (8, 3), (5, 5), (1, 4), (4, 1)])
def test_no_dense_layer_stretches_a_distance(shape):
    for weight in (torch.randn(shape), torch.ones(shape), 1e5 * torch.rand(shape), torch.zeros(shape)):
        assert float(torch.linalg.matrix_norm(aol_dense(weight.double()), 2)) <= 1 + 1e-12
    weight = torch.randn(shape).double()
    tall = weight if shape[0] >= shape[1] else weight.T
    by_hand = tall / (tall.T @ tall).abs().sum(0).sqrt()
    assert torch.allclose(aol_dense(weight), by_hand if shape[0] >= shape[1] else by_hand.T)


def test_a_scale_for_each_kind_of_column_is_tighter_than_the_one_without_a_stride():
    """Leaving out outputs makes no norm larger, so that the scale for stride 1 would be sound as well."""
    weight = torch.tensor([[[[1.0, -1.0]] * 2]], dtype=torch.float64).expand(4, 1, 2, 2)
    full = F.conv2d(weight.transpose(0, 1), weight.transpose(0, 1), padding=1).abs().sum()
    aligned = conv_norm(aol_kernel(weight, 2), (1, 6, 6), 2, 0)
    assert aligned == pytest.approx(1)
    assert conv_norm(weight / full.sqrt(), (1, 6, 6), 2, 0) < 0.9


@pytest.mark.parametrize(("inputs", "outputs"), [(1, 8), (4, 4), (6, 2)])
@pytest.mark.parametrize(("kernel", "stride", "padding"), [(3, 1, 1), (4, 2, 1), (3, 3, 0)])
def test_layers_start_with_norm_one(inputs, outputs, kernel, stride, padding):
    layer = AOLConv2d(inputs, outputs, kernel, stride, padding)
    assert conv_norm(aol_kernel(layer.weight.detach(), stride), (inputs, 9, 9), stride, padding) > 0.99
    dense = AOLLinear(inputs * 4, outputs * 4)
    assert float(torch.linalg.matrix_norm(aol_dense(dense.weight.detach()), 2)) == pytest.approx(1, abs=1e-4)


def test_weights_of_zero_have_gradients():
    for layer, x in ((AOLConv2d(2, 4, 3, 2, 1), torch.rand(2, 2, 6, 6)), (AOLLinear(4, 3), torch.rand(2, 4))):
        nn.init.zeros_(layer.weight)
        layer(x).sum().backward()
        assert bool(layer.weight.grad.isfinite().all())
        assert bool(layer(x).isfinite().all())


@pytest.fixture(scope="module")
def trained():
    """A small network after some steps on blobs, by the logits with a margin."""
    torch.manual_seed(0)
    model = aol_cnn((1, 8, 8), 3, layers=((8, 4, 2, 1), (6, 3, 1, 1)), hidden=(12,))
    y = torch.arange(90) % 3
    x = (torch.rand(3, 1, 8, 8)[y] * 0.8 + 0.2 * torch.rand(90, 1, 8, 8)).clamp(0, 1)
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    for _ in range(40):
        optimizer.zero_grad()
        F.cross_entropy(8 * (model(x) - 0.5 * F.one_hot(y, 3)), y).backward()
        optimizer.step()
    return model.eval(), x, y


def test_the_proven_constant_of_every_layer_is_at_most_one(trained):
    model, x, _ = trained
    bound = lipschitz_bound(trace(model, x))
    assert len(bound.layers) == 3
    for name, constant in bound.layers:
        assert 0.5 < float(constant) <= 1 + 1e-5, name
    assert float(bound.pairs.max()) <= 2 + 1e-4


@pytest.mark.parametrize("method", ["gloro", "lipschitz"])
def test_certificates(trained, method):
    model, x, y = trained
    result = hf.certify(model, x, y, hf.L2(0.1), method)
    assert float(result.certified.float().mean()) > 0.5
    assert not bool((hf.attack(model, x, y, hf.L2(0.1), "pgd", steps=10).success & result.certified).any())
    assert bool(hf.attack(model, x, y, hf.L2(4.0), "pgd", steps=10).success.any())


def test_training_sees_the_weights_as_they_are(trained):
    model = aol_cnn((1, 8, 8), 3, layers=((4, 3, 1, 1),), hidden=())
    x = torch.rand(2, 1, 8, 8)
    for _ in range(2):
        graph, logits = trace_batch(model, x)
        assert torch.allclose(logits, model(x), atol=1e-6)
        bound, _ = lipschitz_estimate(graph, {}, steps=3)
        (gradient,) = torch.autograd.grad(bound.pairs.sum(), model[0].weight)
        assert bool(gradient.any())
        with torch.no_grad():
            model[0].weight += 0.3 * torch.randn_like(model[0].weight)


def test_it_is_in_the_catalogue_and_can_be_saved(tmp_path):
    with torch.device("meta"):
        assert count_parameters(make_model("cnn-aol")) == count_parameters(make_model("2c2f-minmax")) == 166_406
    model = make_model("cnn-aol", input_shape=(1, 8, 6), classes=3, hidden=(4,), seed=0).eval()
    save_model(model, tmp_path / "model.safetensors")
    x = torch.rand(3, 1, 8, 6)
    assert torch.equal(load_model(tmp_path / "model.safetensors")(x), model(x))
    assert "4, stride=2, padding=1" in repr(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": ((5, 3, 1, 1),)}, "must be even"),
        ({"hidden": (7,)}, ">= 2 and even, got 7"),
        ({"layers": ((4, 2, 3, 1),)}, "1 <= stride <= kernel"),
        ({"layers": ("max",)}, "expected a list, got 'max'"),
        ({"layers": ((4, 9, 1, 0),)}, "too small"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(InputError, match=message):
        make_model("cnn-aol", input_shape=(1, 8, 8), classes=3, **options)
