"""Counted operations: by hand on one layer, and the percentages of the published network."""

import pytest
import torch
from torch import nn

from holdfast.analyze.flops import LayerFlops, layer_flops, saved
from holdfast.errors import InputError
from holdfast.models import make_model
from holdfast.models.masked import masked


def test_binary_weights_save_what_the_formulas_say_on_rn34():
    """33.7, 42.5, 45.8 and 41.9 per cent at a rate of 0.99, not the 45 and 32 in print."""
    with torch.device("meta"):
        model = make_model("rn34")
    layers = layer_flops(model, (3, 32, 32), rate=0.99, dense=False)
    assert len(layers) == 36
    found = saved(layers)
    shares = (found.forward_training, found.forward_evaluation, found.backward, found.step)
    assert [round(100 * share, 1) for share in shares] == [33.7, 42.5, 45.8, 41.9]


def test_one_layer_by_hand():
    layer = LayerFlops("conv", weights=3 * 5 * 7, channels=7, pixels=16, density=0.5)
    assert layer.forward(binary=False, training=True) == 2 * 0.5 * 105 * 16 + 11 * 16 * 7
    assert layer.forward(binary=True, training=True) == 0.5 * 105 * 16 + 11 * 16 * 7
    assert layer.forward(binary=False, training=False) == 2 * 0.5 * 105 * 16 + 4 * 16 * 7
    assert layer.forward(binary=True, training=False) == 0.5 * 105 * 16 + 4 * 16 * 7
    assert layer.backward(binary=False) == 4 * 0.5 * 105 * 16 + 4 * 16 * 7 + 105
    assert layer.backward(binary=True) == 3 * 0.5 * 105 * 16 + 4 * 16 * 7


def test_limits_of_the_rate():
    nothing = LayerFlops("conv", 1000, 1, 10**6, density=0.0)
    assert saved([nothing]).forward_training == 0
    whole = LayerFlops("conv", 10**9, 1, 1000, density=1.0)
    assert saved([whole]).forward_evaluation == pytest.approx(0.5, abs=1e-5)
    assert saved([whole]).backward == pytest.approx(0.25, abs=1e-3)
    with pytest.raises(InputError, match="no layers to count"):
        saved([])


def test_layers_of_a_sub_network_have_its_own_densities_and_maps():
    model = masked(
        nn.Sequential(nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 3 * 4, 5)),
        rate=0.5,
        gamma=0.0,
        seed=0,
    ).train()
    conv, dense = layer_flops(model, (2, 6, 8))
    assert (conv.name, conv.weights, conv.channels, conv.pixels) == ("0.0", 72, 4, 12)
    assert (dense.name, dense.weights, dense.channels, dense.pixels) == ("0.3", 240, 5, 1)
    assert (conv.density, dense.density) == (1.0, pytest.approx(84 / 240))
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())
