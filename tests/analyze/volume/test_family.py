"""Batched evaluation gives what a loop over the networks gives, whatever the architecture and the chunk."""

import pytest
import torch
from torch import nn
from torch.nn.utils import vector_to_parameters

import holdfast as hf
from holdfast.analyze.volume.family import block_seed, make_family
from holdfast.models import Normalize

PUBLISHED = {0.2: 1714, 0.3: 3447, 0.4: 6699, 0.5: 11074, 0.6: 14954, 0.7: 21131, 0.8: 26479, 0.9: 34521, 1.0: 43746}


class Skip(nn.Module):
    """Not a stack: only torch.func can run it."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.last(x + self.first(x).tanh())


ARCHITECTURES = {
    "lenet": (lambda: hf.make_model("lenet", input_shape=(1, 20, 17), classes=3, width=0.4), (1, 20, 17)),
    "strided": (lambda: hf.make_model("cnn", input_shape=(2, 9, 8), classes=2, layers=((3, 4, 2, 1),)), (2, 9, 8)),
    "mlp": (lambda: hf.make_model("mlp", input_shape=(5,), classes=4, hidden=(6, 3)), (5,)),
    "linear": (lambda: hf.make_model("linear", input_shape=(1, 4, 3), classes=2), (1, 4, 3)),
    "no bias": (lambda: nn.Sequential(nn.Linear(3, 4, bias=False), nn.ReLU(), nn.Linear(4, 2, bias=False)), (3,)),
    "normalised": (lambda: nn.Sequential(Normalize(0.5, 0.2), nn.Flatten(), nn.Linear(12, 2)), (1, 4, 3)),
    "skip": (Skip, (3,)),
}


def loop(module, weights, x, own=False):
    rows = []
    for i, row in enumerate(weights):
        vector_to_parameters(row.clone(), module.parameters())
        rows.append(module(x[i] if own else x))
    return torch.stack(rows)


@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.no_grad()
def test_many_networks_at_once_are_the_networks_one_by_one(name):
    make, shape = ARCHITECTURES[name]
    module = make().double().eval()
    family = make_family(module)
    assert (family.steps is None) == (name == "skip")
    x = torch.rand(5, *shape, dtype=torch.float64)
    weights = family.draw(7, seed=1, like=x)
    expected = loop(module, weights, x)
    for chunk in (1, 3, 64):
        assert torch.allclose(family.logits(weights, x, chunk=chunk), expected, rtol=1e-12, atol=1e-12)
    own = torch.rand(7, 5, *shape, dtype=torch.float64)
    if name != "normalised":
        assert torch.allclose(family.logits(weights, own, own=True, chunk=2), loop(module, weights, own, True))


def test_the_lenets_have_the_published_numbers_of_parameters():
    for width, count in PUBLISHED.items():
        assert make_family(hf.make_model("lenet", input_shape=(1, 28, 28), classes=2, width=width)).size == count
    assert make_family(hf.make_model("lenet", input_shape=(3, 32, 32), classes=2, width=0.5)).size == 15544
    assert make_family(hf.make_model("lenet", input_shape=(1, 28, 28), classes=10)).size == 44426
    assert make_family(hf.make_model("lenet", input_shape=(3, 32, 32), classes=10)).size == 62006


def test_draws_are_uniform_and_decided_by_the_seed():
    family = make_family(nn.Sequential(nn.Linear(10, 10)))
    drawn = family.draw(1000, seed=3, width=2.0)
    assert torch.equal(drawn, family.draw(1000, seed=3, width=2.0))
    assert not torch.equal(drawn, family.draw(1000, seed=4, width=2.0))
    assert 1.99 < float(drawn.max()) <= 2
    assert float(drawn.double().var()) == pytest.approx(4 / 3, rel=0.02)
    assert block_seed(0, 1) != block_seed(1, 0) != block_seed(0, 0)


def test_default_starts_leave_module_and_generator_alone():
    module = nn.Sequential(nn.Linear(4, 3))
    before, state = module[0].weight.clone(), torch.get_rng_state()
    starts = make_family(module).start(2, seed=0)
    assert torch.equal(module[0].weight, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(starts[0], starts[1])
    assert float(starts.abs().max()) <= 0.5


def test_hooks_and_shared_weights_take_the_general_way():
    hooked = nn.Sequential(nn.Linear(3, 2))
    hooked.register_forward_hook(lambda module, x, out: 2 * out)
    layer = nn.Linear(3, 3)
    tied = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    tied[2].bias = tied[0].bias
    for module in (hooked, nn.Sequential(layer, nn.ReLU(), layer), tied):
        family = make_family(module)
        assert family.steps is None
        x, weights = torch.rand(4, 3), family.draw(3, seed=0)
        assert torch.allclose(family.logits(weights, x), loop(module, weights, x).detach(), atol=1e-6)


def test_what_cannot_be_a_family_is_refused():
    with pytest.raises(hf.UnsupportedError, match="'1' \\(BatchNorm1d\\) keeps batch statistics"):
        make_family(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval())
    with pytest.raises(hf.InputError, match="drops units at random"):
        make_family(nn.Sequential(nn.Linear(2, 2), nn.Dropout()))
    with pytest.raises(hf.InputError, match="has no parameters"):
        make_family(nn.ReLU())
    with pytest.raises(hf.InputError, match=r"a torch.nn.Module, got str"):
        make_family("lenet")
    family = make_family(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(hf.InputError, match=r"shape \(M, 6\), got \(1, 5\)"):
        family.logits(torch.zeros(1, 5), torch.zeros(1, 2))
    with pytest.raises(hf.InputError, match="must return logits"):
        make_family(nn.Sequential(nn.Conv2d(1, 2, 3))).logits(torch.zeros(1, 20), torch.zeros(1, 1, 4, 4))
