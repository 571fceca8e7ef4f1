"""Trace of the Hessian of robust losses with respect to the weights, in closed form where there is one.

How sharply the loss bends around the weights is a term of a PAC-Bayes objective (docs/generalisation.md). The forms for
the linear top layer cost next to nothing; the one for ReLU networks is exact over all weights; Hutchinson's estimator
is for everything else (Wang, Ding, Levinboim, Chen and Soricut, "Improving robust generalization by direct PAC-Bayesian
bound minimization", 2023; several formulas corrected).

Letters: f features (B, d), the input of the top layer; s softmax of the logits (B, K); h = s - s^2; Phi_k column k of
diag(s) - s s^T; a prime marks the attacked input, which is a constant. The forms give one value per input, shape (B,),
with gradients for features and logits; half precision is computed in, and returned as, float32. `bias` says that the
top layer has a bias, which then counts among its weights.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from holdfast.errors import InputError, UnsupportedError
from holdfast.models import Normalize
from holdfast.random import Noise

Parameters = dict[str, Tensor]


def trace_ce(features: Tensor, logits: Tensor, *, bias: bool = False) -> Tensor:
    """Cross-entropy: |f|^2 sum(h), whatever the label, smoothed or not; shape (B,).

    Feature energy times Gini impurity: between 0 (a certain prediction) and |f|^2 (1 - 1/K) (a uniform one).

    >>> trace_ce(torch.tensor([[3.0, 4.0]]), torch.zeros(1, 2))
    tensor([12.5000])
    """
    _check(features, logits)
    return _inner(features, features, bias) * _impurity(logits)


def trace_kl(
    features: Tensor,
    logits: Tensor,
    features_adv: Tensor,
    logits_adv: Tensor,
    *,
    stop_gradient: bool = True,
    bias: bool = False,
) -> Tensor:
    """Divergence KL(s | s'): |f'|^2 sum(h') [+ G], shape (B,).

    G = |f|^2 [sum(h) + sum_k s_k (1 - 2 s_k)(D_k - KL)] - 2 f.f' sum(h), D = log s - log s', is there only if the loss
    has a gradient through its clean logits (`stop_gradient=False`). Without it the trace is never negative.
    """
    _check(features, logits)
    trace = trace_ce(features_adv, logits_adv, bias=bias)
    if stop_gradient:
        return trace
    log_s = _log_softmax(logits)
    s, difference = log_s.exp(), log_s - _log_softmax(logits_adv)
    kl = (s * difference).sum(1, keepdim=True)
    bend = (s * (1 - 2 * s) * (difference - kl)).sum(1)
    impurity = _impurity(logits)
    trace = trace + _inner(features, features, bias) * (impurity + bend)
    return trace - 2 * _inner(features, features_adv, bias) * impurity


def trace_trades(
    features: Tensor,
    logits: Tensor,
    features_adv: Tensor,
    logits_adv: Tensor,
    *,
    weight: float,
    stop_gradient: bool = True,
    bias: bool = False,
) -> Tensor:
    """TRADES, CE(x) + weight KL(s | s'): `trace_ce` at x + weight times `trace_kl`, shape (B,)."""
    kl_part = trace_kl(features, logits, features_adv, logits_adv, stop_gradient=stop_gradient, bias=bias)
    return trace_ce(features, logits, bias=bias) + weight * kl_part


def trace_pairing(
    features: Tensor,
    logits: Tensor,
    features_adv: Tensor,
    logits_adv: Tensor,
    *,
    stop_gradient: bool = True,
    bias: bool = False,
) -> Tensor:
    """Distance of the softmax outputs, |s - s'|^2, shape (B,); may be negative.

    2 sum_k [A'_k], A'_k = |f'|^2 (|Phi'_k|^2 - (1 - 2 s'_k) Phi'_k.(s - s')). With a gradient through the clean logits:
    2 sum_k [A'_k + A_k - 2 f.f' Phi_k.Phi'_k], A_k being A'_k with the roles of x and x' exchanged.
    |Phi_k|^2 = s_k^2 (1 - 2 s_k + |s|^2) and Phi_k.v = s_k (v_k - s.v), so that no matrix is built.
    """
    _check(features, logits)
    s, s_adv = _log_softmax(logits).exp(), _log_softmax(logits_adv).exp()
    gap = s - s_adv
    pairing = _inner(features_adv, features_adv, bias) * _pairing(s_adv, -gap)
    if not stop_gradient:
        columns = (s * s_adv * (1 - s - s_adv + (s * s_adv).sum(1, keepdim=True))).sum(1)
        pairing = pairing + _inner(features, features, bias) * _pairing(s, gap)
        pairing = pairing - 2 * _inner(features, features_adv, bias) * columns
    return 2 * pairing


def trace_logit_pairing(
    features: Tensor, features_adv: Tensor, classes: int, *, stop_gradient: bool = True, bias: bool = False
) -> Tensor:
    """Distance of the logits, |z - z'|^2, shape (B,): 2 K |f'|^2, or 2 K |f - f'|^2 with a gradient through both."""
    moved = features_adv if stop_gradient else features_adv - features
    return 2 * classes * _inner(moved, moved, bias and stop_gradient)  # a bias moves both logits alike


def trace_alp(
    features: Tensor,
    logits: Tensor,
    features_adv: Tensor,
    logits_adv: Tensor,
    *,
    weight: float,
    stop_gradient: bool = True,
    bias: bool = False,
) -> Tensor:
    """ALP, CE(x') + weight |s - s'|^2: `trace_ce` at x' + weight times `trace_pairing`, shape (B,)."""
    pairing = trace_pairing(features, logits, features_adv, logits_adv, stop_gradient=stop_gradient, bias=bias)
    return trace_ce(features_adv, logits_adv, bias=bias) + weight * pairing


def trace_margin(features: Tensor, logits: Tensor, y: Tensor, *, bias: bool = False) -> Tensor:
    """Margin of MART, -log(1 - s_k*): |f|^2 (|r|^2 - |s|^2), r the softmax without k*; shape (B,).

    k* is the likeliest class other than y, held fixed. The loss is the log-sum-exp of all logits less the log-sum-exp
    of all but k*: no division by 1 - s_k*, which may underflow.
    """
    _check(features, logits)
    if logits.shape[1] < 2:
        raise InputError("MART compares the label with another class; the logits have one class only")
    rival = logits.detach().scatter(1, y[:, None], -torch.inf).argmax(1, keepdim=True)
    without = trace_ce(features, logits.scatter(1, rival, -torch.inf), bias=bias)
    return trace_ce(features, logits, bias=bias) - without


def trace_doubted_kl(
    features: Tensor,
    logits: Tensor,
    features_adv: Tensor,
    logits_adv: Tensor,
    y: Tensor,
    *,
    stop_gradient: bool = True,
    bias: bool = False,
) -> Tensor:
    """Divergence of MART, (1 - s_y) KL(s | s'): (1 - s_y) times `trace_kl`, shape (B,).

    With a gradient through the clean logits the factor a = 1 - s_y bends too: + 2 grad(a).grad(KL) + KL trace(a), where
    ds_y/dz_k = Phi_yk and d^2 s_y/dz_k^2 = (1 - 2 s_k) Phi_yk.
    """
    log_s = _log_softmax(logits)
    s, label = log_s.exp(), y[:, None]
    doubt = _complement(s).gather(1, label)[:, 0]
    trace = doubt * trace_kl(features, logits, features_adv, logits_adv, stop_gradient=stop_gradient, bias=bias)
    if stop_gradient:
        return trace
    log_s_adv = _log_softmax(logits_adv)
    difference = log_s - log_s_adv
    kl = (s * difference).sum(1, keepdim=True)
    slope = s.gather(1, label) * (torch.zeros_like(s).scatter(1, label, 1.0) - s)  # Phi_y
    energy, both = _inner(features, features, bias), _inner(features, features_adv, bias)
    turn = energy * (slope * s * (difference - kl)).sum(1) + both * (slope * (log_s_adv.exp() - s)).sum(1)
    return trace - 2 * turn - energy * (kl * (1 - 2 * s) * slope).sum(1)


def trace_mart(
    features: Tensor,
    logits: Tensor,
    features_adv: Tensor,
    logits_adv: Tensor,
    y: Tensor,
    *,
    weight: float,
    ce_at: Literal["adv", "clean"] = "adv",
    stop_gradient: bool = True,
    bias: bool = False,
) -> Tensor:
    """MART, CE - log(1 - s'_k*) + weight (1 - s_y) KL(s | s'); shape (B,).

    The sum of `trace_ce`, `trace_margin` and weight times `trace_doubted_kl`. The cross-entropy is at x', as in the
    original (Wang et al., "Improving adversarial robustness requires revisiting misclassified examples", 2020), or at x
    (`ce_at="clean"`).
    """
    at_ce = (features_adv, logits_adv) if ce_at == "adv" else (features, logits)
    fit = trace_ce(*at_ce, bias=bias) + trace_margin(features_adv, logits_adv, y, bias=bias)
    pair = (features, logits, features_adv, logits_adv)
    return fit + weight * trace_doubted_kl(*pair, y, stop_gradient=stop_gradient, bias=bias)


@dataclass(frozen=True, eq=False)
class ReluLayer:
    """One linear layer of a ReLU network: its Hessian has the diagonal entries variance_d inputs_j^2, and variance_d.

    Attributes:
        name: of the layer in the model.
        weight: (out, in).
        bias: has it a bias?
        inputs: (B, in), what the layer sees.
        variance: (B, out), Var_s of dz_k/d(output d of the layer) over the classes k, drawn with probabilities s.
        jacobian: (B, K, out), dz_k/d(output d).
    """

    name: str
    weight: Tensor
    bias: bool
    inputs: Tensor
    variance: Tensor
    jacobian: Tensor


def relu_layers(model: nn.Module, x: Tensor, *, weights: Mapping[str, Tensor] | None = None) -> list[ReluLayer]:
    """The layers of a network of Flatten, Linear and ReLU in a row, first to last: what its exact traces are made of.

    The logits are piecewise linear in the weights of each layer, so the Hessian of the cross-entropy in one layer's
    weights is J^T Phi J exactly; J comes back through the layers by matrix products and keeps its gradient. Memory
    grows as B K times the widths.

    Args:
        model: nn.Sequential, nested ones included; `Normalize` may come first.
        x: inputs, shape (B, ...).
        weights: by name, in the place of the model's own.
    """
    modules = _sequence(model)
    own = dict(model.named_parameters(remove_duplicate=False)) | dict(weights or {})
    seen, active = [], []
    for name, module in modules:
        seen.append(x)
        if isinstance(module, nn.Linear):
            if x.ndim != 2:
                raise InputError(f"layer '{name}' sees shape {tuple(x.shape)}; put nn.Flatten() in front of it")
            x = nn.functional.linear(x, own[_join(name, "weight")], own.get(_join(name, "bias")))
        else:
            x = module(x)
        active.append(x.detach() > 0)
    s = x.softmax(1)
    jacobian = torch.eye(x.shape[1], dtype=x.dtype, device=x.device).expand(len(x), -1, -1)
    found = []
    for (name, module), inputs, positive in list(zip(modules, seen, active, strict=True))[::-1]:
        if isinstance(module, nn.ReLU):
            jacobian = jacobian * positive[:, None]
        elif isinstance(module, nn.Linear):
            centred = jacobian - s[:, None] @ jacobian
            variance = (s[:, None] @ centred.square())[:, 0]
            weight = own[_join(name, "weight")]
            found.append(ReluLayer(name, weight, module.bias is not None, inputs, variance, jacobian))
            jacobian = jacobian @ weight
    return found[::-1]


def trace_relu_layers(model: nn.Module, x: Tensor, *, weights: Mapping[str, Tensor] | None = None) -> Tensor:
    """Exact trace for the cross-entropy over each layer's weights and bias: (|a|^2 [+ 1]) sum_d Var_d, (layers, B).

    For networks of Flatten, Linear and ReLU in a row, with gradients for the parameters; see `relu_layers`.
    """
    layers = relu_layers(model, x, weights=weights)
    return torch.stack([_inner(at.inputs, at.inputs, at.bias) * at.variance.sum(1) for at in layers])


def trace_relu(model: nn.Module, x: Tensor, *, weights: Mapping[str, Tensor] | None = None) -> Tensor:
    """Exact trace for the cross-entropy over all weights and biases, shape (B,); see `trace_relu_layers`."""
    return trace_relu_layers(model, x, weights=weights).sum(0)


@dataclass(frozen=True, eq=False)
class LayerBound:
    """H_kd = (dz_k/dI_d)^2 h_k, I the input of a layer: its largest entry, and what the next layer says of it.

    Attributes:
        largest: (layers, B), max H of each layer.
        limit: (layers, B), max H of the next layer (of the logits after the last) times |W|_1^2, |W|_1 the largest sum
            over the outputs of |W|. largest <= limit always.
    """

    largest: Tensor
    limit: Tensor


@torch.no_grad()
def layer_bound(model: nn.Module, x: Tensor) -> LayerBound:
    """Why a flat top layer flattens the layers below: max H^(i) <= max H^(i+1) |W^(i)|_1^2. For ReLU networks."""
    layers = relu_layers(model, x)
    s = model(x).softmax(1)
    h = s - s.square()
    largest = [((at.jacobian @ at.weight).square() * h[:, :, None]).amax((1, 2)) for at in layers]
    following = [*largest[1:], h.amax(1)]
    limit = [top * at.weight.abs().sum(0).max() ** 2 for top, at in zip(following, layers, strict=True)]
    return LayerBound(torch.stack(largest), torch.stack(limit))


def trace_hutchinson(
    loss: Callable[[Parameters], Tensor],
    parameters: Mapping[str, Tensor],
    *,
    noise: Noise,
    samples: int,
    create_graph: bool = False,
) -> Tensor:
    """Estimate of the trace of the Hessian of any loss: the mean of v.Hv over random signs v, a scalar.

    Unbiased; the variance is 2 (|H|_F^2 - sum_n H_nn^2) / samples, which is large where weights interact: prefer the
    closed forms. One Hessian-vector product for each sample.

    Args:
        loss: from named parameters to a scalar, such as
            `lambda p: cross_entropy(torch.func.functional_call(model, p, (x,)), y)`.
        parameters: where the Hessian is taken.
        noise: source of the signs; its first input's numbers are used.
        samples: number of sign vectors.
        create_graph: keep a gradient for the parameters.
    """
    if samples < 1:
        raise InputError(f"samples must be at least 1, got {samples}")
    at = {name: p if create_graph else p.detach() for name, p in parameters.items()}
    product = torch.func.vjp(torch.func.grad(loss), at)[1]
    total = torch.stack([_sandwich(product, at, noise.fork(i)[:1]) for i in range(samples)]).mean()
    return total if create_graph else total.detach()


def eigenvalue_spread(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Standard deviation of the eigenvalues of the Hessian of the mean cross-entropy over all parameters, a scalar.

    sqrt(|H|_F^2 / N - (Tr H / N)^2): it falls with the trace unless negative eigenvalues grow. Builds all N^2 entries:
    for networks of a few thousand weights at most.

    Args:
        model: from (B, ...) to logits (B, K).
        x: inputs, shape (B, ...).  y: labels, shape (B,).
    """
    at = {name: p.detach() for name, p in model.named_parameters()}
    sizes = [p.numel() for p in at.values()]

    def loss(flat: Tensor) -> Tensor:
        parts = zip(at.items(), flat.split(sizes), strict=True)
        return cross_entropy(functional_call(model, {name: part.view_as(p) for (name, p), part in parts}, (x,)), y)

    hessian: Tensor = torch.func.jacrev(torch.func.grad(loss))(torch.cat([p.flatten() for p in at.values()]))
    mean = hessian.trace() / len(hessian)
    return (hessian.square().sum() / len(hessian) - mean**2).clamp(min=0).sqrt().detach()


def _sandwich(product: Callable[[Parameters], tuple[Parameters]], at: Parameters, noise: Noise) -> Tensor:
    """v.Hv for one vector of signs."""
    signs = {}
    for i, (name, p) in enumerate(at.items()):
        positive = noise.fork(i).bits((p.numel(),)).view(p.shape) >= 0
        signs[name] = torch.where(positive.to(p.device), 1.0, -1.0).to(p.dtype)
    (bent,) = product(signs)
    return torch.stack([(bent[name] * v).sum() for name, v in signs.items()]).sum()


def _sequence(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers in the order of their calls, or an error that names the first one without a rule."""
    found: list[tuple[str, nn.Module]] = []
    linear: set[int] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        if type(module) is nn.Sequential:
            continue
        flat = isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) == (1, -1)
        before = isinstance(module, Normalize) and not linear  # no weights below it, so nothing to carry through it
        if not (flat or before or type(module) in (nn.Linear, nn.ReLU)):
            raise UnsupportedError(
                "the exact trace is for nn.Sequential of Flatten, Linear and ReLU, after Normalize or not; "
                f"'{name or 'the model'}' is {module}. Use trace_hutchinson, or the trace of the top layer alone."
            )
        if isinstance(module, nn.Linear):
            if id(module.weight) in linear:
                raise UnsupportedError(f"layer '{name}' shares its weight with another; use trace_hutchinson")
            linear.add(id(module.weight))
        found.append((name, module))
    if not linear:
        raise UnsupportedError("the model has no linear layer, and so no weights to take a trace over")
    return found


def _join(layer: str, parameter: str) -> str:
    return f"{layer}.{parameter}" if layer else parameter  # a model that is one layer has no name for it


def _check(features: Tensor, logits: Tensor) -> None:
    if features.ndim != 2 or logits.ndim != 2 or len(features) != len(logits):
        raise InputError(
            "expected features (B, d), the input of the top layer, and logits (B, K), got shapes "
            f"{tuple(features.shape)} and {tuple(logits.shape)}"
        )


def _wide(values: Tensor) -> Tensor:
    """Squares of half-precision numbers overflow."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def _inner(a: Tensor, b: Tensor, bias: bool) -> Tensor:
    """a.b of each input, (B,); a bias is the weight of one more feature, which is always 1."""
    return (_wide(a) * _wide(b)).sum(1) + float(bias)


def _log_softmax(logits: Tensor) -> Tensor:
    return torch.log_softmax(_wide(logits), 1)


def _complement(s: Tensor) -> Tensor:
    """1 - s; for the likeliest class the sum of the others, as 1 - s would cancel to zero for a certain prediction."""
    top = s.argmax(1, keepdim=True)
    return (1 - s).scatter(1, top, s.scatter(1, top, 0.0).sum(1, keepdim=True))


def _impurity(logits: Tensor) -> Tensor:
    """sum(h) = 1 - |s|^2, (B,)."""
    s = _log_softmax(logits).exp()
    return (s * _complement(s)).sum(1)


def _pairing(s: Tensor, gap: Tensor) -> Tensor:
    """sum_k |Phi_k|^2 + (1 - 2 s_k) Phi_k.gap, (B,)."""
    size = s.square() * (1 - 2 * s + s.square().sum(1, keepdim=True))
    bend = (1 - 2 * s) * s * (gap - (s * gap).sum(1, keepdim=True))
    return (size + bend).sum(1)
