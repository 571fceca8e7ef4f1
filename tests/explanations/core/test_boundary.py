"""The boundary search against exact answers, and what BIG says where there is nothing to find."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import holdfast as hf
from explain_tasks import QUICK_SEARCH
from holdfast.certificates.complete.milp import exact_margin
from holdfast.errors import InputError, UnsupportedError
from holdfast.explanations import PUBLISHED, BoundarySearch
from holdfast.explanations.core.boundary import nearest_boundary
from holdfast.explanations.core.exact_boundary import exact_boundary, least_distance
from holdfast.explanations.evaluate.trust import setting_for


@pytest.fixture(scope="module")
def trained():
    """A small ReLU network on points of three classes, in float64."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    x, centres = torch.rand(400, 3).double(), torch.rand(9, 3).double()
    y = torch.cdist(x, centres).argmin(1) % 3
    momentum = [torch.zeros_like(p) for p in model.parameters()]
    for _ in range(300):
        gradients = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), list(model.parameters()))
        for p, m, g in zip(model.parameters(), momentum, gradients, strict=True):
            m.mul_(0.9).add_(g)
            p.data.sub_(0.1 * m)
    assert float((model(x).argmax(1) == y).double().mean()) > 0.7
    return model.eval()


def test_the_search_comes_within_two_percent_of_the_exact_boundary(trained):
    x = torch.rand(30, 3).double()
    y = trained(x).argmax(1)
    points, distance = exact_boundary(trained, x)
    found = hf.explain(trained, x, y, "big")
    ratio = found.distance / distance
    assert bool((ratio > 1 - 1e-6).all())
    assert float((ratio <= 1.02).double().mean()) >= 0.9
    # At an exact projection onto a piece of the boundary its normal points along the move.
    normal = hf.explain(trained, points, y, "saliency", quantity="margin").attribution
    inner = ((points > 1e-6) & (points < 1 - 1e-6)).all(1)
    cosine = nn.functional.cosine_similarity(normal, x - points)
    assert float(cosine[inner].median()) > 0.999


def test_linf_distances_agree_with_mixed_integer_programming(trained):
    x = torch.rand(6, 3).double()
    y = trained(x).argmax(1)
    found = nearest_boundary(trained, x, setting_for(x), BoundarySearch(norm="linf"))
    proved = 0
    for i in range(6):
        one, label, far = x[i : i + 1], y[i : i + 1], float(found.distance[i])
        assert exact_margin(trained, one, label, hf.Linf(1.001 * far)).status[0] == "broken"
        proved += exact_margin(trained, one, label, hf.Linf(0.98 * far)).status[0] == "certified"
    assert proved >= 5


def test_more_attacks_never_find_less(trained):
    x = torch.rand(12, 3).double()
    setting, before = setting_for(x), torch.full((12,), torch.inf).double()
    for attacks in (("deepfool",), ("deepfool", "ddn"), ("deepfool", "ddn", "fmn")):
        found = nearest_boundary(trained, x, setting, BoundarySearch(steps=5, attacks=attacks, starts=0, refine=0))
        assert bool((found.distance <= before).all())
        hit = torch.isfinite(found.distance)
        assert bool((trained(found.x_adv).argmax(1) != trained(x).argmax(1))[hit].all())
        before = found.distance
    refined = nearest_boundary(trained, x, setting, BoundarySearch(steps=5, attacks=attacks))
    assert bool((refined.distance <= before + 1e-12).all())
    assert bool((refined.gradients > found.gradients).all())


def test_the_published_search_stops_behind_the_boundary(trained):
    x = torch.rand(5, 3).double()
    quick = BoundarySearch(budgets=PUBLISHED.budgets, steps=10, attacks=("ddn",), starts=0, refine=0)
    assert (PUBLISHED.steps, PUBLISHED.refine, len(PUBLISHED.budgets)) == (100, 0, 7)
    found = nearest_boundary(trained, x, setting_for(x), quick)
    exact = exact_boundary(trained, x)[1]
    assert bool((found.distance > exact).all())
    assert set(found.by) <= {"pgd", "ddn", ""}


def test_the_published_search_runs_cw_at_the_published_step(trained):
    x = torch.rand(12, 3).double()
    y = trained(x).argmax(1)
    by_cw = replace(PUBLISHED, steps=0)  # without the ascents
    found = nearest_boundary(trained, x, setting_for(x), by_cw).distance
    plain = {"steps": 100, "rounds": 9, "c": 1e-3, "kappa": 0.0, "relative": None, "polish": 0}
    at = {lr: hf.nearest(trained, x, y, "l2", method="cw", lr=lr, **plain).distance for lr in (0.01, 0.1)}
    near = at[0.01] < PUBLISHED.budgets[-1]
    assert int(near.sum()) >= 6
    torch.testing.assert_close(found[near], at[0.01][near])
    assert not torch.allclose(found[near], at[0.1][near], rtol=1e-3)
    assert bool(torch.isinf(found[~near]).all())


def test_options_reach_their_attack_and_unknown_ones_are_refused(trained):
    x = torch.rand(4, 3).double()
    few, many = (
        nearest_boundary(
            trained,
            x,
            setting_for(x),
            BoundarySearch(steps=0, attacks=("fmn",), options={"fmn": {"steps": n}}, refine=0),
        )
        for n in (5, 50)
    )
    assert bool((many.gradients > few.gradients).all())
    with pytest.raises(InputError, match="'cw' has no option 'stepz'"):
        BoundarySearch(attacks=("cw",), options={"cw": {"stepz": 1}})
    with pytest.raises(InputError, match="Did you mean 'cw'"):
        BoundarySearch(options={"cv": {}})


def test_a_misclassified_input_is_explained_as_what_it_was_taken_for(trained):
    x = torch.rand(4, 3).double()
    y = trained(x).argmax(1)
    wrong = torch.where(torch.arange(4) == 2, (y + 1) % 3, y)
    right, found = (hf.explain(trained, x, label, "big", search=QUICK_SEARCH) for label in (y, wrong))
    torch.testing.assert_close(found.attribution, right.attribution)
    assert f"logit of class {int(y[2])}, which the model predicts, not of {int(wrong[2])}" in found.by[2]
    assert "predicts" not in found.by[0]
    assert "boundary to class" in found.by[0]


class Constant(nn.Module):
    """Class 1 everywhere below 0.9 of the first value; nowhere else does anything change."""

    def forward(self, x):
        return torch.stack([x[:, 0] - 0.9, 0 * x[:, 1]], 1)


def test_no_boundary_within_the_largest_budget_is_flagged_and_the_fallback_named():
    x = torch.tensor([[0.85, 0.5], [0.1, 0.5], [0.8, 0.2]])
    y = torch.ones(3, dtype=torch.long)
    search = BoundarySearch(budgets=(0.05, 0.3), steps=2, attacks=("deepfool", "fmn"))
    found = hf.explain(Constant().eval(), x, y, "big", search=search, quantity="margin")
    assert found.ok.tolist() == [True, False, True]
    assert "path from black instead" in found.by[1]
    assert torch.isinf(found.distance[1])
    torch.testing.assert_close(found.boundary[1], x[1])
    black = hf.explain(Constant().eval(), x, y, "integrated-gradients", quantity="margin")
    torch.testing.assert_close(found.attribution[1], black.attribution[1])
    torch.testing.assert_close(found.attribution[0], torch.tensor([0.05, 0.0]), rtol=0, atol=1e-5)
    saliency = hf.explain(Constant().eval(), x, y, "bsm", search=search, quantity="margin")
    assert saliency.ok.tolist() == [True, False, True]
    assert "saliency instead" in saliency.by[1]


def test_bad_searches_are_refused():
    for bad in ({"budgets": ()}, {"budgets": (0.5, 0.3)}, {"norm": "l1"}, {"steps": -1}, {"steps": 0, "attacks": ()}):
        with pytest.raises(InputError):
            BoundarySearch(**bad)
    with pytest.raises(InputError, match="Did you mean 'fmn'"):
        BoundarySearch(attacks=("fmm",))


def test_a_model_that_draws_random_numbers_has_no_boundary():
    class Noisy(nn.Module):
        def forward(self, x):
            return x + torch.randn_like(x)

    with pytest.raises(InputError, match="no fixed boundary"):
        hf.explain(Noisy().eval(), torch.rand(2, 3), torch.zeros(2, dtype=torch.long))


def test_the_exact_boundary_refuses_what_it_cannot_enumerate(trained):
    with pytest.raises(UnsupportedError, match=r"needs an nn\.Sequential"):
        exact_boundary(Constant(), torch.rand(1, 2))
    with pytest.raises(UnsupportedError, match="with a ReLU between"):
        exact_boundary(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)), torch.rand(1, 2))
    with pytest.raises(InputError, match="14 ReLUs"):
        exact_boundary(trained, torch.rand(1, 3), max_relus=10)
    never = nn.Sequential(nn.Linear(2, 2))
    never[0].weight.data.zero_()
    never[0].bias.data = torch.tensor([1.0, 0.0])
    assert bool(torch.isinf(exact_boundary(never, torch.rand(2, 2))[1]).all())
    assert least_distance(torch.tensor([[1.0], [-1.0]]).numpy(), torch.tensor([1.0, 0.0]).numpy()) is None
