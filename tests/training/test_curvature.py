"""Every closed form against the Hessian that automatic differentiation gives; the printed formulas that are wrong."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call, grad, jacrev
from torch.nn.functional import cross_entropy, linear, log_softmax

from holdfast.errors import InputError, UnsupportedError
from holdfast.models import Normalize
from holdfast.random import Noise
from holdfast.training.curvature import (
    eigenvalue_spread,
    layer_bound,
    trace_alp,
    trace_ce,
    trace_hutchinson,
    trace_logit_pairing,
    trace_mart,
    trace_relu,
    trace_relu_layers,
    trace_trades,
)

WEIGHT = 1.7


@st.composite
def heads(draw, smallest=0):
    """A linear top layer and features at clean and attacked inputs: (head, clean, attacked, labels)."""
    size, classes, width = draw(st.integers(smallest, 3)), draw(st.integers(2, 10)), draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    head = nn.Linear(width, classes, bias=draw(st.booleans())).double()
    for p in head.parameters():
        p.data = 2 * torch.randn(p.shape, generator=generator, dtype=torch.float64)
    clean, attacked = torch.randn(2, size, width, generator=generator, dtype=torch.float64)
    return head, clean, attacked, torch.randint(classes, (size,), generator=generator)


def exact(head, loss):
    """Trace of the Hessian of loss(head as a function of features) in the weights, by differentiating twice."""
    names = dict(head.named_parameters())
    flat = torch.cat([p.detach().flatten() for p in names.values()])

    def of(vector):
        parts = vector.split([p.numel() for p in names.values()])
        given = {n: part.view_as(p) for (n, p), part in zip(names.items(), parts, strict=True)}
        return loss(lambda f: linear(f, given["weight"], given.get("bias")))

    return jacrev(grad(of))(flat).trace()


def kl(a, b):
    return (log_softmax(a, -1).exp() * (log_softmax(a, -1) - log_softmax(b, -1))).sum()


def mart(z, f, g, y, ce_at, rival, stop):
    anchor, s_adv = z(f).detach() if stop else z(f), z(g).softmax(-1)
    ce = cross_entropy(z(g if ce_at == "adv" else f), y)
    return ce - torch.log(1 - s_adv[rival]) + WEIGHT * (1 - anchor.softmax(-1)[y]) * kl(anchor, z(g))


LOSSES = {
    "ce": lambda z, f, g, y: cross_entropy(z(g), y),
    "smoothed": lambda z, f, g, y: cross_entropy(z(g), y, label_smoothing=0.2),
    "trades": lambda z, f, g, y: cross_entropy(z(f), y) + WEIGHT * kl(z(f).detach(), z(g)),
    "trades-full": lambda z, f, g, y: cross_entropy(z(f), y) + WEIGHT * kl(z(f), z(g)),
    "alp": lambda z, f, g, y: (
        cross_entropy(z(g), y) + WEIGHT * (z(f).softmax(-1).detach() - z(g).softmax(-1)).square().sum()
    ),
    "alp-logits": lambda z, f, g, y: (z(f).detach() - z(g)).square().sum(),
    "alp-logits-full": lambda z, f, g, y: (z(f) - z(g)).square().sum(),
    "alp-full": lambda z, f, g, y: (
        cross_entropy(z(g), y) + WEIGHT * (z(f).softmax(-1) - z(g).softmax(-1)).square().sum()
    ),
}
FORMS = {
    "ce": lambda f, z, g, w, b: trace_ce(g, w, bias=b),
    "smoothed": lambda f, z, g, w, b: trace_ce(g, w, bias=b),
    "trades": lambda f, z, g, w, b: trace_trades(f, z, g, w, weight=WEIGHT, bias=b),
    "trades-full": lambda f, z, g, w, b: trace_trades(f, z, g, w, weight=WEIGHT, stop_gradient=False, bias=b),
    "alp": lambda f, z, g, w, b: trace_alp(f, z, g, w, weight=WEIGHT, bias=b),
    "alp-logits": lambda f, z, g, w, b: trace_logit_pairing(f, g, z.shape[1], bias=b),
    "alp-logits-full": lambda f, z, g, w, b: trace_logit_pairing(f, g, z.shape[1], stop_gradient=False, bias=b),
    "alp-full": lambda f, z, g, w, b: trace_alp(f, z, g, w, weight=WEIGHT, stop_gradient=False, bias=b),
}


@pytest.mark.parametrize("name", LOSSES)
@given(instance=heads())
def test_closed_form_is_the_trace(name, instance):
    head, clean, attacked, y = instance
    found = FORMS[name](clean, head(clean), attacked, head(attacked), head.bias is not None)
    assert found.shape == (len(clean),)
    for i in range(len(clean)):
        truth = exact(head, lambda z: LOSSES[name](z, clean[i], attacked[i], y[i]))
        assert found[i].item() == pytest.approx(truth.item(), rel=1e-10, abs=1e-10)


@pytest.mark.parametrize("stop", [True, False])
@pytest.mark.parametrize("ce_at", ["adv", "clean"])
@given(instance=heads())
def test_closed_form_of_mart_is_the_trace(ce_at, stop, instance):
    head, clean, attacked, y = instance
    how = {"weight": WEIGHT, "ce_at": ce_at, "stop_gradient": stop, "bias": head.bias is not None}
    found = trace_mart(clean, head(clean), attacked, head(attacked), y, **how)
    assert found.shape == (len(clean),)
    for i in range(len(clean)):
        rival = head(attacked[i]).detach().index_fill(0, y[i], -torch.inf).argmax()
        truth = exact(head, lambda z: mart(z, clean[i], attacked[i], y[i], ce_at, rival, stop))
        # where 1 - s' is tiny it is the loss above that loses digits
        sure = head(attacked[i]).softmax(0)[rival].item()
        assert found[i].item() == pytest.approx(truth.item(), rel=1e-10 / (1 - sure), abs=1e-10 / (1 - sure))


def test_golden_values():
    f = torch.tensor([[3.0, 4.0]])
    even, certain = torch.zeros(1, 2), torch.tensor([[200.0, 0.0]])
    assert trace_ce(f, even).item() == pytest.approx(12.5)
    assert trace_ce(f, even, bias=True).item() == pytest.approx(13.0)
    assert trace_ce(f, certain).item() == 0
    assert trace_ce(torch.ones(1, 2), torch.zeros(1, 4)).item() == pytest.approx(1.5)
    assert trace_trades(f, even, f, even, weight=6.0).item() == pytest.approx(87.5)


@given(instance=heads(smallest=1))
def test_what_is_known_without_computing(instance):
    head, f, g, y = instance
    z, w, bias = head(f), head(g), head.bias is not None
    ce = trace_ce(f, z, bias=bias)
    most = (f.square().sum(1) + bias) * (1 - 1 / z.shape[1])
    assert bool((ce >= 0).all())
    assert bool((ce <= most * (1 + 1e-12)).all())
    torch.testing.assert_close(trace_ce(2 * f, z), 4 * trace_ce(f, z))
    # moving both logits alike leaves equal ones equal, so at x' = x pairing does not bend
    torch.testing.assert_close(trace_trades(f, z, f, z, weight=3.0, stop_gradient=False, bias=bias), ce)
    torch.testing.assert_close(trace_alp(f, z, f, z, weight=3.0, stop_gradient=False, bias=bias), ce)
    torch.testing.assert_close(trace_trades(f, z, f, z, weight=3.0, bias=bias), 4 * ce)
    torch.testing.assert_close(trace_trades(f, z, g, w, weight=0.0, bias=bias), ce)
    torch.testing.assert_close(trace_alp(g, w, f, z, weight=0.0, bias=bias), ce)
    if z.shape[1] == 2:  # 1 - s of the other class is s of the label
        torch.testing.assert_close(trace_mart(g, w, f, z, y, weight=0.0, bias=bias), 2 * ce)


def random_pair():
    generator = torch.Generator().manual_seed(5)
    f, g = torch.randn(2, 3, 4, generator=generator, dtype=torch.float64)
    z, w = 2 * torch.randn(2, 3, 5, generator=generator, dtype=torch.float64)
    return f, z, g, w


def test_printed_formulas_are_other_numbers():
    """The source derives with d Phi_ik/d z_k = Phi_kk Psi_ki, which is false; what follows from it differs."""
    z = random_pair()[1][0]
    third = jacrev(jacrev(lambda z: z.softmax(0)))(z)  # [i, k, l] = d Phi_ik / d z_l
    s = z.softmax(0)
    phi = torch.diag(s) - torch.outer(s, s)
    diagonal = third.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(diagonal, (1 - 2 * s) * phi)
    psi = torch.eye(5, dtype=torch.float64) - s
    assert (diagonal - phi.diag() * psi.T).abs().max() > 0.02

    f, z, g, w = random_pair()
    s, s_adv, size = z.softmax(1), w.softmax(1), g.square().sum(1)
    columns = torch.diag_embed(s_adv) - s_adv[:, :, None] * s_adv[:, None]
    at_adv = trace_ce(g, w)
    alp = (trace_alp(f, z, g, w, weight=1.0) - at_adv) / 2
    clean_columns = torch.diag_embed(s) - s[:, :, None] * s[:, None]
    wrong = size * (clean_columns.square() - (s - s_adv)[:, :, None] * columns * (1 - 2 * s_adv)[:, None]).sum((1, 2))
    assert bool(((alp - wrong).abs() > 1e-3).all())  # the unprimed Phi

    y = torch.tensor([0, 1, 2])
    weighted = trace_mart(f, z, g, w, y, weight=1.0) - trace_mart(f, z, g, w, y, weight=0.0)
    doubt = 1 - s.gather(1, y[:, None])[:, 0]
    torch.testing.assert_close(weighted, doubt * at_adv)
    assert bool(((weighted - at_adv).abs() > 1e-3).all())  # printed without the factor 1 - s_y

    rival = w.scatter(1, y[:, None], -torch.inf).argmax(1)
    row = columns[torch.arange(3), rival]
    left = 1 - s_adv[torch.arange(3), rival][:, None]
    margin = size * ((1 - 2 * s_adv) * row / left + (row / left).square()).sum(1)
    torch.testing.assert_close(trace_mart(f, z, g, w, y, weight=0.0) - at_adv, margin)
    assert bool(((margin - size * (row.square() / left).sum(1)).abs() > 1e-2).all())  # the printed last line


def test_pairing_can_bend_downwards():
    f, z, g, w = random_pair()
    many = torch.cat([trace_alp(f, z * a, g, w * b, weight=10.0) for a in (0.1, 1, 3) for b in (0.1, 0.5, 1)])
    assert many.min() < 0
    assert many.max() > 0


@pytest.mark.parametrize("name", [*FORMS, "mart"])
def test_gradients_against_finite_differences(name):
    leaves = tuple(t.requires_grad_() for t in random_pair())
    y = torch.tensor([0, 1, 2])
    form = (
        (lambda *at: trace_mart(*at, y, weight=WEIGHT))
        if name == "mart"
        else (lambda f, z, g, w: FORMS[name](f, z, g, w, True))
    )
    assert torch.autograd.gradcheck(form, leaves)


def test_certain_predictions_keep_their_digits():
    """1 - |s|^2 is zero in float32 here; the trace and its gradient are not."""
    f, z = torch.ones(1, 4), torch.tensor([[30.0, 0.0]], requires_grad=True)
    trace = trace_ce(f, z)
    assert trace.item() == pytest.approx(8 * torch.exp(torch.tensor(-30.0)).item(), rel=1e-5)
    trace.backward()
    assert z.grad[0, 0].item() == pytest.approx(-trace.item(), rel=1e-4)
    # a rival with all of the probability: 1 - s' underflows, the trace does not
    y = torch.tensor([1])
    assert trace_mart(f, z, f, z, y, weight=0.0).item() == pytest.approx(2 * trace.item(), rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_any_float_dtype(dtype):
    f, z = torch.full((2, 100), 30.0, dtype=dtype), torch.zeros(2, 4, dtype=dtype)
    trace = trace_ce(f, z)  # |f|^2 = 90 000 is beyond float16
    assert trace.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert trace.tolist() == pytest.approx([67500.0] * 2)


def test_shapes_that_make_no_sense():
    with pytest.raises(InputError, match=r"features \(B, d\).*\(2, 3, 4\)"):
        trace_ce(torch.zeros(2, 3, 4), torch.zeros(2, 5))
    with pytest.raises(InputError, match=r"\(1, 4\) and \(2, 5\)"):
        trace_alp(torch.zeros(1, 4), torch.zeros(2, 5), torch.zeros(2, 4), torch.zeros(2, 5), weight=1.0)
    one = torch.zeros(2, 1)
    with pytest.raises(InputError, match="one class"):
        trace_mart(one, one, one, one, torch.zeros(2, dtype=torch.int64), weight=1.0)


def relu_net(bias=True, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(4, 7, bias=bias),
        nn.ReLU(),
        nn.Sequential(nn.Linear(7, 6, bias=bias), nn.ReLU()),
        nn.Linear(6, 3, bias=bias),
    ).double()


def whole_hessian(model, x, y):
    """Traces of the blocks on the diagonal, by name of the parameter, by differentiating twice."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    blocks = jacrev(grad(lambda p: cross_entropy(functional_call(model, p, (x,)), y)))(parameters)
    return {n: blocks[n][n].reshape(p.numel(), p.numel()).trace() for n, p in parameters.items()}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_trace_of_a_relu_network(bias, seed):
    model = relu_net(bias, seed)
    x, y = torch.randn(3, 2, 2, dtype=torch.float64), torch.tensor([0, 1, 2])
    layers = trace_relu_layers(model, x)
    assert layers.shape == (3, 3)
    for i in range(3):
        blocks = whole_hessian(model, x[i : i + 1], y[i : i + 1])
        for layer, name in enumerate(("1", "3.0", "4")):
            truth = sum(v for n, v in blocks.items() if n.startswith(name))
            assert layers[layer, i].item() == pytest.approx(truth.item(), rel=1e-10, abs=1e-12)
        assert trace_relu(model, x)[i].item() == pytest.approx(sum(blocks.values()).item(), rel=1e-10)
    features = model[:4](x)
    torch.testing.assert_close(layers[-1], trace_ce(features, model(x), bias=bias))
    assert trace_relu(model, x[:0]).shape == (0,)


def test_trace_of_a_network_that_ends_in_a_relu():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4), nn.ReLU()).double()
    x = torch.randn(1, 3, dtype=torch.float64)
    truth = sum(whole_hessian(model, x, torch.tensor([1])).values())
    assert trace_relu(model, x).item() == pytest.approx(truth.item(), rel=1e-10)


def test_the_printed_trace_of_lower_layers_is_another_number():
    """It leaves out the terms s_k s_l J_k J_l between classes. Twice the printed number bounds the true one."""
    differs = False
    for seed in range(5):
        model = relu_net(seed=seed)
        x = torch.randn(4, 4, dtype=torch.float64)
        exact_layers = trace_relu_layers(model, x)
        s = model(x).softmax(1)
        hidden = model[:3](x)
        active = model[3][0](hidden) > 0
        slope = (model[4].weight * active[:, None]).square()  # (B, K, 6)
        printed = (hidden.square().sum(1) + 1) * (slope * (s - s.square())[:, :, None]).sum((1, 2))
        assert bool((exact_layers[1] <= 2 * printed * (1 + 1e-12)).all())
        differs |= bool(((exact_layers[1] / printed - 1).abs() > 0.1).any())
    assert differs


def test_gradient_of_the_relu_trace():
    model = relu_net()
    x = torch.randn(3, 4, dtype=torch.float64)
    parameters = list(model.parameters())
    gradient = torch.autograd.grad(trace_relu(model, x).mean(), parameters)
    assert all(bool((g != 0).any()) for g in gradient)
    direction = [torch.randn_like(p) for p in parameters]
    slope = sum((g * v).sum() for g, v in zip(gradient, direction, strict=True)).item()
    ends = []
    for step in (1e-6, -1e-6):
        moved = {n: p + step * v for (n, p), v in zip(model.named_parameters(), direction, strict=True)}
        ends.append(trace_relu(model, x, weights=moved).mean().item())
    assert slope == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-6)
    assert ends[0] != trace_relu(model, x).mean().item()


def test_a_single_layer_is_its_own_top_layer():
    model, x = nn.Linear(4, 3).double(), torch.randn(2, 4, dtype=torch.float64)
    torch.testing.assert_close(trace_relu(model, x), trace_ce(x, model(x), bias=True))


def test_normalisation_may_come_first():
    torch.manual_seed(0)
    inner = relu_net()
    model = nn.Sequential(Normalize(0.3, 0.5), inner).double()
    x = torch.rand(3, 4, dtype=torch.float64)
    torch.testing.assert_close(trace_relu_layers(model, x), trace_relu_layers(inner, (x - 0.3) / 0.5))
    with pytest.raises(UnsupportedError, match="'1' is Normalize"):
        trace_relu(nn.Sequential(nn.Linear(4, 4), Normalize(0.3, 0.5), nn.Linear(4, 2)), x)


def test_networks_without_an_exact_trace():
    x = torch.zeros(1, 4)
    with pytest.raises(UnsupportedError, match=r"'1' is Tanh\(\)"):
        trace_relu(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(), nn.Linear(4, 2)), x)
    with pytest.raises(UnsupportedError, match="'the model' is Bilinear"):
        trace_relu(nn.Bilinear(2, 2, 2), x)
    tied = nn.Linear(4, 4)
    with pytest.raises(UnsupportedError, match="'2' shares its weight"):
        trace_relu(nn.Sequential(tied, nn.ReLU(), tied), x)
    with pytest.raises(UnsupportedError, match="no linear layer"):
        trace_relu(nn.Sequential(nn.ReLU()), x)
    with pytest.raises(InputError, match=r"'0' sees shape \(1, 2, 4\)"):
        trace_relu(nn.Sequential(nn.Linear(4, 2)), torch.zeros(1, 2, 4))


@given(seed=st.integers(0, 10_000), scale=st.floats(0.1, 5))
def test_each_layer_bounds_the_one_below(seed, scale):
    model = relu_net(seed=seed)
    x = torch.randn(4, 4, dtype=torch.float64) * scale
    found = layer_bound(model, x)
    assert found.largest.shape == found.limit.shape == (3, 4)
    assert bool((found.largest <= found.limit * (1 + 1e-12)).all())
    assert bool((found.largest[-1] > 0).all())


def test_the_bound_of_layers_by_hand():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 2, bias=False)).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 3.0], [2.0, 0.0]]))
        model[2].weight.copy_(torch.tensor([[1.0, 0.0], [-1.0, 0.5]]))
    x = torch.zeros(1, 2, dtype=torch.float64) + torch.tensor([1.0, 1.0])
    s = model(x).softmax(1)[0, 0].item()  # inputs 4 and 2 of the top layer, logits 4 and -3
    h = s * (1 - s)
    found = layer_bound(model, x)
    assert found.largest[:, 0].tolist() == pytest.approx([9 * h, h])
    assert found.limit[:, 0].tolist() == pytest.approx([h * 9, h * 4])


def dense_problem():
    """A small network without a closed form, and its Hessian."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.arange(6) % 3
    names = dict(model.named_parameters())

    def loss(parameters):
        return cross_entropy(functional_call(model, parameters, (x,)), y)

    def of(flat):
        parts = flat.split([p.numel() for p in names.values()])
        return loss({n: part.view_as(p) for (n, p), part in zip(names.items(), parts, strict=True)})

    flat = torch.cat([p.detach().flatten() for p in names.values()])
    return (model, x, y), loss, names, jacrev(grad(of))(flat)


def test_hutchinson_is_unbiased():
    _, loss, parameters, hessian = dense_problem()
    samples = 400
    found = trace_hutchinson(loss, parameters, noise=Noise.for_batch(0, 1), samples=samples)
    variance = 2 * (hessian.square().sum() - hessian.diagonal().square().sum()) / samples
    assert not found.requires_grad
    assert abs(found - hessian.trace()) < 3 * variance.sqrt()
    assert variance.sqrt() < 0.2 * hessian.trace()
    few, again, other = (
        trace_hutchinson(loss, parameters, noise=Noise.for_batch(seed, 1), samples=20) for seed in (0, 0, 1)
    )
    assert few.item() == again.item() != other.item()


def test_hutchinson_of_a_diagonal_hessian_is_exact_and_differentiable():
    p = {"a": torch.tensor([1.0, 2.0], requires_grad=True), "b": torch.tensor(3.0, requires_grad=True)}

    def loss(at):
        return (at["a"] ** 3).sum() + at["b"] ** 4

    trace = trace_hutchinson(loss, p, noise=Noise.for_batch(0, 1), samples=2, create_graph=True)
    assert trace.item() == pytest.approx(6 * 3 + 12 * 9)
    trace.backward()
    assert p["a"].grad.tolist() == pytest.approx([6.0, 6.0])
    assert p["b"].grad.item() == pytest.approx(72.0)
    with pytest.raises(InputError, match="samples"):
        trace_hutchinson(loss, p, noise=Noise.for_batch(0, 1), samples=0)


def test_spread_of_the_eigenvalues():
    task, _, _, hessian = dense_problem()
    eigenvalues = torch.linalg.eigvalsh(hessian)
    assert eigenvalue_spread(*task).item() == pytest.approx(eigenvalues.std(correction=0).item(), rel=1e-10)
    assert eigenvalues.sum().item() == pytest.approx(hessian.trace().item())


def test_the_model_is_left_alone():
    model = relu_net()
    before = copy.deepcopy(model.state_dict())
    x = torch.randn(2, 4, dtype=torch.float64)
    trace_relu(model, x)
    layer_bound(model, x)
    assert all(torch.equal(before[n], v) for n, v in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
