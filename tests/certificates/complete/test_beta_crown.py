"""beta-CROWN against the exact method, against enumeration and sampling, and at its limits."""

import copy
import itertools
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

import holdfast as hf
from enumeration import by_enumeration
from holdfast.bounding.core.region import region
from holdfast.bounding.graph.trace import trace
from holdfast.bounding.linear import relaxation as linear
from holdfast.bounding.linear.alpha import Joint
from holdfast.certificates.complete.beta_crown import decide
from holdfast.certificates.complete.branching import quick_bounds, split
from holdfast.certificates.complete.milp import exact_margin
from holdfast.certificates.complete.parts import Tasks, layout
from holdfast.certificates.complete.root import _roots, in_precision
from holdfast.certificates.complete.split import optimise, prove
from holdfast.utils import clock


def steep(sizes, activation=nn.ReLU, seed=0, factor=2.0):
    """A chain of dense layers with large weights, so that linear bounds leave much open."""
    torch.manual_seed(seed)
    layers = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), activation()]
        layers[-2].weight.data.mul_(factor)
    return nn.Sequential(*layers[:-1]).eval()


def tasks_of(model, x, y, threat):
    """One task for each input, against the next class; intervals by CROWN."""
    double = trace(copy.deepcopy(model).double(), x.double())
    exact = linear.relaxation(
        double, region(threat, x.double(), sound=True), slopes="adaptive", hidden=True, sound=True
    )
    fast = in_precision(exact, trace(model, x), region(threat, x, sound=True))
    one_hot = torch.eye(model(x).shape[1], dtype=torch.float64)
    rows, neurons = (one_hot[y] - one_hot[(y + 1) % len(one_hot)])[:, None], layout(fast.graph)
    lowest = torch.full((len(x),), -torch.inf, dtype=torch.float64)
    scale = torch.ones(len(x), len(neurons.layers), dtype=torch.float64)
    tasks = Tasks(fast, exact, neurons, torch.arange(len(x)), rows, scale)
    first = torch.zeros(len(x), dtype=torch.int64)
    return tasks, _roots(tasks, lowest, Joint({}, {}, {}), first, first)


@pytest.mark.parametrize("activation", [nn.ReLU, lambda: nn.LeakyReLU(0.1)], ids=["relu", "leaky"])
@pytest.mark.parametrize("seed", range(3))
def test_every_verdict_is_the_exact_one(activation, seed):
    model = steep([4, 12, 10, 3], activation, seed, 2.5)
    x = torch.rand(10, 4, generator=torch.Generator().manual_seed(seed))
    y, threat = model(x).argmax(1), hf.Linf(0.2)
    ours, truth = decide(model, x, y, threat, time_limit=20), exact_margin(model, x, y, threat)
    assert ours.status == truth.status
    assert bool((ours.margin <= truth.margin + 1e-6).all())


def test_the_exact_verdicts_need_splits_and_come_in_both_kinds():
    model = steep([4, 12, 10, 3], seed=0, factor=2.5)
    x = torch.rand(10, 4, generator=torch.Generator().manual_seed(0))
    y, threat = model(x).argmax(1), hf.Linf(0.2)
    ours = decide(model, x, y, threat)
    assert set(ours.status) == {"certified", "broken"}
    open_ = ~hf.certify(model, x, y, threat, "alpha-crown", ascent=hf.Ascent(joint=True)).certified
    assert bool((ours.parts[torch.tensor([s == "certified" for s in ours.status]) & open_] > 0).all())
    assert int(ours.parts.sum()) > 0
    broken = torch.tensor([s == "broken" for s in ours.status])
    assert bool((model(ours.x_adv[broken]).argmax(1) != y[broken]).all())
    assert bool(threat.contains(ours.x_adv, x).all())


def test_the_margin_is_below_the_smallest_of_all_activation_patterns():
    model = steep([2, 3, 3, 2], seed=5, factor=2.5)
    x = torch.tensor([[0.4, 0.6], [0.7, 0.2]])
    y, threat = model(x).argmax(1), hf.Linf(0.15)
    layers = [(m.weight.detach().double().numpy(), m.bias.detach().double().numpy()) for m in model[::2]]
    lower, upper = (end.double().numpy() for end in threat.box(x))
    truth = [by_enumeration(layers, lower[i], upper[i], int(y[i])) for i in range(2)]
    ours = decide(model, x, y, threat)
    for i in range(2):
        assert float(ours.margin[i]) <= truth[i] + 1e-6
        assert ours.status[i] == ("certified" if truth[i] > 0 else "broken")


@pytest.mark.parametrize("threat", [hf.Linf(0.2), hf.L2(0.4), hf.L1(0.5)], ids=str)
def test_the_bound_of_a_part_is_below_every_point_of_the_part(threat):
    """Three splits deep; the points of the ball are sorted into the parts by the signs of their neurons."""
    model = steep([5, 14, 10, 3], lambda: nn.LeakyReLU(0.05), seed=2)
    x = torch.rand(3, 5, generator=torch.Generator().manual_seed(0))
    y = model(x).argmax(1)
    tasks, parts = tasks_of(model, x, y, threat)
    for _ in range(3):
        parts = split(tasks, parts, 3)[0]
        parts = prove(tasks, optimise(tasks, parts, 6)[0])
    assert len(parts) == 24
    noise = torch.rand(20_000, 3, 5, generator=torch.Generator().manual_seed(1)) * 2 - 1
    points = (x + 0.5 * noise).flatten(0, 1)
    points = threat.project(points, x.repeat(20_000, 1)).double()
    points = points.view(20_000, 3, 5)
    double = copy.deepcopy(model).double()
    met = 0
    for i in range(len(parts)):
        at = points[:, parts.task[i]]
        hidden = torch.cat([double[0](at), double[2](double[1](double[0](at)))], 1)
        inside = ((hidden * parts.signs[i]) >= 0).all(1)
        row = double(at).detach() @ tasks.rows[parts.task[i], 0]
        met += int(inside.sum())
        assert not bool(inside.any()) or float(row[inside].min()) >= float(parts.bound[i])
    assert met >= 20_000 * 3


def test_halves_that_start_from_their_parent_are_no_worse_and_get_better():
    model = steep([5, 14, 10, 3], seed=3)
    x = torch.rand(6, 5, generator=torch.Generator().manual_seed(0))
    y = model(x).argmax(1)
    tasks, roots = tasks_of(model, x, y, hf.Linf(0.2))
    roots = prove(tasks, optimise(tasks, roots, 20)[0])
    kids = split(tasks, roots, 4)[0]
    warm = prove(tasks, optimise(tasks, kids, 10)[0])
    assert bool((warm.bound >= roots.bound.repeat(2)).all())
    assert float(warm.bound.mean()) > float(roots.bound.mean())
    fresh = replace(kids, bound=torch.full_like(kids.bound, -torch.inf), values=torch.zeros_like(kids.values))
    assert float(warm.bound.mean()) > float(prove(tasks, optimise(tasks, fresh, 10)[0]).bound.mean())


def test_multipliers_make_bounds_better_than_exact_lines_do():
    model = steep([5, 14, 10, 3], seed=3)
    x = torch.rand(6, 5, generator=torch.Generator().manual_seed(0))
    tasks, parts = tasks_of(model, x, model(x).argmax(1), hf.Linf(0.2))
    for _ in range(4):
        parts = split(tasks, parts, 1)[0]
    better, _ = optimise(tasks, parts, 10)
    without = replace(better, values=better.values * (better.signs == 0))
    assert float(quick_bounds(tasks, better).mean()) > float(quick_bounds(tasks, without).mean()) + 0.01


def test_it_proves_at_least_what_crown_proves_and_no_attack_breaks_it(net):
    model, shape = net
    threat = hf.L2(0.3)
    x = torch.rand(4, *shape, generator=torch.Generator().manual_seed(7))
    y = model(x).argmax(1)
    crown = hf.certify(model, x, y, threat, "crown")
    ours = hf.certify(model, x, y, threat, "beta-crown", time_limit=1.0)
    assert bool((ours.certified | ~crown.certified).all())
    assert not bool((ours.certified & hf.attack(model, x, y, threat, "pgd").success).any())


def test_a_margin_within_rounding_of_zero_is_left_undecided():
    """The smallest margin is 1e-9, at the kink: nothing is left to split, and no counter-example exists."""
    model = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 2)).eval()
    model[0].weight.data, model[0].bias.data = torch.tensor([[1.0], [-1.0]]), torch.tensor([-0.5, 0.5])
    model[2].weight.data, model[2].bias.data = torch.tensor([[1.0, 1.0], [0.0, 0.0]]), torch.tensor([1e-9, 0.0])
    x, y = torch.tensor([[0.6]]), torch.tensor([0])
    found = decide(model, x, y, hf.Linf(0.2), time_limit=5)
    assert found.status == ("unknown",)
    assert -1e-3 < float(found.margin[0]) < 1e-9
    model[2].bias.data = torch.tensor([1e-3, 0.0])
    assert decide(model, x, y, hf.Linf(0.2)).status == ("certified",)


def test_the_time_limit_is_kept_and_the_best_bound_returned():
    model = steep([30, 80, 80, 80, 3], seed=0)
    x = torch.rand(2, 30, generator=torch.Generator().manual_seed(0))
    y, threat = model(x).argmax(1), hf.Linf(0.15)
    start = time.monotonic()
    found = decide(model, x, y, threat, time_limit=1.0)
    assert time.monotonic() - start < 2 * (1.1 * 1.0) + 1
    crown = hf.certify(model, x, y, threat, "crown").margin
    assert bool((found.margin >= crown - 1e-3).all())
    assert "unknown" in found.status or "broken" in found.status


def test_a_deadline_around_the_call_ends_the_search():
    model, x = steep([4, 12, 3]), torch.rand(10, 4)
    y = model(x).argmax(1)
    with clock.until(clock.now() - 1):
        found = decide(model, x, y, hf.Linf(0.2))
    assert set(found.status) == {"unknown"}
    assert bool((found.margin == -torch.inf).all())


def test_activations_that_are_not_split_are_still_bounded():
    smooth = nn.Sequential(nn.Linear(3, 6), nn.Sigmoid(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)).eval()
    x = torch.rand(6, 3, generator=torch.Generator().manual_seed(0))
    y = smooth(x).argmax(1)
    found = decide(smooth, x, y, hf.Linf(0.3), time_limit=3)
    noise = torch.rand(5000, 1, 3) * 0.6 - 0.3
    logits = smooth((x + noise).clamp(0, 1).flatten(0, 1)).view(5000, 6, 2)
    margins = (logits.gather(2, y.expand(5000, -1)[..., None]) - logits)[..., :].scatter(
        2, y.expand(5000, -1)[..., None], torch.inf
    )
    assert bool((margins.amin((0, 2)) >= found.margin).all())
