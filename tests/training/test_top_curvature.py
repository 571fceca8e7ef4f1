"""The closed forms for the top layer against the Hessian by automatic differentiation, and what is printed wrong."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.func import grad, jacrev
from torch.nn.functional import cross_entropy, linear, log_softmax

from holdfast.errors import InputError
from holdfast.training import top_curvature as forms
from holdfast.training.outputs import Output

WEIGHT = 1.7


def trace_ce(f, z, **how):
    return forms.trace_ce(Output(z, f), **how)


def trace_trades(f, z, g, w, *, weight, bias=False, **how):
    kl = forms.trace_kl(Output(z, f), Output(w, g), bias=bias, **how)
    return trace_ce(f, z, bias=bias) + weight * kl


def trace_alp(f, z, g, w, *, weight, bias=False, **how):
    pairing = forms.trace_pairing(Output(z, f), Output(w, g), bias=bias, **how)
    return trace_ce(g, w, bias=bias) + weight * pairing


def trace_logit_pairing(f, z, g, w, **how):
    return forms.trace_logit_pairing(Output(z, f), Output(w, g), **how)


def trace_mart(f, z, g, w, y, *, weight, ce_at="adv", bias=False, **how):
    clean, adv = Output(z, f), Output(w, g)
    fit = forms.trace_ce(adv if ce_at == "adv" else clean, bias=bias) + forms.trace_margin(adv, y, bias=bias)
    return fit + weight * forms.trace_doubted_kl(clean, adv, y, bias=bias, **how)


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
    "alp-logits": lambda f, z, g, w, b: trace_logit_pairing(f, z, g, w, bias=b),
    "alp-logits-full": lambda f, z, g, w, b: trace_logit_pairing(f, z, g, w, stop_gradient=False, bias=b),
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
