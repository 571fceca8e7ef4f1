"""Normalize, activations by name."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import InputError
from holdfast.models import Arctan, MinMax, Normalize
from holdfast.models.layers import make_activation


def test_normalize_is_per_channel_on_images() -> None:
    x = torch.rand(2, 3, 4, 5)
    layer = Normalize((0.1, 0.2, 0.3), (0.5, 1.0, 2.0))
    expected = torch.stack([(x[:, c] - 0.1 * (c + 1)) / (0.5 * 2**c) for c in range(3)], 1)
    torch.testing.assert_close(layer(x), expected)
    assert layer.mean.shape == (3, 1, 1)


def test_normalize_is_per_feature_on_flat_inputs() -> None:
    x = torch.rand(4, 2)
    layer = Normalize([0.0, 1.0], [1.0, 4.0], flat=True)
    torch.testing.assert_close(layer(x), torch.stack([x[:, 0], (x[:, 1] - 1) / 4], 1))


@given(st.floats(-2, 2), st.floats(0.1, 3))
def test_normalize_with_one_number_takes_any_shape(mean: float, std: float) -> None:
    layer = Normalize(mean, std)
    for shape in ((2, 3), (1, 2, 3, 4)):
        x = torch.linspace(0, 1, 6 if len(shape) == 2 else 24).view(shape)
        torch.testing.assert_close(layer(x), (x - mean) / std)


def test_normalize_is_part_of_the_state_and_is_not_trained() -> None:
    layer = Normalize(0.5, 0.5)
    assert set(layer.state_dict()) == {"mean", "std"}
    assert not list(layer.parameters())


@pytest.mark.parametrize(
    ("mean", "std", "words"),
    [
        (0.0, 0.0, "std of Normalize must be > 0"),
        ((0.0, 0.0), (1.0, -1.0), "std of Normalize must be > 0"),
        (float("nan"), 1.0, "mean of Normalize"),
        ((), 1.0, "mean of Normalize"),
        ("red", 1.0, "mean of Normalize must be a number"),
    ],
)
def test_normalize_refuses(mean: object, std: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        Normalize(mean, std)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("relu", lambda x: x.clamp(min=0)),
        ("leaky_relu", lambda x: torch.where(x > 0, x, 0.01 * x)),
        ("sigmoid", lambda x: 1 / (1 + (-x).exp())),
        ("tanh", lambda x: (x.exp() - (-x).exp()) / (x.exp() + (-x).exp())),
        ("arctan", lambda x: torch.atan2(x, torch.ones_like(x))),
    ],
)
def test_activations_by_name(name: str, function) -> None:
    x = torch.linspace(-3, 3, 31)
    torch.testing.assert_close(make_activation(name)(x), function(x))


def test_arctan_is_a_layer_and_unknown_activations_are_refused() -> None:
    assert isinstance(make_activation("arctan"), Arctan)
    with pytest.raises(InputError, match="Did you mean 'relu'"):
        make_activation("relo")


def test_minmax_sorts_and_sends_gradients_back_to_where_values_came_from() -> None:
    x = torch.randn(5, 4, 3, 3, dtype=torch.float64, requires_grad=True)
    pairs = x.unflatten(1, (2, 2))
    plain = torch.stack([pairs.amax(2), pairs.amin(2)], 2).flatten(1, 2)
    assert torch.equal(MinMax()(x), plain)
    assert torch.autograd.gradcheck(MinMax(), (x,))
    assert torch.autograd.gradgradcheck(MinMax(), (x,))
    assert MinMax()(torch.zeros(0, 4)).shape == (0, 4)
    batched = torch.func.vmap(MinMax())(x.detach()[:, None])
    assert torch.equal(batched[:, 0], plain.detach())
