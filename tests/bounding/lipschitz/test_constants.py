"""Lipschitz constants of networks: the rules one by one, the merging of layers, proof and estimate."""

import math

import pytest
import torch
from nets import tiny_nets
from torch import nn
from torch.nn import functional as F

from holdfast.bounding.graph import ops
from holdfast.bounding.graph.ops import Graph, Node
from holdfast.bounding.graph.trace import trace, trace_batch
from holdfast.bounding.lipschitz import constants as lipschitz
from holdfast.bounding.lipschitz import spectral
from holdfast.bounding.lipschitz.constants import lipschitz_bound, lipschitz_estimate
from holdfast.bounding.lipschitz.single_layers import SLOPES
from holdfast.errors import UnsupportedError
from holdfast.models import Normalize
from holdfast.models.layers import MinMax


def norm_of(weight):
    return float(torch.linalg.matrix_norm(weight.detach(), 2))


def jacobian_norm(model, shape):
    """Of a linear map: the SVD of its matrix, in float64."""
    n = math.prod(shape)
    units = torch.cat([torch.eye(n, dtype=torch.float64), torch.zeros(1, n)]).view(-1, *shape)
    out = model.double()(units).flatten(1)
    model.float()
    return norm_of(out[:-1] - out[-1])


def bound_of(model, shape):
    return lipschitz_bound(trace(model.eval(), torch.rand(1, *shape)))


def steepest(model, shape, count=4000):
    """The largest difference quotients of all margins over random pairs, near and far, (K, K)."""
    x = torch.rand(count, *shape, dtype=torch.float64)
    reach = 10 ** torch.empty(count, *(1,) * len(shape), dtype=torch.float64).uniform_(-3, 0)
    y = x + torch.randn_like(x) * reach
    model.double()
    with torch.no_grad():
        change = model(x) - model(y)
    model.float()
    gaps = (change[:, :, None] - change[:, None]).abs() / (x - y).flatten(1).norm(dim=1)[:, None, None]
    return gaps.amax(0)


@pytest.fixture(params=[*tiny_nets(), "minmax", "liresnet"])
def network(request):
    return {**tiny_nets(), **own_nets()}[request.param]


class LinearResidual(nn.Module):
    """x + beta conv(x) / sqrt(3), then MinMax: a block of LiResNet."""

    def __init__(self, channels, groups=1):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, groups=groups)
        self.beta = nn.Parameter(torch.rand(channels, 1, 1) + 0.5)

    def forward(self, x):
        return x + self.conv(x) * self.beta * (1 / math.sqrt(3))


def own_nets():
    torch.manual_seed(3)
    return {
        "minmax": (nn.Sequential(nn.Linear(6, 8), MinMax(), nn.Linear(8, 8), MinMax(), nn.Linear(8, 3)).eval(), (6,)),
        "liresnet": (
            nn.Sequential(
                Normalize(0.5, 0.5),
                nn.Conv2d(1, 4, 5, stride=2, padding=2),
                MinMax(),
                LinearResidual(4),
                MinMax(),
                nn.Conv2d(4, 4, 2, stride=2),
                MinMax(),
                nn.Flatten(),
                nn.Linear(16, 3),
            ).eval(),
            (1, 8, 8),
        ),
    }


def test_no_pair_of_inputs_beats_the_bound(network):
    model, shape = network
    bound = bound_of(model, shape)
    found = steepest(model, shape)
    assert bound.proven
    assert bound.pairs.dtype == torch.float64
    assert bool((found <= bound.pairs * (1 + 1e-9)).all())
    assert float(found.max()) > 0.02 * float(bound.pairs.max())
    assert bool((bound.pairs.diagonal() == 0).all())
    assert torch.equal(bound.pairs, bound.pairs.T)


def test_one_linear_layer_gives_the_exact_slopes_of_the_margins():
    model = nn.Linear(6, 4).eval()
    bound = bound_of(model, (6,))
    exact = (model.weight[:, None] - model.weight).norm(dim=2).double()
    assert torch.allclose(bound.pairs, exact, rtol=1e-5)
    assert float(bound.body) == pytest.approx(1)
    assert bool((bound.pairs >= exact * (1 - 1e-6)).all())


def test_constants_multiply_and_scale_with_each_layer():
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 6), nn.Sigmoid(), nn.Linear(6, 3))
    bound = bound_of(model, (5,))
    norms = [norm_of(model[i].weight) for i in (0, 2)]
    assert float(bound.body) == pytest.approx(norms[0] * norms[1] / 4, rel=1e-3)
    assert [name for name, _ in bound.layers] == ["0", "1", "2", "3"]
    assert [float(k) for _, k in bound.layers] == pytest.approx([norms[0], 1, norms[1], 0.25], rel=1e-3)
    with torch.no_grad():
        model[2].weight *= 3
        model[4].weight *= 2
    scaled = bound_of(model, (5,))
    assert torch.allclose(scaled.pairs, 6 * bound.pairs, rtol=1e-3)
    assert float(scaled.body) == pytest.approx(3 * float(bound.body), rel=1e-3)


def test_a_pair_is_at_most_sqrt_2_times_the_norm_of_the_last_layer():
    model, shape = own_nets()["minmax"]
    bound = bound_of(model, shape)
    head = norm_of(model[-1].weight)
    assert float(bound.pairs.max()) <= math.sqrt(2) * head * float(bound.body) * (1 + 1e-6)


@pytest.mark.parametrize("kind", SLOPES)
def test_slopes_of_activations(kind):
    modules = {
        "relu": nn.ReLU(), "leaky_relu": nn.LeakyReLU(0.3), "tanh": nn.Tanh(), "relu6": nn.ReLU6(),
        "softsign": nn.Softsign(), "hardtanh": nn.Hardtanh(), "celu": nn.CELU(0.5), "softplus": nn.Softplus(2.0),
        "sigmoid": nn.Sigmoid(), "hardsigmoid": nn.Hardsigmoid(), "elu": nn.ELU(1.7), "selu": nn.SELU(),
    }  # fmt: skip
    function = modules.get(kind, torch.atan)
    parameter = {"leaky_relu": 0.3, "celu": 0.5, "softplus": 2.0, "elu": 1.7}.get(kind, 0.0)
    x = torch.linspace(-12, 12, 240_001, dtype=torch.float64)
    slope = float((function(x).diff() / x.diff()).abs().max())
    assert slope <= SLOPES[kind](parameter) * (1 + 1e-9)
    assert slope >= SLOPES[kind](parameter) * 0.99


def graph_of(op, in_shape, out_shape):
    return Graph((Node(ops.Input(), (), "input", in_shape), Node(op, (0,), "layer", out_shape)))


def test_unknown_layers_are_refused_by_name():
    with pytest.raises(UnsupportedError, match=r"layer 'layer'.*'gelu'.*none is assumed.*ReLU"):
        lipschitz_bound(graph_of(ops.Activation("gelu", F.gelu), (3,), (3,)))
    with pytest.raises(UnsupportedError, match=r"layer 'layer'.*Op"):
        lipschitz_bound(graph_of(ops.Op(), (3,), (3,)))
    with pytest.raises(UnsupportedError, match=r"layer '1'.*GELU"):
        bound_of(nn.Sequential(nn.Linear(3, 3), nn.GELU(), nn.Linear(3, 2)), (3,))
    with pytest.raises(UnsupportedError, match=r"'1'.*threshold"):
        bound_of(nn.Sequential(nn.Linear(3, 3), nn.Softplus(threshold=1), nn.Linear(3, 2)), (3,))
    with pytest.raises(UnsupportedError, match=r"logits"):
        lipschitz_bound(graph_of(ops.Activation("relu", torch.relu), (3, 2), (3, 2)))


@pytest.mark.parametrize(
    ("pool", "constant"),
    [
        (nn.MaxPool2d(2), 1),
        (nn.MaxPool2d(3, stride=2), 2),
        (nn.MaxPool2d(3, stride=1, padding=1), 3),
        (nn.MaxPool2d((3, 1), stride=1), math.sqrt(3)),
        (nn.MaxPool2d(2, stride=2, dilation=2), 2),
        (nn.MaxPool2d(2, stride=2, dilation=3), 1),
        (nn.MaxPool2d(6, stride=1), 1),
    ],
)
def test_max_pooling_counts_the_windows_that_share_a_value(pool, constant):
    bound = bound_of(nn.Sequential(pool, nn.Flatten()), (1, 6, 6))
    assert float(bound.body) == pytest.approx(constant)
    # Raise one value that all its windows see as the largest one: the constant is reached.
    x = torch.zeros(36, 1, 6, 6, dtype=torch.float64)
    raised = x + torch.eye(36, dtype=torch.float64).view(36, 1, 6, 6)
    gain = (pool(raised) - pool(x)).flatten(1).norm(dim=1).max()
    assert float(gain) == pytest.approx(constant)


def merges(model, shape, count):
    """The bound, which must equal the SVD of the whole linear map: `count` operators were measured."""
    bound = bound_of(nn.Sequential(model, nn.ReLU(), nn.Flatten()), shape)
    assert len(bound.layers) == count + 1
    truth = jacobian_norm(model, shape)
    assert truth <= float(bound.body) <= 1.02 * truth
    return bound


def batch_norm(channels, kind=nn.BatchNorm2d):
    norm = kind(channels)
    nn.init.uniform_(norm.running_var, 0.1, 4.0)
    nn.init.uniform_(norm.weight, -2, 2)
    return norm.eval()


def test_scalings_are_merged_into_their_neighbours():
    conv = nn.Sequential(
        Normalize([0.5, 0.4], [0.2, 3.0]), nn.Conv2d(2, 4, 3, padding=1, groups=2), batch_norm(4), Normalize(0.0, 0.3)
    )
    assert merges(conv, (2, 6, 5), 1).layers[0][0] == "sub+truediv+0.1+0.2+sub_1+truediv_1"
    merges(nn.Sequential(batch_norm(5, nn.BatchNorm1d), nn.Linear(5, 7), batch_norm(7, nn.BatchNorm1d)), (5,), 1)


def test_what_cannot_be_merged_multiplies():
    class Pixels(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("factor", torch.rand(1, 2, 6, 5) + 0.5)  # one for each pixel

        def forward(self, x):
            return x * self.factor

    model = nn.Sequential(Pixels(), nn.Conv2d(2, 3, 3), nn.AvgPool2d(2))
    bound = bound_of(nn.Sequential(model, nn.ReLU(), nn.Flatten()), (2, 6, 5))
    assert len(bound.layers) == 4
    assert float(bound.body) >= jacobian_norm(model, (2, 6, 5))
    assert [float(k) for _, k in bound.layers[::2]] == pytest.approx([float(model[0].factor.max()), 0.5])


class Skip(nn.Module):
    def __init__(self, branch, sign=1):
        super().__init__()
        self.branch, self.sign = branch, sign

    def forward(self, x):
        return x + self.branch(x) if self.sign > 0 else self.branch(x) - x


@pytest.mark.parametrize(
    ("branch", "shape"),
    [
        (nn.Conv2d(2, 2, 3, padding=1), (2, 7, 6)),
        (nn.Conv2d(4, 4, 3, padding=1, groups=2), (4, 5, 5)),
        (nn.Conv2d(2, 2, 3, padding=2, dilation=2), (2, 6, 6)),
        (nn.Conv2d(2, 2, (1, 5), padding=(0, 2)), (2, 4, 6)),
        (nn.Linear(6, 6), (6,)),
        (nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), Normalize([0.0] * 3, [0.5, 2.0, 1.0])), (3, 5, 5)),
    ],
)
def test_a_linear_residual_block_has_the_norm_of_the_whole_map(branch, shape):
    model = Skip(branch)
    bound = merges(model, shape, 1)
    assert float(bound.body) < 1 + float(jacobian_norm(branch, shape))


def test_the_block_of_liresnet_and_the_skip_that_comes_second():
    merges(LinearResidual(4), (4, 6, 5), 1)
    merges(LinearResidual(4, groups=2), (4, 6, 5), 1)
    merges(nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), LinearResidual(3))[2], (3, 4, 4), 1)
    model = Skip(nn.Linear(5, 5), sign=-1)  # W x - x is a sum with -x: the general rule, 1 + |W|
    bound = bound_of(nn.Sequential(model, nn.ReLU()), (5,))
    assert float(bound.body) == pytest.approx(1 + norm_of(model.branch.weight), rel=1e-3)


def test_a_skip_over_an_affine_layer_that_was_not_measured_yet():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)

        def forward(self, x):
            h = self.first(x)
            return torch.relu(self.second(h) + h).flatten(1)

    model = Net()
    bound = bound_of(model, (1, 6, 6))
    names = [name for name, _ in bound.layers]
    assert names[:2] == ["first", "second+add"]
    linear = Skip(model.second)
    assert float(bound.body) == pytest.approx(
        jacobian_norm(model.first, (1, 6, 6)) * jacobian_norm(linear, (2, 6, 6)), rel=0.02
    )


def test_residual_blocks_with_a_nonlinear_branch_add():
    branch = nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 5))
    bound = bound_of(nn.Sequential(Skip(branch), nn.ReLU(), nn.Linear(5, 2)), (5,))
    norms = [norm_of(branch[i].weight) for i in (0, 2)]
    assert float(bound.body) == pytest.approx(1 + norms[0] * norms[1], rel=1e-3)
    nn.init.zeros_(branch[2].weight)
    assert float(bound_of(nn.Sequential(Skip(branch), nn.ReLU(), nn.Linear(5, 2)), (5,)).body) == pytest.approx(1)


def test_branches_that_change_the_shape_of_the_kernel_add():
    even = nn.Conv2d(2, 2, 2, padding=1, dilation=2)  # keeps the size, but has no tap in the centre
    bound = bound_of(nn.Sequential(Skip(even), nn.ReLU(), nn.Flatten()), (2, 6, 6))
    assert float(bound.body) == pytest.approx(1 + jacobian_norm(even, (2, 6, 6)), rel=0.02)


def test_concatenation_is_the_root_of_the_sum_of_squares():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 6)

        def forward(self, x):
            return torch.cat([self.a(x), self.b(x)], 1)

    model = Both()
    a, b = (norm_of(layer.weight) for layer in (model.a, model.b))
    assert float(bound_of(nn.Sequential(model, nn.ReLU()), (4,)).body) == pytest.approx(math.hypot(a, b), rel=1e-3)


def test_heads_other_than_a_dense_layer():
    # Without an affine layer at the end all margins have sqrt(2); a convolution and a pool are rows like any other.
    plain = bound_of(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), (4,))
    assert torch.allclose(plain.pairs, math.sqrt(2) * plain.body * (1 - torch.eye(3)).double(), rtol=1e-6)
    conv = nn.Sequential(nn.Conv2d(2, 3, 4), nn.Flatten())
    head = bound_of(conv, (2, 4, 4))
    rows = conv[0].weight.detach().double().flatten(1)
    assert torch.allclose(head.pairs, torch.cdist(rows, rows), rtol=1e-6)
    scaled = bound_of(nn.Sequential(nn.Linear(4, 3), Normalize([0.0] * 3, [1.0, 2.0, 4.0], flat=True)), (4,))
    assert scaled.layers == ()


def test_proof_never_uses_the_estimate(monkeypatch):
    def forbidden(*args, **options):
        raise AssertionError("the estimate was used")

    monkeypatch.setattr(lipschitz, "norm_estimate", forbidden)
    for name in ("power_iteration", "fourier_norm"):
        monkeypatch.setattr(spectral, name, forbidden)
    model, shape = own_nets()["liresnet"]
    graph = trace(model, torch.rand(1, *shape))
    assert lipschitz_bound(graph).proven
    with pytest.raises(AssertionError, match="estimate was used"):
        lipschitz_estimate(graph, {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_estimate_comes_within_one_percent_of_exact_norms(network, dtype):
    model, shape = network
    graph = trace(model.to(dtype), torch.rand(1, *shape, dtype=dtype))
    bound = lipschitz_bound(graph)
    estimate, state = lipschitz_estimate(graph, {}, steps=20)
    for _ in range(30):
        estimate, state = lipschitz_estimate(graph, state, steps=5)
    assert not estimate.proven
    assert estimate.pairs.dtype == dtype
    assert bool((estimate.pairs.double() <= bound.pairs * (1 + 1e-5)).all())
    for (name, k), (same, proven) in zip(estimate.layers, bound.layers, strict=True):
        assert name == same
        assert float(k.detach()) >= 0.99 * float(proven)
    model.float()


def test_gradients_of_the_estimate_are_those_of_exact_norms():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 3)).double().eval()
    graph = trace(model, torch.rand(1, 5, dtype=torch.float64))
    pairs = lipschitz_estimate(graph, {}, steps=3000)[0].pairs
    first, second, head = (model[i].weight for i in (0, 2, 4))
    exact = torch.linalg.matrix_norm(first, 2) * torch.linalg.matrix_norm(second, 2)
    exact = exact * (head[:, None] - head).square().sum(2).clamp(min=1e-30).sqrt()
    weights = torch.rand(3, 3, dtype=torch.float64)
    ours = torch.autograd.grad((pairs * weights).sum(), list(model.parameters())[::2])
    theirs = torch.autograd.grad((exact * weights).sum(), [first, second, head])
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_gradients_reach_every_weight_through_merged_layers():
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), MinMax(), LinearResidual(4), MinMax(), nn.Flatten(), nn.Linear(144, 3)
    )
    graph, logits = trace_batch(model, torch.rand(5, 1, 8, 8))
    bound, state = lipschitz_estimate(graph, {}, steps=2)
    bound.pairs.max().backward()
    assert logits.shape == (5, 3)
    assert all(bool(torch.isfinite(p.grad).all()) for p in model.parameters() if p.grad is not None)
    for weight in (model[0].weight, model[1].weight, model[3].conv.weight, model[3].beta, model[-1].weight):
        assert float(weight.grad.abs().max()) > 0
    assert not any(v.requires_grad for v in state.values())


def test_the_state_is_tensors_by_name_and_survives_inputs_of_another_size():
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(8, 2)
    )
    model.eval()
    small, large = (trace(model, torch.rand(1, 1, n, n)) for n in (4, 8))
    _, state = lipschitz_estimate(small, {}, steps=3)
    assert {key: tuple(v.shape) for key, v in state.items()} == {"0 0": (1, 4, 4), "2 2": (2, 4, 4)}
    _, other = lipschitz_estimate(large, state)
    assert other["0 0"].shape == (1, 8, 8)
    again = lipschitz_estimate(small, state)[0].body
    assert torch.equal(again, lipschitz_estimate(small, state)[0].body)


def test_the_model_is_left_as_it_was(network):
    model, shape = network
    before = {name: value.clone() for name, value in model.state_dict().items()}
    graph = trace(model, torch.rand(1, *shape))
    lipschitz_bound(graph)
    lipschitz_estimate(graph, {})
    assert not model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
