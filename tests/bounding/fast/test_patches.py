import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import tiny_nets
from torch import nn

import holdfast as hf
from holdfast.bounding.fast import patches as local
from holdfast.bounding.graph.trace import trace
from patch_tasks import dense_margins, task


@pytest.mark.parametrize("name", ["cnn", "pooled", "residual"])
def test_windows_give_the_bounds_of_whole_maps(name):
    model, shape = tiny_nets()[name]
    x, y = task(3, shape, 2)
    threat = hf.Patch(2, 2, low=-0.5, high=1.5)
    graph, corners = trace(model, x), threat.locations(shape)
    ours = local.margin_bounds(graph, x, y, threat, corners[:, None].expand(3, -1, 1, 2), 0.7)
    assert torch.allclose(ours, dense_margins(graph, x, y, threat, corners, 0.7), atol=1e-5)


@settings(max_examples=12, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(1, 2),
    st.integers(1, 2),
    st.integers(1, 3),
    st.integers(0, 99),
)
def test_windows_of_any_convolution(kernel, stride, padding, dilation, second, size, seed):
    torch.manual_seed(seed)
    layers = [
        nn.Conv2d(1, 2, kernel, stride, padding, dilation),
        nn.Tanh(),
        nn.Conv2d(2, 2, (second, 1), (second, 1), 1, bias=False),
        nn.Flatten(),
    ]
    x, y = task(2, (1, 8, 9), 3, seed)
    features = nn.Sequential(*layers)(x).shape[1]
    model, threat = nn.Sequential(*layers, nn.Linear(features, 3)), hf.Patch(size, 2)
    graph, corners = trace(model, x), threat.locations((1, 8, 9))
    ours = local.margin_bounds(graph, x, y, threat, corners[:, None].expand(2, -1, 1, 2), 1.0)
    assert torch.allclose(ours, dense_margins(graph, x, y, threat, corners, 1.0), atol=1e-5)


def test_windows_in_double_precision_are_exact():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3, 2, 1), nn.ReLU(), nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(8, 3)
    ).double()
    x, y = task(3, (1, 8, 8), 3)
    threat, graph = hf.Patch(3, 2), trace(model, x.double())
    corners = threat.locations((1, 8, 8))
    ours = local.margin_bounds(graph, x.double(), y, threat, corners[:, None].expand(3, -1, 1, 2), 1.0)
    theirs = dense_margins(graph, x.double(), y, threat, corners, 1.0)
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-13)
