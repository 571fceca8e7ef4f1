"""Masks: exact counts, the straight-through gradient, fixed weights; signs of BinaryConnect."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from holdfast.errors import UnsupportedError
from holdfast.models.masked import Mask, Sign, computed, fixed_weights, masked, patterns
from holdfast.models.masked.mask import maskable, top


def network(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 3 * 2, 4))
    return masked(model, **{"rate": 0.6, "seed": 1, "last_batch_norm": False, **options})


X, Y = torch.rand(5, 1, 5, 4, generator=torch.Generator().manual_seed(2)), torch.arange(5) % 4


@pytest.mark.parametrize("kept", [1, 2, 5, 11, 12])
def test_exactly_so_many_are_kept_also_of_equal_values(kept):
    for values in (torch.zeros(3, 4), torch.tensor([[1.0, 2, 2, 0], [2, 2, 1, 1], [0, 0, 0, 2]])):
        chosen = top(values, kept)
        assert int(chosen.sum()) == kept
        assert kept == 12 or values[chosen].min() >= values[~chosen].max()
    assert top(torch.zeros(3, 4), kept).flatten().tolist() == [True] * kept + [False] * (12 - kept)


@pytest.mark.parametrize("weights", ["binary", "kaiming-normal"])
@pytest.mark.parametrize("transform", ["abs", "identity"])
def test_the_gradient_reaches_every_score_as_if_the_mask_were_the_score(transform, weights):
    """dL/ds = theta * dL/d(theta m), times sign(s) for |s|, for pruned weights too."""
    model = network(transform=transform, weights=weights)
    masks, theta = computed(model, Mask), fixed_weights(model)
    gradients = torch.autograd.grad(cross_entropy(model(X), Y), [mask.scores for mask in masks.values()])
    plain = {name: (theta[name] * masks[name].pattern()).requires_grad_(True) for name in masks}
    h = nn.functional.conv2d(X, plain["0"]).relu().flatten(1) @ plain["3"].T
    expected = torch.autograd.grad(cross_entropy(h, Y), [plain["0"], plain["3"]])
    for (name, mask), gradient, other in zip(masks.items(), gradients, expected, strict=True):
        sign = mask.scores.sign() if transform == "abs" else 1.0
        assert torch.allclose(gradient, theta[name] * other * sign, atol=1e-7)
        assert (gradient[~mask.pattern()] != 0).any()


@pytest.mark.parametrize(("transform", "best"), [("abs", [0, 3]), ("identity", [2, 3])])
def test_ranking_by_score_and_by_its_size_differ(transform, best):
    mask = Mask(torch.tensor([-4.0, 0.1, 1.0, 3.0]), 2, transform)
    assert mask.pattern().nonzero()[:, 0].tolist() == best


def test_the_pattern_follows_every_change_of_the_scores():
    mask = Mask(torch.tensor([1.0, 2.0, 3.0]), 1)
    assert mask.pattern().tolist() == [False, False, True]
    with torch.no_grad():
        mask.scores[0] = 9.0
    assert mask.pattern().tolist() == [True, False, False]
    other = functional_call(mask, {"scores": torch.tensor([0.0, 5.0, 0.0])}, (torch.ones(3),))
    assert other.tolist() == [0, 1, 0]
    assert mask.pattern().tolist() == [True, False, False]
    mask.load_state_dict({"scores": torch.tensor([0.0, 5.0, 0.0])})
    assert mask.pattern().tolist() == [False, True, False]
    moved = copy.deepcopy(mask).double()
    assert moved(torch.ones(3, dtype=torch.float64)).tolist() == [0, 1, 0]


def test_training_moves_scores_and_leaves_every_bit_of_the_weights():
    model = network()
    before = {name: theta.clone() for name, theta in fixed_weights(model).items()}
    counts = {name: int(pattern.sum()) for name, pattern in patterns(model).items()}
    first = {name: pattern.clone() for name, pattern in patterns(model).items()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5, momentum=0.9)
    for _ in range(20):
        optimizer.zero_grad()
        cross_entropy(model(X), Y).backward()
        optimizer.step()
    assert all(torch.equal(before[name], theta) for name, theta in fixed_weights(model).items())
    assert {name: int(pattern.sum()) for name, pattern in patterns(model).items()} == counts
    assert any(not torch.equal(first[name], pattern) for name, pattern in patterns(model).items())
    assert {name.rpartition(".")[2] for name, p in model.named_parameters() if p.requires_grad} == {"scores"}


def test_signs_are_1_and_minus_1_and_the_gradient_goes_to_the_real_weights():
    w = torch.tensor([-0.3, 0.0, -0.0, 0.2], requires_grad=True)
    signs = Sign()(w)
    assert signs.tolist() == [-1, 1, 1, 1]
    (gradient,) = torch.autograd.grad((signs * torch.arange(4.0)).sum(), w)
    assert gradient.tolist() == [0, 1, 2, 3]


def test_models_that_cannot_be_masked_are_refused():
    with pytest.raises(UnsupportedError, match="no layer that can be masked"):
        masked(nn.Sequential(nn.Flatten(), nn.ReLU()))
    with pytest.raises(UnsupportedError, match="layer '0' computes its weight already"):
        masked(network())
    shared = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    shared[1].weight = shared[0].weight
    with pytest.raises(UnsupportedError, match="share a weight"):
        maskable(shared)
