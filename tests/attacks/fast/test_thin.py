"""The gradient of thin convolutions as a product and a fold equals the gradient that torch computes."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import holdfast as hf
from holdfast.attacks.core.gradients import frozen, input_gradient
from holdfast.attacks.core.losses import cross_entropy
from holdfast.attacks.fast import thin
from holdfast.attacks.fast.thin import FoldedConvolution, TurnedConvolution, conv2d
from holdfast.attacks.pgd import pgd

GEOMETRIES = [
    {"stride": 2, "padding": 1},
    {"stride": (2, 3), "padding": (0, 2)},
    {"stride": 3, "padding": 1, "dilation": 2},
    {},
    {"padding": 2, "dilation": (1, 2)},
    {"stride": [1, 1], "padding": [0, 1]},
]


def by_torch(x, weight, bias, upstream, **geometry):
    x = x.detach().requires_grad_(True)
    return torch.autograd.grad(F.conv2d(x, weight, bias, **geometry), x, upstream)[0]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("channels", [1, 3])
def test_the_folded_gradient_is_the_gradient(geometry, channels):
    x = torch.rand(5, channels, 13, 10, requires_grad=True)
    weight, bias = torch.randn(32, channels, 3, 2), torch.randn(32)
    out = conv2d(x, weight, bias, **geometry)
    assert "Folded" in type(out.grad_fn).__name__
    assert torch.equal(out, F.conv2d(x, weight, bias, **geometry))
    upstream = torch.randn_like(out)
    (gradient,) = torch.autograd.grad(out, x, upstream)
    assert torch.allclose(gradient, by_torch(x, weight, bias, upstream, **geometry), atol=1e-4)


@pytest.mark.parametrize(
    ("x", "weight", "options"),
    [
        (torch.rand(2, 8, 6, 6), torch.randn(99, 8, 3, 3), {}),  # not thin
        (torch.rand(2, 1, 9, 9), torch.randn(8, 1, 3, 3), {}),  # more columns than outputs
        (torch.rand(2, 2, 6, 6), torch.randn(64, 1, 3, 3), {"groups": 2}),
        (torch.rand(2, 1, 6, 6), torch.randn(64, 1, 3, 3), {"padding": "same"}),
        (torch.rand(1, 6, 6), torch.randn(64, 1, 3, 3), {}),  # one image without a batch
        (torch.rand(2, 1, 6, 6).double(), torch.randn(64, 1, 3, 3).double(), {}),
        (torch.rand(2, 1, 6, 6), torch.randn(64, 1, 3, 3).requires_grad_(True), {}),
    ],
)
def test_every_other_convolution_is_left_alone(x, weight, options):
    out = conv2d(x.requires_grad_(True), weight, **options)
    assert "Folded" not in type(out.grad_fn).__name__
    assert torch.equal(out, F.conv2d(x, weight, **options))


def test_the_weights_of_a_free_model_still_get_their_gradient():
    weight = torch.randn(64, 1, 3, 3, requires_grad=True)
    conv2d(torch.rand(2, 1, 6, 6, requires_grad=True), weight).sum().backward()
    assert weight.grad is not None


def test_input_gradient_uses_it_and_agrees_with_autograd():
    model = nn.Sequential(nn.Conv2d(1, 16, 4, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 5)).eval()
    x, y = torch.rand(7, 1, 12, 12), torch.arange(7) % 5
    seen = []
    handle = model[0].register_forward_hook(lambda *args: seen.append(type(args[2].grad_fn).__name__))
    free, _, _ = input_gradient(model, x, y, cross_entropy)
    with frozen(model):
        held, _, _ = input_gradient(model, x, y, cross_entropy)
    handle.remove()
    assert ["Folded" in name for name in seen] == [False, True]
    assert torch.allclose(free, held, atol=1e-6)


@pytest.mark.parametrize("stride", [1, 2])
def test_it_works_under_vmap_and_twice(stride):
    x, weight = torch.rand(3, 2, 1, 6, 6), torch.randn(16, 1, 3, 3)

    def total(x):
        return FoldedConvolution.apply(x, weight, None, stride, 1, 1).square().sum()

    def plain(x):
        return F.conv2d(x, weight, None, stride, 1).square().sum()

    expected = torch.stack([torch.autograd.functional.jacobian(plain, one) for one in x])
    assert torch.allclose(torch.func.vmap(torch.func.grad(total))(x), expected, rtol=1e-4, atol=1e-3)
    hessian = torch.autograd.functional.hessian(total, x[0, :1])
    exact = torch.autograd.functional.hessian(plain, x[0, :1])
    assert torch.allclose(hessian, exact, atol=1e-3)


def test_a_compiled_model_gives_the_same_gradient():
    model = nn.Sequential(nn.Conv2d(1, 16, 4, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 5)).eval()
    x, y = torch.rand(4, 1, 12, 12), torch.arange(4)
    with frozen(model):
        plain, _, _ = input_gradient(model, x, y, cross_entropy)
        compiled, _, _ = input_gradient(torch.compile(model, backend="eager"), x, y, cross_entropy)
    assert torch.allclose(plain, compiled, atol=1e-6)


def test_done_inputs_ride_along_unchanged_until_they_are_enough_to_leave():
    """One input of 40 breaks at once (2.5 %): the batch keeps its size, the input its first broken iterate."""
    sizes = []

    class Recorder(nn.Module):
        def forward(self, x):
            sizes.append(len(x))
            return torch.stack([x.sum(1) - 2.0, torch.zeros(len(x), dtype=x.dtype)], 1)

    x = torch.full((40, 4), 0.9)
    x[7] = 0.52  # class 0 by 0.08; the first step of 0.05 takes it over
    y = torch.zeros(40, dtype=torch.long)
    result = pgd(Recorder().eval(), x, y, hf.Linf(0.1), steps=6, step_size=0.05, random_start=False)
    assert result.success.tolist() == [i == 7 for i in range(40)]
    assert set(sizes) == {40}
    assert torch.allclose(result.x_adv[7], torch.full((4,), 0.47))
    assert (int(result.gradients[7]), int(result.queries[7])) == (2, 2)
    assert (int(result.gradients[0]), int(result.queries[0])) == (6, 7)


@given(
    st.tuples(*[st.integers(1, 5)] * 2),
    st.tuples(*[st.integers(1, 4)] * 2),
    st.tuples(*[st.integers(0, 3)] * 2),
    st.tuples(*[st.integers(1, 2)] * 2),
    st.tuples(*[st.integers(9, 12)] * 2),
    st.integers(1, 3),
    st.sampled_from([torch.contiguous_format, torch.channels_last]),
)
def test_every_geometry_has_the_gradient_of_torch(kernel, stride, padding, dilation, size, batch, order):
    x = torch.randn(batch, 2, *size, dtype=torch.float64).contiguous(memory_format=order).requires_grad_(True)
    weight = torch.randn(3, 2, *kernel, dtype=torch.float64)
    out = FoldedConvolution.apply(x, weight, None, stride, padding, dilation)
    upstream = torch.randn_like(out)
    (ours,) = torch.autograd.grad(out, x, upstream)
    (theirs,) = torch.autograd.grad(F.conv2d(x, weight, None, stride, padding, dilation), x, upstream)
    assert ours.shape == theirs.shape
    assert torch.allclose(ours, theirs)


@given(st.tuples(*[st.integers(1, 5)] * 2), st.tuples(*[st.integers(0, 4)] * 2), st.integers(5, 9), st.integers(1, 3))
def test_a_turned_kernel_has_the_gradient_of_torch(kernel, padding, size, batch):
    padding = tuple(min(pad, width - 1) for pad, width in zip(padding, kernel, strict=True))
    x = torch.randn(batch, 5, size, size + 1, dtype=torch.float64, requires_grad=True)
    weight, bias = torch.randn(3, 5, *kernel, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    out = TurnedConvolution.apply(x, weight, bias, padding)
    assert torch.equal(out, F.conv2d(x, weight, bias, padding=padding))
    upstream = torch.randn_like(out)
    (ours,) = torch.autograd.grad(out, x, upstream)
    (theirs,) = torch.autograd.grad(F.conv2d(x, weight, bias, padding=padding), x, upstream)
    assert torch.allclose(ours, theirs)


def test_kernels_are_turned_only_where_the_gradient_is_the_same():
    def turned(weight, x, **geometry):
        return "Turned" in type(conv2d(x.requires_grad_(True), weight, **geometry).grad_fn).__name__

    weight, x = torch.randn(8, 16, 4, 4), torch.rand(2, 16, 9, 9)
    assert turned(weight, x, padding=1)
    assert turned(weight, x, padding=(0, 3))
    assert not turned(weight, x, padding=4)
    assert not turned(weight, x, stride=2)
    assert not turned(weight, x, dilation=2)
    assert not turned(weight[..., :3, :3], x, padding="same")
    assert not turned(weight.double(), x.double())
    assert not turned(weight.clone().requires_grad_(True), x)
    assert not turned(torch.randn(8, 8, 4, 4), x, groups=2)


def test_an_empty_batch_is_left_to_torch():
    x = torch.rand(0, 1, 8, 8, requires_grad=True)
    out = conv2d(x, torch.randn(16, 1, 4, 4), stride=2)
    assert "Folded" not in type(out.grad_fn).__name__
    assert torch.autograd.grad(out.sum(), x)[0].shape == x.shape


def test_large_batches_go_through_the_cache_in_pieces(monkeypatch):
    monkeypatch.setattr(thin, "CACHE", 200)
    x, weight = torch.rand(7, 1, 8, 8, requires_grad=True), torch.randn(4, 1, 4, 4)
    ours = torch.autograd.grad(FoldedConvolution.apply(x, weight, None, 2, 1, 1).square().sum(), x)[0]
    theirs = torch.autograd.grad(F.conv2d(x, weight, None, 2, 1).square().sum(), x)[0]
    assert torch.allclose(ours, theirs, atol=1e-4)
