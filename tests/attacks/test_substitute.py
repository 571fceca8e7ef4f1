"""A stand-in that learns the model's decisions: against what the gradients of the model itself break."""

import pytest
import torch
from torch import nn
from torch.nn.functional import one_hot

import holdfast as hf
from holdfast.attacks.substitute import small_network, substitute

THREAT = hf.Linf(0.1)


@pytest.fixture(scope="module")
def digits():
    """A network that the budget 0.1 breaks on most inputs, and 40 inputs that it gets right."""
    data = hf.load_data("mnist-mini")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for start in range(0, 4000, 100):
        x, y = data.train.x[start : start + 100], data.train.y[start : start + 100]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    optimizer.zero_grad()
    model.eval()
    right = (model(data.test.x[:100]).argmax(1) == data.test.y[:100]).nonzero()[:40, 0]
    return model, data.test.x[right], data.test.y[right], data.test.x[100:220]


class Decisions(nn.Module):
    """The one-hot of the largest logit, out of reach of autograd and of whoever looks for the network inside."""

    def __init__(self, model):
        super().__init__()
        self.ask = model.__call__

    def forward(self, x):
        return one_hot(self.ask(x.detach()).argmax(1), 10).to(x)


def test_decisions_alone_give_away_most_of_what_gradients_break(digits):
    model, x, y, data = digits
    decisions = Decisions(model).eval()
    assert len(list(decisions.modules())) == 1, "there is no part to look into"
    true = hf.attack(model, x, y, THREAT, "pgd", steps=40).success
    assert float(true.float().mean()) > 0.6
    found = hf.attack(decisions, x, y, THREAT, "substitute", data=data)
    assert float(found.success.float().mean()) > 0.6 * float(true.float().mean())
    noise = (x + 0.1 * torch.randn_like(x).sign()).clamp(0, 1)
    assert float((model(noise).argmax(1) != y).float().mean()) < 0.2, "chance does not explain it"
    assert set(found.by) == {"substitute", ""}
    assert int(found.queries.max()) <= 1 + 11, "a few answers for each input"
    once = hf.attack(decisions, x, y, THREAT, "substitute", data=data, rounds=1)
    assert int(once.success.sum()) < int(found.success.sum()), "its own mistakes teach it more"


def test_it_learns_from_the_inputs_if_there_is_nothing_else(digits):
    model, x, y = (part[:12] if isinstance(part, torch.Tensor) else part for part in digits[:3])
    decisions = Decisions(model).eval()
    alone = hf.attack(decisions, x, y, THREAT, "substitute", rounds=2)
    assert torch.equal(alone.x_adv, hf.attack(decisions, x, y, THREAT, "substitute", rounds=2, data=x).x_adv)
    assert torch.equal(alone.x_adv, hf.attack(decisions, x, y, THREAT, "substitute", rounds=2, chunk=7).x_adv)


class Hardened(nn.Module):
    """Decisions, with the network inside in sight."""

    def __init__(self, model, after):
        super().__init__()
        self.model, self.after = model, after

    def forward(self, x):
        return self.after(self.model(x))


class NoGradient(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    @torch.no_grad()
    def forward(self, x):
        return self.model(x)


HARD = {
    "one-hot": lambda m: Hardened(m, lambda z: one_hot(z.argmax(1), 10).float()),
    "one-hot, zero gradient": lambda m: Hardened(m, lambda z: one_hot(z.argmax(1), 10) + 0 * z),
    "saturated": lambda m: Hardened(m, lambda z: 2 * (1000 * z).softmax(1) - 1),
    "numpy": lambda m: Hardened(m, lambda z: torch.from_numpy(z.numpy().round(1))),
    "no gradient": NoGradient,
}


@pytest.mark.parametrize("kind", HARD)
def test_a_part_with_the_same_decisions_gives_away_everything(digits, kind):
    """What plain gradients break on the network inside breaks the hardened one too."""
    model, x, y, _ = digits
    hard = HARD[kind](model).eval()
    true = hf.attack(model, x, y, THREAT, "pgd", steps=40).success
    before = list(hard.model._forward_hooks)
    found = hf.attack(hard, x, y, THREAT, "substitute")
    assert int(found.success.sum()) >= int(true.sum()) - 1
    with torch.no_grad():
        assert torch.equal(hard(found.x_adv).argmax(1) != y, found.success)
    assert list(hard.model._forward_hooks) == before
    assert int(found.gradients.sum()) == 0


def test_options_and_data_are_checked():
    model, x = nn.Linear(6, 3).eval(), torch.rand(4, 6)
    y = model(x).argmax(1)
    for option, value in (("rounds", 0), ("steps", 0), ("epochs", 0), ("copies", -1)):
        with pytest.raises(hf.InputError, match=f"'{option}' .*: expected an integer >="):
            hf.attack(model, x, y, THREAT, "substitute", **{option: value})
    with pytest.raises(hf.InputError, match=r"inputs of shape \(6,\) as x does, got \(5,\)"):
        substitute(model, x, y, THREAT, data=torch.rand(3, 5))
    with pytest.raises(hf.InputError, match="outside the valid range"):
        substitute(model, x, y, THREAT, data=2 + torch.rand(3, 6))


@pytest.mark.parametrize("shape", [(7,), (1, 4, 4), (1, 8, 9), (3, 11, 8), (2, 3, 5, 6)])
def test_there_is_a_small_network_for_every_shape(shape):
    assert small_network(shape, 4)(torch.rand(3, *shape)).shape == (3, 4)
