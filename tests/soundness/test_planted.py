"""Networks built around a counter-example that is hard to find: no sound certificate may say that they hold.

The margin is a small network's, kept above a floor, minus a spike: c relu(rho - |x - p|_1). It is negative only within
a fraction of rho around p, which random points and gradient steps miss: the spike is flat zero elsewhere.
"""

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.certificates.complete.beta_crown import decide
from holdfast.registry import methods

SIZE, RHO, FLOOR = 3, 0.02, 0.5


class Planted(nn.Module):
    """Two logits whose difference is FLOOR + relu noise - c relu(RHO - |x - p|_1)."""

    def __init__(self, seed, spike):
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.p = 0.3 + 0.4 * torch.rand(SIZE, generator=g)
        eye = torch.eye(SIZE)
        noise = torch.randn(4, SIZE, generator=g)
        self.first, self.second, self.last = nn.Linear(SIZE, 2 * SIZE + 4), nn.Linear(2 * SIZE + 4, 5), nn.Linear(5, 2)
        self.first.weight.data = torch.cat([eye, -eye, noise])
        self.first.bias.data = torch.cat([-self.p, self.p, 0.3 * torch.randn(4, generator=g)])
        weight = torch.zeros(5, 2 * SIZE + 4)
        weight[0, : 2 * SIZE] = -1.0
        weight[1:, 2 * SIZE :] = torch.rand(4, 4, generator=g)
        self.second.weight.data, self.second.bias.data = weight, torch.tensor([RHO, 0.0, 0.0, 0.0, 0.0])
        self.last.weight.data = torch.tensor([[-spike, 0.1, 0.1, 0.1, 0.1], [0.0] * 5])
        self.last.bias.data = torch.tensor([FLOOR, 0.0])

    def forward(self, x):
        return self.last(torch.relu(self.second(torch.relu(self.first(x)))))


def planted(seed, spike=200.0):
    model = Planted(seed, spike).eval()
    x = (model.p + 0.1 * (torch.rand(SIZE, generator=torch.Generator().manual_seed(seed)) - 0.5))[None]
    return model, x, torch.zeros(1, dtype=torch.long)


@pytest.mark.parametrize("seed", range(3))
def test_the_counter_example_is_there_and_an_attack_does_not_find_it(seed):
    model, x, y = planted(seed)
    threat = hf.Linf(0.15)
    assert bool(threat.contains(model.p[None], x))
    assert int(model(model.p[None]).argmax()) == 1
    assert int(model(x).argmax()) == 0
    assert not bool(hf.attack(model, x, y, threat, "pgd").success)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "name", [m.name for m in methods("certify") if "linf" in m.threats and not m.smoothed and not m.needs]
)
def test_no_certificate_says_that_a_planted_network_holds(name, seed):
    model, x, y = planted(seed)
    options = {"time_limit": 5.0} if name in ("milp", "beta-crown") else {}
    assert not bool(hf.certify(model, x, y, hf.Linf(0.15), name, **options).certified)


@pytest.mark.parametrize("seed", range(3))
def test_branch_and_bound_proves_the_same_network_with_a_spike_below_the_floor(seed):
    model, x, y = planted(seed, spike=20.0)
    assert decide(model, x, y, hf.Linf(0.15), time_limit=20).status == ("certified",)
