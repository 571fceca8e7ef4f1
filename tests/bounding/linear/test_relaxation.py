"""Linear bounds: golden values, exactness on affine pieces, independent slow versions, soundness by sampling."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import tiny_nets
from torch import nn

import holdfast as hf
from holdfast.bounding import interval
from holdfast.bounding.core.region import region
from holdfast.bounding.graph import ops
from holdfast.bounding.graph.trace import trace
from holdfast.bounding.linear import relaxation as linear
from holdfast.bounding.linear.coefficients import Coefficients, dense
from holdfast.models.layers import MinMax
from holdfast.random import Noise

THREATS = [hf.Linf(0.05), hf.L2(0.15), hf.L1(0.3)]
METHODS = {"crown": ("adaptive", True), "fastlin": ("parallel", True), "crown-ibp": ("adaptive", False)}


def relaxed(model, x, threat, method="crown", sound=False):
    slopes, hidden = METHODS[method]
    r = region(threat, x, sound=sound)
    return linear.relaxation(trace(model, x), r, slopes=slopes, hidden=hidden, sound=sound)


def points_of(threat, x, count):
    """Random points of the set around one input, half of them pushed to its rim."""
    many = x.expand(count, *x.shape[1:])
    points = threat.random_start(many, Noise.for_batch(7, count))
    far = many + 50 * (points - many)
    return torch.cat([points[: count // 2], threat.project(far, many)[count // 2 :]])


def golden(dtype=torch.float64):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)).to(dtype).eval()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 1.0], [1.0, -1.0]]))
        model[0].bias.copy_(torch.tensor([0.0, -0.1], dtype=dtype))
        model[2].weight.copy_(torch.tensor([[1.0, -0.5], [-0.5, 1.0]]))
        model[2].bias.zero_()
    return model, torch.tensor([[0.5, 0.25]], dtype=dtype), torch.tensor([0])


def test_golden_values_by_hand():
    """Margin f_1 - f_0 at most +0.30 by intervals, -0.1125 by linear bounds; its largest value is -0.30."""
    model, x, y = golden()
    threat = hf.Linf(0.2)
    graph, r = trace(model, x), region(threat, x, sound=False)
    lower, upper = interval.propagate(graph, r.lower, r.upper, sound=False)[1]
    assert torch.allclose(lower, lower.new_tensor([[0.35, -0.25]]))
    assert torch.allclose(upper, upper.new_tensor([[1.15, 0.55]]))
    assert abs(interval.margin_bounds(graph, r.lower, r.upper, y, sound=False)[0, 1].item() + 0.30) < 1e-9
    for method in METHODS:
        relaxation = relaxed(model, x, threat, method)
        planes = linear.margin_planes(relaxation, y)
        assert torch.allclose(planes.coefficients.values[0, 1], -x.new_tensor([-0.46875, -2.53125]))
        assert abs(linear.margin_bounds(relaxation, y)[0, 1].item() - 0.1125) < 1e-9
        assert linear.margin_bounds(relaxation, y)[0, 0] == 0
    values = model(points_of(threat, x, 10_000)).diff(dim=1)
    corner = model(x + x.new_tensor([[-0.2, -0.2]])).diff(dim=1)
    assert values.max() <= -0.30 + 1e-6
    assert abs(corner.item() + 0.30) < 1e-9


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("threat", THREATS, ids=str)
def test_exact_where_every_neuron_is_stable(threat, method):
    model = nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 9), nn.LeakyReLU(0.1), nn.Linear(9, 3))
    model = model.double().eval()
    with torch.no_grad():
        for layer in model[:-1:2]:
            layer.bias.copy_(torch.where(torch.rand(9) < 0.5, 9.0, -9.0))
    x = torch.rand(4, 5, dtype=torch.float64) * 0.2 + 0.4  # far from the ends of the valid range
    weight = torch.func.vmap(torch.func.jacrev(model))(x)
    reach = threat.budget * torch.stack([threat.dual_norm(row) for row in weight.flatten(0, 1)[:, None]]).view(4, 3)
    low, high = linear.output_bounds(relaxed(model, x, threat, method))
    assert torch.allclose(low, model(x) - reach, atol=1e-9)
    assert torch.allclose(high, model(x) + reach, atol=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_no_budget_gives_the_forward_pass(net, method):
    model, shape = net
    x = torch.rand(3, *shape, dtype=torch.float64)
    low, high = linear.output_bounds(relaxed(model.double(), x, hf.Linf(0.0), method))
    assert torch.allclose(low, model(x), atol=1e-7)
    assert torch.allclose(high, model(x), atol=1e-7)


def unrolled(conv, shape):
    """The convolution as a dense layer, column by column."""
    size = int(torch.Size(shape).numel())
    with torch.no_grad():
        nothing = conv(torch.zeros(1, *shape, dtype=conv.weight.dtype))
        columns = conv(torch.eye(size, dtype=conv.weight.dtype).view(size, *shape)) - nothing
        layer = nn.Linear(size, nothing.numel(), dtype=conv.weight.dtype)
        layer.weight.copy_(columns.flatten(1).T)
        layer.bias.copy_(nothing.flatten())
    return layer, tuple(nothing.shape[1:])


CONVOLUTIONS = {
    "plain": ({"kernel_size": 3}, {"kernel_size": 2}),
    "padded": ({"kernel_size": 3, "padding": 1}, {"kernel_size": 3, "padding": (2, 1)}),
    "strided": ({"kernel_size": 4, "stride": 2, "padding": 1}, {"kernel_size": 2, "stride": (1, 2), "padding": 1}),
    "stride with a rest": ({"kernel_size": 2, "stride": 3}, {"kernel_size": (1, 2), "stride": 2, "padding": 1}),
    "dilated": ({"kernel_size": 3, "dilation": 2, "padding": 2}, {"kernel_size": 2, "dilation": (1, 2), "padding": 1}),
    "groups": ({"kernel_size": 3, "groups": 2, "padding": 1}, {"kernel_size": 3, "groups": 4, "stride": 2}),
    "no bias": ({"kernel_size": (3, 1), "bias": False}, {"kernel_size": 1, "bias": False}),
}


@pytest.mark.parametrize("threat", [hf.Linf(0.05), hf.L2(0.2)], ids=str)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_equal_their_matrices(name, threat):
    first, second = (
        nn.Conv2d(c, 4, **options, dtype=torch.float64) for c, options in zip((2, 4), CONVOLUTIONS[name], strict=True)
    )
    dense_1, shape_1 = unrolled(first, (2, 8, 7))
    dense_2, shape_2 = unrolled(second, shape_1)
    head = nn.Linear(int(torch.Size(shape_2).numel()), 3, dtype=torch.float64)
    conv = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), head).eval()
    flat = nn.Sequential(nn.Flatten(), dense_1, nn.ReLU(), dense_2, nn.ReLU(), head).eval()
    x = torch.rand(3, 2, 8, 7, dtype=torch.float64)
    assert torch.allclose(conv(x), flat(x))
    for method in METHODS:
        ours, theirs = relaxed(conv, x, threat, method), relaxed(flat, x, threat, method)
        for a, b in zip(linear.output_bounds(ours), linear.output_bounds(theirs), strict=True):
            assert torch.allclose(a, b, atol=1e-9)
        for a, b in zip(ours.intervals[3], theirs.intervals[4], strict=True):
            assert torch.allclose(a.flatten(1), b, atol=1e-9)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_windows_equal_dense_rows(name):
    first, second = (nn.Conv2d(c, 4, **options) for c, options in zip((2, 4), CONVOLUTIONS[name], strict=True))
    model = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.LazyLinear(2)).eval()
    x = torch.rand(2, 2, 12, 11)
    model(x)
    for sound in (False, True):
        r = relaxed(model, x, hf.Linf(0.05), sound=sound)
        count = r.intervals[3][0][0].numel()
        unit = torch.eye(count).repeat_interleave(2, 0) * torch.tensor([1.0, -1.0]).repeat(count)[:, None]
        unit = unit.view(1, -1, *r.graph.nodes[3].shape).expand(2, -1, -1, -1, -1)
        theirs = linear.backward(r, 3, Coefficients(unit))
        for which in ("all", "some"):
            wanted = torch.ones(2, count, dtype=torch.bool)
            if which == "some":
                wanted[0, 5::2], wanted[1, ::2] = False, False
            neurons = linear.chosen(r.graph, 3, wanted)
            assert neurons.ndim == (1 if which == "all" else 2)
            j, windows, shift = linear._behind(r, 3, neurons)
            assert windows.window is not None
            ours = linear.backward(r, j, windows, shift=shift.expand(linear._rows_of(windows)))
            neurons = neurons.expand(2, neurons.shape[-1])
            rows = (2 * neurons[:, :, None] + torch.arange(2)).flatten(1)
            expected = theirs.coefficients.values.flatten(2).gather(1, rows[:, :, None].expand(-1, -1, x[0].numel()))
            found = dense(ours.coefficients, x.shape[1:]).values.flatten(2)
            assert torch.allclose(found, expected, atol=1e-5)
            a = linear.concretise(r, ours).flatten(1)
            if sound and j != 3:  # what reading the neurons themselves may lose
                a = a - r.errors[3].flatten(1).gather(1, neurons).repeat_interleave(2, 1)
            b = linear.concretise(r, theirs).gather(1, rows)
            # The rounding term grows with the number of terms, so that windows lose less to it.
            assert bool((a >= b - 1e-6).all())
            assert torch.allclose(a, b, atol=1e-3 if sound else 1e-5)


class Branches(nn.Module):
    """Residual block, concatenation, pooling of both kinds and MinMax, for 2 x 8 x 6."""

    def __init__(self):
        super().__init__()
        self.stem, self.inner = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.pool, self.average, self.sort = nn.MaxPool2d((3, 2), 2, (1, 0)), nn.AvgPool2d(2), MinMax()
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        h = torch.relu(self.stem(x))
        h = torch.cat([self.pool(h + self.inner(h)), self.pool(self.sort(h))], 1)
        return self.head(self.average(h).flatten(1))


def branching():
    torch.manual_seed(4)
    return {
        "branches": (Branches().eval(), (2, 8, 6)),
        "minmax": (
            nn.Sequential(nn.Linear(6, 12), MinMax(), nn.Linear(12, 12), MinMax(), nn.Linear(12, 3)).eval(),
            (6,),
        ),
        **tiny_nets(),
    }


@pytest.mark.parametrize("threat", THREATS, ids=str)
@pytest.mark.parametrize("name", branching())
def test_ten_thousand_points_stay_within_the_bounds(name, threat):
    model, shape = branching()[name]
    x = torch.rand(1, *shape)
    y = torch.tensor([1])
    points = points_of(threat, x, 10_000)
    assert bool(threat.contains(points, x.expand_as(points)).all())
    with torch.no_grad():
        logits = model(points)
    margins = logits[:, 1, None] - logits
    for method in METHODS:
        for sound in (False, True):
            r = relaxed(model, x, threat, method, sound)
            low, high = linear.output_bounds(r)
            slack = 0 if sound else 1e-5
            assert bool((logits >= low - slack).all()), method
            assert bool((logits <= high + slack).all()), method
            assert bool((margins >= linear.margin_bounds(r, y) - slack).all()), method


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", branching())
def test_sound_bounds_contain_the_plain_and_the_float64_ones(name, method):
    model, shape = branching()[name]
    x, y = torch.rand(3, *shape), torch.tensor([0, 1, 0])
    plain, sound = (relaxed(model, x, hf.Linf(0.02), method, s) for s in (False, True))
    low, high = linear.output_bounds(sound)
    assert torch.allclose(linear.margin_bounds(plain, y), linear.margin_bounds(sound, y), atol=1e-3)
    ends = linear.output_bounds(plain)
    exact = linear.output_bounds(relaxed(model.double(), x.double(), hf.Linf(0.02), method))
    for other in (ends, exact):
        assert bool((low <= other[0]).all())
        assert bool((high >= other[1]).all())


@pytest.mark.parametrize("method", METHODS)
def test_a_maximum_of_inputs_is_between_its_largest_lower_and_upper_end(method):
    """Max pooling of a box that holds negative values: which input is the largest is open in most windows."""
    model = nn.Sequential(nn.MaxPool2d(2), nn.Flatten()).eval()
    x = torch.rand(20, 1, 4, 4, dtype=torch.float64) - 0.7
    lower, upper = hf.Linf(0.2, low=-1.0).box(x)
    low, high = linear.output_bounds(relaxed(model, x, hf.Linf(0.2, low=-1.0), method))
    assert torch.allclose(low, model(lower), rtol=0, atol=1e-12)
    assert torch.allclose(high, model(upper), rtol=0, atol=1e-12)
    assert bool((high < 0).any())


def test_linear_bounds_are_tighter_than_intervals_on_average():
    for name in ("mlp", "smooth", "cnn", "residual"):
        model, shape = tiny_nets()[name]
        x = torch.rand(20, *shape)
        widths = {}
        for method in (*METHODS, "ibp"):
            bounds = hf.bounds(model, x, hf.Linf(0.02), method, sound=False)
            widths[method] = float((bounds.upper - bounds.lower).detach().mean())
        assert widths["crown"] < widths["ibp"]
        assert widths["fastlin"] < widths["ibp"]
        assert widths["crown"] <= widths["crown-ibp"] * (1 + 1e-5) <= widths["ibp"] * (1 + 1e-4)


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_refining_unstable_neurons_alone_equals_refining_all(name, monkeypatch):
    """The lines of stable neurons are exact whatever their bounds, so the extra rows change nothing for ReLUs."""
    model, shape = branching()[name]
    x, y = torch.rand(3, *shape), torch.tensor([0, 1, 2])
    some = relaxed(model, x, hf.Linf(0.03))
    monkeypatch.setattr(linear, "unstable", lambda op, low, high: torch.ones_like(low, dtype=torch.bool))
    every = relaxed(model, x, hf.Linf(0.03))
    narrower = 0
    for a, b in zip(some.intervals, every.intervals, strict=True):
        assert bool((b[0] >= a[0] - 1e-5).all())
        assert bool((b[1] <= a[1] + 1e-5).all())
        narrower += int((b[1] - b[0] < a[1] - a[0] - 1e-5).sum())
    assert narrower > 0, "there were stable neurons to refine"
    assert torch.allclose(linear.margin_bounds(some, y), linear.margin_bounds(every, y), atol=1e-5)


@pytest.mark.parametrize("name", ["mlp", "cnn", "residual", "branches"])
def test_little_memory_does_not_change_the_bounds(name, monkeypatch):
    model, shape = branching()[name]
    x = torch.rand(3, *shape)
    whole = linear.output_bounds(relaxed(model, x, hf.L2(0.1)))
    calls = []
    plain = linear._ends
    monkeypatch.setattr(linear, "_ends", lambda *args: calls.append(args[2].shape[-1]) or plain(*args))
    monkeypatch.setattr(linear, "MEMORY", 400)
    pieces = linear.output_bounds(relaxed(model, x, hf.L2(0.1)))
    assert max(calls) <= 400 // 3
    for a, b in zip(whole, pieces, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["mlp", "smooth", "cnn"])
def test_gradients_equal_finite_differences(name, method):
    model, shape = tiny_nets()[name]
    model = model.double()
    x, y = torch.rand(2, *shape, dtype=torch.float64), torch.tensor([0, 1])
    weight = model[0].weight

    def bound():
        return linear.margin_bounds(relaxed(model, x, hf.Linf(0.03), method), y).sum()

    (gradient,) = torch.autograd.grad(bound(), [weight])
    start = weight.detach().clone()
    for _ in range(3):
        direction = torch.randn_like(start)
        ends = []
        for sign in (1, -1):
            with torch.no_grad():
                weight.copy_(start + sign * 1e-7 * direction)
                ends.append(bound().item())
        finite = (ends[0] - ends[1]) / 2e-7
        assert abs((gradient * direction).sum().item() - finite) < 1e-4 * max(1, abs(finite))


@settings(max_examples=25)
@given(st.data())
def test_random_convolutional_networks_are_sound(data):
    draw = lambda *range_: data.draw(st.integers(*range_))  # noqa: E731
    torch.manual_seed(draw(0, 10_000))
    channels, size, layers = draw(1, 2), (draw(4, 8), draw(4, 8)), []
    before = channels
    for _ in range(draw(1, 2)):
        kernel, groups = draw(1, 3), draw(1, 2) if before % 2 == 0 else 1
        after = 2 * draw(1, 2)
        layers.append(nn.Conv2d(before, after, kernel, draw(1, 2), draw(0, 2), groups=groups, bias=draw(0, 1) == 1))
        layers.append(data.draw(st.sampled_from([nn.ReLU(), nn.LeakyReLU(0.2), nn.Tanh(), nn.Sigmoid()])))
        before = after
    features = nn.Sequential(*layers, nn.Flatten())
    x = torch.rand(1, channels, *size)
    model = nn.Sequential(features, nn.Linear(features(x).shape[1], 3)).eval()
    threat = data.draw(st.sampled_from([hf.Linf(0.1), hf.L2(0.4), hf.L1(0.8)]))
    logits = model(points_of(threat, x, 500))
    for method in METHODS:
        bounds = hf.bounds(model, x, threat, method)
        assert bool((logits >= bounds.lower).all())
        assert bool((logits <= bounds.upper).all())


@pytest.mark.parametrize("method", METHODS)
def test_margins_are_bounded_for_the_other_classes_alone(net, method):
    model, shape = net
    x, y = torch.rand(5, *shape), torch.tensor([0, 1, 0, 1, 1])
    r = relaxed(model, x, hf.Linf(0.1), method)
    every = linear.concretise(r, linear.margin_planes(r, y)).scatter(1, y[:, None], 0.0)
    assert torch.allclose(linear.margin_bounds(r, y), every, atol=1e-5)


def test_a_single_class_has_no_rival():
    r = relaxed(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)), torch.rand(2, 3), hf.Linf(0.1), "crown")
    assert torch.equal(linear.margin_bounds(r, torch.zeros(2, dtype=torch.long)), torch.zeros(2, 1))


@pytest.mark.parametrize("method", METHODS)
def test_inputs_of_a_batch_do_not_see_each_other(net, method):
    model, shape = net
    x = torch.rand(5, *shape)
    y = torch.tensor([0, 1, 0, 1, 1])
    whole = linear.margin_bounds(relaxed(model, x, hf.L2(0.1), method), y)
    for i in range(5):
        alone = linear.margin_bounds(relaxed(model, x[i : i + 1], hf.L2(0.1), method), y[i : i + 1])
        assert torch.allclose(whole[i], alone[0], atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_rounding_fools_the_plain_bounds_but_not_the_sound_ones(method):
    """z_0 - z_1 = (2^26 - 1) x - 2^26 x + 1/8 = -7/8 at x = 1.

    The coefficient 2^26 - 1 is a sum of two products on the way back, which float32 rounds to 2^26 in any order.
    """
    big = 2.0**26
    weights = [
        [[1.0], [1.0]],
        [[big, 0.0], [-1.0, 0.0], [0.0, -big]],
        [[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]],
        [[1.0, 1.0], [0.0, 0.0]],
    ]
    layers = []
    for weight in weights:
        layers.append(nn.Linear(len(weight[0]), len(weight)))
        layers[-1].weight.data, layers[-1].bias.data = torch.tensor(weight), torch.zeros(len(weight))
    layers[-1].bias.data[0] = 0.125
    for model in (nn.Sequential(*layers).eval(), nn.Sequential(layers[0], nn.ReLU(), *layers[1:]).eval()):
        x, y = torch.ones(1, 1), torch.tensor([0])
        assert model(x).argmax(1).item() == 0, "float32 sees the wrong class"
        assert model.double()(x.double()).argmax(1).item() == 1
        model.float()
        assert hf.certify(model, x, y, hf.Linf(0.0), method, sound=False).certified.item()
        assert not hf.certify(model, x, y, hf.Linf(0.0), method, sound=True).certified.item()


def test_merging_the_margin_into_the_pass_never_loosens_it():
    for name in ("mlp", "cnn"):
        model, shape = tiny_nets()[name]
        x, y = torch.rand(4, *shape), torch.tensor([0, 1, 2, 0])
        r = relaxed(model, x, hf.Linf(0.02))
        rows = torch.eye(r.graph.nodes[-1].shape[0]).expand(4, -1, -1)
        last = len(r.graph.nodes) - 1
        low, high = (
            sign * linear.concretise(r, linear.backward(r, last, Coefficients(sign * rows))) for sign in (1.0, -1.0)
        )
        separate = (low.gather(1, y[:, None]) - high).scatter(1, y[:, None], 0.0)
        assert bool((linear.margin_bounds(r, y) >= separate - 1e-5).all())


def test_a_layer_that_the_output_does_not_need_is_harmless():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x):
            logits = self.used(x)
            torch.relu(self.idle(x))
            return logits

    model, x = Idle().eval(), torch.rand(2, 4)
    ours, theirs = (hf.bounds(m, x, hf.Linf(0.1), "crown") for m in (model, model.used))
    assert torch.allclose(ours.lower, theirs.lower, atol=1e-5)
    assert torch.allclose(ours.upper, theirs.upper, atol=1e-5)
    assert isinstance(trace(model.used, x).nodes[-1].op, ops.Linear)
