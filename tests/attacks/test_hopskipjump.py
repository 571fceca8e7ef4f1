"""HopSkipJump against the exact distance to a linear model's boundary, and on a model without gradients."""

import itertools
import math

import pytest
import torch
from nets import tiny_nets
from torch import nn

import holdfast as hf
from holdfast.attacks.core.minimum_norm import norm_of
from holdfast.attacks.hopskipjump import hop_skip_jump, hopskipjump
from holdfast.errors import InputError, UnsupportedError
from holdfast.random import Noise


class PlainLinear(nn.Module):
    """Linear decisions, with sums that do not depend on the batch; counts the inputs that it is asked about."""

    def __init__(self, size, classes, steps=None):
        super().__init__()
        self.register_buffer("weight", torch.randn(classes, size, dtype=torch.float64))
        self.steps, self.asked = steps, 0
        self.eval()

    def logits(self, x):
        return ((x.flatten(1) - 0.5)[:, None] * self.weight).sum(2)

    def forward(self, x):
        """The decision alone: one at the largest logit, zero elsewhere."""
        self.asked += len(x)
        if self.steps is not None:
            x = (x * self.steps).round() / self.steps
        logits = self.logits(x)
        return torch.nn.functional.one_hot(logits.argmax(1), logits.shape[1]).to(x.dtype)


def task(model, count, shape):
    x = 0.3 + 0.4 * torch.rand(count, *shape, dtype=torch.float64)
    return x, model(x).argmax(1)


def exact_distance(model, x, y, norm):
    """Distance to the nearest of a linear model's boundaries, the valid range ignored, (B,)."""
    gaps = model.weight[None] - model.weight[y][:, None]
    slope = gaps.norm(dim=2) if norm == "l2" else gaps.abs().sum(2)
    logits = model.logits(x)
    values = (logits.gather(1, y[:, None]) - logits) / slope
    return values.scatter(1, y[:, None], torch.inf).amin(1)


@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("classes", [2, 5])
def test_within_a_tenth_of_the_exact_distance_of_a_linear_model(norm, classes):
    torch.manual_seed(classes)
    model = PlainLinear(48, classes)
    x, y = task(model, 12, (3, 4, 4))
    exact = exact_distance(model, x, y, norm)
    found = hop_skip_jump(model, x, y, norm, queries=5000)
    ratio = found.distance / exact
    assert float(ratio.min()) >= 1 - 1e-9
    # With more classes the walk may end at the boundary to another class than the nearest.
    assert float(ratio.max() if classes == 2 else ratio.median()) < 1.1
    assert torch.equal(found.distance, norm_of(found.x_adv - x, norm))
    assert bool((model(found.x_adv).argmax(1) != y).all())
    assert int(found.queries.max()) <= 5000
    assert int(found.gradients.sum()) == 0
    assert found.by == ("hopskipjump",) * 12


@pytest.mark.parametrize("threat", [hf.L2(0.12), hf.Linf(0.02)], ids=str)
def test_broken_where_the_distance_is_within_the_budget(threat):
    torch.manual_seed(1)
    model = PlainLinear(48, 2)
    x, y = task(model, 24, (48,))
    exact = exact_distance(model, x, y, threat.name)
    result = hf.attack(model, x, y, threat, "hopskipjump", queries=5000)
    assert bool(result.success[1.1 * exact < threat.eps].all())
    assert not bool(result.success[exact > threat.eps].any())
    assert 0 < int(result.success.sum()) < 24
    assert float(result.queries[result.success].double().mean()) < float(
        result.queries[~result.success].double().mean()
    )


@pytest.mark.parametrize("threat", [hf.L2(0.8), hf.Linf(0.15)], ids=str)
def test_a_model_without_gradients_is_broken(threat):
    torch.manual_seed(2)
    model = PlainLinear(25, 3, steps=20)
    x, y = task(model, 16, (1, 5, 5))
    result = hf.attack(model, x, y, threat, "hopskipjump", queries=3000)
    assert float(result.success.double().mean()) > 0.9
    assert int(result.gradients.sum()) == 0


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_the_answer_does_not_depend_on_batch_or_chunk(norm):
    torch.manual_seed(3)
    model = PlainLinear(24, 4)
    x, y = task(model, 20, (2, 3, 4))
    noise = Noise(3, torch.arange(20) * 7)
    options = {"steps": 5, "initial_evaluations": 33, "goal": {"l2": 0.1, "linf": 0.02}[norm]}
    whole = hop_skip_jump(model, x, y, norm, noise=noise, **options)
    assert len(set(whole.queries.tolist())) > 5
    order = torch.randperm(20)
    mixed = hop_skip_jump(model, x[order], y[order], norm, noise=noise[order], chunk=50, **options)
    assert torch.equal(mixed.x_adv, whole.x_adv[order])
    assert torch.equal(mixed.distance, whole.distance[order])
    assert torch.equal(mixed.queries, whole.queries[order])
    for i in (0, 7, 19):
        one = slice(i, i + 1)
        alone = hop_skip_jump(model, x[one], y[one], norm, noise=noise[one], chunk=1, **options)
        assert torch.equal(alone.x_adv, whole.x_adv[one])
        assert torch.equal(alone.queries, whole.queries[one])


@pytest.mark.parametrize("threat", [hf.L2(0.3), hf.Linf(0.1), hf.Linf(0.4, low=-1.0, high=2.0)], ids=str)
def test_points_stay_in_the_set_and_successes_are_misclassified(threat):
    torch.manual_seed(4)
    for model, shape in tiny_nets().values():
        x = torch.rand(6, *shape).round(decimals=1)
        y = model(x).argmax(1)
        result = hopskipjump(model, x, y, threat, steps=4)
        assert bool(threat.contains(result.x_adv, x).all())
        assert bool((model(result.x_adv).argmax(1) != y)[result.success].all())
        assert tuple(by == "hopskipjump" for by in result.by) == tuple(result.success.tolist())


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_queries_are_counted_and_capped(norm):
    torch.manual_seed(5)
    model = PlainLinear(20, 3)
    x, y = task(model, 1, (20,))
    for queries in (12, 200, 1000, None):
        model.asked = 0
        found = hop_skip_jump(model, x, y, norm, queries=queries, steps=8)
        assert model.asked == int(found.queries)
        assert queries is None or int(found.queries) <= queries


class Recorder(PlainLinear):
    """Keeps every batch that it is asked about."""

    def __init__(self, size, classes):
        super().__init__(size, classes)
        self.batches = []

    def forward(self, x):
        self.batches.append(x)
        return super().forward(x)


def phases(batches):
    """Images asked about one by one (starts, bisection, leap) and probes, in turn: pairs (single, images)."""
    runs = itertools.groupby(batches, key=lambda batch: len(batch) == 1)
    return [(single, torch.cat(list(run))) for single, run in runs]


@pytest.mark.parametrize(("norm", "power"), [("l2", 1.5), ("linf", 2)])
@pytest.mark.parametrize("gamma", [1.0, 0.25])
def test_the_first_bisection_halves_down_to_the_published_precision(norm, power, gamma):
    torch.manual_seed(7)
    model = Recorder(16, 3)
    x, y = task(model, 1, (16,))
    model.batches = []
    hop_skip_jump(model, x, y, norm, steps=1, gamma=gamma)
    images = phases(model.batches)[0][1]
    start = int((model(images).argmax(1) != y).int().argmax())  # the first that is misclassified
    theta = gamma * 16**-power  # Chen et al.: d^(-3/2) for L2, d^(-2) for Linf
    assert len(images[start + 1 :]) == round(-math.log2(theta))


def test_evaluations_grow_with_the_root_of_the_step_up_to_their_most():
    torch.manual_seed(8)
    model = Recorder(20, 3)
    x, y = task(model, 1, (20,))
    for most, expected in ((10_000, [20, 28, 34, 40]), (30, [20, 28, 30, 30])):
        model.batches = []
        hop_skip_jump(model, x, y, "l2", steps=4, initial_evaluations=20, max_evaluations=most)
        assert [len(images) for single, images in phases(model.batches) if not single] == expected


@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("span", [1.0, 20.0])
def test_the_first_leap_follows_the_mean_of_centred_decisions(norm, span):
    torch.manual_seed(9)
    for seed in range(3):
        model = Recorder(30, 3)
        x, y = task(model, 1, (30,))
        model.batches = []
        low, high = 0.5 - span / 2, 0.5 + span / 2
        hop_skip_jump(model, x, y, norm, low, high, noise=Noise.for_batch(seed, 1), steps=1, initial_evaluations=37)
        (_, before), (_, probes), (_, after) = phases(model.batches)
        at = before[model(before).argmax(1) != y][-1]  # where the bisection ends
        v, wrong = probes - at, model(probes).argmax(1) != y
        phi = 2 * wrong.double() - 1
        assert 0 < abs(float(phi.mean())) < 1  # centring changes the direction
        normal = ((phi - phi.mean())[:, None] * v).mean(0)
        normal = normal / normal.norm() if norm == "l2" else normal.sign()
        leap = (at + norm_of((at - x), norm) * normal).clamp(low, high)
        torch.testing.assert_close(after[0], leap)


def test_more_steps_never_come_out_farther():
    torch.manual_seed(6)
    model = PlainLinear(20, 3)
    x, y = task(model, 10, (20,))
    distances = [hop_skip_jump(model, x, y, "l2", steps=steps).distance for steps in (1, 3, 9)]
    assert bool((distances[0] >= distances[1]).all())
    assert bool((distances[1] >= distances[2]).all())
    assert bool((distances[0] > distances[2]).all())


def test_inputs_that_are_wrong_already_and_those_without_a_start():
    class OneClass(nn.Module):
        def forward(self, x):
            return torch.nn.functional.one_hot(torch.zeros(len(x), dtype=torch.long), 2).to(x.dtype)

    x = torch.rand(3, 6)
    found = hop_skip_jump(OneClass().eval(), x, torch.tensor([0, 1, 0]), "linf", starts=7)
    assert found.distance.tolist() == [torch.inf, 0.0, torch.inf]
    assert found.by == ("", "clean", "")
    assert found.queries.tolist() == [8, 1, 8]
    result = hopskipjump(OneClass().eval(), x, torch.tensor([0, 1, 0]), hf.Linf(0.0), starts=7)
    assert result.success.tolist() == [False, True, False]
    assert torch.equal(result.x_adv, x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps"),
        ({"initial_evaluations": 0}, "initial_evaluations"),
        ({"max_evaluations": 0}, "max_evaluations"),
        ({"starts": 0}, "starts"),
        ({"chunk": 0}, "chunk"),
        ({"gamma": 0.0}, "gamma"),
        ({"queries": 3}, "queries=3"),
    ],
)
def test_bad_options_are_refused(options, message):
    model = PlainLinear(20, 3)
    x, y = task(model, 2, (20,))
    with pytest.raises(InputError, match=message):
        hf.attack(model, x, y, hf.L2(0.1), "hopskipjump", **options)


def test_another_norm_is_refused():
    model = PlainLinear(20, 3)
    x, y = task(model, 2, (20,))
    with pytest.raises(UnsupportedError, match="l1"):
        hop_skip_jump(model, x, y, "l1")
