"""Both forms of the normalisation agree, and rescaled layers have the same normalised loss."""

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.analyze.volume.family import make_family
from holdfast.analyze.volume.fitting import make_fitting
from holdfast.analyze.volume.loss_scale import check_homogeneous, layer_scales, loss_scale, normalised


@pytest.fixture(scope="module")
def fitting():
    torch.manual_seed(0)
    x, y = torch.randn(6, 1, 16, 18, dtype=torch.float64), torch.arange(6) % 2
    module = hf.make_model("lenet", input_shape=(1, 16, 18), classes=2, width=0.4).double().eval()
    return make_fitting(module, x, y)


def test_dividing_the_logits_is_dividing_the_weights(fitting):
    family, weights = fitting.family, fitting.family.draw(4, seed=0, like=fitting.x)
    divided = family.logits(weights, fitting.x) / loss_scale(family, weights, 3.0)[:, None, None]
    scaled = normalised(family, weights, 3.0)
    assert torch.allclose(divided, family.logits(scaled, fitting.x), rtol=1e-10)
    assert torch.allclose(layer_scales(family, scaled, 3.0), torch.ones(4, 5, dtype=torch.float64))


def test_the_scale_of_a_layer_is_its_norm_by_the_divisor():
    module = nn.Sequential(nn.Linear(2, 1), nn.ReLU(), nn.Linear(1, 2)).double()
    family = make_family(module)
    weights = torch.tensor([[3.0, 4.0, 9.0, 6.0, 8.0, 9.0, 9.0]], dtype=torch.float64)  # biases are 9
    assert layer_scales(family, weights, 2.0).tolist() == [[2.5, 5.0]]
    assert normalised(family, weights, 2.0)[0].tolist() == pytest.approx(
        [1.2, 1.6, 9 / 2.5, 1.2, 1.6, 9 / 12.5, 9 / 12.5]
    )


def test_rescaled_layers_have_the_same_loss_and_accuracy(fitting):
    family, weights = fitting.family, fitting.family.draw(3, seed=1, like=fitting.x)
    accuracy, loss = fitting.measure(weights)
    layer, moved = -1, weights.clone()
    for _, place, shape in family.places:  # W_2 and all biases from layer 2 on, times 5
        layer += len(shape) > 1
        if (layer == 1 and len(shape) > 1) or (layer >= 1 and len(shape) == 1):
            moved[:, place] *= 5
    assert torch.allclose(fitting.measure(moved)[1], loss, rtol=1e-10)
    assert torch.equal(fitting.measure(moved)[0], accuracy)
    assert not torch.allclose(fitting.measure(2 * weights)[1], loss, rtol=1e-6)  # biases count only once each


def test_a_network_that_is_not_homogeneous_is_refused():
    module = nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 2))
    with pytest.raises(hf.UnsupportedError, match="not positively homogeneous"):
        check_homogeneous(make_family(module), torch.rand(4, 3), 1.0)
    make_fitting(module, torch.rand(4, 3), torch.tensor([0, 1, 0, 1]), divisor=None)
