"""All attacks of training: in the set, in any batch, without a trace in the model."""

import inspect

import pytest
import torch
from torch import nn

from attack_tasks import ATTACKS, EPS, linear, run
from contexts import make_context
from holdfast import Linf
from holdfast.random import Noise
from holdfast.training.attack.atas import atas
from holdfast.training.attack.atta import atta
from holdfast.training.attack.fgsm import fgsm_rs
from holdfast.training.attack.iat import iat


@pytest.mark.parametrize("name", ATTACKS)
def test_without_a_budget_nothing_moves(name):
    x, y = torch.rand(4, 3), torch.arange(4) % 2
    for epoch in (0, 9):
        assert torch.equal(run(name, linear(), x, y, make_context(x, Linf(0.0), epoch=epoch)), x)


@pytest.mark.parametrize("name", ATTACKS)
def test_batch_norm_is_touched_in_train_mode_alone(name):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).train()
    x, y = torch.rand(8, 3), torch.arange(8) % 2
    before = {key: value.clone() for key, value in model.state_dict().items()}
    run(name, model, x, y, make_context(x, Linf(EPS), epoch=9))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    run(name, model, x, y, make_context(x, Linf(EPS), epoch=9), mode="train")
    assert model[1].num_batches_tracked > before["1.num_batches_tracked"]
    assert model.training
    assert model[1].training


@pytest.mark.parametrize("name", ATTACKS)
def test_an_example_gets_the_same_point_in_any_batch(name):
    x, y = torch.rand(6, 3), torch.arange(6) % 2
    whole = run(name, linear(), x, y, make_context(x, Linf(EPS)), **({"c": 1e6} if name == "atas" else {}))
    part = torch.tensor([4, 1])
    context = make_context(x[part], Linf(EPS), index=part, noise=Noise(0, part), count=6)
    again = run(name, linear(), x[part], y[part], context, **({"c": 1e6} if name == "atas" else {}))
    assert torch.allclose(again, whole[part], atol=1e-7)


def test_defaults_are_the_published_settings():
    def default(function, option):
        return inspect.signature(function).parameters[option].default

    assert default(fgsm_rs, "step") == 1.25
    assert default(atta, "step") * 8 == 4
    assert (default(atas, "step") * 8, default(atas, "c"), default(atas, "beta")) == (16, 0.01, 0.5)
    assert (default(iat, "gamma") * 8, default(iat, "beta")) == (1.9, 0.1)
