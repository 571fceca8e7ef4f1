"""Evaluating a network where its input changed equals evaluating it anew."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from holdfast import Linf
from holdfast.attacks.fast import windows as module
from holdfast.attacks.fast.windows import windowed
from holdfast.attacks.square import _search, square
from holdfast.models import Normalize
from holdfast.random import Noise


@pytest.fixture(autouse=True)
def worth_it(monkeypatch):
    """Tiny networks too."""
    monkeypatch.setattr(module, "_WORTH", 0.0)


def make_net(kernel, stride, padding, *, norm=True, channels=2, size=9, pool=False):
    torch.manual_seed(kernel + 10 * stride + 100 * padding)
    layers = [Normalize([0.4] * channels, [0.3] * channels), nn.Conv2d(channels, 4, kernel, stride, padding)]
    if norm:
        layers.append(nn.BatchNorm2d(4))
    layers += [nn.ReLU(), nn.Conv2d(4, 5, 3, 1, 1), nn.LeakyReLU(0.1)]
    if pool:
        layers.append(nn.MaxPool2d(2))
    layers += [nn.Flatten(), nn.LazyLinear(7), nn.ReLU(), nn.Linear(7, 3)]
    net = nn.Sequential(*layers)
    net(torch.rand(4, channels, size, size))
    if norm:
        net[2].running_mean.uniform_(-0.5, 0.5)
        net[2].running_var.uniform_(0.5, 2)
        nn.init.uniform_(net[2].weight, 0.5, 1.5)
    return net.eval().double()


def cut(x, corner, size):
    """The windows of `size` at the corners (B, 2)."""
    return torch.stack(
        [image[:, r : r + size[0], c : c + size[1]] for image, (r, c) in zip(x, corner.tolist(), strict=True)]
    )


def walk(net, size, steps, seed, batch=5, channels=2, side=9):
    """Random proposals, some of them kept; the largest error of the logits, and how many layers were local."""
    generator = torch.Generator().manual_seed(seed)
    best = torch.rand(batch, channels, side, side, generator=generator, dtype=torch.float64)
    local = windowed(net, best)
    local.start(best, size)
    error, depth = 0.0, local.local(size)
    for _ in range(steps if depth else 0):
        corner = torch.stack([torch.randint(0, side - n + 1, (batch,), generator=generator) for n in size], dim=1)
        x_new = best.clone()
        for i, (r, c) in enumerate(corner.tolist()):
            x_new[i, :, r : r + size[0], c : c + size[1]] = torch.rand(channels, 1, 1, generator=generator).double()
        error = max(error, float((local.propose(cut(x_new, corner, size), corner) - net(x_new)).abs().max()))
        kept = torch.rand(batch, generator=generator) < 0.4
        best[kept] = x_new[kept]
        local.settle((~kept).nonzero()[:, 0])
    return error, depth


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 4), st.integers(1, 3), st.integers(0, 2), st.tuples(st.integers(1, 5), st.integers(1, 5)),
    st.booleans(), st.booleans(), st.integers(0, 5),
)  # fmt: skip
@torch.no_grad()
def test_logits_equal_those_of_a_full_pass(kernel, stride, padding, size, norm, pool, seed):
    error, _ = walk(make_net(kernel, stride, padding, norm=norm, pool=pool), size, 6, seed)
    assert error < 1e-12


@torch.no_grad()
def test_small_windows_leave_layers_untouched_and_large_ones_do_not():
    assert walk(make_net(3, 1, 1), (1, 1), 3, 0)[1] == 2
    assert walk(make_net(3, 1, 1), (9, 9), 3, 0)[1] == 0
    for small in (0, 10**6):  # both ways to compute a patch
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "_SMALL", small)
            assert walk(make_net(3, 2, 1), (2, 2), 5, 1)[0] < 1e-12


@torch.no_grad()
def test_inputs_that_leave_take_their_maps_along():
    net, size = make_net(3, 1, 1), (2, 2)
    best = torch.rand(6, 2, 9, 9, dtype=torch.float64)
    local = windowed(net, best)
    local.start(best, size)
    rows = torch.tensor([4, 1])
    local.select(rows)
    x_new, corner = best[rows].clone(), torch.tensor([[3, 4], [0, 7]])
    x_new[0, :, 3:5, 4:6] = 0.9
    x_new[1, :, 0:2, 7:9] = 0.1
    assert torch.allclose(local.propose(cut(x_new, corner, size), corner), net(x_new), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "net",
    [
        nn.Sequential(nn.Flatten(), nn.Linear(162, 3)),
        nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 3)),
        nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.Flatten(), nn.Linear(196, 3)),
        nn.Sequential(nn.Conv2d(2, 4, 3, dilation=2), nn.Flatten(), nn.Linear(100, 3)),
    ],
)
def test_other_networks_are_left_to_full_passes(net):
    assert windowed(net.eval(), torch.rand(2, 2, 9, 9)) is None


def test_hooks_residual_connections_and_control_flow_are_left_to_full_passes():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.top = nn.Conv2d(2, 2, 3, padding=1), nn.Linear(162, 3)

        def forward(self, x):
            return self.top((x + self.conv(x)).flatten(1))

    class Branching(nn.Module):
        def forward(self, x):
            return x.flatten(1) if x.sum() > 0 else -x.flatten(1)

    x = torch.rand(2, 2, 9, 9, dtype=torch.float64)
    assert windowed(Residual().double().eval(), x) is None
    assert windowed(Branching().eval(), x) is None
    hooked = make_net(3, 1, 1)
    assert windowed(hooked, x) is not None
    hooked[1].register_forward_hook(lambda *_: None)
    assert windowed(hooked, x) is None


def test_square_finds_the_same_with_and_without(monkeypatch):
    net = make_net(3, 2, 1).float()
    x = torch.rand(12, 2, 9, 9, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        net[-1].bias -= net(x).mean(0)  # inputs of several classes, some of them near a boundary
    y = net(x).argmax(1)
    part = square(net, x, y, Linf(0.01), queries=150)
    monkeypatch.setattr(module, "_WORTH", float("inf"))
    full = square(net, x, y, Linf(0.01), queries=150)
    assert torch.equal(part.success, full.success)
    assert 0 < int(full.success.sum()) < 12
    assert bool((net(part.x_adv).argmax(1) != y)[part.success].all())
    assert bool(Linf(0.01).contains(part.x_adv, x).all())
    # Rounding may choose between equal proposals, so most paths agree and not all.
    assert (part.queries == full.queries).float().mean() >= 0.7


def test_a_restart_does_not_meet_the_maps_of_the_run_before():
    """The first windows are too large for parts; inputs leave then, while old maps would be of other inputs."""
    net = make_net(3, 2, 1).float()
    x = torch.rand(64, 2, 9, 9, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        net[-1].bias -= net(x).mean(0)
        y, threat, noise = net(x).argmax(1), Linf(0.06), Noise.for_batch(0, 64)
        used, fresh = windowed(net, x), windowed(net, x)
        _search(net, used, x[:4], y[:4], Linf(0.001), noise[:4], queries=100, p_init=0.8)
        runs = [_search(net, each, x, y, threat, noise, queries=100, p_init=0.8) for each in (used, fresh)]
    assert 0 < int((runs[1].queries < 5).sum()) < 64
    assert torch.equal(runs[0].x_adv, runs[1].x_adv)
    assert torch.equal(runs[0].queries, runs[1].queries)
