"""The certificate by balls and boxes: no attack breaks what it proves, and its norms are proved once for each model."""

from collections import OrderedDict
from copy import deepcopy
from itertools import pairwise

import pytest
import torch
from nets import tiny_nets
from torch import nn

import holdfast as hf
from holdfast.bounding.core.region import region
from holdfast.bounding.graph.trace import trace
from holdfast.bounding.lipschitz.constants import lipschitz_bound
from holdfast.certificates.bcp import bcp, bcp_margins
from holdfast.certificates.core import proved_norms as cache
from holdfast.certificates.core.proved_norms import cached_norm
from holdfast.errors import InputError, UnsupportedError
from holdfast.random import Noise
from holdfast.training.augment import Transform
from holdfast.training.context import Context
from holdfast.training.objectives.bcp import bcp as objective


def trained(model, x, y, eps, steps=80):
    """A few steps of training for the certificate itself, so that it has something to prove."""
    optimizer, state, index = torch.optim.Adam(model.parameters(), lr=1e-2), {}, torch.arange(len(x))
    for step in range(steps):
        ramp = min(1.0, 2 * step / steps)
        threat, noise = hf.L2(eps * ramp), Noise(0, index)
        context = Context(0, step, 0.5, index, noise, Transform(), state, len(x), optimizer, threat, ramp=ramp)
        loss, _ = objective(model, x, y, context)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


class Skip(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        return x + torch.relu(self.inner(x))


@pytest.fixture(scope="module")
def task():
    """Images of 6 x 5 with two bright rows, one pair for each class, and a residual network trained on them."""
    torch.manual_seed(0)
    y = torch.arange(60) % 3
    bright = torch.eye(3).repeat_interleave(2, 1)[:, None, :, None]
    x = (0.2 + 0.6 * bright[y] + 0.2 * torch.randn(60, 1, 6, 5)).clamp(0, 1)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.ReLU(), Skip(), nn.Flatten(), nn.Linear(36, 16), nn.ReLU()
    )
    return trained(nn.Sequential(*model, nn.Linear(16, 3)), x, y, 0.3), x, y


@pytest.mark.parametrize("threat", [hf.L2(0.2), hf.L2(0.6), hf.Linf(0.04), hf.L1(0.5)], ids=str)
def test_no_attack_breaks_what_is_certified(task, threat):
    model, x, y = task
    result = hf.certify(model, x, y, threat, "bcp")
    assert len(set(y[result.certified].tolist())) == 3
    assert bool((result.certified <= (model(x).argmax(1) == y)).all())
    for loss in ("ce", "margin"):
        attack = hf.attack(model, x, y, threat, "pgd", steps=20, loss=loss)
        assert not bool((attack.success & result.certified).any())
        logits = model(attack.x_adv).detach()
        others = logits.scatter(1, y[:, None], -torch.inf).amax(1)
        assert bool((logits.gather(1, y[:, None])[:, 0] - others >= result.margin).all())
    assert bool((result.certified == (result.margin > 0)).all())
    assert set(result.by) <= {"bcp", ""}
    assert result.radius is None


def test_it_proves_more_than_the_plain_lipschitz_bound_and_than_intervals(task):
    model, x, y = task
    threat = hf.L2(0.6)
    ours = hf.certify(model, x, y, threat, "bcp")
    logits = model(x).detach()
    plain = logits.gather(1, y[:, None]) - logits - 0.6 * lipschitz_bound(trace(model, x)).pairs[y].float()
    plain = plain.scatter(1, y[:, None], torch.inf).amin(1)
    intervals = hf.certify(model, x, y, threat, "ibp")
    assert bool((ours.margin >= plain - 1e-3).all())
    assert bool((ours.margin >= intervals.margin - 1e-3).all())
    assert int(ours.certified.sum()) > int(((plain > 0) & (logits.argmax(1) == y)).sum())
    assert int(ours.certified.sum()) > int(intervals.certified.sum())


def test_on_linf_it_generalises_intervals():
    for net, shape in tiny_nets().values():
        torch.manual_seed(1)
        x = torch.rand(6, *shape)
        y = net(x).argmax(1)
        ours = bcp(net, x, y, hf.Linf(0.03), sound=False).margin
        assert bool((ours >= hf.certify(net, x, y, hf.Linf(0.03), "ibp", sound=False).margin - 1e-5).all())


def test_the_margin_falls_with_the_budget_and_is_exact_on_a_linear_model(task):
    model, x, y = task
    found = [hf.certify(model, x, y, hf.L2(eps), "bcp").margin for eps in (0.0, 0.1, 0.3, 0.9)]
    for less, more in pairwise(found):
        assert bool((more <= less + 1e-6).all())
    linear = nn.Linear(7, 2).double().eval()
    x = torch.full((3, 7), 0.5, dtype=torch.float64)
    y = linear(x).argmax(1)
    gap = (linear.weight[0] - linear.weight[1]).norm()
    exact = (linear(x)[:, 0] - linear(x)[:, 1]).abs() - 0.1 * gap
    assert torch.allclose(hf.certify(linear, x, y, hf.L2(0.1), "bcp").margin, exact.detach(), rtol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_input_or_many_in_chunks_give_the_same(task, dtype):
    model, x, y = task
    model, x = deepcopy(model).to(dtype), x.to(dtype)
    whole = hf.certify(model, x, y, hf.L2(0.3), "bcp")
    assert whole.margin.dtype == dtype
    parts = hf.certify(model, x, y, hf.L2(0.3), "bcp", chunk=7)
    one = hf.certify(model, x[5:6], y[5:6], hf.L2(0.3), "bcp")
    assert torch.allclose(parts.margin, whole.margin, atol=1e-5)
    assert one.margin.item() == pytest.approx(whole.margin[5].item(), abs=1e-5)


def test_rounding_is_accounted_for(task):
    """The sound margin is below what any evaluation gives, also by single inputs and in float64."""
    model, x, y = task
    exact = bcp_margins(trace(model, x), region(hf.L2(0.0), x, sound=False), y, sound=False)
    sound = bcp_margins(trace(model, x), region(hf.L2(0.0), x, sound=True), y, sound=True)
    other = torch.ones_like(exact).scatter(1, y[:, None], 0).bool()
    assert bool((sound[other] < exact[other]).all())
    assert torch.allclose(sound, exact, rtol=1e-3)
    with torch.no_grad():
        alone = torch.cat([model(one[None]) for one in x])
        double = deepcopy(model).double()(x.double())
    for logits in (alone, double):
        assert bool((logits.gather(1, y[:, None]) - logits >= sound)[other].all())


def test_norms_are_proved_once_and_anew_when_the_weights_change(task, monkeypatch):
    model, x, y = task
    proved = []

    def counted(op, *, tight):
        proved.append(op)
        return 1.0

    monkeypatch.setattr(cache, "norm_bound", counted)
    monkeypatch.setattr(cache, "_NORMS", OrderedDict())
    first = hf.certify(model, x, y, hf.L2(0.1), "bcp", chunk=13)
    layers = len(proved)
    assert layers == 3  # the last layer is taken row by row
    second = hf.certify(model, x, y, hf.L2(0.1), "bcp", chunk=30)
    assert len(proved) == layers
    assert torch.allclose(first.margin, second.margin, atol=1e-6)
    weight = model[0].weight
    weight.data.mul_(2)  # leaves no trace in the version of the parameter
    hf.certify(model, x, y, hf.L2(0.1), "bcp")
    assert len(proved) == layers + 1
    weight.data.div_(2)
    hf.certify(model, x, y, hf.L2(0.1), "bcp")
    assert len(proved) == layers + 1


def test_the_cache_tells_geometry_apart_and_stays_small(monkeypatch):
    weight = torch.rand(2, 2, 3, 3)
    convs = [nn.Conv2d(2, 2, 3, padding=p, stride=s, bias=False).eval() for p, s in ((0, 1), (1, 1), (1, 2))]
    monkeypatch.setattr(cache, "_NORMS", OrderedDict())
    found = []
    for conv in convs:
        conv.weight.data.copy_(weight)
        graph = trace(nn.Sequential(conv, nn.Flatten()), torch.rand(1, 2, 6, 6))
        found.append(cached_norm(graph.nodes[1].op))
        assert cached_norm(graph.nodes[1].op) == found[-1]
    assert len(set(found)) == 3
    assert len(cache._NORMS) == 3
    monkeypatch.setattr(cache, "LARGEST", 2)
    for n in (3, 4):
        cached_norm(trace(nn.Linear(n, n), torch.rand(1, n)).nodes[1].op)
    assert len(cache._NORMS) <= 3


def test_what_it_cannot_prove_is_refused(task):
    model, x, y = task
    with pytest.raises((InputError, UnsupportedError), match="patch"):
        hf.certify(model, x, y, hf.Patch(2, 2), "bcp")
    gelu = nn.Sequential(nn.Flatten(), nn.Linear(30, 4), nn.GELU(), nn.Linear(4, 3)).eval()
    with pytest.raises(UnsupportedError, match="GELU"):
        hf.certify(gelu, x, y, hf.L2(0.1), "bcp")
