"""Grad-CAM by hand."""

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.errors import InputError, UnsupportedError


def test_grad_cam_by_hand():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    )
    model, x = model.eval(), torch.rand(2, 3, 6, 5)
    y = torch.tensor([0, 1])
    a = model[0](x).detach()
    alpha = model[4].weight.detach()[y][:, :, None, None] * (a > 0) / 30
    cam = (alpha.mean((2, 3), keepdim=True) * a).sum(1).clamp(min=0)
    found = hf.explain(model, x, y, "grad-cam", layer="0")
    torch.testing.assert_close(found.attribution.sum(1), cam)
    assert torch.equal(found.attribution, hf.explain(model, x, y, "grad-cam").attribution)
    assert not model[0]._forward_hooks
    with pytest.raises(InputError, match="has no module 'conv'"):
        hf.explain(model, x, y, "grad-cam", layer="conv")
    with pytest.raises(UnsupportedError, match="needs a convolution"):
        hf.explain(nn.Sequential(nn.Flatten(), nn.Linear(90, 2)).eval(), x, y, "grad-cam")
