"""The loss of a neighbour, computed from the layers above the moved weight, is its loss computed whole."""

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.analyze.volume.fitting import make_fitting
from holdfast.analyze.volume.moves import Neighbours

MODULES = {
    "lenet": (lambda: hf.make_model("lenet", input_shape=(1, 17, 16), classes=3, width=0.3), (1, 17, 16), 3.0),
    "strided": (
        lambda: hf.make_model("cnn", input_shape=(2, 7, 8), classes=3, layers=((3, 4, 2, 1),), hidden=(5,)),
        (2, 7, 8),
        1.0,
    ),
    "raw": (lambda: nn.Sequential(nn.Linear(4, 3)), (4,), None),
    "general": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), (4,), None),
}


@pytest.mark.parametrize("name", MODULES)
@torch.no_grad()
def test_neighbours_have_the_loss_of_the_network_with_one_weight_moved(name):
    make, shape, divisor = MODULES[name]
    torch.manual_seed(1)
    x = torch.randn(6, *shape, dtype=torch.float64)
    fitting = make_fitting(make().double().eval(), x, torch.arange(6) % 3, divisor=divisor)
    point = fitting.family.draw(1, seed=0, like=x)[0]
    here = Neighbours(fitting, point)
    accuracy, loss = fitting.measure(point[None])
    assert here.loss == pytest.approx(float(loss[0]), rel=1e-12)
    assert here.fits == bool(accuracy[0] == 1)
    # some of every layer, weights and biases
    index = torch.cat([torch.randperm(p.stop - p.start)[:5] + p.start for _, p, _ in fitting.family.places])
    step = torch.randn(len(index), dtype=torch.float64)
    moved = point.repeat(len(index), 1)
    moved[torch.arange(len(index)), index] += step
    assert torch.allclose(here.losses(index, step), fitting.measure(moved)[1], rtol=1e-9)
    order = torch.randperm(len(index))
    assert torch.allclose(here.losses(index[order], step[order]), here.losses(index, step)[order], rtol=1e-12)
