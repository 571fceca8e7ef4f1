"""How far the proofs reach below the audited budgets, and what each step did: against a model whose radii are known."""

import math

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.audits.reach import SMALLER, _search
from holdfast.audits.saved import load_audit


@pytest.mark.parametrize("truth", [0.09, 0.024, 0.001, 3e-6])
def test_the_search_comes_within_a_fifth_and_never_above(truth):
    asked = []

    def proves(size):
        asked.append(size)
        return size <= truth

    found = _search(proves, 0.1)
    assert truth / 1.3 < found <= truth
    assert len(asked) <= 11
    assert asked[0] == 0.1 / SMALLER


def test_the_search_gives_up_where_nothing_is_proved():
    assert _search(lambda size: False, 0.1) is None


class Steep(nn.Module):
    """Classifies by the first value; |z_0 - z_1| = 2 |x_0 - 0.5|, hidden behind two ReLUs that cancel elsewhere."""

    def __init__(self, cancel):
        super().__init__()
        self.first, self.last = nn.Linear(2, 4), nn.Linear(4, 2)
        with torch.no_grad():
            # Two copies of relu(c x_1) and relu(-c x_1) cancel exactly; bounds that forget that see 2 c eps of doubt.
            self.first.weight.copy_(torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, cancel], [0.0, cancel]]))
            self.first.bias.copy_(torch.tensor([0.0, 0.0, 1.0, 1.0]))
            self.last.weight.copy_(torch.tensor([[1.0, 1.0, 1.0, -1.0], [-1.0, -1.0, -1.0, 1.0]]))
            self.last.bias.copy_(torch.tensor([-1.0, 1.0]))

    def forward(self, x):
        return self.last(self.first(x).relu())


@pytest.fixture
def audit(tmp_path):
    """Sixteen inputs with x_0 = 0.75: margin 1 at x; intervals lose (4 + 4 c) eps of it."""
    x = torch.stack([torch.full((16,), 0.75), torch.linspace(0.3, 0.7, 16)], 1)
    y = torch.zeros(16, dtype=torch.long)
    how = {"budgets": 2, "certify": "ibp", "attack": "fgsm", "progress": False, "out": tmp_path}
    return hf.audit(Steep(100.0).eval(), (x, y), "linf:51/255", **how)


def test_the_reach_is_below_the_true_radius_of_the_proof_and_close_to_it(audit, tmp_path):
    (bracket,) = audit.brackets
    truth = 1 / (4 + 4 * 100)
    assert bracket.nothing_proved
    assert truth / 1.3 < bracket.reach <= truth
    assert bracket.half == bracket.reach
    assert load_audit(tmp_path).brackets[0].reach == bracket.reach


def test_each_step_has_its_own_result_and_time(audit, tmp_path):
    (bracket,) = audit.brackets
    proof, attack = bracket.steps
    assert (proof.stage, proof.method, proof.inputs, proof.decided, proof.part) == ("certify", "ibp", 16, 0, 0)
    assert (attack.stage, attack.method, attack.inputs, attack.part) == ("attack", "fgsm", 16, 0)
    assert attack.decided == sum(record.broken_by == "fgsm" for record in bracket.records)
    assert math.isclose(proof.seconds, bracket.seconds["certify ibp"])
    assert load_audit(tmp_path).brackets[0].steps == bracket.steps


def test_steps_of_one_method_are_told_apart():
    model, x = nn.Linear(2, 2).eval(), torch.rand(12, 2)
    y = model(x).argmax(1)
    result = hf.audit(model, (x, y), "linf:0.3", budgets=2, progress=False)
    (bracket,) = result.brackets
    assert len({step.number for step in bracket.steps}) == len(bracket.steps)
    for name, seconds in bracket.seconds.items():
        own = [step.seconds for step in bracket.steps if f"{step.stage} {step.method}" == name]
        assert not own or sum(own) == pytest.approx(seconds)
    plan = result.settings["steps"]
    assert all(plan[step.number - 1]["method"] == step.method for step in bracket.steps)
