"""Descents side by side are descents one by one, and each network is kept where its loss enters the bin."""

from itertools import chain

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import holdfast as hf
from holdfast.analyze.volume.family import make_family
from holdfast.analyze.volume.fitting import make_fitting
from holdfast.analyze.volume.gradient_descent import descend, gradient_descent
from holdfast.analyze.volume.poison import poison
from holdfast.analyze.volume.wedge import one_hidden_layer, wedge_task
from holdfast.data import Split


def test_networks_do_not_see_each_other():
    torch.manual_seed(0)
    module = hf.make_model("mlp", input_shape=(4,), classes=3, hidden=(5,)).double()
    family = make_family(module)
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.arange(6) % 3
    starts = family.draw(3, seed=0, like=x)
    found, steps = descend(family, starts, x, y, epochs=4, lr=0.1, momentum=0.5, batch_size=6)
    assert steps == 4
    for start, end in zip(starts, found, strict=True):
        vector_to_parameters(start.clone(), module.parameters())
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5)
        for _ in range(4):
            optimizer.zero_grad()
            cross_entropy(module(x), y).backward()
            optimizer.step()
        assert torch.allclose(parameters_to_vector(module.parameters()).detach(), end, rtol=1e-10)


def test_each_epoch_sees_every_sample_once():
    seen = []
    family = make_family(torch.nn.Sequential(torch.nn.Linear(1, 2)))
    x, y = torch.arange(5.0)[:, None], torch.tensor([0, 1, 0, 1, 0])

    class Spy:
        def __getattr__(self, name):
            return getattr(family, name)

        def logits(self, weights, batch, **options):
            seen.append(batch.flatten().tolist())
            return family.logits(weights, batch, **options)

    descend(Spy(), family.draw(1, seed=0), x, y, epochs=2, lr=0.1, batch_size=2)
    assert [len(part) for part in seen] == [2, 2, 1, 2, 2, 1]
    assert sorted(chain(*seen[:3])) == sorted(chain(*seen[3:])) == x.flatten().tolist()
    assert seen[:3] != seen[3:]


def first_in(trace, fitting, low, high):
    """By the definition, run by run: the first step with a loss of at most high decides whether a run counts."""
    for run in range(trace.shape[1]):
        accuracy, loss = fitting.measure(trace[:, run])
        stop = ((accuracy == 1) & (loss <= high)).nonzero()[:1, 0].tolist()
        if stop and float(loss[stop[0]]) > low:
            return trace[stop[0], run]
    return None


def test_networks_are_kept_where_the_first_run_enters_the_bin():
    train, _ = wedge_task(seed=5)
    fitting = make_fitting(one_hidden_layer(10), train.x[:6], train.y[:6], divisor=1.0)
    bins = [(0.0, 0.6), (0.6, 0.65), (0.65, 10.0), (0.0, 0.0001)]
    how = {"epochs": 100, "lr": 0.2, "batch_size": 4}
    found = gradient_descent(fitting, bins[:3], **how, runs=8, start="default")
    trace = []
    starts = fitting.family.start(8, seed=0, like=fitting.x)
    descend(fitting.family, starts, fitting.x, fitting.y, **how, after=lambda now, _: trace.append(now.clone()))
    expected = [first_in(torch.stack(trace), fitting, *edges) for edges in bins[:3]]
    assert found.bin.tolist() == [0, 1, 2]
    for weights, known in zip(found.weights, expected, strict=True):
        assert torch.equal(weights, known)
    assert torch.allclose(fitting.measure(found.weights)[1], found.loss)
    none = gradient_descent(fitting, bins[3:], **{**how, "epochs": 2}, runs=2)
    assert none.hits.tolist() == [0]
    assert len(none.weights) == 0


def test_poisoned_networks_fit_and_fail():
    train, test = wedge_task(seed=0)
    fitting = make_fitting(one_hidden_layer(20), train.x, train.y, divisor=1.0)
    found = poison(fitting, test, runs=4, epochs=800, seed=0)
    assert len(found.weights) >= 1
    assert bool((fitting.measure(found.weights)[0] == 1).all())
    right = (fitting.family.logits(found.weights, test.x).argmax(2) == test.y).double().mean(1)
    assert torch.equal(right, found.accuracy)
    assert float(found.accuracy[0]) == 0
    assert found.accuracy.tolist() == sorted(found.accuracy.tolist())
    with pytest.raises(hf.InputError, match="at least one test sample"):
        poison(fitting, Split(test.x[:0], test.y[:0]))
