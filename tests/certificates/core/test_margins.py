"""A network without an activation is one affine map: certificates must reach the closed form of its worst margins."""

import importlib
from dataclasses import replace

import pytest
import torch
from nets import QUICK, settle
from torch import nn

import holdfast as hf
from holdfast.models import Normalize
from holdfast.registry import get
from holdfast.results import CertifyResult

CHANNELS, HEIGHT, WIDTH, CLASSES = 2, 5, 4, 4
SIZE = CHANNELS * HEIGHT * WIDTH
THREATS = (hf.Linf(0.02), hf.L2(0.1), hf.L1(0.2), hf.Sparse(1), hf.Sparse(3), hf.Patch(2, 1))
BY_CONSTANTS = {"gloro", "lipschitz"}  # one Lipschitz constant for each layer, whatever the direction
OF_THEIR_OWN = {"centroid", "nonuniform"}  # a model of its own kind; the volume of a box, not a margin


class Skip(nn.Module):
    """A residual block without an activation, then a dense layer."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.Linear(SIZE, CLASSES)

    def forward(self, x):
        return self.head(torch.flatten(x + self.conv(x), 1))


def linear_models():
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(CLASSES)
    nn.init.uniform_(norm.running_var, 0.5, 2.0)
    nn.init.normal_(norm.weight)
    models = {
        "dense": [nn.Flatten(), nn.Linear(SIZE, CLASSES)],
        "normalised": [Normalize([0.4, 0.6], [0.5, 0.2]), nn.Flatten(), nn.Linear(SIZE, CLASSES)],
        "batch norm": [nn.BatchNorm2d(CHANNELS), nn.Flatten(), nn.Linear(SIZE, CLASSES), norm],
        "two dense": [nn.Flatten(), nn.Linear(SIZE, 7), nn.Dropout(), nn.Linear(7, CLASSES)],
        "convolution": [nn.Conv2d(CHANNELS, 3, 3, padding=1), nn.Flatten(), nn.Linear(3 * HEIGHT * WIDTH, CLASSES)],
        "convolution last": [nn.ZeroPad2d(1), nn.Conv2d(CHANNELS, CLASSES, (HEIGHT + 2, WIDTH + 2)), nn.Flatten()],
        "pooled": [nn.AvgPool2d(2), nn.Flatten(), nn.Linear(4 * CHANNELS, CLASSES)],
        "residual": [Skip()],
    }
    return {name: settle(nn.Sequential(*layers)) for name, layers in models.items()}


def rows_of(model, x):
    """The rows (K, n) of the affine map, read off unit vectors, and the logits of x; float64."""
    model, x = model.double(), x.double()
    units = torch.eye(SIZE, dtype=x.dtype).view(SIZE, *x.shape[1:])
    with torch.no_grad():
        return (model(units) - model(torch.zeros_like(units))).T, model(x)


def drops(rows, x, threat, *, ranges):
    """By how much <row, x'> falls below <row, x> at most, rows (B, M, n), shape (B, M).

    Exact for boxes, patches and sparse changes. For l1 and l2, `ranges="apart"` gives the better of the ball without
    the valid range and the box with it, which is what is promised; "together" the truth, which some certificates reach.
    """
    x = x.double()
    down, up = ((end - x).flatten(1)[:, None] for end in threat.box(x))
    gain = -torch.minimum(rows * down, rows * up)
    match threat:
        case hf.Linf():
            return gain.sum(2)
        case hf.Sparse():
            return gain.unflatten(2, (CHANNELS, -1)).sum(2).topk(threat.k, 2).values.sum(2)
        case hf.Patch():
            masks = threat.masks(threat.locations(x.shape[1:]), x.shape[1:])
            return (gain @ masks.expand(-1, CHANNELS, -1, -1).flatten(1).to(gain).T).amax(2)
    room = torch.where(rows > 0, -down, up)
    if ranges == "apart":
        norm = torch.linalg.vector_norm(rows, 2 if isinstance(threat, hf.L2) else torch.inf, dim=2)
        return torch.minimum(gain.sum(2), threat.eps * norm)
    if isinstance(threat, hf.L1):  # the values with the largest weights go to their ends until the budget is spent
        size, order = rows.abs().sort(2, descending=True)
        room = room.gather(2, order)
        return (size * torch.minimum(room, (threat.eps - room.cumsum(2) + room).clamp(min=0))).sum(2)
    low, high = torch.zeros_like(rows[..., :1]), torch.full_like(rows[..., :1], 1e6)
    for _ in range(200):  # how far a value of weight one moves, until the budget is spent
        step = (low + high) / 2
        spent = torch.minimum(rows.abs() * step, room).square().sum(2, keepdim=True)
        low, high = torch.where(spent < threat.eps**2, step, low), torch.where(spent < threat.eps**2, high, step)
    return (rows.abs() * torch.minimum(rows.abs() * high, room)).sum(2)


def exact_margins(model, x, y, threat, *, ranges="apart"):
    """Smallest worst margin of each input over the other classes, (B,)."""
    rows, logits = rows_of(model, x)
    worst = logits.gather(1, y[:, None]) - logits - drops(rows[y][:, None] - rows, x, threat, ranges=ranges)
    return worst.scatter(1, y[:, None], torch.inf).amin(1)


def near_the_boundary(model, threat):
    """Twenty inputs that cannot be broken, barely, and twenty that can, with the labels that they get."""
    x = torch.rand(1000, CHANNELS, HEIGHT, WIDTH, dtype=torch.float64)
    rows, _ = rows_of(model, x)
    best = (rows - rows.mean(0) > 0).to(x).repeat(1000 // CLASSES, 1).view_as(x)  # for each class in turn
    x = x + torch.rand(1000, 1, 1, 1, dtype=x.dtype) * (best - x)
    with torch.no_grad():
        y = model(x).argmax(1)
    exact = exact_margins(model, x, y, threat)
    holds, broken = (exact > 0).nonzero()[:, 0], (exact <= 0).nonzero()[:, 0]
    chosen = torch.cat([part[exact[part].abs().argsort()[:20]] for part in (holds, broken)])
    return x[chosen], y[chosen], exact[chosen]


CASES = [
    (entry.name, threat)
    for entry in hf.methods("certify")
    for threat in THREATS
    if threat.name in entry.threats and not entry.smoothed and entry.name not in BY_CONSTANTS | OF_THEIR_OWN
]


@pytest.mark.parametrize(("method", "threat"), CASES, ids=str)
@pytest.mark.parametrize("name", linear_models())
def test_a_linear_model_gets_its_exact_margins(name, method, threat):
    if (method, name) == ("cap", "residual"):
        pytest.skip("the dual bound covers layers in sequence")
    torch.manual_seed(1)
    model = linear_models()[name]
    x, y, exact = near_the_boundary(model, threat)
    assert bool((exact > 1e-6).any())
    assert bool((exact < -1e-6).any())
    found = hf.certify(model, x, y, threat, method, **QUICK.get(method, {}))
    truth = exact_margins(model, x, y, threat, ranges="together")
    assert bool((found.margin <= truth + 1e-12).all())
    assert bool((found.certified >= (exact > 1e-5)).all())
    if method != "auto":  # which stops as soon as an input is proved
        slack = 1e-5 if method == "milp" else 1e-8  # what the solver counts as feasible
        assert bool((found.margin >= exact - slack).all())


@pytest.mark.parametrize("threat", THREATS, ids=str)
@pytest.mark.parametrize("name", linear_models())
def test_a_linear_model_gets_the_exact_bounds_of_its_logits(name, threat):
    model = linear_models()[name]
    x = torch.rand(6, CHANNELS, HEIGHT, WIDTH, dtype=torch.float64)
    rows, logits = rows_of(model, x)
    for method in ("ibp", "crown", "crown-ibp"):
        bounds = hf.bounds(model, x, threat, method)
        for sign, found in ((1, bounds.lower), (-1, -bounds.upper)):
            exact = sign * logits - drops((sign * rows).expand(6, -1, -1), x, threat, ranges="apart")
            assert bool((found <= exact).all())
            assert bool((found >= exact - 1e-8).all())


@pytest.mark.parametrize("method", ["ibp", "crown", "auto"])
def test_the_margins_of_a_linear_model_hold_at_the_worst_point_as_it_is_computed(method):
    """In float32, at the sparse changes that lower a margin most, one input at a time and all at once."""
    torch.manual_seed(2)
    model, threat = linear_models()["dense"], hf.Sparse(3)
    x = torch.rand(200, CHANNELS, HEIGHT, WIDTH)
    y = model(x).argmax(1)
    rows, _ = rows_of(model, x)
    model.float()
    margin = hf.certify(model, x, y, threat, method).margin
    for j in range(CLASSES):
        gaps = (rows[y] - rows[j]).view_as(x)
        ends = torch.where(gaps > 0, 0.0, 1.0)
        worst = threat.keep(ends, x, threat.per_pixel(gaps * (x - ends)))
        for logits in (model(worst), torch.cat([model(point[None]) for point in worst])):
            reached = logits.gather(1, y[:, None])[:, 0] - logits[:, j]
            assert bool((margin <= reached).logical_or(y == j).all())


@pytest.mark.parametrize("threat", [hf.L2(0.1), hf.L1(0.2), hf.Sparse(2)], ids=str)
def test_a_padded_first_layer_is_bounded_like_a_padding_layer_before_it(threat):
    """The padding reads one value each: the layer behind it is still the first."""
    torch.manual_seed(3)
    conv = nn.Conv2d(CHANNELS, 3, 3, padding=1)
    rest = [nn.ReLU(), nn.Flatten(), nn.Linear(3 * HEIGHT * WIDTH, CLASSES)]
    bare = nn.Conv2d(CHANNELS, 3, 3)
    bare.load_state_dict(conv.state_dict())
    inside, outside = nn.Sequential(conv, *rest).double().eval(), nn.Sequential(nn.ZeroPad2d(1), bare, *rest)
    x = torch.rand(5, CHANNELS, HEIGHT, WIDTH, dtype=torch.float64)
    y = inside(x).argmax(1)
    for method in ("ibp", "crown-ibp"):
        one, two = (hf.certify(m.double().eval(), x, y, threat, method).margin for m in (inside, outside))
        assert torch.allclose(one, two, atol=1e-9)


@pytest.mark.parametrize("above", [0.0, 1e-4])
def test_a_margin_above_that_of_the_input_itself_is_refused(above, monkeypatch):
    """Logits 0.5, 0.3 and 0.1 of class 0: no certificate can prove more than 0.2 for the first input."""
    model = nn.Linear(3, 3).eval()
    model.weight.data, model.bias.data = torch.eye(3), torch.zeros(3)
    x, y = torch.tensor([[0.5, 0.3, 0.1], [0.1, 0.2, 0.9]]), torch.tensor([0, 2])

    def lie(model, x, y, threat, **options):
        margin = torch.tensor([0.2, 0.1]) * (1 - 1e-6) + torch.tensor([above, 0.0])
        return CertifyResult(margin > 0, margin, by=("ibp",) * 2)

    module = importlib.import_module("holdfast.certificates")  # hf.certify is the function
    monkeypatch.setattr(module, "get", lambda kind, name: replace(get(kind, name), function=lie))
    if above == 0:
        assert hf.certify(model, x, y, hf.Linf(0.1), "ibp").certified.tolist() == [True, True]
        return
    with pytest.raises(hf.SoundnessError, match=r"'ibp' proves a margin of 0.2001 for an input .* has 0.2\."):
        hf.certify(model, x, y, hf.Linf(0.1), "ibp")
