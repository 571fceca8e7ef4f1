"""Patterns of masks: known empty channels, chance by counting, agreement of layers, pictures."""

import itertools

import pytest
import torch
from torch import nn

from holdfast.analyze.subnetworks import (
    alignment,
    channel_plot,
    consecutive,
    empty_share,
    layer_patterns,
    mask_picture,
    pattern_of,
    random_counts,
)
from holdfast.errors import InputError
from holdfast.models import make_model
from holdfast.models.masked import masked


def synthetic(outputs=(), inputs=(), shape=(4, 6, 3, 2)):
    """A mask that is full but for some empty channels."""
    mask = torch.ones(shape, dtype=torch.bool)
    mask[list(outputs)] = False
    mask[:, list(inputs)] = False
    return mask


def test_empty_channels_are_counted():
    pattern = pattern_of("conv", synthetic([1], [0, 5]))
    assert pattern.outputs.tolist() == [24, 0, 24, 24]
    assert pattern.inputs.tolist() == [0, 18, 18, 18, 18, 0]
    assert (pattern.empty_outputs, pattern.empty_inputs) == (0.25, pytest.approx(1 / 3))
    assert pattern.density == 3 * 4 / (4 * 6)


@pytest.mark.parametrize(("weights", "kept", "channels"), [(8, 3, 4), (9, 4, 3), (6, 5, 2), (8, 1, 8)])
def test_chance_is_the_mean_over_all_masks(weights, kept, channels):
    size = weights // channels
    empty = [
        sum(not set(range(c * size, (c + 1) * size)) & set(chosen) for c in range(channels)) / channels
        for chosen in itertools.combinations(range(weights), kept)
    ]
    assert empty_share(weights, kept, channels) == pytest.approx(sum(empty) / len(empty))


def test_the_published_layer_would_have_no_empty_channel_by_chance():
    assert empty_share(256 * 256 * 9, round(0.0108 * 256 * 256 * 9), 256) == pytest.approx(2.718281828**-25.1, rel=0.3)


def test_random_masks_agree_with_the_expected_share():
    pattern = pattern_of("dense", torch.rand(10, 8, generator=torch.Generator().manual_seed(0)) < 0.2)
    outputs, inputs = random_counts(pattern, draws=2000, seed=1)
    assert outputs.sum() == pytest.approx(int(pattern.mask.sum()))
    assert inputs.sum() == pytest.approx(int(pattern.mask.sum()))
    assert torch.equal(outputs, outputs.sort(descending=True).values)
    assert (len(outputs), len(inputs)) == (10, 8)


def test_agreement_is_1_for_the_same_channels_and_0_for_others():
    first = pattern_of("first", synthetic([0, 2], shape=(6, 3, 1, 1)))
    assert alignment(first, pattern_of("second", synthetic([], [0, 2]))) == 1
    assert alignment(first, pattern_of("second", synthetic([], [1, 3]))) == 0
    assert alignment(first, pattern_of("second", synthetic([], [2, 3]))) == pytest.approx(1 / 3)
    assert alignment(pattern_of("first", synthetic(shape=(6, 3, 1, 1))), pattern_of("second", synthetic())) == 1
    with pytest.raises(InputError, match="'first' has 6 outputs, layer 'second' 4 inputs"):
        alignment(first, pattern_of("second", synthetic(shape=(4, 4))))


def test_pairs_are_layers_that_feed_each_other():
    model = masked(
        make_model("resnet18", blocks=(1, 1), channels=(4, 8), input_shape=(1, 8, 8), seed=0), rate=0.5, seed=0
    )
    names = list(layer_patterns(model))
    assert consecutive(model) == [("0.0", "0.3.body.0"), ("0.3.body.0", "0.3.body.3"), ("0.4.body.0", "0.4.body.3")]
    assert all(name in names for pair in consecutive(model) for name in pair)

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x):
            return self.layer(x) if x.sum() > 0 else x

    assert consecutive(Branches()) == []


class Functional(nn.Module):
    """Activations as functions and methods, a layer with groups, and one that is transposed."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3)
        self.groups, self.fourth = nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 6, 3)
        self.up, self.head, self.last = nn.ConvTranspose2d(6, 2, 3), nn.Linear(32, 5), nn.Linear(5, 3)

    def forward(self, x):
        h = nn.functional.max_pool2d(torch.relu(self.first(x)), 2)
        h = self.groups(self.second(h).relu())
        h = self.up(self.fourth(h))
        return self.last(self.head(nn.functional.adaptive_avg_pool2d(h, 4).flatten(1)).tanh())


def test_pairs_are_found_across_functions_and_not_across_groups():
    pairs = consecutive(Functional())
    assert pairs == [("first", "second"), ("head", "last")]
    found = layer_patterns(Functional())
    assert all(alignment(found[first], found[second]) == 1 for first, second in pairs)


def test_pictures_have_a_pixel_for_each_weight():
    mask = synthetic([1], [3])
    picture = mask_picture(mask)
    assert picture.shape == (1, 12, 12)
    assert torch.equal(picture[0, 3:6], torch.zeros(3, 12))
    assert torch.equal(picture[0, :, 6:8], torch.zeros(12, 2))
    assert picture.sum() == mask.sum()
    assert mask_picture(torch.ones(3, 5, dtype=torch.bool)).shape == (1, 3, 5)
    with pytest.raises(InputError, match="a picture needs the mask"):
        mask_picture(torch.ones(3, 5, 2, dtype=torch.bool))
    plot = channel_plot(pattern_of("conv", mask), draws=5)
    assert "25% of the outputs and 17% of the inputs are empty" in plot.alt
    assert str(plot).count("<polyline") == 4
