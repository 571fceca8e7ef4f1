"""How often an attack calls the model."""

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.attacks.core.chance import PROBED


class Counting(nn.Module):
    """A linear model that adds up the inputs that it is given."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.top = nn.Linear(6, 3)
        self.seen = 0

    def forward(self, x):
        self.seen += len(x)
        return self.top(x)


@pytest.mark.parametrize("eps", [0.0, 0.02, 0.2])
@pytest.mark.parametrize(("method", "options", "needed"), [
    ("pgd", {"steps": 7}, 8), ("pgd", {"steps": 1}, 2), ("fgsm", {}, 2), ("apgd-ce", {"steps": 7}, 8)
])  # fmt: skip
def test_at_most_one_pass_more_than_the_steps_need(method, options, needed, eps):
    """The steps, the look at the last iterate and the clean pass; each example that is found is checked once more."""
    model, x = Counting().eval(), torch.rand(64, 6)
    y = model(x).argmax(1)
    model.seen = 0
    result = hf.attack(model, x, y, hf.Linf(eps), method, **options)
    assert model.seen <= (needed + 1) * len(x) + PROBED + int(result.success.sum())
    assert int(result.queries.max()) <= needed + 1


class PrivateGenerator(nn.Module):
    def __init__(self):
        super().__init__()
        self.top, self.generator = nn.Linear(6, 3), torch.Generator().manual_seed(0)

    def forward(self, x):
        return self.top(x) + torch.randn(3, generator=self.generator)


def test_a_model_with_a_generator_of_its_own_is_noticed():
    model, x = PrivateGenerator().eval(), torch.rand(20, 6)
    with pytest.raises(hf.errors.InputError, match="draws random numbers"):
        hf.attack(model, x, torch.zeros(20, dtype=torch.int64), hf.Linf(0.1), "pgd")
