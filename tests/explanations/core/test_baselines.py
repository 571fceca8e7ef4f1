"""The inputs that stand for nothing to see."""

import pytest
import torch
from nets import tiny_nets
from torch import nn

import holdfast as hf
from holdfast.errors import InputError
from holdfast.explanations.core.baselines import blur


def test_baselines():
    model, shape = tiny_nets()["cnn"]
    x, y = torch.rand(3, *shape), torch.tensor([0, 1, 2])

    def at(baseline):
        return hf.explain(model, x, y, "integrated-gradients", baseline=baseline, steps=5, tolerance=None).attribution

    torch.testing.assert_close(at("black"), at(torch.zeros(shape)))
    torch.testing.assert_close(at("white"), at(torch.ones_like(x)))
    torch.testing.assert_close(at("blurred"), at(blur(x)))
    assert bool((at(x) == 0).all())
    assert torch.equal(at("random"), at("random"))
    flat = torch.full((1, 1, 6, 9), 0.3)
    torch.testing.assert_close(blur(flat), flat)
    spot = torch.zeros(1, 1, 9, 7)
    spot[0, 0, 4, 3] = 1
    assert blur(spot).argmax() == spot.argmax()
    assert 0 < float(blur(spot).max()) < 1
    with pytest.raises(InputError, match="expected one of 'black'"):
        at("blak")
    with pytest.raises(InputError, match="the baseline must have the shape of one input"):
        at(torch.zeros(2, 2))
    with pytest.raises(InputError, match="outside the valid range"):
        at(torch.full(shape, 2.0))
    with pytest.raises(InputError, match="'blurred' needs images"):
        hf.explain(
            nn.Linear(2, 2).eval(), torch.rand(1, 2), torch.tensor([0]), "integrated-gradients", baseline="blurred"
        )
