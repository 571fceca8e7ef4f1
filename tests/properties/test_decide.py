"""Verdicts: against enumeration, on planted counter-examples, in time, and with a clear word for bad questions."""

import itertools
import time

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.bounding.graph.trace import trace
from holdfast.bounding.linear import relaxation as linear
from holdfast.certificates.complete.milp import exact_margin
from holdfast.certificates.complete.problem import Answer, Conditions, Problem
from holdfast.certificates.complete.split_neurons import covers, interval_bounds
from holdfast.errors import InputError, UnsupportedError
from holdfast.properties import Case, Polytope, Property, robust
from holdfast.properties import decide as decide_module
from holdfast.properties.asked import conditions_of, subject_of
from holdfast.properties.counterexamples import _aims
from holdfast.properties.points import Judge, hull, representable
from holdfast.properties.together import bounded_together
from holdfast.utils import clock


def network(seed: int, inputs: int = 3, width: int = 6, outputs: int = 2, depth: int = 2) -> nn.Module:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for i in range(depth):
        layers += [nn.Linear(inputs if i == 0 else width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, outputs)).eval()


def least(model: nn.Module, row: torch.Tensor, low: float, high: float) -> float:
    """The exact least <row, z> over the box [low, high]^n, as margin of the two outputs (<row, z>, 0)."""
    rows = torch.stack([row, torch.zeros_like(row)]).double()
    last = nn.Linear(rows.shape[1], 2, bias=False).double()
    last.weight.data = rows
    both = nn.Sequential(*[layer.double() for layer in model], last).eval()
    n = model[0].in_features
    x = torch.full((1, n), (low + high) / 2).double()
    threat = hf.Linf((high - low) / 2, low=low - 1, high=high + 1)
    found = exact_margin(both, x, torch.tensor([0]), threat)
    model.float()
    assert bool(found.exact[0])
    return float(found.margin[0])


@pytest.mark.parametrize("seed", range(6))
def test_verdicts_agree_with_the_exact_minimum_on_both_sides_of_it(seed):
    model, row = network(seed), torch.tensor([1.0, -0.5])
    minimum = least(model, row, -1.0, 1.0)
    for shift, expected in ((-1e-3, "holds"), (1e-3, "violated")):
        case = Case([-1.0] * 3, [1.0] * 3, (Polytope(row[None], [minimum + shift]),))
        found = hf.verify(model, Property((case,)), timeout=20)
        assert found.status == expected
        if expected == "violated":
            point = found.counterexample
            assert bool((point >= -1).all() and (point <= 1).all())
            assert float(model(point[None])[0].detach() @ row) <= minimum + shift
        else:
            assert found.bound >= 0


@pytest.mark.parametrize("groups", ["and", "or"])
def test_and_or_of_conditions_against_a_fine_grid(groups):
    model = network(11, inputs=2, depth=1)
    ticks = torch.linspace(-1, 1, 201)
    z = model(torch.tensor(list(itertools.product(ticks.tolist(), repeat=2))))
    rows = torch.eye(2)
    met = 0
    for a, b in itertools.product([-1.2, -0.4, 0.0, 0.8], repeat=2):
        inside = (z[:, 0] <= a, z[:, 1] <= b)
        truth = bool((inside[0] & inside[1] if groups == "and" else inside[0] | inside[1]).any())
        limits = [a, b]
        unsafe = (
            (Polytope(rows, limits),)
            if groups == "and"
            else tuple(Polytope(rows[i : i + 1], limits[i : i + 1]) for i in range(2))
        )
        found = hf.verify(model, Property((Case([-1.0, -1.0], [1.0, 1.0], unsafe),)), timeout=20)
        met += found.status == "holds"
        assert found.status == "violated" if truth else found.status != "unknown"
    assert 0 < met < 16


def test_a_network_with_a_hidden_counter_example_is_never_said_to_hold():
    """A spike of width 2e-3 in [0, 1]^2 that neither sampling nor descent meets: flat elsewhere."""
    for k, place in enumerate(torch.rand(4, 2, generator=torch.Generator().manual_seed(3))):
        model = spike(place, 1e-3)
        # z = 1 - spike: at the place it is 0, elsewhere 1.
        asked = Property((Case([0.0, 0.0], [1.0, 1.0], (Polytope([[1.0]], [0.25]),)),))
        found = hf.verify(model, asked, timeout=20, seed=k)
        assert found.status == "violated"
        assert (found.counterexample - place).abs().max() < 2e-3


def spike(place: torch.Tensor, width: float) -> nn.Module:
    """z = 1 - relu(1 - sum_i |x_i - place_i| / width), by two ReLU layers."""
    first, second, third = nn.Linear(2, 4), nn.Linear(4, 1), nn.Linear(1, 1)
    with torch.no_grad():
        first.weight.copy_(torch.tensor([[1.0, 0], [-1, 0], [0, 1], [0, -1]]))
        first.bias.copy_(torch.stack([-place[0], place[0], -place[1], place[1]]))
        second.weight.fill_(-1 / width)
        second.bias.fill_(1.0)
        third.weight.fill_(-1.0)
        third.bias.fill_(1.0)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), third).eval()


def test_many_inputs_are_decided_by_bounds():
    model = network(5, inputs=60, width=20, outputs=3)
    x = torch.rand(60)
    label = int(model(x[None]).argmax())
    assert hf.verify(model, robust(x, label, hf.Linf(1e-4), 3), timeout=20).status == "holds"
    assert hf.verify(model, robust(x, label, hf.L2(1e-3), 3), timeout=20).status == "holds"
    broken = hf.verify(model, robust(x, label, hf.Linf(0.9), 3), timeout=20)
    assert broken.status == "violated"
    assert int(model(broken.counterexample[None]).argmax()) != label


def test_a_counter_example_of_a_ball_lies_in_the_ball():
    model = network(7, inputs=3, outputs=2)
    x, threat = torch.full((3,), 0.5), hf.L2(0.4)
    label = int(model(x[None]).argmax())
    found = hf.verify(model, robust(x, label, threat, 2), timeout=5)
    if found.status == "violated":
        assert bool(threat.contains(found.counterexample[None], x[None]).all())


def test_a_tie_is_a_counter_example_and_is_called_so():
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU()).eval()
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[0].bias.fill_(0.0)
    found = hf.verify(model, Property((Case([-1.0], [1.0], (Polytope([[1.0]], [0.0]),)),)))
    assert found.status == "violated"
    assert "on the boundary" in found.note
    below = hf.verify(model, Property((Case([-1.0], [1.0], (Polytope([[1.0]], [-1e-3]),)),)))
    assert below.status == "holds"


def test_outputs_of_several_dimensions_are_counted_in_a_row():
    model = nn.Sequential(network(2, outputs=4), nn.Unflatten(1, (2, 2))).eval()
    top = Polytope([[0.0, 0.0, 0.0, -1.0]], [-50.0])
    assert hf.verify(model, Property((Case([0.0] * 3, [1.0] * 3, (top,)),))).status == "holds"


def test_an_empty_region_holds_and_says_so():
    found = hf.verify(network(0), Property((Case([0.0, 1.0, 0.0], [1.0, 0.5, 1.0], (Polytope([[1.0, 0]], [9.0]),)),)))
    assert (found.status, found.note) == ("holds", "the region of inputs is empty")


def test_every_output_is_unsafe_without_a_condition():
    asked = Property((Case([0.0] * 3, [1.0] * 3, (Polytope(torch.zeros(0, 2), torch.zeros(0)),)),))
    assert hf.verify(network(0), asked).status == "violated"


def test_questions_that_do_not_fit_are_refused():
    model = network(0)
    fits = Polytope([[1.0, 0.0]], [0.0])
    with pytest.raises(InputError, match="4 inputs X, the network takes 3 values"):
        hf.verify(model, Property((Case([0.0] * 4, [1.0] * 4, (fits,)),)), input_shape=(3,))
    with pytest.raises(InputError, match="failed on a batch of shape"):
        hf.verify(model, Property((Case([0.0] * 4, [1.0] * 4, (fits,)),)))
    with pytest.raises(InputError, match="3 outputs Y, the network 2"):
        hf.verify(model, Property((Case([0.0] * 3, [1.0] * 3, (Polytope([[1.0, 0, 0]], [0.0]),)),)))
    with pytest.raises(InputError, match="expected a number > 0, got 0"):
        hf.verify(model, Property((Case([0.0] * 3, [1.0] * 3, (fits,)),)), timeout=0)
    with pytest.raises(UnsupportedError, match="float32 or float64 on the CPU"):
        hf.verify(network(0).half(), Property((Case([0.0] * 3, [1.0] * 3, (fits,)),)))
    with pytest.raises(InputError, match="a region must be bounded"):
        Case([0.0], [float("inf")], (fits,))
    with pytest.raises(InputError, match="differ in their number of inputs"):
        Property((Case([0.0], [1.0], (fits,)), Case([0.0, 0.0], [1.0, 1.0], (fits,))))


def test_the_deadline_is_kept():
    """A question at the exact minimum cannot be decided by bounds."""
    model = network(3, inputs=6, width=24, depth=3)
    values = model(torch.rand(20000, 6) * 2 - 1)[:, 0].detach()
    asked = Property((Case([-1.0] * 6, [1.0] * 6, (Polytope([[1.0, 0.0]], [float(values.min()) - 0.05]),)),))
    with clock.timed_by(time.process_time):  # other processes do not count
        start = clock.now()
        found = hf.verify(model, asked, timeout=1)
        assert clock.now() - start < 1 * 1.1 + 1
    assert found.status != "unknown" or found.late


def test_a_replay_that_disagrees_keeps_a_counter_example_from_being_reported():
    model = network(1)
    asked = Property((Case([-1.0] * 3, [1.0] * 3, (Polytope([[1.0, 0.0]], [50.0]),)),))
    assert hf.verify(model, asked).status == "violated"
    never = hf.verify(model, asked, timeout=1, replays=[lambda x: torch.full((1, 2), 99.0)])
    assert never.status == "unknown"


def test_a_point_counts_only_after_the_model_has_confirmed_it():
    model = network(1)
    case = Case([-1.0] * 3, [1.0] * 3, (Polytope([[1.0, 0.0]], [0.0]),))
    z = model(torch.zeros(1, 3))[0, 0].item()
    for limit, confirmed in ((z - 0.1, False), (z + 0.1, True)):
        conditions = Conditions(torch.tensor([[1.0, 0.0]]).double(), torch.tensor([limit]).double(), torch.tensor([0]))
        judge = Judge(model, case, conditions, (3,), torch.float32)
        assert (judge.check(torch.zeros(1, 3).double()) is not None) == confirmed
    assert judge.place(torch.full((1, 3), 7.0)).tolist() == [[1.0] * 3]


def test_points_lie_inside_of_boxes_whose_ends_are_no_float32_numbers():
    case = Case([0.1, 1 / 3], [0.3, 1 / 3], (Polytope([[1.0]], [0.0]),))
    low, high = representable(case, torch.float32)
    assert low[0].double() >= 0.1
    assert high[0].double() <= 0.3
    assert low[1] == high[1] == torch.tensor(1 / 3)
    lower, upper = hull(case, torch.float32)
    assert bool((lower <= low.double()).all() and (upper >= high.double()).all())


def test_a_later_case_is_looked_at_if_an_earlier_one_stays_open(monkeypatch):
    model, plain = network(0), decide_module._decide
    never, always = Polytope([[1.0, 0.0]], [-100.0]), Polytope([[1.0, 0.0]], [100.0])
    boxes = Case([-1.0] * 3, [1.0] * 3, (never,)), Case([-1.0] * 3, [1.0] * 3, (always,))

    def open_first(subject, case, *rest):
        answer, judge = plain(subject, case, *rest)
        return (decide_module._unknown() if case is boxes[0] else answer), judge

    monkeypatch.setattr(decide_module, "_decide", open_first)
    assert hf.verify(model, Property(boxes)).status == "violated"
    assert hf.verify(model, Property(boxes[:1])).status == "unknown"


def many(limits, low=0.0, high=1.0, groups=1):
    """One case for each limit: an output at or above it between `low` and `high`; conditions may be repeated."""
    never = [tuple(Polytope([[-1.0]], [-limit]) for _ in range(1 + i % groups)) for i, limit in enumerate(limits)]
    return Property(tuple(Case([low], [high], unsafe) for unsafe in never))


def ramp():
    """y = relu(2 x - 1)."""
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU()).eval()
    with torch.no_grad():
        model[0].weight.fill_(2.0)
        model[0].bias.fill_(-1.0)
    return model


def test_many_cases_are_bounded_together_and_a_counter_example_among_them_is_found(monkeypatch):
    alone = []
    once = decide_module._decide
    monkeypatch.setattr(decide_module, "_decide", lambda s, case, *rest: alone.append(case) or once(s, case, *rest))
    holds = hf.verify(ramp(), many([1.5 + i / 1000 for i in range(600)], groups=3), timeout=20)
    assert holds.status == "holds"
    assert holds.bound == pytest.approx(0.5, rel=1e-6)
    assert alone == []
    limits = [1.5] * 300
    limits[277] = 0.9
    found = hf.verify(ramp(), many(limits, groups=2), timeout=20)
    assert found.status == "violated"
    assert float(ramp()(found.counterexample[None]).detach()) >= 0.9
    assert len(alone) == 1


@pytest.mark.parametrize("seed", range(4))
def test_bounds_of_cases_together_are_below_the_exact_minimum_and_one_of_them_is_tight(seed):
    model = network(seed)
    torch.manual_seed(seed)
    rows, limits = torch.randn(5, 2), torch.randn(5)
    minima = [least(model, row, -0.1, 0.1) - float(limit) for row, limit in zip(rows, limits, strict=True)]
    cases = [
        Case([-0.1] * 3, [0.1] * 3, (Polytope(row[None], [float(limit)]),))
        for row, limit in zip(rows, limits, strict=True)
    ]
    subject = subject_of(model, Property(tuple(cases)), None)
    answers = bounded_together(subject, cases, clock.now() + 20)
    for minimum, answer in zip(minima, answers, strict=True):
        assert minimum - 0.5 < answer.bound <= minimum + 1e-6
        assert answer.status == ("holds" if answer.bound > 0 else "unknown")
    assert min(minimum - answer.bound for minimum, answer in zip(minima, answers, strict=True)) < 1e-2


def test_a_case_that_is_late_gets_the_time_that_the_others_leave(monkeypatch):
    """The first case of four needs half of the time."""
    spent = [0.0]
    given = []

    def decided(subject, case, until, seed, replays):
        given.append((float(case.unsafe[0].limits), until - spent[0]))
        if case.unsafe[0].limits == -1.5 and until - spent[0] < 5:
            spent[0] = until
            return Answer("unknown", -1.0, 7), None
        spent[0] += 0.1
        return Answer("holds", 1.0, 1), None

    monkeypatch.setattr(decide_module, "_decide", decided)
    monkeypatch.setattr(
        decide_module, "bounded_together", lambda subject, cases, deadline: [Answer("unknown", -2.0) for _ in cases]
    )
    with clock.timed_by(lambda: spent[0]):
        found = hf.verify(ramp(), many([1.5, 2.0, 2.5, 3.0]), timeout=10)
    assert found.status == "holds"
    assert found.splits == 7 + 4
    assert [limit for limit, _ in given] == [-1.5, -2.0, -2.5, -3.0, -1.5]
    assert given[0][1] == pytest.approx(2.5)
    assert given[-1][1] == pytest.approx(10 - 2.5 - 0.3)


class Wave(nn.Module):
    """An operation that no bound covers."""

    def forward(self, x):
        return torch.sin(8 * x)


def test_a_network_that_cannot_be_bounded_is_attacked_all_the_same():
    found = hf.verify(Wave().eval(), many([0.99]), timeout=5)
    assert found.status == "violated"
    assert float(Wave()(found.counterexample)) >= 0.99
    start = clock.now()
    found = hf.verify(Wave().eval(), many([1.5]), timeout=1)
    assert found.status == "unknown"
    assert not found.late
    assert "no proof is possible" in found.note
    assert "sin" in found.note
    assert clock.now() - start < 2.1


def test_intervals_prove_what_lines_do_not_cover():
    model = nn.Sequential(nn.Linear(1, 1), nn.Softsign()).eval()
    asked = many([1.5])
    assert not covers(trace(model, torch.zeros(1, 1)))
    assert hf.verify(model, asked, timeout=5).status == "holds"
    assert hf.verify(model, many([-0.99]), timeout=5).status == "violated"


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_an_overflow_of_intervals_proves_nothing(monkeypatch, value):
    model = ramp()
    subject = subject_of(model, many([1.5]), None)
    case = many([1.5]).cases[0]
    graph, own = subject.graphs(*subject.box([case]))
    problem = Problem(graph, own, subject.region(case), conditions_of(case), torch.float32, lambda points: None)
    assert interval_bounds(problem).bound == pytest.approx(0.5, rel=1e-5)
    broken = linear.relaxation

    def overflown(*task, **options):
        r = broken(*task, **options)
        r.intervals[-1] = tuple(torch.full_like(end, value) for end in r.intervals[-1])
        return r

    monkeypatch.setattr(linear, "relaxation", overflown)
    assert interval_bounds(problem).bound == -torch.inf


def test_the_long_search_runs_although_the_first_bounds_find_no_end(monkeypatch):
    """A counter-example that only the long search finds; the bounds take all the time that they are given."""
    tried, given = [], []

    def searched(judge, deadline, effort, seed):
        tried.append(effort)
        return judge.high if effort is not decide_module.QUICK else None

    def endless(problem, deadline):
        given.append(deadline - clock.now())

    monkeypatch.setattr(decide_module, "_searched", searched)
    monkeypatch.setattr(decide_module, "linear_bounds", endless)
    found = hf.verify(ramp(), many([0.9]), timeout=30)
    assert found.status == "violated"
    assert len(tried) == 2
    assert 1 < given[0] <= 1.5
    assert len(given) == 1


def test_starts_aim_at_the_closest_groups_and_half_of_them_farther():
    rows = [Polytope([[-1.0]], [-limit]) for limit in (3.0, 1.5, 2.0)]
    case = Case([0.0], [1.0], tuple(rows))
    conditions = conditions_of(case)
    judge = Judge(ramp(), case, conditions, (1,), torch.float32)
    assert _aims(judge, torch.ones(7, 1)).tolist() == [1, 1, 1, 2, 1, 0, 1]
