"""Networks built around a hidden counter-example: a sound tool may not say that they hold.

The spike of a planted network is too narrow for random points and its surroundings are flat, so that descent has
nothing to follow: a verdict "holds" can only come from a proof that is wrong.
"""

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.properties import Case, Polytope, Property


def planted(inputs: int, width: float, depth: int, seed: int) -> tuple[nn.Module, torch.Tensor]:
    """A random network plus a spike that lowers its first output by 100 within `width` of a place; and the place."""
    noise = torch.Generator().manual_seed(seed)
    place = torch.rand(inputs, generator=noise)
    random = [torch.randn(8, inputs if i == 0 else 8, generator=noise) / 3 for i in range(depth)]

    class Planted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers: list[nn.Module] = []
            for weight in random:
                layer = nn.Linear(weight.shape[1], 8)
                layer.weight.data, layer.bias.data = weight, torch.zeros(8)
                layers += [layer, nn.ReLU()]
            self.base = nn.Sequential(*layers, nn.Linear(8, 2))
            self.near, self.spike = nn.Linear(inputs, 2 * inputs), nn.Linear(2 * inputs, 1)
            eye = torch.eye(inputs)
            self.near.weight.data, self.near.bias.data = torch.cat([eye, -eye]), torch.cat([-place, place])
            self.spike.weight.data.fill_(-1 / width)
            self.spike.bias.data.fill_(1.0)
            self.out = nn.Linear(1, 2, bias=False)
            self.out.weight.data = torch.tensor([[-100.0], [0.0]])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            peak = torch.relu(self.spike(torch.relu(self.near(x))))
            return self.base(x) + self.out(peak)

    torch.manual_seed(seed)
    return Planted().eval(), place


@pytest.mark.parametrize("inputs", [1, 2, 3])
@pytest.mark.parametrize("width", [1e-2, 1e-4])
def test_verify_finds_the_planted_counter_example_or_does_not_know(inputs, width):
    for seed in range(2):
        model, place = planted(inputs, width, 2, seed)
        asked = Property((Case([0.0] * inputs, [1.0] * inputs, (Polytope([[1.0, 0.0]], [-50.0]),)),))
        assert float(model(place[None])[0, 0].detach()) < -50
        found = hf.verify(model, asked, timeout=5)
        assert found.status != "holds"
        if found.status == "violated":
            assert float(model(found.counterexample[None])[0, 0].detach()) <= -50


@pytest.mark.parametrize("inputs", [2, 3])
def test_input_split_does_not_certify_over_a_planted_example(inputs):
    for seed in range(3):
        model, place = planted(inputs, 1e-3, 1, seed)
        x = (place + 0.03).clamp(0, 1)[None]
        label = model(x).argmax(1)
        model.out.weight.data = torch.tensor([[-100.0], [0.0]]).roll(int(label), 0)
        threat = hf.Linf(0.04)
        assert bool(threat.contains(place[None], x).all())
        assert int(model(place[None]).argmax()) != int(label)
        assert not bool(hf.certify(model, x, label, threat, "input-split", time_limit=2).certified.any())


def test_the_plants_are_hard_to_find_and_holds_is_said_without_them():
    """Else the tests above would say nothing."""
    model, _ = planted(3, 1e-4, 2, 0)
    points = torch.rand(100_000, 3)
    assert float(model(points)[:, 0].min().detach()) > -50
    model.out.weight.data.zero_()
    asked = Property((Case([0.0] * 3, [1.0] * 3, (Polytope([[1.0, 0.0]], [-50.0]),)),))
    assert hf.verify(model, asked, timeout=5).status == "holds"
