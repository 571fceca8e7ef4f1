"""Perturbations of the weights: the loss is taken at theta + xi, where xi raises it, and theta takes the step."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from holdfast.registry import Part
from holdfast.training.context import Context
from holdfast.training.outputs import Weights, top_layer
from holdfast.utils.options import Epochs, NotNegative

LossAt = Callable[[Weights], Tensor]


def _ascend(model: nn.Module, loss_at: LossAt, names: list[str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The parameters, and the gradient of the loss for those named. Batch norm keeps its statistics."""
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    loss = loss_at({**parameters, **buffers})
    gradients = torch.autograd.grad(loss, [parameters[name] for name in names], allow_unused=True)
    return parameters, {name: g for name, g in zip(names, gradients, strict=True) if g is not None}


def _moved(parameters: dict[str, Tensor], xi: dict[str, Tensor]) -> Weights:
    return {name: p + xi[name].detach() if name in xi else p for name, p in parameters.items()}


def _matrices(model: nn.Module) -> list[str]:
    """Names of the weights of layers: no biases, no scales of normalisation."""
    return [name for name, p in model.named_parameters() if p.requires_grad and p.ndim > 1]


def _relative(model: nn.Module, loss_at: LossAt, names: list[str], delta: float) -> Weights:
    parameters, gradients = _ascend(model, loss_at, names)
    tiny = torch.finfo(next(iter(parameters.values())).dtype).tiny
    xi = {name: delta * parameters[name].norm() / g.norm().clamp(min=tiny) * g for name, g in gradients.items()}
    return _moved(parameters, xi)


@Part(
    "awp",
    part="perturb_weights",
    summary="the loss at weights that one step of ascent has moved, each layer by a share of its norm",
    reference="Wu, Xia and Wang, Adversarial weight perturbation helps robust generalization, 2020",
)
def awp(
    model: nn.Module, loss_at: LossAt, context: Context, *, delta: NotNegative = 5e-3, start: Epochs = 0
) -> Weights | None:
    """theta + xi, with xi = delta |W| g / |g| for each weight W of a layer, from the epoch `start` on."""
    if delta == 0 or context.epoch < start:
        return None
    return _relative(model, loss_at, _matrices(model), delta)


@Part(
    "awp-top",
    part="perturb_weights",
    check_model=lambda model, x, **_: top_layer(model, x),
    summary="as awp, for the linear top layer only",
    reference="Wang et al., Improving robust generalization by direct PAC-Bayesian bound minimization, 2023",
)
def awp_top(
    model: nn.Module, loss_at: LossAt, context: Context, *, delta: NotNegative = 5e-3, start: Epochs = 0
) -> Weights | None:
    """theta + xi, with xi = delta |W| g / |g| for the weight W of the top layer."""
    if delta == 0 or context.epoch < start:
        return None
    top = context.parts.top
    return _relative(model, loss_at, [f"{top}.weight" if top else "weight"], delta)


@Part(
    "sam",
    part="perturb_weights",
    summary="sharpness-aware minimisation: the loss at the worst weights in a small ball",
    reference="Foret et al., Sharpness-aware minimization for efficiently improving generalization, 2021",
)
def sam(
    model: nn.Module, loss_at: LossAt, context: Context, *, rho: NotNegative = 0.05, start: Epochs = 0
) -> Weights | None:
    """theta + rho g / |g|, g the gradient for all parameters together."""
    if rho == 0 or context.epoch < start:
        return None
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    parameters, gradients = _ascend(model, loss_at, names)
    norm = torch.stack([g.norm() for g in gradients.values()]).norm()
    scale = rho / norm.clamp(min=torch.finfo(norm.dtype).tiny)
    return _moved(parameters, {name: scale * g for name, g in gradients.items()})
