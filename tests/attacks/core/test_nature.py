"""What a model is like before it is attacked: random or not, and what its gradients are worth."""

import pytest
import torch
from torch import nn
from torch.nn.functional import dropout, one_hot

from holdfast.attacks.core import batches
from holdfast.attacks.core.batches import kept_bytes
from holdfast.attacks.core.nature import Nature, nature_of


class Between(nn.Module):
    """A smooth network between two functions."""

    def __init__(self, before=lambda x: x, after=lambda z: z):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4))
        self.before, self.after = before, after

    def forward(self, x):
        return self.after(self.net(self.before(x)))


class NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise NotImplementedError


MODELS = {
    "plain": ({}, Nature()),
    "rounded": ({"before": lambda x: (255 * x).round() / 255}, Nature()),
    "softmax": ({"after": lambda z: (1000 * z).softmax(1)}, Nature()),
    "noise": ({"before": lambda x: x + 0.1 * torch.randn_like(x)}, Nature(random=True)),
    "dropout": ({"before": lambda x: dropout(x, 0.1)}, Nature(random=True)),
    "noise that decisions hide": (
        {
            "before": lambda x: x + 1e-4 * torch.randn_like(x),
            "after": lambda z: one_hot(z.detach().argmax(1), 4).float(),
        },
        Nature(random=True, gradients="none"),
    ),
    "one-hot": ({"after": lambda z: one_hot(z.argmax(1), 4).float()}, Nature(gradients="none")),
    "numpy": ({"before": lambda x: torch.from_numpy(x.numpy() * 1)}, Nature(gradients="none")),
    "detached": ({"after": torch.Tensor.detach}, Nature(gradients="none")),
    "no backward": ({"before": NoBackward.apply}, Nature(gradients="none")),
    "zero": ({"after": lambda z: one_hot(z.argmax(1), 4) + 0 * z}, Nature(gradients="useless")),
    "saturated": ({"after": lambda z: 2 * (1e6 * z).softmax(1) - 1}, Nature(gradients="useless")),
    "shattered": ({"before": lambda x: x - 2 * torch.remainder(x, 0.0005)}, Nature(gradients="useless")),
    "nan": ({"before": lambda x: x + 0 * (0 * x).sqrt()}, Nature(gradients="useless")),
    "random numpy": (
        {"before": lambda x: torch.from_numpy((x + 0.1 * torch.randn_like(x)).numpy() * 1)},
        Nature(random=True, gradients="none"),
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_models_are_told_apart_and_left_alone(kind):
    functions, expected = MODELS[kind]
    model = Between(**functions).eval()
    x = torch.rand(40, 12, generator=torch.Generator().manual_seed(1))
    if kind == "shattered":
        model.net = nn.Linear(12, 4).eval()
    state = torch.random.get_rng_state()
    assert nature_of(model, x) == expected
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert not x.requires_grad


def test_the_valid_range_gives_the_length_of_the_steps():
    """Rounded to whole numbers, pixels up to 255 move by steps of 2.55 and 25.5, not of 0.1."""
    model = Between(before=lambda x: x.round() / 255).eval()
    x = 255 * torch.rand(20, 12, generator=torch.Generator().manual_seed(1))
    assert nature_of(model, x, high=255.0) == Nature()
    assert nature_of(model, x, high=1.0).gradients == "useless"


def test_a_look_at_large_inputs_fits_memory(monkeypatch):
    class Watched(nn.Module):
        def __init__(self):
            super().__init__()
            self.top, self.sizes = nn.Linear(50, 3), []

        def forward(self, x):
            self.sizes += [len(x)] * x.requires_grad
            return self.top(x.tanh())

    model, x = Watched().eval(), torch.rand(12, 50)
    assert nature_of(model, x) == Nature()
    assert max(model.sizes) == 12
    monkeypatch.setattr(batches, "LARGE_INPUT", 50)
    monkeypatch.setattr(batches, "MEMORY", 4 * kept_bytes(model, x[:1]))
    model.sizes.clear()
    assert nature_of(model, x) == Nature()
    assert max(model.sizes) == 4
