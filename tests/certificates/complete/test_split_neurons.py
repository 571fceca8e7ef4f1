"""Neurons split for any output conditions: against input splitting, with mixtures of rows, and by range."""

import time

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.certificates.complete.input_split import split_inputs
from holdfast.certificates.complete.problem import Conditions
from holdfast.certificates.complete.split_neurons import linear_bounds, members, split_neurons
from holdfast.properties import Case, Polytope, Property
from holdfast.properties import decide as decide_module
from holdfast.properties.asked import subject_of
from holdfast.utils import clock


def network(seed, activation=nn.ReLU, width=8, outputs=3):
    torch.manual_seed(seed)
    layers = [nn.Linear(3, width), activation(), nn.Linear(width, width), activation(), nn.Linear(width, outputs)]
    for layer in layers[::2]:
        layer.weight.data.mul_(2.5)
    return nn.Sequential(*layers).eval()


def by_neurons(monkeypatch, model, asked, seconds=2.0):
    """The verdict without splitting inputs, in CPU seconds."""
    nothing = lambda problem, deadline: decide_module._unknown()  # noqa: E731
    monkeypatch.setattr(decide_module, "split_inputs", nothing)
    with clock.timed_by(time.process_time):
        return hf.verify(model, asked, timeout=seconds)


def question(model, seed, rows, beyond):
    """Groups of `rows` conditions each, whose limits are `beyond` the least that random points reach."""
    draw = torch.Generator().manual_seed(seed)
    points = torch.rand(4000, 3, generator=draw) * 2 - 1
    outputs = model(points).double().detach()
    unsafe = []
    for count in rows:
        matrix = torch.randn(count, outputs.shape[1], generator=draw).double()
        worst = (outputs @ matrix.T).amax(1)
        unsafe.append(Polytope(matrix, torch.full((count,), float(worst.min()) + beyond)))
    return Property((Case([-1.0] * 3, [1.0] * 3, tuple(unsafe)),))


@pytest.mark.parametrize("activation", [nn.ReLU, lambda: nn.LeakyReLU(0.1), nn.Hardtanh], ids=["relu", "leaky", "clip"])
def test_verdicts_agree_with_input_splitting(monkeypatch, activation):
    seen, splits = set(), 0
    for seed in range(2):
        model = network(seed, activation, width=5)
        for beyond in (-0.8, 0.3):
            asked = question(model, seed, (1, 2, 3), beyond)
            with monkeypatch.context() as patch:
                ours = by_neurons(patch, model, asked)
            with clock.timed_by(time.process_time):
                theirs = hf.verify(model, asked, timeout=10)
            assert {ours.status, theirs.status} != {"holds", "violated"}
            seen.add(ours.status)
            splits += ours.splits
            if ours.status == "holds":
                points = torch.rand(20_000, 3) * 2 - 1
                outputs = model(points).double().detach()
                assert min(float(p.excess(outputs).min()) for p in asked.cases[0].unsafe) > 0
    assert seen >= {"holds", "violated"}
    assert splits > 2


@pytest.mark.parametrize(("activation", "beyond"), [(nn.Sigmoid, -0.03), (nn.Tanh, -0.6)], ids=["sigmoid", "tanh"])
def test_ranges_of_curved_neurons_are_split_and_no_bound_is_above_a_point(monkeypatch, activation, beyond):
    decided = splits = 0
    for seed in range(3):
        model = network(seed, activation, width=5, outputs=2)
        asked = question(model, seed, (1, 2), beyond)
        with monkeypatch.context() as patch:
            found = by_neurons(patch, model, asked, 1.0)
        outputs = model(torch.rand(50_000, 3) * 2 - 1).double().detach()
        least = min(float(p.excess(outputs).min()) for p in asked.cases[0].unsafe)
        assert found.bound <= least
        decided, splits = decided + (found.status == "holds"), splits + found.splits
    assert decided >= 1
    assert splits > 20


def test_a_mixture_of_rows_proves_what_no_row_does(monkeypatch):
    """x - 0.4 <= 0 and 0.6 - x <= 0 exclude each other, but each is met somewhere; no neuron is open."""
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 2)).eval()
    model[0].weight.data, model[0].bias.data = torch.ones(1, 1), torch.ones(1)
    model[2].weight.data, model[2].bias.data = torch.tensor([[1.0], [-1.0]]), torch.tensor([-1.4, 1.6])
    asked = Property((Case([0.0], [1.0], (Polytope(torch.eye(2), [0.0, 0.0]),)),))
    found = by_neurons(monkeypatch, model, asked)
    assert found.status == "holds"
    model[2].bias.data = torch.tensor([-1.6, 1.4])
    assert hf.verify(model, asked).status == "violated"


def test_members_of_groups_repeat_the_first_row_of_a_short_one():
    asked = Conditions(torch.zeros(4, 2), torch.zeros(4), torch.tensor([0, 1, 0, 0]))
    assert members(asked).tolist() == [[0, 2, 3], [1, 1, 1]]


def test_the_deadline_is_kept_while_slopes_are_optimised():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 2)).eval()
    subject_case = Case([-1.0] * 40, [1.0] * 40, (Polytope([[1.0, 0.0]], [-50.0]),))
    subject = subject_of(model, Property((subject_case,)), None)
    conditions = Conditions(torch.tensor([[1.0, 0.0]]).double(), torch.tensor([-5.0]).double(), torch.tensor([0]))
    graph, own = subject.graphs(*subject.box([subject_case]))
    region = subject.region(subject_case)
    problem = decide_module.Problem(graph, own, region, conditions, torch.float32, lambda points: None)
    root = linear_bounds(problem, clock.now() + 60)
    start = clock.now()
    found = split_neurons(problem, root, start + 0.5)
    assert clock.now() - start < 0.5 * 1.1 + 1
    assert found.status == "unknown"
    assert found.bound >= root.answer.bound
    assert linear_bounds(problem, clock.now() - 1) is None
    assert split_inputs(problem, clock.now() - 1).status == "unknown"
