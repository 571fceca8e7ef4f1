"""The gradient of a chain that is written out is the one that autograd finds, whatever the layers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import Whole
from torch import nn

from holdfast.attacks.core.gradients import input_gradient
from holdfast.attacks.core.losses import cross_entropy
from holdfast.attacks.fast.chain import forward, is_chain, is_plain


def compare(model, x, y):
    ours, whole = (input_gradient(m, x, y, cross_entropy) for m in (model, Whole(model)))
    for a, b in zip(ours, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 if x.dtype == torch.float32 else 1e-12)
    assert not any(t.requires_grad for t in ours)
    return ours


CONVOLUTIONS = st.fixed_dictionaries(
    {
        "kernel_size": st.sampled_from([1, 2, 3, 4, (3, 2)]),
        "stride": st.sampled_from([1, 2, (1, 2)]),
        "padding": st.sampled_from([0, 1, (2, 1)]),
        "dilation": st.sampled_from([1, 2]),
        "bias": st.booleans(),
    }
)
SIMPLE = [nn.ReLU, nn.Tanh, nn.Identity, nn.GELU]
BETWEEN = st.sampled_from([*SIMPLE, lambda: nn.Dropout(0.5), lambda: nn.LeakyReLU(0.1), lambda: nn.MaxPool2d(2, 1)])


@settings(max_examples=60)
@given(
    st.sampled_from([1, 3, 5]),
    st.lists(st.tuples(st.sampled_from([4, 16, 32]), CONVOLUTIONS, BETWEEN), min_size=1, max_size=3),
    st.integers(1, 4),
    st.sampled_from([torch.float32, torch.float64]),
    st.booleans(),
)
def test_any_chain_of_convolutions(channels, stack, count, dtype, last):
    torch.manual_seed(0)
    layers, width = [], channels
    for out, geometry, between in stack:
        layers += [nn.Conv2d(width, out, **geometry), between()]
        width = out
    body = nn.Sequential(*layers).to(dtype).eval()
    x = torch.rand(count, channels, 33, 35, dtype=dtype)
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
    features = body(x)[0].numel()
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, 6), nn.ReLU(), nn.Linear(6, 3)).to(dtype).eval()
    assert is_plain(model)
    gradient, _, _ = compare(model, x, torch.arange(count) % 3)
    assert gradient.stride() == x.stride() or gradient.is_contiguous()


def test_layers_that_keep_or_share_their_input():
    torch.manual_seed(0)
    shared = nn.ReLU()
    model = nn.Sequential(nn.ReLU(), nn.Identity(), nn.Linear(5, 7), shared, shared, nn.Identity(), nn.Linear(7, 3))
    x = torch.rand(6, 5) - 0.5
    before = x.clone()
    compare(model.eval(), x, torch.arange(6) % 3)
    assert torch.equal(x, before)
    compare(nn.Sequential(nn.Flatten()), torch.rand(4, 1, 1, 3), torch.arange(4) % 3)


def test_dense_layers_over_the_last_axis():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Flatten(), nn.Linear(15, 3)).eval()
    compare(model, torch.rand(2, 3, 4), torch.arange(2))


def test_batch_norm_in_training_counts_one_pass():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 3)).train()
    input_gradient(model, torch.rand(5, 1, 6, 6), torch.arange(5) % 3, cross_entropy)
    assert int(model[1].num_batches_tracked) == 1


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(2, 3, 3, padding="same"),
        nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"),
        nn.utils.parametrizations.weight_norm(nn.Conv2d(2, 3, 3)),
        nn.Softmax(1),
        nn.Sequential(nn.Conv2d(2, 3, 3)),
    ],
    ids=["same", "circular", "parametrised", "softmax", "nested"],
)
def test_what_is_not_plain_goes_through_autograd(layer):
    model = nn.Sequential(layer, nn.Flatten()).eval()
    assert is_chain(model)
    assert not is_plain(model)
    compare(model, torch.rand(3, 2, 5, 5), torch.arange(3))


def test_grouped_convolutions():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 3)).eval()
    assert is_plain(model)
    compare(model, torch.rand(3, 4, 6, 6), torch.arange(3))


def test_the_tape_holds_a_way_back_for_every_layer_that_changes_something():
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)).eval()
    tape = []
    with torch.no_grad():
        forward(model, torch.rand(4, 2), torch.no_grad(), tape)
    assert len(tape) == 3


def test_a_known_slope_takes_the_place_of_autograd():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)).eval()
    x, y = torch.rand(6, 5), torch.arange(6) % 3

    def logit(logits, y):
        return logits.gather(1, y[:, None]).squeeze(1)

    for m in (model, Whole(model)):  # which has no use for it
        gradient, values, _ = input_gradient(m, x, y, logit, lambda z, y: nn.functional.one_hot(y, 3).to(z.dtype))
        expected, same, _ = input_gradient(Whole(model), x, y, logit)
        torch.testing.assert_close(gradient, expected)
        torch.testing.assert_close(values, same)
