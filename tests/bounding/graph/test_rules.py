"""Every option of every layer with a rule: the bounds hold where torch computes the layer, to the last bit."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from holdfast.bounding import interval
from holdfast.bounding.core.region import Region
from holdfast.bounding.graph.trace import trace
from holdfast.bounding.linear import relaxation as linear
from holdfast.errors import UnsupportedError
from holdfast.models.layers import MinMax

SHAPE = (2, 6, 5)
DTYPES = (torch.float32, torch.float64)


def batch_norm(**options):
    layer = nn.BatchNorm2d(2, **options)
    nn.init.normal_(layer.running_mean)
    nn.init.uniform_(layer.running_var, 1e-4, 3)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)  # negative factors too
    return layer


class Function(nn.Module):
    """A function of torch, called in forward(), perhaps with a constant tensor."""

    def __init__(self, function, constant=None):
        super().__init__()
        self.function = function
        self.register_buffer("constant", constant)

    def forward(self, x):
        return self.function(x) if self.constant is None else self.function(x, self.constant)


AFFINE = {
    "dense over the last axis": lambda: nn.Linear(5, 3),
    "dense without bias": lambda: nn.Sequential(nn.Flatten(), nn.Linear(60, 4, bias=False)),
    "sequence batch norm": lambda: nn.Sequential(nn.Flatten(2), nn.BatchNorm1d(2)),
    "unflattened": lambda: nn.Sequential(nn.Flatten(), nn.Unflatten(1, (3, 4, 5)), nn.Conv2d(3, 1, 2)),
    "concatenation": lambda: Function(lambda x: torch.cat([x, -x, x * 2], 1)),
    "concatenation of rows": lambda: Function(lambda x: torch.cat([x, 1 - x], -2)),
    "sum": lambda: Function(lambda x: (x - 0.3) + (0.2 - 3 * x)),
    "difference": lambda: Function(lambda x: x - (x * 3 - 1)),
    "conv": lambda: nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2)),
    "grouped conv": lambda: nn.Conv2d(2, 4, 3, groups=2, bias=False),
    "same conv": lambda: nn.Conv2d(2, 2, 3, padding="same", dilation=2),
    "valid conv": lambda: nn.Conv2d(2, 2, 3, padding="valid"),
    "conv function": lambda: Function(lambda x, w: F.conv2d(x, weight=w, padding=1), torch.randn(3, 2, 2, 2)),
    "batch norm": batch_norm,
    "plain batch norm": lambda: batch_norm(affine=False),
    "average": lambda: nn.AvgPool2d(2),
    "average with padding": lambda: nn.AvgPool2d((3, 2), stride=(2, 1), padding=(1, 1)),
    "average without its padding": lambda: nn.AvgPool2d(3, stride=2, padding=1, count_include_pad=False),
    "average rounded up": lambda: nn.AvgPool2d(3, stride=2, ceil_mode=True),
    "average rounded up with padding": lambda: nn.AvgPool2d(2, stride=3, padding=1, ceil_mode=True),
    "average rounded up without its padding": lambda: nn.AvgPool2d(
        3, stride=2, padding=1, ceil_mode=True, count_include_pad=False
    ),
    "average with a divisor": lambda: nn.AvgPool2d(2, divisor_override=1),
    "average with a large divisor": lambda: nn.AvgPool2d(2, padding=1, divisor_override=7),
    "average function": lambda: Function(lambda x: F.avg_pool2d(x, kernel_size=2, stride=1, ceil_mode=True)),
    "even adaptive": lambda: nn.AdaptiveAvgPool2d((3, 5)),
    "uneven adaptive": lambda: nn.AdaptiveAvgPool2d((4, 3)),
    "enlarging adaptive": lambda: nn.AdaptiveAvgPool2d((8, None)),
    "adaptive function": lambda: Function(lambda x: F.adaptive_avg_pool2d(x, output_size=(4, 2))),
    "mean": lambda: Function(lambda x: x.mean((-1, 2), keepdim=True)),
    "padding": lambda: nn.ZeroPad2d((1, 0, 2, 3)),
    "cropping": lambda: nn.ZeroPad2d((-1, 0, 2, -2)),
    "negation": lambda: Function(lambda x, w: 0.3 - x * w, torch.tensor([-2.0, 3.0]).view(2, 1, 1)),
    "division": lambda: Function(lambda x, w: (-x) / w, torch.tensor([-0.7, 0.3]).view(2, 1, 1)),
}
MAXIMA = {
    "sorted pairs": MinMax,
    "maximum": lambda: nn.MaxPool2d(2),
    "maximum with padding": lambda: nn.MaxPool2d(3, stride=2, padding=1),
    "dilated maximum": lambda: nn.MaxPool2d((2, 3), stride=1, padding=(1, 0), dilation=(3, 2)),
    "maximum rounded up": lambda: nn.MaxPool2d(2, stride=3, ceil_mode=True),
    "maximum rounded up with padding": lambda: nn.MaxPool2d(3, stride=(2, 3), padding=1, ceil_mode=True),
    "maximum function": lambda: Function(lambda x: F.max_pool2d(x, kernel_size=2, stride=1)),
}
LINED = {
    "relu": nn.ReLU,
    "leaky relu": lambda: nn.LeakyReLU(0.01),
    "leaky relu of slope zero": lambda: nn.LeakyReLU(0.0),
    "leaky relu of slope one": lambda: nn.LeakyReLU(1.0),
    "steep leaky relu": lambda: nn.LeakyReLU(0.7, inplace=True),
    "leaky function": lambda: Function(lambda x: F.leaky_relu(x, negative_slope=0.2)),
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "arctan": lambda: Function(torch.atan),
}
CURVED = {
    "relu6": nn.ReLU6,
    "hardtanh": nn.Hardtanh,
    "shifted hardtanh": lambda: nn.Hardtanh(0.1, 0.7, inplace=True),
    "negative hardtanh": lambda: nn.Hardtanh(-0.7, -0.1),
    "hardsigmoid": nn.Hardsigmoid,
    "softsign": nn.Softsign,
    "selu": nn.SELU,
    "elu": nn.ELU,
    "steep elu": lambda: nn.ELU(3.0, inplace=True),
    "flat elu": lambda: nn.ELU(0.01),
    "celu": lambda: nn.CELU(0.3, inplace=True),
    "wide celu": lambda: nn.CELU(4.0),
    "softplus": nn.Softplus,
    "sharp softplus": lambda: nn.Softplus(beta=7.0),
    "wide softplus": lambda: nn.Softplus(beta=0.1),
    "mirrored softplus": lambda: nn.Softplus(beta=-2.0, threshold=3.0),
    **{
        f"softplus up to {t:g}": lambda t=t: nn.Softplus(beta=1.5, threshold=t)
        for t in (-6.0, -1.0, 0.0, 1.0, 12.0, 60.0)
    },
}
KINKS = (
    0.0,
    3.0,
    -3.0,
    6.0,
    0.1,
    0.7,
    -0.1,
    -0.7,
    1.0,
    -1.0,
    20.0,
    20 / 7,
    200.0,
    -1.5,
    -4.0,
    -2 / 3,
    2 / 3,
    8.0,
    40.0,
)
"""Where one of the activations bends, jumps or saturates."""


def around(value, dtype):
    """The value and its neighbours in that dtype."""
    centre = torch.tensor(value, dtype=dtype)
    ends = [torch.nextafter(centre, torch.tensor(side * math.inf, dtype=dtype)) for side in (-1, 1)]
    return torch.stack([ends[0], centre, ends[1]])


def boxes_and_points(dtype, count=60):
    """Boxes (B, *SHAPE) of many widths and places, and 40 points of each: corners, the middle, random ones, kinks."""
    scale = 10.0 ** torch.randint(-3, 3, (count, 1, 1, 1)).to(dtype)
    middle = scale * torch.randn(count, *SHAPE, dtype=dtype)
    middle[::3] = torch.tensor(KINKS, dtype=dtype)[torch.randint(len(KINKS), (len(middle[::3]), *SHAPE))]
    radius = 10.0 ** torch.empty(count, 1, 1, 1, dtype=dtype).uniform_(-8, 1) * torch.rand(count, *SHAPE, dtype=dtype)
    radius[1::7] = 0
    lower, upper = middle - radius, middle + radius
    share = torch.rand(40, count, *SHAPE, dtype=dtype)
    share[:12] = share[:12].round()
    share[12] = 0.5
    points = lower + share * (upper - lower)
    near = torch.cat([around(k, dtype) for k in KINKS])
    points[20:] = near[torch.randint(len(near), points[20:].shape)]
    return lower, upper, points.clamp(lower, upper)


def check(layer, dtype, method, falls=0.0):
    model = nn.Sequential(Function(torch.clone), layer, nn.Flatten()).to(dtype).eval()
    lower, upper, points = boxes_and_points(dtype)
    graph = trace(model, points[0])
    with torch.no_grad():
        if method == "intervals":
            low, high = interval.output_bounds(graph, lower, upper, sound=True)
        else:
            region = Region(lower, upper, lower)
            relaxed = linear.relaxation(graph, region, slopes=method, hidden=True, sound=True)
            low, high = linear.output_bounds(relaxed)
        outputs = torch.stack([model(p.clone()) for p in points])
        alone = torch.cat([model(p[None].clone()) for p in points[20]])  # another batch, another kernel
        # As near to real arithmetic as can be had: the same weights and points in float64.
        real = model.double()(points[::3].flatten(0, 1).double()).unflatten(0, (-1, len(lower)))
    assert bool((low <= high).all())
    points_only = slice(1, None, 7)
    largest = lower[points_only].abs().flatten(1).amax(1, keepdim=True)
    slack = 1e4 * torch.finfo(dtype).eps * (1 + largest) + 2.1 * falls
    assert bool((high - low)[points_only].le(slack).all())  # not sound by being useless
    for values in (*outputs, alone, *real):
        assert bool((values >= low).all())
        assert bool((values <= high).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*AFFINE, *MAXIMA, *LINED, *CURVED])
def test_intervals_hold_at_every_point_of_the_box(name, dtype):
    for seed in range(3):
        torch.manual_seed(seed)
        layer = (AFFINE | MAXIMA | LINED | CURVED)[name]()
        check(layer, dtype, "intervals", fall(layer) if isinstance(layer, nn.Softplus) else 0.0)


def fall(layer):
    """By how much softplus falls where it becomes the identity."""
    return math.log1p(math.exp(-layer.threshold)) / abs(layer.beta)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layer", [nn.Softplus(), nn.Softplus(1.5, 0.0), nn.Softplus(-2.0, 3.0)], ids=str)
def test_softplus_falls_at_its_threshold_and_the_bounds_know(layer, dtype):
    at = layer.threshold / layer.beta
    near = around(at, dtype)
    values = layer(near[:, None])
    if dtype is torch.float64 or layer.threshold < 20:  # in float32 the fall of the default is lost in rounding
        assert values.diff(dim=0).min().item() == pytest.approx(-fall(layer), rel=1e-3)
    graph = trace(nn.Sequential(Function(torch.clone), layer, nn.Flatten()).to(dtype).eval(), near[:, None])
    for lower, upper in ((near[:1], near[1:2]), (near[1:2], near[2:]), (near[:1], near[2:])):
        low, high = interval.output_bounds(graph, lower[:, None], upper[:, None], sound=False)
        inside = values[(near >= lower) & (near <= upper)]
        assert bool((low <= inside).all() and (inside <= high).all())


def behind_a_layer(layer):
    """A scaling by one in front: the layer is a hidden one, bounded by a backward pass."""
    return nn.Sequential(Function(lambda x: x * 1.0), layer)


@pytest.mark.parametrize("slopes", ["adaptive", "parallel"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*AFFINE, *MAXIMA, *LINED])
def test_linear_bounds_hold_at_every_point_of_the_box(name, dtype, slopes):
    for seed in range(3):
        torch.manual_seed(seed)
        check(behind_a_layer((AFFINE | MAXIMA | LINED)[name]()), dtype, slopes)


IN_PLACE = [nn.Hardtanh(inplace=True), nn.ELU(inplace=True), nn.CELU(inplace=True), nn.LeakyReLU(inplace=True)]


@pytest.mark.parametrize("layer", [*IN_PLACE, nn.ReLU(inplace=True), nn.ReLU6(inplace=True), nn.SELU(inplace=True)])
def test_a_layer_that_works_in_place_leaves_the_bounds_before_it_alone(layer):
    lower, upper = -2 * torch.ones(3, 4), 2 * torch.ones(3, 4)
    graph = trace(nn.Sequential(nn.Linear(4, 4), layer).eval(), torch.rand(3, 4))
    before, after = interval.propagate(graph, lower, upper, sound=True)[1:]
    again = interval.step(graph.nodes[1], [(lower, upper)], sound=True)
    assert torch.equal(before[0], again[0])
    assert torch.equal(before[1], again[1])
    assert not torch.equal(before[0], after[0])


def changed(layer, **attributes):
    """The layer with attributes that its constructor refuses."""
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


REFUSED = {
    "divisor": (nn.AvgPool2d(2, divisor_override=-4), "divisor_override=-4"),
    "divisor of the function": (Function(lambda x: F.avg_pool2d(x, 2, divisor_override=-4)), "divisor_override=-4"),
    "elu": (nn.ELU(-1.0), "ELU with alpha=-1"),
    "elu of zero": (nn.ELU(0.0), "ELU with alpha=0"),
    "celu": (nn.CELU(-1.0), "CELU with alpha=-1"),
    "falling leaky relu": (nn.LeakyReLU(-0.1), "negative_slope=-0.1"),
    "steep leaky relu": (nn.LeakyReLU(1.5), "negative_slope=1.5"),
    "prelu": (nn.PReLU(), "PReLU"),
    "softplus of beta zero": (changed(nn.Softplus(), beta=0.0), "beta=0"),
    "softplus that overflows": (nn.Softplus(threshold=1000.0), "threshold=1000"),
    "softplus without a threshold": (nn.Softplus(threshold=math.nan), "threshold=nan"),
    "hardtanh upside down": (changed(nn.Hardtanh(), min_val=2.0), "min_val=2 and max_val=1"),
    "reflected padding": (nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"), "padding_mode='reflect'"),
    "even kernel": (nn.Conv2d(2, 2, 2, padding="same"), "asymmetric"),
    "transposed": (nn.ConvTranspose2d(2, 2, 3), "ConvTranspose2d"),
    "batch norm of the batch": (nn.BatchNorm2d(2, track_running_stats=False), "running statistics"),
    "group norm": (nn.GroupNorm(1, 2), "GroupNorm"),
    "instance norm": (nn.InstanceNorm2d(2), "InstanceNorm2d"),
    "layer norm": (nn.LayerNorm(SHAPE), "LayerNorm"),
    "local response": (nn.LocalResponseNorm(2), "the model cannot be traced|no rule"),
    "gelu": (nn.GELU(), "GELU"),
    "silu": (nn.SiLU(), "SiLU"),
    "hardswish": (nn.Hardswish(), "Hardswish"),
    "clamp by tensors": (Function(lambda x, c: torch.clamp(x, min=c), torch.zeros(1)), "'clamp'"),
    "clamp": (Function(lambda x: x.clamp(0, 1)), "'clamp'"),
    "softplus function": (Function(lambda x: F.softplus(x, threshold=0)), "'softplus'"),
    "mean of all": (Function(lambda x: x + x.mean()), "all axes"),
    "mean in another dtype": (Function(lambda x: x.mean((2, 3), dtype=torch.float64)), "these arguments"),
    "indices of a maximum": (nn.MaxPool2d(2, return_indices=True), "indices"),
    "rounded division": (Function(lambda x: torch.div(x, 2, rounding_mode="floor")), "'div'"),
    "named input": (Function(lambda x, w: F.linear(input=x, weight=w), torch.ones(1, 5)), "'linear'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_without_a_rule_is_refused_by_name(name):
    layer, message = REFUSED[name]
    with pytest.raises(UnsupportedError, match=message) as caught:
        trace(nn.Sequential(nn.Identity(), layer).eval(), torch.rand(2, *SHAPE))
    assert "layer '" in str(caught.value)
