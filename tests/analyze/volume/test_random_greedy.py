"""Random greedy search: the loss falls, failures are counted anew after a success, the noise is halved."""

import pytest
import torch

from holdfast.analyze.volume.fitting import make_fitting
from holdfast.analyze.volume.random_greedy import greedy_path, random_greedy
from holdfast.analyze.volume.wedge import one_hidden_layer, wedge_task


def test_noise_shrinks_after_so_many_failures_in_a_row():
    """Losses by script: a block that succeeds starts the count again."""
    script = iter([5.0, 6, 6, 4, 6, 6, 6, 6, 6, 6, 6, 6])  # the start, then one for each block of two

    def measure(points):
        loss = next(script)
        return torch.zeros(len(points)), torch.full((len(points),), loss)

    path = greedy_path(measure, torch.zeros(3), failures=6, block=2)
    visits = [next(path) for _ in range(10)]
    assert [v.size for v in visits] == [1, 1, 1, 1, 1, 1, 0.5, 0.5, 0.5, 0.25]
    assert [v.moved for v in visits] == [True, False, False, True, *[False] * 6]
    assert [v.tried for v in visits] == list(range(1, 20, 2))


def test_steps_are_normal_with_the_given_deviation():
    points = []

    def measure(batch):
        points.append(batch)
        return torch.zeros(len(batch)), torch.arange(len(batch)) + 1.0

    path = greedy_path(measure, torch.full((2000,), 3.0), sigma=0.5, block=4)
    next(path), next(path)
    noise = points[1].double() - 3
    assert float(noise.mean()) == pytest.approx(0, abs=0.03)
    assert float(noise.std()) == pytest.approx(0.5, rel=0.03)


def test_a_wedge_is_fitted_with_falling_losses():
    train, _ = wedge_task(seed=3)
    fitting = make_fitting(one_hidden_layer(10), train.x[:6], train.y[:6], divisor=1.0)
    found = random_greedy(fitting, failures=100, block=16, limit=3000, seed=0)
    assert float(fitting.measure(found.weights)[0]) == 1
    assert bool((found.path.diff() < 0).all())
    assert torch.equal(random_greedy(fitting, failures=100, block=16, limit=3000, seed=0).weights, found.weights)
