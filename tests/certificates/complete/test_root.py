"""The ascent before the first split: it goes on while that promises a proof, and no longer."""

import dataclasses
import itertools
import time

import pytest
import torch
from torch import nn

from holdfast.bounding.core.evaluation import doubled
from holdfast.bounding.core.region import region
from holdfast.bounding.graph.trace import trace
from holdfast.bounding.linear import alpha
from holdfast.bounding.linear.climb import Ascent, climb
from holdfast.certificates.complete import root
from holdfast.certificates.complete.branch_and_bound import Effort
from holdfast.certificates.complete.root import AHEAD, LEAST, STRIDE, Network, _Worth, begin, tighten_and_split
from holdfast.threats import Linf
from holdfast.utils import clock

INF = torch.inf
ALONE = torch.tensor([[0], [1], [2]])


def iterates(worth, bounds):
    """How many of the bounds, (M,) or (B, M) each, it takes until the ascent ends."""
    for number, bound in enumerate(bounds):
        if worth.over(torch.as_tensor(bound).view(len(worth.margins), -1)):
            return number
    return len(bounds)


def test_proved_twice_is_enough():
    worth = _Worth(ALONE, torch.tensor([[INF, -9.0, 2.0]]), torch.tensor([1]))
    assert iterates(worth, [[-1.0], [0.5], [0.6], [0.7]]) == 2


@pytest.mark.parametrize(("gain", "ends"), [(1.0, False), (0.01, True)])
def test_it_goes_on_while_four_times_the_gain_would_close_the_gap(gain, ends):
    """A gap of 20 less the gains so far: each stride gains 5 or 0.05."""
    worth = _Worth(ALONE, torch.tensor([[INF, -20.0, 2.0]]), torch.tensor([1]))
    steps = [[-20.0 + gain * i] for i in range(LEAST + 1)]
    assert iterates(worth, steps) == (LEAST if ends else len(steps))


def test_the_gap_that_counts_is_the_largest_of_an_input_and_one_input_is_reason_enough():
    margins = torch.tensor([[INF, -20.0, -20.0], [INF, -20.0, -20.0]])
    worth, count = _Worth(ALONE, margins, torch.tensor([1, 2])), LEAST + 1
    stuck = [[[-20.0 + i, -20.0], [-20.0, -20.0 + i]] for i in range(count)]  # a class of each input does not move
    assert iterates(worth, stuck) == LEAST
    moving = [[[-20.0 + i, -20.0 + i], [-20.0, -20.0]] for i in range(count)]
    assert iterates(_Worth(ALONE, margins, torch.tensor([1, 2])), moving) == count


def test_the_best_class_of_a_group_counts_and_what_was_known_before():
    groups = torch.tensor([[0, 0], [1, 2]])
    worth = _Worth(groups, torch.tensor([[INF, -20.0, -14.0]]), torch.tensor([1]))
    assert iterates(worth, [[-20.0 + i] for i in range(LEAST + 1)]) == LEAST + 1  # 14 are lacking, and then 10
    worth = _Worth(groups, torch.tensor([[INF, -20.0, -9.0]]), torch.tensor([1]))
    assert iterates(worth, [[-20.0 + i] for i in range(LEAST + 1)]) == LEAST  # 9 are lacking all the time
    worth = _Worth(groups, torch.tensor([[INF, -10.0, 0.2]]), torch.tensor([1]))
    assert iterates(worth, [[-10.0]] * 3) == 1


def test_looks_are_a_stride_apart():
    """The gain is the one of the last stride: a jump before that does not count."""
    worth = _Worth(ALONE, torch.tensor([[INF, -10.0, 2.0]]), torch.tensor([1]))
    steps = [[-10.0]] * (LEAST - STRIDE) + [[-1.0]] * 40
    assert iterates(worth, steps) == LEAST  # -10 to -1 between two looks, then nothing
    late = [[-10.0]] * (LEAST + 1) + [[-3.0]] * 40
    assert AHEAD * 7.0 > 3.0
    assert iterates(_Worth(ALONE, worth.margins, torch.tensor([1])), late) == LEAST
    late = [[-10.0]] * LEAST + [[-3.0]] * 40
    assert iterates(_Worth(ALONE, worth.margins, torch.tensor([1])), late) == LEAST + STRIDE


def test_climb_ends_when_it_is_told():
    seen, slopes = [], {0: torch.zeros(1, 1, 3)}

    def enough(best):
        seen.append(float(best))
        return len(seen) == 4

    climb(slopes, lambda: slopes[0].sum(2), Ascent(50), {0: 0.0}, enough=enough)
    assert len(seen) == 4
    assert seen == sorted(seen)


def test_more_iterations_prove_sigmoids_without_a_split(monkeypatch):
    torch.manual_seed(1)
    widths = [10, 20, 20, 20, 3]
    layers = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.Sigmoid())]
    model = nn.Sequential(*layers[:-1]).eval()
    for layer in model[::2]:
        layer.weight.data.mul_(4.0)
    x = torch.rand(1, 10)
    graph = trace(model, x, Linf(0.2))
    network, box = Network(graph, doubled(graph), torch.arange(3)[:, None]), region(Linf(0.2), x, sound=True)

    def splits(iterations):
        monkeypatch.setattr(root, "ROOT", dataclasses.replace(root.ROOT, iterations=iterations))
        with torch.no_grad(), clock.timed_by(time.process_time):
            y, one = model(x).argmax(1), torch.arange(1)
            state, exact = begin(network, box, y)
            task = (network, alpha.select(exact, one), box, y, one, state, lambda which, points: which < 0)
            tighten_and_split(*task, Effort(width=8), 20.0)
        assert float(state.excess.min()) > 0
        return int(state.parts[0])

    assert splits(LEAST) > 0
    assert splits(300) == 0
