"""The exact method against enumeration of activation patterns, against bounds from both sides, and at its limits."""

import copy
import itertools
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import tiny_nets
from scipy.optimize import OptimizeResult, linprog
from torch import nn

import holdfast as hf
from holdfast.bounds import ops
from holdfast.bounds.graph import trace
from holdfast.certify.margins import crown, ibp
from holdfast.certify.milp import evaluation_error, exact_margin, milp
from holdfast.certify.milp_model import affine_matrix
from holdfast.models.layers import MinMax
from holdfast.random import Noise

WIDE = {"low": -1.0, "high": 2.0}


def by_enumeration(layers, lower, upper, y, slope=0.0):
    """Smallest margin of an MLP [(W, b), ...] over a box: one LP for each pattern of signs of its hidden neurons."""
    widths = [len(b) for _, b in layers[:-1]]
    best = np.inf
    for pattern in itertools.product((0, 1), repeat=sum(widths)):
        matrix, shift = np.eye(len(lower)), np.zeros(len(lower))
        rows, limits, signs = [], [], list(pattern)
        for weight, bias in layers[:-1]:
            matrix, shift = weight @ matrix, weight @ shift + bias
            on = np.array([signs.pop(0) for _ in bias])
            rows.append(np.where(on, -1, 1)[:, None] * matrix)
            limits.append(np.where(on, 1, -1) * shift)
            factor = np.where(on, 1.0, slope)
            matrix, shift = factor[:, None] * matrix, factor * shift
        weight, bias = layers[-1]
        matrix, shift = weight @ matrix, weight @ shift + bias
        for j in set(range(len(bias))) - {y}:
            found = linprog(
                matrix[y] - matrix[j], np.concatenate(rows), np.concatenate(limits), bounds=np.stack([lower, upper], 1)
            )
            if found.status == 0:
                best = min(best, found.fun + shift[y] - shift[j])
    return best


def mlp(sizes, activation=nn.ReLU, seed=0):
    torch.manual_seed(seed)
    layers = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), activation()]
    return nn.Sequential(*layers[:-1]).double().eval()


def weights(model):
    return [
        (m.weight.detach().double().numpy(), m.bias.detach().double().numpy()) for m in model if hasattr(m, "weight")
    ]


@given(
    st.sampled_from([(2, 4, 2), (3, 6, 3), (3, 3, 3, 2), (2, 2, 2, 2, 3), (1, 5, 2)]),
    st.sampled_from([0.0, 0.2]),
    st.integers(0, 10_000),
    st.sampled_from([0.05, 0.3, 1.0]),
)
@settings(max_examples=25)
def test_equals_the_enumeration_of_patterns(sizes, slope, seed, eps):
    model = mlp(sizes, (lambda: nn.LeakyReLU(slope)) if slope else nn.ReLU, seed)
    x = torch.rand(1, sizes[0], dtype=torch.float64)
    y = model(x).argmax(1)
    found = exact_margin(model, x, y, hf.Linf(eps))
    lower, upper = (end[0].numpy() for end in hf.Linf(eps).box(x))
    truth = by_enumeration(weights(model), lower, upper, int(y), slope)
    assert bool(found.exact)
    assert float(found.margin) == pytest.approx(truth, abs=2e-6)
    assert found.status == (("certified",) if truth > 1e-4 else ("broken",) if truth < -1e-4 else found.status)
    assert bool(hf.Linf(eps).contains(found.x_adv, x).all())


def golden(dtype=torch.float64):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)).to(dtype).eval()
    values = ([[1.0, 1.0], [1.0, -1.0]], [0.0, -0.1], [[1.0, -0.5], [-0.5, 1.0]], [0.0, 0.0])
    for p, value in zip(model.parameters(), values, strict=True):
        p.data = torch.tensor(value, dtype=dtype)
    return model, torch.tensor([[0.5, 0.25]], dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_case_solved_by_hand(dtype):
    model, x = golden(dtype)
    found = exact_margin(model, x, torch.tensor([0]), hf.Linf(0.2, **WIDE))
    assert float(found.margin) == pytest.approx(0.30, abs=3e-6)
    assert found.status == ("certified",)
    assert torch.equal(found.x_adv, x)
    assert float(found.slack) < 1e-5
    assert found.margin.dtype == torch.float64
    # At 0.4 the worst corner is (0.9, -0.15): margin 1.5 (0.75) - 1.5 (0.95) = -0.3.
    found = exact_margin(model, x, torch.tensor([0]), hf.Linf(0.4, **WIDE))
    assert float(found.margin) == pytest.approx(-0.30, abs=3e-6)
    assert found.status == ("broken",)
    assert model(found.x_adv).argmax() == 1
    assert found.x_adv.dtype == dtype


class Block(nn.Module):
    """Residual and concatenating, on images of 2 x 4 x 3."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.norm = nn.BatchNorm2d(2)
        self.head = nn.Linear(48, 3)

    def forward(self, x):
        h = torch.relu(self.norm(self.conv((x - 0.4) / 0.5)))
        return self.head(torch.cat([h + x, x - h], 1).flatten(1))


def layered_nets():
    """Name -> (network, shape of one input, budget that leaves some neurons open)."""
    torch.manual_seed(3)
    tiny = tiny_nets()
    nets = {
        "linear": (*tiny["linear"], 0.1),
        "mlp": (*tiny["mlp"], 0.1),
        "cnn": (*tiny["cnn"], 0.1),
        "pooled": (*tiny["pooled"], 0.05),
        "block": (Block(), (2, 4, 3), 0.1),
        "minmax": (nn.Sequential(nn.Linear(4, 8), MinMax(), nn.Linear(8, 6), MinMax(), nn.Linear(6, 3)), (4,), 0.2),
        "conv-minmax": (
            nn.Sequential(nn.Conv2d(1, 4, 2, stride=(2, 1)), MinMax(), nn.Flatten(), nn.Linear(24, 2)),
            (1, 4, 4),
            0.2,
        ),
        "overlapping-pools": (
            nn.Sequential(
                nn.Conv2d(1, 2, 2, groups=1), nn.MaxPool2d(3, 2, 1, ceil_mode=True), nn.Flatten(), nn.Linear(12, 3)
            ),
            (1, 4, 5),
            0.2,
        ),
    }
    return {name: (net.eval(), shape, eps) for name, (net, shape, eps) in nets.items()}


@pytest.fixture(params=list(layered_nets()))
def layered(request):
    return layered_nets()[request.param]


def margin_of(model, x, y):
    logits = model(x)
    others = logits.scatter(1, y[:, None], -torch.inf)
    return logits.gather(1, y[:, None])[:, 0] - others.amax(1)


def test_lies_between_every_bound_and_every_point(layered):
    model, shape, eps = layered
    threat = hf.Linf(eps)
    x = torch.rand(3, *shape)
    with torch.no_grad():
        y = model(x).argmax(1)
        found = exact_margin(model, x, y, threat)
        assert bool(found.exact.all())
        for certificate in (ibp, crown):
            assert bool((found.margin + 1e-5 >= certificate(model, x, y, threat).margin).all())
        attacked = hf.attack(model, x, y, threat, "pgd", steps=40).x_adv
        points = [attacked] + [threat.random_start(x, Noise.for_batch(seed, 3)) for seed in range(50)]
        reached = torch.stack([margin_of(model, point, y) for point in points]).amin(0)
        assert bool((found.margin <= reached + found.slack).all())
    for i, status in enumerate(found.status):
        if status == "broken":
            assert bool(threat.contains(found.x_adv, x)[i])
            assert model(found.x_adv[i : i + 1]).argmax() != y[i]


def test_the_minimum_is_attained_at_a_point_of_the_set(layered):
    """With the least likely class as the label all breaks, and x_adv has just the margin that is claimed."""
    model, shape, eps = layered
    model = model.double()
    x = torch.rand(2, *shape, dtype=torch.float64)
    y = model(x).argmin(1)
    found = exact_margin(model, x, y, hf.Linf(eps))
    assert found.status == ("broken", "broken")
    assert torch.allclose(margin_of(model, found.x_adv, y), found.margin, atol=1e-5)
    assert bool((found.margin <= margin_of(model, x, y)).all())


def test_the_verdict_agrees_with_the_exact_margin(layered):
    model, shape, eps = layered
    x = torch.rand(3, *shape)
    y = model(x).argmax(1)
    for scale in (0.1, 1.0):
        threat = hf.Linf(eps * scale)
        exact = exact_margin(model, x, y, threat)
        quick = milp(model, x, y, threat)
        assert quick.certified.tolist() == [status == "certified" for status in exact.status]
        assert bool((quick.margin <= exact.margin).all())
        assert bool((quick.certified == (quick.margin > 0)).all())
        assert quick.by == tuple("milp" if c else "" for c in quick.certified.tolist())
        assert quick.margin.dtype == x.dtype
        assert bool(quick.certified[crown(model, x, y, threat).margin > 1e-3].all())


def test_decides_what_crown_leaves_open():
    """Around the exact radius of an input: certified below it, broken above it, while CROWN stops much earlier."""
    model = mlp((6, 12, 12, 3), seed=4)
    x = torch.rand(1, 6, dtype=torch.float64)
    y = model(x).argmax(1)
    low, high = 0.0, 1.0
    for _ in range(8):
        middle = (low + high) / 2
        status = exact_margin(model, x, y, hf.Linf(middle)).status[0]
        assert status in ("certified", "broken")
        low, high = (middle, high) if status == "certified" else (low, middle)
    assert 0 < low < high < 1
    assert bool(milp(model, x, y, hf.Linf(low)).certified)
    assert not bool(crown(model, x, y, hf.Linf(low)).certified)


def test_wrong_inputs_are_broken_and_ties_are_not_certified():
    model = nn.Linear(2, 2).eval()
    model.weight.data, model.bias.data = torch.eye(2), torch.zeros(2)
    x = torch.tensor([[0.2, 0.8], [0.5, 0.5], [0.8, 0.2]])
    y = torch.zeros(3, dtype=torch.long)
    found = exact_margin(model, x, y, hf.Linf(0.0))
    assert found.status == ("broken", "unknown", "certified")
    assert torch.allclose(found.margin, torch.tensor([-0.6, 0.0, 0.6], dtype=torch.float64), atol=1e-6)
    assert torch.equal(found.x_adv, x)
    result = hf.certify(model, x, y, hf.Linf(0.0), "milp")
    assert result.certified.tolist() == [False, False, True]
    assert float(result.margin[0]) <= 0


def test_one_input_at_a_time_or_both_and_boxes_of_their_own():
    model = mlp((3, 8, 3), seed=1).float()
    x = torch.rand(2, 3)
    y = model(x).argmax(1)
    radius = torch.tensor([[0.1, 0.0, 0.3], [0.0, 0.2, 0.05]])
    both = exact_margin(model, x, y, hf.Box(radius, batched=True))
    for i in range(2):
        alone = exact_margin(model, x[i : i + 1], y[i : i + 1], hf.Box(radius[i]))
        assert float(alone.margin) == pytest.approx(float(both.margin[i]), abs=2e-6)
        lower, upper = (end[i].double().numpy() for end in hf.Box(radius, batched=True).box(x))
        assert float(alone.margin) == pytest.approx(by_enumeration(weights(model), lower, upper, int(y[i])), abs=5e-6)
    ball = exact_margin(model, x, y, hf.Box(torch.full((3,), 0.1)))
    assert torch.allclose(ball.margin, exact_margin(model, x, y, hf.Linf(0.1)).margin, atol=3e-6)


def hard_case():
    model = mlp((20, 40, 40, 40, 3), seed=2)
    x = torch.rand(1, 20, dtype=torch.float64)
    return model.requires_grad_(False), x, model(x).argmax(1)


def test_the_time_limit_is_kept_and_the_bound_stays_proven():
    model, x, y = hard_case()
    threat = hf.Linf(0.5)
    start = time.monotonic()
    found = exact_margin(model, x, y, threat, time_limit=1.0)
    assert time.monotonic() - start < 8
    assert not bool(found.exact)
    assert found.status[0] in ("unknown", "broken")
    assert float(found.margin) >= float(crown(model, x, y, threat).margin) - 1e-9
    assert float(found.margin) <= float(margin_of(model, hf.attack(model, x, y, threat, "pgd").x_adv, y))
    nothing = milp(model, x, y, threat, time_limit=1e-9)
    assert not bool(nothing.certified)
    assert float(nothing.margin) == pytest.approx(float(crown(model, x, y, threat).margin), abs=1e-3)


def test_too_many_binaries_leave_the_input_undecided():
    model, x, y = hard_case()
    found = exact_margin(model, x, y, hf.Linf(0.5), max_binaries=10)
    assert found.status == ("unknown",)
    assert int(found.binaries) > 10
    assert int(found.nodes) == 0
    assert float(found.margin) == pytest.approx(float(crown(model, x, y, hf.Linf(0.5)).margin), abs=1e-9)
    assert not bool(milp(model, x, y, hf.Linf(0.5), max_binaries=10).certified)
    # Where CROWN's own bound is enough, no binary is needed for the verdict.
    assert bool(milp(model, x, y, hf.Linf(1e-4), max_binaries=0).certified)


def test_overflow_proves_nothing():
    """The logits at x are finite, those around it are not: 1e200 twice is more than float64 holds."""
    model = mlp((2, 3, 2))
    for layer in (model[0], model[2]):
        layer.weight.data *= 1e200
        layer.bias.data *= 1e-200
    x = torch.zeros(1, 2, dtype=torch.float64)
    result = milp(model, x, model(x).argmax(1), hf.Linf(0.5))
    assert not bool(result.certified)
    assert float(result.margin) == -torch.inf


@pytest.mark.parametrize("bound", [np.inf, np.nan, None])
def test_numerical_trouble_of_the_solver_proves_nothing(monkeypatch, bound):
    """The network itself is always a solution: "infeasible" must not be read as "no counter-example"."""
    model, x, y = hard_case()
    answer = OptimizeResult(status=2, fun=None, x=None, mip_dual_bound=bound, mip_node_count=None)
    monkeypatch.setattr("scipy.optimize.milp", lambda *args, **options: answer)
    found = exact_margin(model, x, y, hf.Linf(0.5))
    assert found.status == ("unknown",)
    assert float(found.margin) == pytest.approx(float(crown(model, x, y, hf.Linf(0.5)).margin), abs=1e-9)


def test_one_output_is_refused():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)).eval()
    with pytest.raises(hf.InputError, match="one output"):
        exact_margin(model, torch.rand(2, 3), torch.zeros(2, dtype=torch.long), hf.Linf(0.1))


@pytest.mark.parametrize(("layer", "name"), [(nn.Sigmoid(), "sigmoid"), (nn.Softplus(), "softplus")])
def test_a_layer_that_is_not_piecewise_linear_is_refused(layer, name):
    model = nn.Sequential(nn.Linear(2, 3), layer, nn.Linear(3, 2)).eval()
    with pytest.raises(hf.UnsupportedError, match=rf"layer '1'.*'{name}'.*method='crown'"):
        milp(model, torch.rand(1, 2), torch.tensor([0]), hf.Linf(0.1))


def test_bad_arguments_are_refused():
    model, x = golden()
    y = torch.tensor([0])
    with pytest.raises(hf.UnsupportedError, match=r"'milp' does not handle the threat 'l2:0.1'"):
        exact_margin(model, x, y, hf.L2(0.1))
    with pytest.raises(hf.InputError, match="outside the classes"):
        exact_margin(model, x, y + 2, hf.Linf(0.1))
    with pytest.raises(hf.InputError, match="time_limit must be > 0"):
        exact_margin(model, x, y, hf.Linf(0.1), time_limit=0)
    with pytest.raises(hf.InputError, match="max_binaries >= 0, got 60"):
        milp(model, x, y, hf.Linf(0.1), max_binaries=-1)


def test_the_model_is_left_as_it_came():
    model, x = golden(torch.float32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    exact_margin(model, x, torch.tensor([0]), hf.Linf(0.1))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model[0].weight.dtype == torch.float32
    assert model[0].weight.requires_grad


CONVOLUTIONS = [
    nn.Conv2d(2, 4, 3, padding=1),
    nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=(0, 1)),
    nn.Conv2d(2, 4, 2, dilation=2, groups=2, bias=False),
    nn.Conv2d(2, 6, 3, stride=2, padding=2, groups=2),
]


@pytest.mark.parametrize("layer", [*CONVOLUTIONS, nn.AvgPool2d(2, ceil_mode=True), nn.Linear(5, 3)], ids=str)
def test_an_affine_layer_equals_its_matrix(layer):
    x = torch.rand(3, 2, 6, 5, dtype=torch.float64)
    graph = trace(nn.Sequential(layer).double().eval(), x)
    (node,) = (node for node in graph.nodes if isinstance(node.op, ops.Affine))
    with torch.no_grad():
        matrix, bias = affine_matrix(node.op, (2, 6, 5), node.shape)
        expected = layer(x).flatten(1).numpy()
    assert np.allclose(x.flatten(1).numpy() @ matrix.toarray().T + bias, expected, atol=1e-12)


def test_the_rounding_term_covers_what_float32_does(layered):
    model, shape, _ = layered
    x = torch.rand(64, *shape)
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        graph = trace(exact, x.double())
        values = graph.walk(x.double(), lambda node, given: ops.evaluate(node.op, given))
        error = evaluation_error(graph, [(v, v) for v in values], torch.float32)
        missed = (model(x).double() - values[-1]).abs()
        assert bool((missed <= error).all())
        assert float(error.max()) < 1e-3 * float(values[-1].abs().max())
