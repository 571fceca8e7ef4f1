"""Random networks whose branches meet in every way that the networks of users have."""

import random
from collections.abc import Callable

import torch
from nets import settle
from torch import Tensor, nn

from holdfast.models.layers import MinMax

SHAPE = (2, 7, 8)  # not square, and odd: a stride leaves a row over


class Meet(nn.Module):
    """The branches side by side on one input, then their sum or their concatenation."""

    def __init__(self, branches: list[nn.Module], *, concatenate: bool) -> None:
        super().__init__()
        self.branches, self.concatenate = nn.ModuleList(branches), concatenate

    def forward(self, x: Tensor) -> Tensor:
        values = [branch(x) for branch in self.branches]
        if self.concatenate:
            return torch.cat(values, 1)
        total = values[0]
        for value in values[1:]:
            total = total + value
        return total


class Dense(nn.Module):
    """Flattens the maps and mixes all of their values."""

    def __init__(self, before: tuple[int, ...], after: tuple[int, ...]) -> None:
        super().__init__()
        self.after = after
        self.linear = nn.Linear(torch.Size(before).numel(), torch.Size(after).numel())

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.flatten(1)).view(x.size(0), *self.after)


class Folded(nn.Module):
    """Some layers on the maps read as maps of another shape: neighbours before are none after."""

    def __init__(self, shape: tuple[int, int, int], layers: nn.Module) -> None:
        super().__init__()
        self.shape, self.layers = shape, layers

    def forward(self, x: Tensor) -> Tensor:
        c, h, w = self.shape
        return self.layers(x.reshape(x.size(0), c, w, h)).reshape(x.size(0), -1, h, w)


def halving(
    draw: random.Random, inputs: int, outputs: int, bend: Callable[[], nn.Module], *, max_pool: bool
) -> list[nn.Module]:
    """Branches from (inputs, h, w) to (outputs, ceil(h / 2), ceil(w / 2)), in random order."""
    narrow = nn.Conv2d(inputs, outputs, 3, 2, 1)
    branches = [
        nn.Conv2d(inputs, outputs, 1, 2, bias=draw.random() < 0.5),
        nn.Sequential(nn.Conv2d(inputs, outputs, 1, 2, bias=False), nn.BatchNorm2d(outputs)),
        narrow,
        nn.Sequential(narrow, nn.BatchNorm2d(outputs), bend()),  # a layer that two branches share
        nn.Conv2d(inputs, outputs, 5, 2, 2),
        nn.Conv2d(inputs, outputs, 3, 2, 2, dilation=2),
        nn.Sequential(nn.Conv2d(inputs, outputs, 3, 1, 1), bend(), nn.Conv2d(outputs, outputs, 3, 2, 1)),
        nn.Sequential(nn.Conv2d(inputs, outputs, 3, 2, 1), bend(), nn.Conv2d(outputs, outputs, 3, 1, 1)),
        nn.Sequential(nn.AvgPool2d(2, 2, ceil_mode=True, count_include_pad=False), nn.Conv2d(inputs, outputs, 1)),
    ]
    if max_pool:
        branches.append(nn.Sequential(nn.MaxPool2d(3, 2, 1), nn.Conv2d(inputs, outputs, 1)))
    draw.shuffle(branches)
    return branches


def keeping(
    draw: random.Random, shape: tuple[int, int, int], outputs: int, bend: Callable[[], nn.Module]
) -> list[nn.Module]:
    """Branches from `shape` (C, h, w) to (outputs, h, w), in random order."""
    inputs, h, w = shape
    branches = [
        nn.Conv2d(inputs, outputs, 1),
        nn.Conv2d(inputs, outputs, 3, 1, 1),
        nn.Sequential(nn.Conv2d(inputs, outputs, 3, 1, 1), nn.BatchNorm2d(outputs), bend()),
        nn.Sequential(bend(), nn.Conv2d(inputs, outputs, (3, 1), 1, (1, 0))),
        nn.Conv2d(inputs, outputs, 3, 1, 1, groups=2),
        Dense(shape, (outputs, h, w)),
        Folded(shape, nn.Conv2d(inputs, outputs, 3, 1, 1)),
        nn.Sequential(nn.AvgPool2d(3, 1, 1), nn.Conv2d(inputs, outputs, 1, bias=False)),
        nn.Sequential(MinMax(), nn.Conv2d(inputs, outputs, 1)),
    ]
    if inputs == outputs:
        branches += [nn.Identity(), nn.Identity(), bend()]
    draw.shuffle(branches)
    return branches


def random_dag(
    seed: int,
    activations: tuple[type[nn.Module], ...] = (nn.ReLU, nn.LeakyReLU, nn.Tanh),
    *,
    max_pool: bool = True,
) -> nn.Module:
    """A network from images of SHAPE to three logits, in eval mode; the seed decides on layout and weights."""
    draw, shape = random.Random(seed), SHAPE
    torch.manual_seed(seed)

    def bend() -> nn.Module:
        return draw.choice(activations)()

    layers: list[nn.Module] = [bend()] if draw.random() < 0.2 else []
    for _ in range(draw.randint(2, 4)):
        outputs, count = draw.choice([2, 4]), draw.randint(1, 3)
        concatenate = count > 1 and draw.random() < 0.3
        if min(shape[1:]) > 1 and draw.random() < 0.6:
            branches = halving(draw, shape[0], outputs, bend, max_pool=max_pool)
            shape = (shape[0], -(-shape[1] // 2), -(-shape[2] // 2))
        else:
            branches = keeping(draw, shape, outputs, bend)
        layers.append(Meet(branches[:count], concatenate=concatenate))
        shape = (outputs * (count if concatenate else 1), *shape[1:])
        layers += [bend()] if draw.random() < 0.7 else []
    ends = [nn.Flatten()] if draw.random() < 0.5 else [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    size = torch.Size(shape).numel() if len(ends) == 1 else shape[0]
    return settle(nn.Sequential(*layers, *ends, nn.Linear(size, 3)))
