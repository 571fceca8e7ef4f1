"""Constants of every shape that broadcasts against a map: one number, channels, rows, columns, images."""

import pytest
import torch
from nets import QUICK
from torch import nn

import holdfast as hf
from holdfast.bounding.graph.ops import is_per_channel
from holdfast.random import Noise

SHAPES = [(), (1,), (1, 1, 1), (4, 1, 1), (1, 4, 1), (4,), (1, 1, 4), (1, 4, 4), (4, 4, 4), (1, 4, 4, 4)]
"""For maps of 4 channels and 4 x 4 places, where sizes cannot tell a row, a column and a channel apart."""


class Shifted(nn.Module):
    """Convolutions around (z - shift) * factor, once on the input and once on hidden maps."""

    def __init__(self, shape, what):
        super().__init__()
        one = torch.ones(())
        self.register_buffer("shift", torch.rand(shape) + 0.5 if what != "factor" else one)
        self.register_buffer("factor", torch.rand(shape) + 0.5 if what != "shift" else one)
        self.front, self.middle = nn.Conv2d(4, 4, 3, 1, 1), nn.Conv2d(4, 4, 3, 1, 1)
        self.last = nn.Conv2d(4, 4, 3, 2, 1)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        z = torch.relu(self.front((x - self.shift) * self.factor))
        z = torch.relu(self.middle((z - self.shift) * self.factor))
        return self.head(torch.relu(self.last(z)).flatten(1))


@torch.no_grad()
@pytest.mark.parametrize("what", ["shift", "factor", "both"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bounds_hold_and_are_those_of_the_whole_image(shape, what):
    torch.manual_seed(len(shape))
    model, x, threat = Shifted(shape, what).eval(), torch.rand(3, 4, 4, 4), hf.Linf(0.1)
    spelt = Shifted((4, 4, 4), "both").eval()
    spelt.load_state_dict(
        model.state_dict() | {name: getattr(model, name).expand(1, 4, 4, 4)[0].clone() for name in ("shift", "factor")}
    )
    points = [x + 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(i)).sign() for i in range(30)]
    for entry in hf.methods("bounds"):
        if "linf" not in entry.threats:
            continue
        given = hf.bounds(model, x, threat, entry.name, **QUICK.get(entry.name, {}))
        whole = hf.bounds(spelt, x, threat, entry.name, **QUICK.get(entry.name, {}))
        for point in points:
            logits = model(point.clamp(0, 1))
            assert bool((given.lower <= logits).all()), entry.name
            assert bool((logits <= given.upper).all()), entry.name
        torch.testing.assert_close(given.lower, whole.lower, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(given.upper, whole.upper, rtol=1e-3, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_patches_are_bounded_with_any_constant(shape):
    torch.manual_seed(len(shape))
    model, x, threat = Shifted(shape, "both").eval(), torch.rand(2, 4, 4, 4), hf.Patch(2, 2)
    logits = model(x)
    margin = hf.certify(model, x, logits.argmax(1), threat, "patch").margin
    for draw in range(60):
        point = threat.random_start(x, Noise.for_batch(draw, len(x)))
        moved = model(threat.project(x + (point - x).sign(), x))
        own = moved.gather(1, logits.argmax(1)[:, None])[:, 0]
        others = moved.scatter(1, logits.argmax(1)[:, None], -torch.inf).amax(1)
        assert bool((margin <= own - others).all())


def test_windows_of_maps_see_only_constants_of_a_channel():
    assert [shape for shape in SHAPES if is_per_channel(torch.zeros(shape), 4)] == [(), (1,), (1, 1, 1), (4, 1, 1)]
