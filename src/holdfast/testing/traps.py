"""Networks that round badly, each with a point of the threat set at which the network fails by a hair.

Inputs are single pixels in [0, 1], so that linf, l2 and l1 balls, a patch of one pixel and one changed pixel are the
same interval, and every bound is tight in real arithmetic where the network is monotone: whether a certificate holds is
decided only by its rounding-error term. The bias of the last layer is the largest one with which the network still
fails at the end of the interval: as it is run in its own precision, or in rational arithmetic. A sound certificate
proves none of these.
"""

import itertools
import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

import torch
from torch import Tensor, nn

from holdfast.threats import L1, L2, Box, Linf, Patch, PatchShape, Sparse, Threat

CENTRE, RADIUS = 0.5, 0.25
THREATS: dict[str, Threat] = {
    "linf": Linf(RADIUS),
    "l2": L2(RADIUS),
    "l1": L1(RADIUS),
    "box": Box(torch.full((1, 1, 1), RADIUS)),
    "patch": Patch(1, 1, low=CENTRE - RADIUS, high=CENTRE + RADIUS),
    "patch-shape": PatchShape("square", 1, low=CENTRE - RADIUS, high=CENTRE + RADIUS),
    "sparse": Sparse(1, low=CENTRE - RADIUS, high=CENTRE + RADIUS),
}
"""The same interval of one pixel as each kind of threat."""


@dataclass(frozen=True, eq=False)
class Trap:
    """A model, a clean input of class 0, and a point within 0.25 of it at which class 0 does not win."""

    name: str
    model: nn.Sequential
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
            rows = zip(layer.weight.tolist(), layer.bias.tolist(), strict=True)
            values = [sum((Fraction(w) * v for w, v in zip(ws, values, strict=True)), Fraction(b)) for ws, b in rows]
        elif isinstance(layer, nn.ReLU):
            values = [max(v, Fraction(0)) for v in values]
        else:
            assert isinstance(layer, nn.Flatten)
    return values


def is_chain(model: nn.Sequential) -> bool:
    """Whether `exact` can evaluate the model."""
    return all(isinstance(layer, nn.Flatten | nn.Linear | nn.ReLU) for layer in model)


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


def _bias(model: nn.Sequential) -> Tensor:
    return model[-1].get_parameter("bias")


def _set(model: nn.Sequential, bias: float) -> nn.Sequential:
    _bias(model).data[0] = bias
    return model


def _margin(model: nn.Sequential, value: float, rational: bool = False) -> float:
    """z_0 - z_1 at one pixel, as the model is run or exactly; only its sign is used where that is delicate."""
    if rational:
        logits = exact(model, value)
        return float(logits[0] - logits[1])
    found = model(_pixel(value, _bias(model).dtype))[0]
    return float(found[0] - found[1])


def _pixel(value: float, dtype: torch.dtype) -> Tensor:
    return torch.full((1, 1, 1, 1), value, dtype=dtype)


@torch.no_grad()
def trap(name: str, model: nn.Sequential, *, rational: bool = False) -> Trap | None:
    """The model with the largest bias that fails at an end of the interval; None if rounding leaves no such network."""
    dtype, model = _bias(model).dtype, _set(model.eval(), 0.0)
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


@cache
def traps(dtype: torch.dtype = torch.float32) -> tuple[Trap, ...]:
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
    return (*(one for one in found if one is not None), *special(dtype))


def some_traps(threat: str, dtype: torch.dtype, first: bool) -> tuple[Trap, ...]:
    """All of the traps for the first threat of a method in float32; others meet a share, each threat another one.

    On one pixel all threats are the same interval, so that they differ only in their own few lines.
    """
    if first:
        return traps(dtype)[:: 1 if dtype == torch.float32 else 3]
    return traps(dtype)[list(THREATS).index(threat) :: len(THREATS)]


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


def _normed(dtype: torch.dtype, sign: float) -> nn.Sequential:
    norm, conv = nn.BatchNorm2d(1, eps=0.0, dtype=dtype), nn.Conv2d(1, 1, 1, dtype=dtype)
    tensors = norm.get_buffer("running_mean"), norm.get_buffer("running_var"), conv.weight, conv.get_parameter("bias")
    for tensor, value in zip(tensors, (0.4999, 1e-9, 0.3, 7.0), strict=True):
        nn.init.constant_(tensor, value)
    head = _dense(torch.tensor([[sign], [0.0]], dtype=dtype), torch.zeros(2, dtype=dtype))
    return nn.Sequential(norm, conv, nn.Flatten(), head).eval()


class _Residual(nn.Module):
    """K x - (K - k) x: cancels all but k x."""

    def __init__(self, dtype: torch.dtype, large: float, small: float) -> None:
        super().__init__()
        one = torch.ones(1, dtype=dtype)
        self.first, self.second = _dense(one[None] * large, one), _dense(one[None] * -(large - small), one)

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = self.first(x) + self.second(x)
        return total
