"""Guided backpropagation: gradients that only positive numbers pass. A control that a sanity check must fail."""

from typing import Any

import torch
from torch import Tensor, nn

from holdfast.bounding.graph import ops
from holdfast.bounding.graph.ops import Graph, Node
from holdfast.bounding.graph.trace import trace
from holdfast.errors import UnsupportedError
from holdfast.explanations.core.answers import describe, without_error
from holdfast.explanations.core.quantity import Setting, value
from holdfast.registry import Explainer
from holdfast.results import Explanation


class _GuidedReLU(torch.autograd.Function):
    """max(x, 0); back goes g where both x and g are positive, and zero elsewhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.where((x > 0) & (gradients[0] > 0), gradients[0], 0)


@Explainer(
    "guided-backprop",
    summary="the gradient without what is negative on its way back; a control that sanity checks must fail",
    reference="Springenberg et al., Striving for simplicity: the all convolutional net, 2015",
)
def guided_backprop(model: nn.Module, x: Tensor, y: Tensor, setting: Setting) -> Explanation:
    """A(x) = gradient of f_y at x, with negative gradients set to zero at every ReLU; shape of x.

    It draws edges of the image and depends little on what the upper layers have learnt (Adebayo et al., "Sanity checks
    for saliency maps", 2018), so do not read it as an explanation. `randomised` shows it beside the others.
    """
    graph = trace(model, x[:1])
    if not any(_is_relu(node) for node in graph.nodes):
        raise UnsupportedError("guided-backprop changes what ReLUs pass back, and the model has none; use 'saliency'")
    parts = [
        _one_chunk(graph, some, labels, setting)
        for some, labels in zip(x.split(setting.chunk), y.split(setting.chunk), strict=True)
    ]
    slope, values = (torch.cat(column) for column in zip(*parts, strict=True))
    return without_error(slope, values, None, describe(y, setting, "positive gradients only"), 1)


def _is_relu(node: Node) -> bool:
    return isinstance(node.op, ops.Activation) and node.op.kind == "relu"


def _one_chunk(graph: Graph, x: Tensor, y: Tensor, setting: Setting) -> tuple[Tensor, Tensor]:
    def step(node: Node, inputs: list[Tensor]) -> Tensor:
        guided: Tensor = _GuidedReLU.apply(inputs[0]) if _is_relu(node) else ops.evaluate(node.op, inputs)  # type: ignore[no-untyped-call]
        return guided

    with torch.enable_grad():
        x = x.detach().requires_grad_(True)
        values = value(setting.quantity)(graph.walk(x, step)[-1], y)
        (slope,) = torch.autograd.grad(values.sum(), x)
    return slope, values.detach()
