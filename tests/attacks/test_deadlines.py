"""Every attack looks at the clock in its longest loop, and returns the best that it has."""

import itertools
import math

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.registry import get, methods
from holdfast.utils import clock

THREATS = {"linf": hf.Linf(0.1), "patch": hf.Patch(2, 2), "sparse": hf.Sparse(2), "l2": hf.L2(0.3)}
NAMES = [method.name for method in methods("attack")]
CHECKS = 2  # passes of the front door itself: the logits, and whether a second pass agrees
# Passes that make up one step of attacks that average, and the votes at their end.
LONGEST = {"eot-pgd": 90, "eot-fgsm": 65, "eot-apgd": 110, "eot-square": 110, "eot-nes": 90, "eot-grid": 170}
LONGEST |= {"spsa": 40}


class Counted(nn.Module):
    """Counts its passes."""

    def __init__(self, model):
        super().__init__()
        self.model, self.passes = model, 0

    def forward(self, x):
        self.passes += 1
        return self.model(x)


@pytest.fixture(scope="module")
def task():
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 7 * 8, 3)
    model = nn.Sequential(*layers).eval()
    x = torch.rand(6, 1, 7, 8)
    return model, x, model(x).argmax(1)


def run(task, name, looks):
    """The result and the passes of an attack at whose `looks`-th look at the clock the time is over."""
    model, x, y = task
    counted, seconds = Counted(model).eval(), itertools.count()
    threat = THREATS[next(t for t in get("attack", name).threats if t in THREATS)]
    with clock.timed_by(lambda: float(next(seconds))), clock.until(looks):
        return hf.attack(counted, x, y, threat, name), counted.passes


@pytest.mark.parametrize("name", NAMES)
def test_an_attack_stops_at_the_deadline(task, name):
    assert run(task, name, 0)[1] == CHECKS
    result, passes = run(task, name, 6)
    assert passes <= LONGEST.get(name, 25)
    assert result.x_adv.shape == task[1].shape


@pytest.mark.parametrize("name", ["pgd", "apgd-ce", "square", "sparse-rs", "patch-pgd", "cascade", "fmn"])
def test_more_time_breaks_no_less(task, name):
    broken = [set(run(task, name, looks)[0].success.nonzero()[:, 0].tolist()) for looks in (0, 5, 10, 20, 60, 200)]
    assert all(less <= more for less, more in itertools.pairwise(broken))
    assert not broken[0]
    assert len({len(found) for found in broken}) > 1, "choose a threat that breaks some of them"


def test_without_a_deadline_the_answer_is_the_same(task):
    model, x, y = task
    alone = hf.attack(model, x, y, hf.Linf(0.1), "apgd-ce")
    with clock.until(math.inf):
        inside = hf.attack(model, x, y, hf.Linf(0.1), "apgd-ce")
    assert torch.equal(alone.x_adv, inside.x_adv)
    assert torch.equal(alone.queries, inside.queries)
