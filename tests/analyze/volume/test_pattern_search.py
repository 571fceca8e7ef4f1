"""Pattern search: a separable quadratic to within the radius, falling losses, the schedule, networks in their bins."""

import pytest
import torch

import holdfast as hf
from holdfast.analyze.volume.fitting import make_fitting
from holdfast.analyze.volume.pattern_search import pattern_path, pattern_search


class Quadratic:
    """Sum of a_i (x_i - c_i)^2; also counts how often it is asked."""

    fits = False

    def __init__(self, point, centre, scale):
        self.point, self.centre, self.scale = point, centre, scale
        self.loss = float((scale * (point - centre) ** 2).sum())

    def losses(self, index, step):
        points = self.point.repeat(len(index), 1)
        points[torch.arange(len(index)), index] += step
        return (self.scale * (points - self.centre) ** 2).sum(1)


@pytest.mark.parametrize("block", [1, 7, 100])
def test_a_separable_quadratic_is_minimised_to_within_half_the_radius(block):
    generator = torch.Generator().manual_seed(block)
    centre = 4 * torch.rand(12, generator=generator, dtype=torch.float64) - 2
    scale = torch.rand(12, generator=generator, dtype=torch.float64) + 0.1
    zero = torch.zeros(12, dtype=torch.float64)
    visits = list(pattern_path(lambda p: Quadratic(p, centre, scale), zero, least=0.01, block=block))
    before = None
    for visit in visits:
        if before is not None and visit.moved:
            assert visit.loss < before.loss
            change = (visit.point - before.point).abs()
            assert float(change.max()) == before.size == float(change.sum())  # one coordinate, by the radius
        if before is not None and not visit.moved:
            assert visit.size == before.size / 2
            assert visit.tried - before.tried == 24  # every pair was tried
            # a minimum along each axis at this radius: nearer to the centre than half of it
            assert float((visit.point - centre).abs().max()) <= before.size / 2 + 1e-12
        before = visit
    assert [v.size for v in visits if not v.moved] == [2.0**-i for i in range(1, 8)]
    assert float((visits[-1].point - centre).abs().max()) <= 0.01


@pytest.fixture(scope="module")
def lenet():
    torch.manual_seed(0)
    x, y = torch.randn(6, 1, 16, 16), torch.arange(6) % 3
    return make_fitting(hf.make_model("lenet", input_shape=(1, 16, 16), classes=3, width=0.3).eval(), x, y)


def test_it_stops_at_the_first_network_that_fits(lenet):
    found = pattern_search(lenet, block=64, seed=1)
    assert bool((found.path.diff() < 0).all())
    assert float(lenet.measure(found.weights)[0]) == 1
    assert found.accepted == 1
    assert float(found.path[-1]) == pytest.approx(float(found.loss[0]))
    assert torch.equal(found.last, found.weights[0])
    assert torch.equal(pattern_search(lenet, block=64, seed=1).weights, found.weights)
    assert not torch.equal(pattern_search(lenet, block=64, seed=2).weights, found.weights)


def test_bins_below_are_filled_on_the_way_down(lenet):
    bins = [(0.4, 0.5), (0.6, 0.7), (-1.0, 0.0)]
    found = pattern_search(lenet, bins, block=64, seed=0, limit=40)
    accuracy, loss = lenet.measure(found.weights)
    assert found.bin.tolist() == [0, 1]
    assert found.hits.tolist() == [1, 1, 0]
    assert bool((accuracy == 1).all())
    assert 0.4 < float(loss[0]) <= 0.5 < 0.6 < float(loss[1]) <= 0.7
    assert len(found.path) > 1
    assert int(found.waits[1]) < int(found.waits[0]) < found.tried


def test_a_limit_and_a_start_are_kept(lenet):
    start = lenet.family.draw(1, seed=5)[0]
    found = pattern_search(lenet, start=start, limit=3, block=16, to_the_end=True)
    assert len(found.path) <= 4
    assert int((found.last != start).sum()) <= 3
    assert float(found.path[0]) == pytest.approx(float(lenet.measure(start[None])[1]))
