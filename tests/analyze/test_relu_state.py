"""Counts of ReLU states by hand and by sampling; the stability loss neuron by neuron."""

from itertools import pairwise

import pytest
import torch
from nets import tiny_nets
from torch import nn

import holdfast as hf
from holdfast.analyze.relu_state import relu_state
from holdfast.bounding.core.region import region
from holdfast.bounding.graph.trace import trace
from holdfast.bounding.linear import relaxation as linear
from holdfast.bounding.linear.slopes import chord_slopes, optimised_slopes
from holdfast.errors import InputError, UnsupportedError
from holdfast.random import Noise
from holdfast.training.regularizers.relu_stability import relu_stability_loss


def by_hand():
    """x - 0.2 > 0, x - 0.5 with chord 1/2, x - 0.45 with chord 3/4, x - 0.9 < 0, over x in [0.4, 0.6]."""
    model = nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 2)).double().eval()
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[0].bias.copy_(-torch.tensor([0.2, 0.5, 0.45, 0.9], dtype=torch.float64))
    return model, torch.full((1, 1), 0.5, dtype=torch.float64)


def relaxed(model, x, threat):
    return linear.relaxation(
        trace(model, x), region(threat, x, sound=False), slopes="adaptive", hidden=False, sound=False
    )


def test_counts_by_hand():
    model, x = by_hand()
    state = relu_state(model, x, hf.Linf(0.1), bins=5)
    assert (state.active.item(), state.unstable.item(), state.dead.item()) == (1, 2, 1)
    assert state.slopes.tolist() == [0, 0, 1, 1, 0]
    # CROWN's own rule: slope 1 where u > -l; at u = -l up to rounding either is right
    assert state.low_zero.item() + state.low_one.item() == 2
    assert state.low_between.item() == 0
    chords = relu_state(model, x, hf.Linf(0.1), bins=5, rule=chord_slopes)
    assert (chords.low_zero.item(), chords.low_between.item(), chords.low_one.item()) == (0, 2, 0)


@pytest.mark.parametrize("threat", [hf.Linf(0.05), hf.L2(0.2), hf.L1(0.2)], ids=str)
@pytest.mark.parametrize("hidden", [False, True])
def test_counts_sum_to_the_number_of_neurons(threat, hidden):
    model, shape = tiny_nets()["mlp"]
    x = torch.rand(4, *shape)
    state = relu_state(model, x, threat, hidden=hidden)
    assert (state.active + state.unstable + state.dead).tolist() == [32] * 4
    assert torch.equal(state.low_zero + state.low_between + state.low_one, state.unstable)
    assert int(state.slopes.sum()) == int(state.unstable.sum())


def test_more_budget_means_more_unstable_neurons():
    model, shape = tiny_nets()["mlp"]
    x = torch.rand(6, *shape)
    states = [relu_state(model, x, hf.Linf(eps)) for eps in (0.0, 0.01, 0.05, 0.2, 0.5)]
    for a, b in pairwise(states):
        assert bool((a.unstable <= b.unstable).all())
        assert bool((a.active >= b.active).all())
        assert bool((a.dead >= b.dead).all())
    assert states[0].unstable.sum() < states[-1].unstable.sum()


def test_tighter_bounds_leave_fewer_unstable():
    model, shape = tiny_nets()["mlp"]
    x = torch.rand(6, *shape)
    loose, tight = (relu_state(model, x, hf.Linf(0.1), hidden=hidden) for hidden in (False, True))
    assert bool((tight.unstable <= loose.unstable).all())
    assert tight.unstable.sum() < loose.unstable.sum()


def test_states_are_true_of_the_network():
    """A neuron that takes both signs within the set is counted as unstable."""
    model, shape = tiny_nets()["mlp"]
    x = torch.rand(1, *shape)
    points = hf.Linf(0.1).random_start(x.expand(2000, *shape), Noise.for_batch(0, 2000))
    first = model[0](points)
    second = model[2](torch.relu(first))
    signs = torch.cat([first, second], 1) > 0
    mixed = int((signs.any(0) & ~signs.all(0)).sum())
    assert 0 < mixed <= relu_state(model, x, hf.Linf(0.1), hidden=True).unstable.item()


def test_the_lower_slopes_of_a_rule_are_counted():
    model, shape = tiny_nets()["mlp"]
    x, y = torch.rand(5, *shape), torch.tensor([0, 1, 2, 0, 1])
    state = relu_state(
        model, x, hf.Linf(0.1), rule=lambda r: optimised_slopes(r, y, noise=Noise.for_batch(0, 5), steps=1)
    )
    assert int((state.low_zero + state.low_one).sum()) > int(state.low_between.sum())


def test_the_stability_loss_neuron_by_neuron():
    model, x = by_hand()
    r = relaxed(model, x, hf.Linf(0.1))
    low = torch.tensor([0.2, -0.1, -0.05, -0.5], dtype=torch.float64)
    high = low + 0.2
    assert relu_stability_loss(r).item() == pytest.approx(-torch.tanh(1 + low * high).sum().item())
    # The form with one inner product over neurons is another number: it lets stable neurons pay for unstable ones.
    assert abs(relu_stability_loss(r).item() + torch.tanh(1 + (low * high).sum()).item()) > 0.1


def test_a_gradient_step_makes_neurons_more_stable():
    model, x = by_hand()
    r = relaxed(model, x, hf.Linf(0.1))
    low, high = r.intervals[1]
    low, high = low.detach().requires_grad_(), high.detach().requires_grad_()
    r.intervals[1] = (low, high)
    grads = torch.autograd.grad(relu_stability_loss(r).sum(), [low, high])
    before = (low * high).detach()
    after = (low - 1e-3 * grads[0]) * (high - 1e-3 * grads[1])
    assert bool((after > before).all())
    r.intervals[1] = ((low * 0 + 20).detach().requires_grad_(), high + 30)
    (flat,) = torch.autograd.grad(relu_stability_loss(r).sum(), [r.intervals[1][0]])
    assert bool((flat.abs() < 1e-6).all())


def test_a_network_without_relus():
    model, shape = tiny_nets()["smooth"]
    x = torch.rand(2, *shape)
    with pytest.raises(UnsupportedError, match="no ReLU"):
        relu_state(model, x, hf.Linf(0.1))
    assert relu_stability_loss(relaxed(model, x, hf.Linf(0.1))).tolist() == [0.0, 0.0]


def test_what_makes_no_sense_is_refused():
    model, shape = tiny_nets()["pooled"]
    x = torch.rand(2, *shape)
    with pytest.raises(UnsupportedError, match="patch:1x1"):
        relu_state(model, x, hf.Patch(1, 1))
    with pytest.raises(InputError, match="bins"):
        relu_state(model, x, hf.Linf(0.1), bins=0)
