"""Sparse changes against brute force, and against the full box."""

import itertools

import torch
from nets import tiny_nets
from torch import nn

import holdfast as hf


def test_sparse_equals_brute_force_on_one_linear_layer():
    """Every choice of k values at their ends: the tightened first layer is exact."""
    model = nn.Linear(7, 6).eval()
    x = torch.rand(3, 7)
    for k in (1, 2, 7):
        bounds = hf.bounds(model, x, hf.Sparse(k), "ibp", sound=False)
        outputs = []
        for chosen in itertools.combinations(range(7), k):
            for values in itertools.product([0.0, 1.0], repeat=k):
                changed = x.clone()
                changed[:, list(chosen)] = torch.tensor(values)
                outputs.append(model(changed))
        outputs.append(model(x))
        # a value may also stay as it is: fewer than k changes
        for smaller in range(1, k):
            low = hf.bounds(model, x, hf.Sparse(smaller), "ibp", sound=False)
            assert bool((low.lower >= bounds.lower - 1e-6).all())
        stacked = torch.stack(outputs)
        assert bool((bounds.upper >= stacked.amax(0) - 1e-6).all())
        gain = torch.maximum(model.weight * (1 - x[:, None]), -model.weight * x[:, None]).clamp(min=0)
        exact = model(x) + gain.topk(k, dim=2).values.sum(2)
        assert torch.allclose(bounds.upper, exact, atol=1e-5)


def test_sparse_with_every_pixel_free_is_the_full_box():
    model, shape = tiny_nets()["mlp"]
    x = torch.rand(4, *shape)
    y = model(x).argmax(1)
    free = hf.certify(model, x, y, hf.Sparse(6), "sparse").margin
    box = hf.certify(model, x, y, hf.Box(torch.ones(shape)), "ibp").margin
    assert torch.allclose(free, box, atol=1e-4)
    assert bool((hf.certify(model, x, y, hf.Sparse(1), "sparse").margin >= free - 1e-6).all())
