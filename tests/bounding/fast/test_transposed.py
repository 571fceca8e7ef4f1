"""Transposed convolutions against the kernel of torch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from holdfast.bounding.fast.transposed import conv_transpose


@given(
    st.integers(0, 40),
    *[st.integers(1, 6)] * 2,
    st.sampled_from([4, 9, 12, 20]),
    *[st.integers(1, 3)] * 3,
)
def test_every_way_to_transpose_a_convolution_gives_what_torch_gives(count, h, w, channels, inputs, kernel, stride):
    """Small maps, thin kernels, and the rest; with planes or channels last in memory; gradients too."""
    generator = torch.Generator().manual_seed(0)
    g = torch.rand(count, channels, h, w, generator=generator, dtype=torch.float64)
    weight = torch.rand(channels, inputs, kernel, kernel, generator=generator, dtype=torch.float64).requires_grad_()
    options = ((stride, stride), (0, 0), (0, 0), 1, (1, 1))
    expected = F.conv_transpose2d(g, weight, None, *options)
    (slope,) = torch.autograd.grad(expected.square().sum(), weight)
    for layout in (torch.contiguous_format, torch.channels_last):
        ours = conv_transpose(g.contiguous(memory_format=layout), weight, *options)
        assert torch.allclose(ours, expected)
        assert torch.allclose(torch.autograd.grad(ours.square().sum(), weight)[0], slope)


@pytest.mark.parametrize("kernel", [(1, 1), (3, 3), (2, 3), (3, 1)])
@pytest.mark.parametrize(("stride", "padding", "dilation", "groups"), [
    (1, (0, 0), 1, 1), (1, (1, 0), 1, 1), (1, (1, 2), 2, 1), (1, (2, 1), 1, 1), (2, (1, 0), 1, 1),
    (2, (0, 0), 1, 1), (1, (0, 0), 1, 2),
])  # fmt: skip
def test_few_channels_without_gradients_give_what_torch_gives(kernel, stride, padding, dilation, groups):
    """Without a stride they go through a convolution; kernels are not symmetric, and some padding is too large."""
    generator = torch.Generator().manual_seed(0)
    g = torch.rand(7, 4, 6, 5, generator=generator, dtype=torch.float64)
    weight = torch.rand(4, 3, *kernel, generator=generator, dtype=torch.float64)
    spare = int(stride > 1 and padding[0] > 0)  # rows that a strided convolution does not reach
    options = ((stride, stride), padding, (spare, spare), groups, (dilation, dilation))
    with torch.no_grad():
        assert torch.allclose(conv_transpose(g, weight, *options), F.conv_transpose2d(g, weight, None, *options))
