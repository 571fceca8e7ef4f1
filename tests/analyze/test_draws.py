"""Transfer between draws, and accuracy against draws and queries."""

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.analyze.draws import accuracy_by_draws, accuracy_by_queries, transfer_between_draws
from holdfast.models import adv_bnn


def task(std=0.05):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 10), nn.ReLU(), nn.Linear(10, 3))
    with torch.no_grad():
        for p in plain.parameters():
            p.copy_(torch.randn_like(p))
    model, x = adv_bnn(plain, posterior_std=std).eval(), torch.rand(20, 8)
    return model, x, model.predict(x)


def test_the_diagonal_is_white_box_accuracy_and_equal_draws_give_constant_rows():
    model, x, y = task()
    found = transfer_between_draws(model, x, y, "linf:0.1", draws=4, seed=3)
    one = model.sample(4)
    x_adv = hf.attack(one, x, y, hf.Linf(0.1), "pgd", steps=20, step_size=0.025, random_start=False).x_adv
    assert float(found.matrix[1, 1]) == pytest.approx(float((one(x_adv).argmax(1) == y).double().mean()), abs=1e-6)
    assert found.summary.min <= found.summary.mean <= found.summary.max
    still = transfer_between_draws(task(std=0.0)[0], x, y, hf.Linf(0.1), draws=3).matrix
    assert torch.equal(still, still[:1, :1].expand(3, 3))
    with pytest.raises(hf.InputError, match="only a random network"):
        transfer_between_draws(one, x, y, "linf:0.1")
    with pytest.raises(hf.InputError, match="at least 2"):
        transfer_between_draws(model, x, y, "linf:0.1", draws=1)


def test_accuracy_and_rise_for_each_number_of_draws():
    model, x, y = task()
    found = accuracy_by_draws(model, x, y, "linf:0.2", samples=(1, 4), steps=4)
    assert found.numbers == (1, 4)
    assert found.rise.shape == (2, 20)
    assert float(found.rise.mean()) > 0
    assert all(0 <= value < 1 for value in found.accuracy)
    still = task(std=0.0)[0]
    both = accuracy_by_draws(still, x, still.predict(x), "linf:0.1", samples=(1, 4), steps=4).accuracy
    assert both[0] == both[1]
    for samples in ((), (0, 1)):
        with pytest.raises(hf.InputError, match="each at least 1"):
            accuracy_by_draws(model, x, y, "linf:0.1", samples=samples)


def test_more_queries_leave_no_more_accuracy():
    model, x, y = task(std=0.01)
    found = accuracy_by_queries(model, x, y, "linf:0.3", queries=(110, 220))
    assert set(found) == {"eot-square", "eot-nes"}
    for curve in found.values():
        assert curve.accuracy[1] <= curve.accuracy[0]
        assert curve.accuracy[1] < 1
    with pytest.raises(hf.InputError, match="at least one budget"):
        accuracy_by_queries(model, x, y, "linf:0.3", queries=())
