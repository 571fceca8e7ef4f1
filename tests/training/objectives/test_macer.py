"""MACER: the loss against its formula, with the same noise."""

import math

import pytest
import torch

from contexts import make_context
from holdfast.training.objectives.macer import macer
from noisy_tasks import net, noisy_logits, task


def test_macer_is_a_hinge_on_the_radius_of_what_is_right():
    model, (x, y) = net(3), task(40)
    y = model(x).argmax(1).where(torch.arange(40) % 4 > 0, y)  # most of them right
    options = {"sigma": 0.3, "samples": 6, "weight": 5.0, "gamma": 1.5, "beta": 4.0}
    loss, metrics = macer(model, x, y, make_context(x), **options)
    logits = noisy_logits(model, x, 0.3, 6)
    fit = -logits.softmax(2).mean(1).gather(1, y[:, None]).log().mean()
    t = (4 * logits).softmax(2).mean(1).double()
    total, counted = 0.0, 0
    for row, label in zip(t.tolist(), y.tolist(), strict=True):
        others = max(p for j, p in enumerate(row) if j != label)
        if row[label] > others:
            normal = torch.distributions.Normal(0.0, 1.0)
            room = float(normal.icdf(torch.tensor(row[label])) - normal.icdf(torch.tensor(others)))
            total += max(0.0, 1.5 - room)
            counted += room < 1.5
    assert 0 < counted < 40
    assert loss.item() == pytest.approx(fit.item() + 5 * 0.3 / 2 * total / 40, rel=1e-4)
    assert float(metrics["hinge"]) == pytest.approx(total / 40, rel=1e-3)


def test_macer_stays_finite_where_the_vote_is_unanimous():
    model, (x, y) = net(), task()
    with torch.no_grad():
        model[3].bias[0] += 1000.0
    loss, metrics = macer(model, x, torch.zeros_like(y), make_context(x))
    loss.backward()
    assert math.isfinite(loss.item())
    assert float(metrics["hinge"]) == 0.0
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters())
