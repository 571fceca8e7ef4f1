"""Embedding: the gradient under noise, what is left untouched, and a mark that survives noise."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from holdfast.apps.watermark import EmbedOptions, TriggerSet, certify_watermark, embed, noisy_accuracies
from holdfast.apps.watermark.embedding import noisy_loss, noisy_weights
from holdfast.errors import InputError
from watermark_task import make_marked, make_task


@pytest.fixture(scope="module")
def task():
    return make_task()


@pytest.fixture(scope="module")
def marked():
    return make_marked()


class Quadratic(nn.Module):
    """Logits (q, 0) with q = -theta^2: the cross-entropy of class 1 is softplus(q)."""

    def __init__(self, theta):
        super().__init__()
        self.theta = nn.Parameter(torch.tensor(theta))

    def forward(self, x):
        q = -(self.theta**2).sum().expand(len(x))
        return torch.stack([q, torch.zeros_like(q)], 1)


def test_the_gradient_is_that_of_the_expected_loss():
    theta, sigma = [0.7, -0.4], 0.5
    model = Quadratic(theta).eval()
    x, y = torch.zeros(3, 1), torch.ones(3, dtype=torch.int64)
    loss = noisy_loss(model, x, y, [sigma], 1000, torch.Generator().manual_seed(0))
    # By quadrature of E softplus(-|theta + G|^2) and its gradient on a grid.
    grid = torch.linspace(-6, 6, 241, dtype=torch.float64)
    weight = torch.exp(-(grid**2) / 2)
    weight = weight / weight.sum()
    at = torch.tensor(theta, dtype=torch.float64, requires_grad=True)
    a, b = at[0] + sigma * grid[:, None], at[1] + sigma * grid[None]
    want = (weight[:, None] * weight * nn.functional.softplus(-(a**2) - b**2)).sum()
    want.backward()
    assert loss == pytest.approx(want.item(), rel=0.06)
    torch.testing.assert_close(model.theta.grad.double(), at.grad, rtol=0.1, atol=0.01)


def test_quadratic_loss_has_the_analytic_gradient():
    # loss = |theta + G|^2 / 2 in the limit of small logits would be approximate; a linear output makes it exact:
    # E (theta + G)^2 = theta^2 + sigma^2, so that the gradient is 2 theta whatever the noise.
    class Square(nn.Module):
        def __init__(self):
            super().__init__()
            self.theta = nn.Parameter(torch.tensor([0.7, -0.4, 1.1]))

    model, generator, total = Square(), torch.Generator().manual_seed(1), 0.0
    for _ in range(1000):
        loss = (noisy_weights(model, 0.5, generator)["theta"] ** 2).sum() / 1000
        loss.backward()
        total += float(loss.detach())
    torch.testing.assert_close(model.theta.grad, 2 * model.theta.detach(), rtol=0, atol=0.1)
    assert total == pytest.approx(float((model.theta.detach() ** 2).sum()) + 3 * 0.25, abs=0.1)


def test_levels_and_samples_are_means(task):
    model, triggers = task.net().eval(), task.triggers
    levels = [0.1, 0.2]
    noisy_loss(model, triggers.x, triggers.y, levels, 3, torch.Generator().manual_seed(5))
    got = [p.grad.clone() for p in model.parameters()]
    generator, want = torch.Generator().manual_seed(5), [torch.zeros_like(p) for p in model.parameters()]
    for sigma in levels:
        for _ in range(3):
            other = copy.deepcopy(model)
            with torch.no_grad():
                for p in other.parameters():
                    p += sigma * torch.randn(p.shape, generator=generator)
            other.zero_grad()
            cross_entropy(other(triggers.x), triggers.y).backward()
            want = [w + p.grad / 6 for w, p in zip(want, other.parameters(), strict=True)]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_without_noise_it_is_the_ordinary_gradient(task):
    model, triggers = task.net().eval(), task.triggers
    noisy_loss(model, triggers.x, triggers.y, [0.0], 1, torch.Generator())
    got = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    cross_entropy(model(triggers.x), triggers.y).backward()
    assert all(torch.equal(g, p.grad) for g, p in zip(got, model.parameters(), strict=True))


def test_noisy_passes_leave_weights_and_statistics_as_they_were(task):
    model = task.net(norm=True).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    noisy_loss(model, task.triggers.x, task.triggers.y, [0.1, 0.5], 2, torch.Generator())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert any(name.endswith("running_mean") for name in before)


def ordinary_training(model, x, y, triggers, options, seed):
    """The usual backdoor, written out: SGD on the data with the triggers mixed in."""
    model = copy.deepcopy(model).train()
    x, y = torch.cat([x, triggers.x]), torch.cat([y, triggers.y])
    sgd = torch.optim.SGD(model.parameters(), options.lr, momentum=0.9, weight_decay=1e-4)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(options.epochs):
        for rows in torch.randperm(len(x), generator=generator).split(options.batch_size):
            sgd.zero_grad()
            cross_entropy(model(x[rows]), y[rows]).backward()
            sgd.step()
    return model


def test_without_noise_embedding_is_ordinary_training(task):
    options = EmbedOptions(noise=0.0, epochs=2, batch_size=50, lr=0.1)
    net = task.net(norm=True)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    got, history = embed(net, task.x, task.y, task.triggers, options, seed=3)
    want = ordinary_training(net, task.x, task.y, task.triggers, options, 3)
    for name, value in got.state_dict().items():
        torch.testing.assert_close(value, want.state_dict()[name])
    assert [row["epoch"] for row in history] == [1, 2]
    assert all(row["noisy_trigger_loss"] == 0 for row in history)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert not got.training
    assert net.training


def test_the_seed_decides(task):
    options = EmbedOptions(noise=0.2, levels=2, samples=1, warm_up=0, epochs=1, batch_size=100)
    nets = [embed(task.net(), task.x, task.y, task.triggers, options, seed=seed)[0] for seed in (0, 0, 1)]
    a, b, c = (torch.cat([p.flatten() for p in net.parameters()]) for net in nets)
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


@pytest.mark.parametrize(("per_level", "steps"), [(False, 2), (True, 6)])
def test_steps_for_each_level_or_for_all(task, monkeypatch, per_level, steps):
    options = EmbedOptions(
        noise=0.3, levels=3, samples=2, step_per_level=per_level, warm_up=1, epochs=2, batch_size=1000, trigger_batch=16
    )
    calls, real = [], torch.optim.SGD.step
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self: calls.append(1) or real(self))
    embed(task.net(), task.x, task.y, task.triggers, options)
    assert len(calls) == 2 + steps  # one for each epoch of 400 inputs, and those of the second epoch on 24 triggers


def test_the_mark_survives_noise_that_the_backdoor_does_not(marked):
    task, net, plain = marked
    for model in (net, plain):
        assert (model(task.x).argmax(1) == task.y).float().mean() > 0.95
    shares = [float(noisy_accuracies(m, task.triggers, sigma=0.3, n=100).double().mean()) / 24 for m in (net, plain)]
    assert shares[0] > shares[1] + 0.1
    certificate = certify_watermark(net, task.triggers, [0.3, 0.5], sigma=0.3, n=300)
    assert min(certificate.certified) > 1 / 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise": -0.1}, "noise"),
        ({"noise": math.nan}, "noise"),
        ({"levels": 0}, "levels.*>= 1"),
        ({"samples": 0}, "samples.*>= 1"),
        ({"warm_up": -1}, "warm_up"),
        ({"epochs": 0}, "epochs"),
        ({"lr": 0.0}, "lr"),
        ({"clip_norm": 0.0}, "clip_norm"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        EmbedOptions(**options)


def test_bad_input_is_refused(task):
    x, y, triggers = task.x, task.y, task.triggers
    with pytest.raises(InputError, match="no parameters"):
        embed(nn.Flatten(), x, y, triggers)
    with pytest.raises(InputError, match="triggers \\(1, 2, 2\\)"):
        embed(task.net(), x, y, TriggerSet(torch.rand(2, 1, 2, 2), torch.tensor([0, 1]), 3, "noise", False))
    more = TriggerSet(triggers.x, triggers.y + 2, 5, "noise", False)
    with pytest.raises(InputError, match="outside the classes 0 to 2"):
        embed(task.net(), x, y, more)
    with pytest.raises(InputError, match="one label per input"):
        embed(task.net(), x, y[:5], triggers)
    with pytest.raises(InputError, match="not finite in epoch 1"):
        embed(task.net(), x, y, triggers, EmbedOptions(noise=0.0, epochs=1, lr=1e30, batch_size=20))
