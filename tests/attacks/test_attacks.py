"""The contract of every attack, over the whole registry."""

import pytest
import torch
from nets import tiny_nets
from torch import nn

import holdfast as hf
from holdfast.errors import HoldfastError

ATTACKS = [m.name for m in hf.methods("attack")]
THREATS = {
    "linf": hf.Linf(0.08),
    "l2": hf.L2(0.3),
    "l1": hf.L1(0.8),
    "box": hf.Box(torch.tensor(0.08).expand(2, 7, 5)),
}
PAIRS = [(m.name, t) for m in hf.methods("attack") for t in m.threats if t in THREATS]


def task(batch=12, name="cnn", dtype=torch.float32):
    model, shape = tiny_nets()[name]
    model = model.to(dtype)
    x = torch.rand(batch, *shape, dtype=dtype, generator=torch.Generator().manual_seed(5))
    return model, x, model(x).argmax(1).detach()


@pytest.mark.parametrize(("name", "threat"), PAIRS)
def test_results_are_what_they_claim(name, threat):
    model, x, y = task()
    y = y.clone()
    y[0] = (y[0] + 1) % 5  # one input that is wrong to begin with
    result = hf.attack(model, x, y, THREATS[threat], name)
    wrong = model(result.x_adv).argmax(1) != y
    assert torch.equal(wrong & result.success, result.success)
    assert bool(THREATS[threat].contains(result.x_adv, x).all())
    assert result.by[0] == "clean"
    assert torch.equal(result.x_adv[0], x[0])
    assert result.success.shape == result.gradients.shape == result.queries.shape == (12,)
    assert [bool(name) for name in result.by] == result.success.tolist()
    assert int(result.gradients[0]) == 0
    assert bool((result.queries >= result.gradients).all())


@pytest.mark.parametrize(("name", "threat"), PAIRS)
def test_the_answer_depends_on_the_seed_and_not_on_the_batch(name, threat):
    model, x, y = task(dtype=torch.float64)
    whole = hf.attack(model, x, y, THREATS[threat].__class__(**vars(THREATS[threat])), name, seed=3)
    pieces = hf.attack(model, x, y, THREATS[threat], name, seed=3, chunk=5)
    alone = [
        hf.attack(model, x[i : i + 1], y[i : i + 1], THREATS[threat], name, seed=3, index=torch.tensor([i]))
        for i in (0, 7)
    ]
    assert torch.equal(whole.success, pieces.success)
    assert torch.allclose(whole.x_adv, pieces.x_adv, atol=1e-9)
    for i, one in zip((0, 7), alone, strict=True):
        assert torch.allclose(whole.x_adv[i], one.x_adv[0], atol=1e-9)
        assert int(whole.gradients[i]) == int(one.gradients[0])


@pytest.mark.parametrize("name", ATTACKS)
def test_the_model_is_left_as_it_came(name):
    model, x, y = task()
    model[0].weight.requires_grad_(False)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    wanted = [p.requires_grad for p in model.parameters()]
    hf.attack(model, x, y, hf.Linf(0.1), name)
    assert [p.requires_grad for p in model.parameters()] == wanted
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not model.training


@pytest.mark.parametrize("name", ATTACKS)
def test_zero_budget_breaks_nothing_that_is_right(name):
    model, x, y = task()
    result = hf.attack(model, x, y, hf.Linf(0.0), name)
    assert not bool(result.success.any())
    assert torch.equal(result.x_adv, x)


@pytest.mark.parametrize("name", ATTACKS)
def test_a_huge_budget_breaks_everything_it_can(name):
    """With all pixels free, a linear model of two classes has both classes in reach."""
    weight = torch.randn(1, 8)
    model = nn.Linear(8, 2)
    model.weight.data, model.bias.data = torch.cat([weight, -weight]), torch.zeros(2)
    model.weight.data[:, 0] = torch.tensor([9.0, -9.0])
    model.weight.data[:, 1] = torch.tensor([-9.0, 9.0])
    x = torch.rand(20, 8)
    assert bool(hf.attack(model.eval(), x, model(x).argmax(1), hf.Linf(1.0), name).success.all())


def test_a_model_that_depends_on_chance_is_found_out():
    class Chance(nn.Module):
        def forward(self, x):
            return torch.randn(len(x), 4) + 0 * x.flatten(1)[:, :1]

    x = torch.rand(200, 3)
    with pytest.raises(HoldfastError, match="depends on chance"):
        hf.attack(Chance().eval(), x, torch.zeros(200, dtype=torch.long), hf.Linf(0.1), "pgd", steps=3)
