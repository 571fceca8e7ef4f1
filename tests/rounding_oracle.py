"""Networks that round badly, each with a point of the threat set at which the network fails by a hair.

Inputs are single pixels in [0, 1], so that linf, l2 and l1 balls, a patch of one pixel and one changed pixel are the
same interval, and every bound is tight in real arithmetic where the network is monotone: whether a certificate holds is
decided by its rounding-error term alone. The bias of the last layer is the largest one with which the network still
fails at the end of the interval: as it is run in its own precision, or in rational arithmetic. A sound certificate
proves none of these.
"""

import itertools
import math
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor, nn

import holdfast as hf

CENTRE, RADIUS = 0.5, 0.25
THREATS = {
    "linf": hf.Linf(RADIUS),
    "l2": hf.L2(RADIUS),
    "l1": hf.L1(RADIUS),
    "box": hf.Box(torch.full((1, 1, 1), RADIUS)),
    "patch": hf.Patch(1, 1, low=CENTRE - RADIUS, high=CENTRE + RADIUS),
    "sparse": hf.Sparse(1, low=CENTRE - RADIUS, high=CENTRE + RADIUS),
}


@dataclass(frozen=True, eq=False)
class Trap:
    """A model, a clean input of class 0, and a point within 0.25 of it at which class 0 does not win."""

    name: str
    model: nn.Module
    x: Tensor
    bad: Tensor

    @property
    def y(self) -> Tensor:
        return torch.zeros(1, dtype=torch.long)


def exact(model: nn.Sequential, value: float) -> list[Fraction]:
    """The logits of a chain of dense layers and ReLUs in rational arithmetic."""
    values = [Fraction(value)]
    for layer in model:
        if isinstance(layer, nn.Linear):
            weight, bias = layer.weight.tolist(), layer.bias.tolist()
            values = [
                sum((Fraction(w) * v for w, v in zip(row, values, strict=True)), Fraction(b))
                for row, b in zip(weight, bias, strict=True)
            ]
        elif isinstance(layer, nn.ReLU):
            values = [max(v, Fraction(0)) for v in values]
        else:
            assert isinstance(layer, nn.Flatten)
    return values


def _dense(weight: Tensor, bias: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], dtype=weight.dtype)
    layer.weight.data, layer.bias.data = weight.clone(), bias.clone()
    return layer


def _sizes(depth: int, spread: float, generator: torch.Generator) -> list[float]:
    """Sizes of the hidden values, ten to a power within +- spread, no two neighbours more than 36 powers apart."""
    powers = [0.0]
    for _ in range(depth):
        step = (2 * torch.rand((), generator=generator, dtype=torch.float64).item() - 1) * 36
        powers.append(max(-spread, min(spread, powers[-1] + step)))
    return [10.0**p for p in powers]


def chain(seed: int, *, width: int, depth: int, spread: float, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Dense layers and ReLUs on one pixel; all neurons are active on the interval, so the network is affine there.

    Logits are of any size from 1 down to 10 to the power of -spread.
    """
    generator = torch.Generator().manual_seed(seed)
    sizes = _sizes(depth, spread, generator)
    layers: list[nn.Module] = [nn.Flatten()]
    columns = 1
    for before, after in itertools.pairwise(sizes):
        weight = torch.rand(width, columns, generator=generator, dtype=torch.float64) + 0.1
        bias = torch.rand(width, generator=generator, dtype=torch.float64) * after
        layers += [_dense((weight * (after / before)).to(dtype), bias.to(dtype)), nn.ReLU()]
        columns = width
    signs = (torch.arange(columns) % 2 * -2 + 1).double()  # neighbours cancel
    last = torch.stack([signs * (1 + 0.01 * torch.rand(columns, generator=generator, dtype=torch.float64)), 0 * signs])
    size = 10.0 ** (-spread * torch.rand((), generator=generator, dtype=torch.float64).item())
    last = last * (size / sizes[-1])
    return nn.Sequential(*layers, _dense(last.to(dtype), torch.zeros(2, dtype=dtype))).eval()


def _set(model: nn.Module, bias: float) -> nn.Module:
    model[-1].bias.data[0] = bias
    return model


def _margin(model: nn.Module, value: float, rational: bool = False) -> float:
    """z_0 - z_1 at one pixel, as the model is run or exactly; only its sign is used where that is delicate."""
    if rational:
        logits = exact(model, value)
        return float(logits[0] - logits[1])
    found = model(_pixel(value, model[-1].bias.dtype))[0]
    return (found[0] - found[1]).item()


def _pixel(value: float, dtype: torch.dtype) -> Tensor:
    return torch.full((1, 1, 1, 1), value, dtype=dtype)


@torch.no_grad()
def trap(name: str, model: nn.Module, *, rational: bool = False) -> Trap | None:
    """The model with the largest bias that fails at an end of the interval; None if rounding leaves no such network."""
    dtype, model = model[-1].bias.dtype, model.eval()
    _set(model, 0.0)
    ends = [CENTRE - RADIUS, CENTRE + RADIUS]
    values = [_margin(model, end) for end in ends]
    if not all(map(math.isfinite, values)):
        return None
    worst = ends[values.index(min(values))]
    size = 4 * max(abs(v) for v in values) + float(torch.finfo(dtype).tiny)
    low, high = -size, size
    for _ in range(200):  # margins grow with the bias: the largest one that fails
        middle = (low + high) / 2
        low, high = (middle, high) if _margin(_set(model, middle), worst, rational) <= 0 else (low, middle)
    found = torch.tensor(low, dtype=torch.float64).to(dtype)
    for _ in range(4):
        if _margin(_set(model, found.item()), worst, rational) <= 0:
            break
        found = torch.nextafter(found, torch.tensor(-math.inf, dtype=dtype))
    x, bad = _pixel(CENTRE, dtype), _pixel(worst, dtype)
    if _margin(model, worst, rational) > 0 or _margin(model, CENTRE) <= 0:
        return None
    return Trap(name, model, x, bad)


def traps(dtype: torch.dtype = torch.float32) -> list[Trap]:
    """The collection: widths, depths and scales from 1e-30 to 1e30, cancelling, huge and tiny weights."""
    spread = 30.0 if dtype == torch.float32 else 250.0
    found = [
        trap(f"width {width}, depth {depth}, scales 1e+-{scale:g}, seed {seed}", model, rational=seed % 2 == 1)
        for width in (1, 2, 8)
        for depth in (1, 2, 4)
        for scale in (0.0, spread / 6, spread)
        for seed in range(4)
        for model in [chain(seed, width=width, depth=depth, spread=scale, dtype=dtype)]
    ]
    return [one for one in found if one is not None] + special(dtype)


def special(dtype: torch.dtype) -> list[Trap]:
    """Products that underflow, sums that cancel, and other operations than dense layers."""
    found = []
    tiny, huge = (1e-25, 1e37) if dtype == torch.float32 else (1e-200, 1e300)

    def one(value: float, bias: float = 0.0) -> nn.Linear:
        return _dense(torch.tensor([[value]], dtype=dtype), torch.tensor([bias], dtype=dtype))

    def head(value: float) -> nn.Linear:
        return _dense(torch.tensor([[value], [0.0]], dtype=dtype), torch.zeros(2, dtype=dtype))

    relu = nn.ReLU()
    for sign in (1.0, -1.0):
        found += [
            trap("underflow", nn.Sequential(nn.Flatten(), one(huge), relu, one(tiny), relu, head(sign * tiny))),
            trap("overflow", nn.Sequential(nn.Flatten(), one(tiny), relu, one(huge), relu, head(sign * huge * tiny))),
            trap("cancelling bias", nn.Sequential(nn.Flatten(), one(1e-6, 1.0), nn.ReLU(), head(sign * 1e6))),
            trap("tanh", nn.Sequential(nn.Flatten(), one(3.0, -1.0), nn.Tanh(), head(sign * 7.0))),
            trap("sigmoid", nn.Sequential(nn.Flatten(), one(300.0, -160.0), nn.Sigmoid(), head(sign * 1e6))),
            trap("leaky", nn.Sequential(nn.Flatten(), one(-2.0), nn.LeakyReLU(0.3), head(sign * 1.1))),
            trap("batch norm", _normed(dtype, sign)),
            trap("residual", nn.Sequential(nn.Flatten(), _Residual(dtype, 1e5, 1e-4), head(sign * 3.0))),
        ]  # fmt: skip
    return [f for f in found if f is not None]


def _normed(dtype: torch.dtype, sign: float) -> nn.Module:
    norm = nn.BatchNorm2d(1).to(dtype)
    norm.running_mean.fill_(0.4999)
    norm.running_var.fill_(1e-9)
    norm.eps = 0.0
    model = nn.Sequential(norm, nn.Conv2d(1, 1, 1, dtype=dtype), nn.Flatten(), nn.Linear(1, 2, dtype=dtype)).eval()
    model[1].weight.data.fill_(0.3)
    model[1].bias.data.fill_(7.0)
    model[3].weight.data = torch.tensor([[sign], [0.0]], dtype=dtype)
    model[3].bias.data.zero_()
    return model


class _Residual(nn.Module):
    """K x - (K - k) x: cancels all but k x."""

    def __init__(self, dtype: torch.dtype, large: float, small: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 1, dtype=dtype), nn.Linear(1, 1, dtype=dtype)
        self.first.weight.data.fill_(large)
        self.second.weight.data.fill_(-(large - small))
        self.first.bias.data.fill_(1.0)
        self.second.bias.data.fill_(1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x)
