"""Models that draw random numbers: found, and judged by their mean softmax."""

import pytest
import torch
from torch import nn

from holdfast.attacks.core.chance import is_stochastic, mean_prediction
from holdfast.errors import InputError


class NoisyLinear(nn.Module):
    """Linear model with Gaussian noise: on the weights, one draw for a batch, or on the logits, one for each input."""

    def __init__(self, inputs=6, classes=3, weights=0.0, logits=0.0):
        super().__init__()
        self.layer = nn.Linear(inputs, classes).double()
        self.weights, self.logits = weights, logits

    def forward(self, x):
        weight = self.layer.weight + self.weights * torch.randn_like(self.layer.weight)
        z = x @ weight.T + self.layer.bias
        return z + self.logits * torch.randn_like(z)


def task(count=20, **noise):
    model = NoisyLinear(**noise).eval()
    x = torch.rand(count, 6, dtype=torch.float64)
    return model, x, (x @ model.layer.weight.T + model.layer.bias).argmax(1)


def test_mean_prediction_is_a_distribution_and_settles():
    model, x, _ = task(50, weights=1.0)
    log_p = mean_prediction(model, x, 20, seed=4)
    assert torch.allclose(log_p.exp().sum(1), torch.ones(50, dtype=torch.float64))
    assert torch.equal(log_p, mean_prediction(model, x, 20, seed=4))

    def spread(samples):
        return float(torch.stack([mean_prediction(model, x, samples, s).exp() for s in range(20)]).std(0).mean())

    assert spread(64) == pytest.approx(spread(4) / 4, rel=0.3)
    with pytest.raises(InputError, match="at least one sample"):
        mean_prediction(model, x, 0)


def test_mean_prediction_averages_the_probabilities_of_a_model_that_ends_in_a_softmax():
    model, x, _ = task(10, weights=1.0)
    assert torch.allclose(
        mean_prediction(nn.Sequential(model, nn.Softmax(1)), x, 9, seed=1), mean_prediction(model, x, 9, seed=1)
    )


class Hard(nn.Module):
    """The one-hot of the largest logit, which noise changes only at the boundary."""

    def forward(self, z):
        return nn.functional.one_hot(z.argmax(1), 3).to(z)


def test_is_stochastic():
    before = torch.get_rng_state()
    for model, expected in [
        (NoisyLinear(weights=0.1), True),
        (NoisyLinear(logits=1e-6), True),
        (NoisyLinear(), False),
        (nn.Sequential(NoisyLinear(logits=1e-6), Hard()).eval(), True),
        (nn.Sequential(NoisyLinear(), Hard()).eval(), False),
        (nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 3).double()).eval(), False),
        (nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 3).double()).train(), True),
    ]:
        torch.set_rng_state(before)
        assert is_stochastic(model, torch.ones(100, 6, dtype=torch.float64)) is expected
        assert torch.equal(torch.get_rng_state(), before)
