"""The top layer of a model."""

import pytest
import torch
from torch import nn

from holdfast import InputError
from holdfast.training.outputs import forward, top_layer
from regularizer_tasks import make_model


def test_top_layer_is_found_by_what_it_returns():
    x = torch.rand(2, 4)
    assert top_layer(make_model().float(), x) == "2"
    assert top_layer(nn.Linear(4, 3), x) == ""
    nested = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 3), nn.Identity()))
    with torch.no_grad():
        output = forward(nested, x, top=top_layer(nested, x))
        assert torch.equal(output.z, nested[0](x))
        assert torch.equal(output.logits, nested(x))
    assert not nested[1][0]._forward_pre_hooks
    with pytest.raises(InputError, match="no top layer was named"):
        forward(nested, x).z  # noqa: B018
