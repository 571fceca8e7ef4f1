"""The two forms of an attack: what it is given as one value, and the call that it has from outside."""

import inspect

import torch
from torch import nn

import holdfast as hf
from holdfast.attacks.cw import cw, cw_nearest
from holdfast.attacks.pgd import pgd
from holdfast.random import Noise


def test_an_attack_is_called_with_a_model_inputs_a_threat_and_its_own_options():
    own = ["steps", "step_size", "restarts", "loss", "random_start", "sparsity"]
    parameters = inspect.signature(pgd).parameters
    assert list(parameters) == ["model", "x", "y", "threat", "noise", *own]
    assert [p.kind for p in parameters.values()][4:] == [inspect.Parameter.KEYWORD_ONLY] * (1 + len(own))
    assert list(pgd.__annotations__) == [*parameters, "return"]
    assert (pgd.__name__, pgd.__module__) == ("pgd", "holdfast.attacks.pgd")
    assert pgd.__doc__.startswith("Run projected gradient ascent")


def test_the_form_for_a_threat_has_the_options_of_the_nearest_form_but_no_goal():
    near, within = (list(inspect.signature(form).parameters) for form in (cw_nearest, cw))
    assert near[:8] == ["model", "x", "y", "norm", "low", "high", "noise", "goal"]
    assert within == ["model", "x", "y", "threat", "noise", *near[8:]]


def test_without_a_noise_the_random_numbers_are_those_of_seed_0_and_no_graph_is_kept():
    torch.manual_seed(0)
    model, x, y = nn.Linear(6, 3), torch.rand(8, 6), torch.zeros(8, dtype=torch.int64)
    one = pgd(model, x, y, hf.Linf(0.01), steps=2)
    same = pgd(model, x, y, hf.Linf(0.01), noise=Noise.for_batch(0, 8), steps=2)
    other = pgd(model, x, y, hf.Linf(0.01), noise=Noise.for_batch(1, 8), steps=2)
    assert torch.equal(one.x_adv, same.x_adv)
    assert not torch.equal(one.x_adv, other.x_adv)
    assert not one.x_adv.requires_grad
