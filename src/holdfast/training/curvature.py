"""Trace of the Hessian of the loss over all layers: exact for ReLU networks, by Hutchinson's estimator for any model.

How sharply the loss bends around the weights is a term of a PAC-Bayes objective (docs/generalisation.md; Wang, Ding,
Levinboim, Chen and Soricut, "Improving robust generalization by direct PAC-Bayesian bound minimization", 2023; several
formulas corrected). `top_curvature` has the closed forms for the linear top layer, which cost next to nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from holdfast.errors import InputError, UnsupportedError
from holdfast.models import Normalize
from holdfast.random import Noise
from holdfast.training.top_curvature import inner

Parameters = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class ReluLayer:
    """A linear layer of a ReLU network: its Hessian has the diagonal entries variance_d inputs_j^2, and variance_d."""

    name: str
    weight: Tensor  # (out, in)
    bias: bool  # has it a bias?
    inputs: Tensor  # (B, in), what the layer sees
    variance: Tensor  # (B, out), Var_s of dz_k/d(output d of the layer) over the classes k, drawn with probabilities s
    jacobian: Tensor  # (B, K, out), dz_k/d(output d)


def relu_layers(model: nn.Module, x: Tensor, *, weights: Mapping[str, Tensor] | None = None) -> list[ReluLayer]:
    """The layers of a network of Flatten, Linear and ReLU in a row, first to last: what its exact traces are made of.

    The logits are piecewise linear in the weights of each layer, so the Hessian of the cross-entropy in one layer's
    weights is J^T Phi J exactly; J comes back through the layers by matrix products and keeps its gradient. Memory
    grows as B K times the widths. Nested nn.Sequential are taken too, and `Normalize` may come first; `weights`, by
    name, are in the place of the model's own.
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
    return torch.stack([inner(at.inputs, at.inputs, at.bias) * at.variance.sum(1) for at in layers])


def trace_relu(model: nn.Module, x: Tensor, *, weights: Mapping[str, Tensor] | None = None) -> Tensor:
    """Exact trace for the cross-entropy over all weights and biases, shape (B,); see `trace_relu_layers`."""
    return trace_relu_layers(model, x, weights=weights).sum(0)


@dataclass(frozen=True, eq=False)
class LayerBound:
    """H_kd = (dz_k/dI_d)^2 h_k, I the input of a layer: its largest entry, and what the next layer says of it.

    `limit` is max H of the next layer (of the logits after the last) times |W|_1^2, |W|_1 the largest sum over the
    outputs of |W|. largest <= limit always.
    """

    largest: Tensor  # (layers, B), max H of each layer
    limit: Tensor  # (layers, B)


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
    parameters: Mapping[str, Tensor],  # where the Hessian is taken
    *,
    noise: Noise,  # source of the signs; its first input's numbers are used
    samples: int,
    create_graph: bool = False,  # keep a gradient for the parameters
) -> Tensor:
    """Estimate of the trace of the Hessian of any loss: the mean of v.Hv over random signs v, a scalar.

    Unbiased; the variance is 2 (|H|_F^2 - sum_n H_nn^2) / samples, which is large where weights interact: prefer the
    closed forms. One Hessian-vector product for each sample. A loss may be
    `lambda p: cross_entropy(torch.func.functional_call(model, p, (x,)), y)`.
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
                f"'{name or 'the model'}' is {module}. Use trace_hutchinson, or the trace of the top layer only."
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
