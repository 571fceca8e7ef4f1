"""Ascent on slopes: the best of every row is kept, with its slopes, and proved again in float64."""

import pytest
import torch
from nets import tiny_nets

import holdfast as hf
from holdfast.bounding.core.region import region
from holdfast.bounding.graph.trace import trace
from holdfast.bounding.linear import alpha
from holdfast.bounding.linear import relaxation as linear
from holdfast.bounding.linear.climb import RESERVE, Ascent, climb, keep
from holdfast.utils import clock


def test_kept_slopes_give_the_best_value_of_every_row():
    """A rate so large that the ascent overshoots: rows have their best values at different iterates."""
    torch.manual_seed(0)
    target = torch.rand(3, 4, 5)
    slopes, kept, values = {0: torch.rand(3, 4, 5)}, {}, []

    def bound():
        values.append(-(slopes[0] - target).square().sum(2))
        return values[-1]

    best = climb(slopes, bound, Ascent(30, learning_rate=0.7), {0: 0.0}, note=lambda b: keep(kept, slopes, b))
    assert torch.equal(best, torch.stack(values).amax(0))
    assert len(set(torch.stack(values).argmax(0).flatten().tolist())) > 3
    assert torch.equal(-(kept[0] - target).square().sum(2), best)
    assert 0 <= float(kept[0].min()) <= float(kept[0].max()) <= 1  # without a projection some would leave the range
    assert float(slopes[0].detach().max()) <= 1
    assert float(best.sum()) > float(values[0].detach().sum()) / 4


def test_rows_at_places_are_kept_place_by_place():
    kept, better = {}, torch.tensor([[True, False, False, False, True, False]])
    keep(kept, {0: torch.zeros(1, 3, 2, 1, 2, 2)}, better)
    keep(kept, {0: torch.ones(1, 3, 2, 1, 2, 2)}, better)
    assert torch.equal(kept[0].amin((3, 4, 5)), torch.tensor([[[1.0, 0.0], [0.0, 0.0], [1.0, 0.0]]]))
    assert torch.equal(kept[0].amax((3, 4, 5)), kept[0].amin((3, 4, 5)))


def test_a_deadline_leaves_time_for_the_bound_that_follows():
    calls, slopes = [0.0], {0: torch.zeros(1, 1, 2)}

    def bound():
        calls[0] += 1
        return slopes[0].sum(2)

    with clock.timed_by(lambda: calls[0]), clock.until(20.0):
        climb(slopes, bound, Ascent(100), {0: 0.0}, note=lambda better: None)
        assert clock.left() == RESERVE - 1  # the first moment at which less is left than was to be reserved
        climb(slopes, bound, Ascent(100), {0: 0.0})
        assert clock.left() == -1  # nothing follows: up to the deadline


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("name", ["cnn", "residual", "smooth"])
def test_an_account_of_rounding_costs_next_to_nothing(name, joint):
    model, shape = tiny_nets()[name]
    x = torch.rand(2, *shape, generator=torch.Generator().manual_seed(0))
    y, ascent = model(x).argmax(1), Ascent(8, joint=joint)
    graph, box = trace(model, x), region(hf.Linf(0.1), x, sound=True)
    plain = alpha.margin_bounds(graph, box, y, ascent, sound=False)
    found = alpha.margin_bounds(graph, box, y, ascent, sound=True)
    r = linear.relaxation(graph, box, slopes="adaptive", hidden=True, sound=False)
    crown = linear.margin_bounds(r, y).detach()
    other = torch.ones_like(found, dtype=torch.bool).scatter(1, y[:, None], False)
    gain = float((plain - crown)[other].mean())
    assert gain > 0
    assert float((plain - found)[other].abs().max()) < max(0.05 * gain, 2e-5)
    assert found.dtype == torch.float32


def test_hidden_rows_are_proved_with_their_best_slopes():
    """Keeping the best slopes of each row is worth more than ending with the last ones."""
    model, shape = tiny_nets()["mlp"]
    x = torch.rand(3, *shape, generator=torch.Generator().manual_seed(1))
    y = model(x).argmax(1)

    def start(r):
        return linear.margin_rows(r, y)

    r = linear.relaxation(
        trace(model, x), region(hf.Linf(0.2), x, sound=False), slopes="adaptive", hidden=True, sound=False
    )
    with torch.no_grad():
        best, state = alpha.joint(r, start, Ascent(12, learning_rate=0.6, joint=True), keeps=True)
        again = alpha.replayed(r, start, state)[0]
        last = alpha.joint_step(r, start, state)[0]
    assert bool((again >= best - 1e-5).all())
    assert float(again.sum()) > float(last.sum()) + 1e-4
