"""Relaxations compared on one model: the same as the bounds that they stand for, and the order found on average."""

import pytest
import torch
from nets import tiny_nets
from torch import nn
from torch.nn.functional import cross_entropy

import holdfast as hf
from holdfast.analyze.tightness import RELAXATIONS, Tightness, tightness, tightness_table
from holdfast.errors import InputError, UnsupportedError
from holdfast.random import Noise


def trained():
    """A network that separates two blobs, so that a budget means something."""
    torch.manual_seed(0)
    y = torch.arange(60) % 2
    x = (torch.rand(60, 6) * 0.3 + 0.5 * y[:, None] * torch.tensor([1, 0, 1, 0, 1, 0]) + 0.1).clamp(0, 1)
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(60):
        optimiser.zero_grad()
        cross_entropy(model(x), y).backward()
        optimiser.step()
    return model.eval(), x, y


def test_each_measure_is_that_of_the_bound_it_stands_for():
    model, shape = tiny_nets()["mlp"]
    x = torch.rand(5, *shape)
    y = model(x).argmax(1)
    found = tightness(model, x, y, hf.Linf(0.03))
    assert list(found) == list(RELAXATIONS)
    for name in ("ibp", "crown-ibp"):
        margin = hf.certify(model, x, y, hf.Linf(0.03), name, sound=False).margin
        single = {name: lambda r, y, noise, name=name: _only_worst(RELAXATIONS[name](r, y, noise), y)}
        assert torch.allclose(tightness(model, x, y, hf.Linf(0.03), relaxations=single)[name].total, -margin, atol=1e-5)


def _only_worst(margins, y):
    worst = margins.scatter(1, y[:, None], torch.inf).amin(1, keepdim=True)
    return torch.cat([worst, torch.zeros_like(margins[:, 1:])], 1)


@pytest.mark.parametrize("name", ["mlp", "cnn", "residual"])
def test_the_loss_bounds_the_loss_at_every_point(name):
    model, shape = tiny_nets()[name]
    x = torch.rand(4, *shape)
    y = model(x).argmax(1)
    found = tightness(model, x, y, hf.Linf(0.02))
    for draw in range(50):
        point = hf.Linf(0.02).random_start(x, Noise.for_batch(draw, 4))
        loss = cross_entropy(model(point), y, reduction="none")
        for result in found.values():
            assert bool((loss <= result.loss + 1e-5).all())


def test_without_a_budget_all_relaxations_give_the_clean_margins():
    model, shape = tiny_nets()["mlp"]
    x = torch.rand(4, *shape)
    y = model(x).argmax(1)
    logits = model(x)
    for result in tightness(model, x, y, hf.Linf(0.0)).values():
        assert torch.allclose(result.total, (logits - logits.gather(1, y[:, None])).sum(1), atol=1e-5)
        assert torch.allclose(result.loss, cross_entropy(logits, y, reduction="none"), atol=1e-5)


def test_the_order_on_a_trained_network_on_average():
    model, x, y = trained()
    found = {name: result.loss.mean() for name, result in tightness(model, x, y, hf.Linf(0.1)).items()}
    assert found["crown-ibp"] < found["cap-ibp"] < found["random"] < found["ibp"]
    # One gradient step from random slopes finds about what CROWN's rule gives.
    assert found["slope-step"] < found["cap-ibp"]
    assert found["slope-step"] < found["crown-ibp"] * 1.01


def test_chunks_do_not_matter_and_the_seed_does():
    model, shape = tiny_nets()["cnn"]
    x = torch.rand(7, *shape)
    y = model(x).argmax(1)
    whole, pieces, other = (
        tightness(model, x, y, hf.Linf(0.05), **options) for options in ({}, {"chunk": 3}, {"seed": 1})
    )
    for name in RELAXATIONS:
        assert torch.allclose(whole[name].total, pieces[name].total, atol=1e-4)
        assert torch.allclose(whole[name].loss, pieces[name].loss, atol=1e-4)
    assert not torch.allclose(whole["random"].total, other["random"].total, atol=1e-4)
    assert torch.equal(whole["crown-ibp"].total, other["crown-ibp"].total)


def test_table():
    values = torch.tensor([1.0, 2.0, 3.0, 6.0])
    rows = tightness_table({"a": Tightness(values, -values)})
    assert [(row["relaxation"], row["measure"]) for row in rows] == [("a", "total"), ("a", "loss")]
    total = rows[0]
    assert (total["mean"], total["min"], total["median"], total["max"]) == (3.0, 1.0, 2.5, 6.0)
    assert total["std"] == pytest.approx(3.5**0.5)
    assert rows[1]["min"] == -6.0


def test_what_makes_no_sense_is_refused():
    model, shape = tiny_nets()["cnn"]
    x, y = torch.rand(2, *shape), torch.tensor([0, 1])
    with pytest.raises(UnsupportedError, match="patch:2x2"):
        tightness(model, x, y, hf.Patch(2, 2))
    with pytest.raises(InputError, match="at least one relaxation"):
        tightness(model, x, y, hf.Linf(0.1), relaxations={})
