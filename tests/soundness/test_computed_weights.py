"""Weights that a model computes are the ones it computes in its own precision, also in proofs that work in float64."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import holdfast as hf
from holdfast.properties.property import robust


class Coarse(nn.Module):
    """Adds and takes away a million: in float32 a multiple of 1/16 is left, in float64 the weight itself."""

    def forward(self, weight):
        return (weight + 1e6) - 1e6


@pytest.fixture
def network():
    """z_0 - z_1 = 0.05 - w x with w = 0.04 in float64 and 0.0625 in float32: negative at x = 1 as the model is run."""
    layer = nn.Linear(1, 2)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[-0.04], [0.0]]))
        layer.bias.copy_(torch.tensor([0.05, 0.0]))
    parametrize.register_parametrization(layer, "weight", Coarse(), unsafe=True)
    return nn.Sequential(layer).eval()


METHODS = [m.name for m in hf.methods("certify") if m.guarantee == "proof" and "linf" in m.threats and not m.needs]


def test_the_networks_differ_in_the_two_precisions(network):
    ends = torch.tensor([[0.5], [1.0]])
    assert network(ends).argmax(1).tolist() == [0, 1]
    assert nn.Sequential(network[0].double())(ends.double()).argmax(1).tolist() == [0, 0]


@pytest.mark.parametrize("method", METHODS)
def test_no_certificate_proves_the_network_of_the_other_precision(network, method):
    x, y = torch.full((1, 1), 0.5), torch.tensor([0])
    try:
        assert not bool(hf.certify(network, x, y, hf.Linf(0.5), method).certified)
    except hf.UnsupportedError:
        pytest.skip("it refuses such layers")


def test_verify_finds_the_counter_example_of_the_run(network):
    prop = robust(torch.full((1,), 0.5), 0, hf.Linf(0.5), classes=2)
    assert hf.verify(network, prop, timeout=10).status == "violated"
