"""Integrated gradients add up, with as many steps as that takes."""

import torch
from nets import tiny_nets
from torch import nn

import holdfast as hf
from explain_tasks import QUICK_SEARCH


class Square(nn.Module):
    """z = (0, x' Q x)."""

    def __init__(self, q):
        super().__init__()
        self.q = nn.Parameter(q)

    def forward(self, x):
        z = ((x @ self.q) * x).sum(1, keepdim=True)
        return torch.cat([0 * z, z], 1)


def test_a_quadratic_is_exact_with_the_trapezoid():
    q = torch.randn(4, 4, dtype=torch.float64)
    x, y = torch.rand(3, 4, dtype=torch.float64), torch.ones(3, dtype=torch.long)
    found = hf.explain(Square(q).eval(), x, y, "integrated-gradients", steps=2)
    torch.testing.assert_close(found.attribution, x * (x @ (q + q.T)) / 2)
    assert bool((found.gradients == 2).all())


def test_steps_are_raised_until_the_attribution_is_complete():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3)).eval()
    x = torch.rand(20, 8)
    y = model(x).argmax(1)
    for rule in ("left", "trapezoid", "gauss-legendre"):
        rough = hf.explain(model, x, y, "integrated-gradients", rule=rule, steps=3, tolerance=None)
        fine = hf.explain(model, x, y, "integrated-gradients", rule=rule, steps=3)
        assert float(rough.error.max()) > 0.01
        assert bool((fine.error <= 0.01).all() & fine.ok.all())
        assert bool((fine.gradients >= rough.gradients).all())
        total = fine.attribution.sum(1)
        change = (model(x) - model(torch.zeros_like(x))).detach().gather(1, y[:, None])[:, 0]
        assert bool(((total - change).abs() <= 0.0101 * change.abs()).all())
    stuck = hf.explain(model, x, y, "integrated-gradients", rule="left", steps=3, max_steps=3)
    assert torch.equal(stuck.ok, stuck.error <= 0.01)
    assert not bool(stuck.ok.all())
    assert bool((hf.explain(model, x, y, "big", search=QUICK_SEARCH).error <= 0.01).all())


def test_doubled_steps_are_those_of_the_finer_rule():
    model, shape = tiny_nets()["smooth"]
    model, x = model.double(), torch.rand(3, *shape, dtype=torch.float64)
    y = torch.zeros(3, dtype=torch.long)
    for rule, once, twice in (("trapezoid", 3, 5), ("left", 3, 6), ("right", 3, 6)):
        doubled = hf.explain(model, x, y, "integrated-gradients", rule=rule, steps=once, tolerance=1e-15, max_steps=6)
        direct = hf.explain(model, x, y, "integrated-gradients", rule=rule, steps=twice, tolerance=None)
        torch.testing.assert_close(doubled.attribution, direct.attribution)
