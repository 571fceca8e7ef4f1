"""The pieces on which a piecewise linear network is affine: around an input, and along a segment.

The signs of all ReLUs at x define a polytope, on which f(x) = w x + b with w the Jacobian. The saliency is a row of w:
it is normal to the boundary as this one piece continues it, which need not be where the boundary is. Along a segment
from b to x the gradient is constant on each piece, so that a path integral is a finite sum,

    integral over t of the gradient at b + t (x - b) = sum over pieces i of l_i w_i,

with l_i the share of the segment inside piece i: integrated gradients and `big` without a quadrature.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from holdfast.attacks.core.gradients import frozen
from holdfast.bounding.graph import ops
from holdfast.bounding.graph.ops import Graph, Node
from holdfast.bounding.graph.trace import trace
from holdfast.certificates.complete.pieces import in_pieces
from holdfast.errors import InputError, UnsupportedError
from holdfast.explanations.core.quantity import Setting, gradients_at


@dataclass(frozen=True, eq=False)
class Piece:
    """The affine map of a network on the polytope of each input: f = `weight` x + `bias` there.

    Attributes:
        weight: (B, K, ...), the gradient of every logit.
        bias: (B, K).
    """

    weight: Tensor
    bias: Tensor


def piece_at(model: nn.Module, x: Tensor) -> Piece:
    """The affine map of the model around each input x (B, ...), by differentiation; one pass for each logit."""
    with frozen(model), torch.enable_grad():
        point = x.detach().requires_grad_(True)
        logits = model(point)
        rows = [torch.autograd.grad(z.sum(), point, retain_graph=True)[0] for z in logits.unbind(1)]
    weight = torch.stack(rows, 1)
    return Piece(weight, logits.detach() - (weight * x[:, None]).flatten(2).sum(2))


@torch.no_grad()
def breakpoints(model: nn.Module, start: Tensor, end: Tensor) -> Tensor:
    """Where the segment from `start` to `end` (one input each, without a batch) changes its piece: 0 < t < 1, sorted.

    Exact up to rounding: between two breakpoints of the layers before, the input of a ReLU is affine in t, and has at
    most one zero.
    """
    if start.shape != end.shape:
        raise InputError(f"expected two inputs of one shape, got {tuple(start.shape)} and {tuple(end.shape)}")
    graph = in_pieces(trace(model, start[None]))
    _check_piecewise_linear(graph)
    t = torch.tensor([0.0, 1.0], dtype=start.dtype, device=start.device)
    for node in graph.nodes:
        if isinstance(node.op, ops.Activation):
            before = node.inputs[0]
            values = _values(graph, before, start + t.view(-1, *[1] * start.ndim) * (end - start)).flatten(1)
            left, right = values[:-1], values[1:]
            crossed = (left * right < 0).nonzero()
            at, unit = crossed.unbind(1)
            share = left[at, unit] / (left[at, unit] - right[at, unit])
            t = torch.cat([t, t[at] + share * (t[at + 1] - t[at])]).unique()
    return t[(t > 0) & (t < 1)]


def path_slope(model: nn.Module, start: Tensor, end: Tensor, y: int, setting: Setting) -> Tensor:
    """sum_i l_i w_i for the quantity of class y, shape of one input: the exact mean gradient along the segment."""
    inner = breakpoints(model, start, end)
    t = torch.cat([inner.new_zeros(1), inner, inner.new_ones(1)])
    middles, lengths = (t[1:] + t[:-1]) / 2, t[1:] - t[:-1]
    shape = (-1, *[1] * start.ndim)
    points = start + middles.view(shape) * (end - start)
    slopes, _ = gradients_at(model, points, torch.full((len(points),), y, device=start.device), setting)
    return (lengths.view(shape) * slopes).sum(0)


def _values(graph: Graph, index: int, points: Tensor) -> Tensor:
    """The values of one node, with the nodes after it left out."""
    part = Graph(graph.nodes[: index + 1])
    value: Tensor = part.walk(points, lambda node, inputs: ops.evaluate(node.op, inputs))[index]
    return value


def _check_piecewise_linear(graph: Graph) -> None:
    for node in graph.nodes:
        if isinstance(node.op, ops.MaxPool | ops.MinMax) or not _is_piecewise_linear(node):
            raise UnsupportedError(
                f"layer '{node.name}': only networks of ReLUs, leaky ReLUs, MinMax and plain max pooling have pieces "
                "that this can find"
            )


def _is_piecewise_linear(node: Node) -> bool:
    return not isinstance(node.op, ops.Activation) or node.op.kind in ("relu", "leaky_relu")
