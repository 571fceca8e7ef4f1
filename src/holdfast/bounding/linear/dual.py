"""The dual view of the linear bound: the convex adversarial polytope (CAP).

Replace every ReLU by its triangle, write the linear programme that minimises <c, z>, and take one feasible point of its
dual: it is a backward pass of a network with the transposed weights, nu = c at the logits, nuhat = W^T nu before an
affine layer, nu = alpha nuhat before a ReLU, xi at the input, and

    <c, z> >= sum nu b + sum min over l <= zhat <= u of nuhat (relu(zhat) - alpha zhat) + min over x' of <xi, x'>.

With alpha = u / (u - l) on an unstable ReLU the inner minimum is 0 where nuhat >= 0 and -nuhat u l / (u - l) elsewhere;
alpha is 1 on an active and 0 on a dead one, without cost. As the slopes do not depend on c, one pass bounds a neuron
from both sides. (Wong and Kolter, "Provable defenses against adversarial examples via the convex outer adversarial
polytope", 2018. For the same slopes it is the Fast-Lin bound, computed another way.)
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from holdfast.bounding import interval
from holdfast.bounding.core.region import Region, minimum
from holdfast.bounding.graph import ops
from holdfast.bounding.graph.ops import Graph
from holdfast.bounding.linear import relaxation as linear
from holdfast.bounding.linear.coefficients import Coefficients
from holdfast.bounding.linear.relax import chord, upper_shift
from holdfast.errors import UnsupportedError, argument


@dataclass(frozen=True, eq=False)
class Polytope:
    """A chain of affine layers and ReLUs: all that a dual pass needs.

    Attributes:
        boxes: interval bounds of the nodes, (B, *shape) each, tightened before ReLUs.
        slopes: alpha of every ReLU, by node (B, *shape).
        gaps: largest relu(z) - alpha z of every ReLU, by node (B, *shape).
    """

    graph: Graph
    region: Region
    boxes: list[interval.Interval] = field(default_factory=list)
    slopes: dict[int, Tensor] = field(default_factory=dict)
    gaps: dict[int, Tensor] = field(default_factory=dict)


def check_chain(graph: Graph) -> None:
    """Refuse all but affine layers and ReLUs, one after the other."""
    for i, node in enumerate(graph.nodes[1:], start=1):
        relu = isinstance(node.op, ops.Activation) and node.op.kind == "relu"
        if node.inputs != (i - 1,):
            raise UnsupportedError(
                f"layer '{node.name}': the dual bound covers layers in sequence, without branches. "
                f"Use {argument('method', 'fastlin')}, which gives the same bound for sequences and covers branches "
                "as well."
            )
        if not (relu or isinstance(node.op, ops.Affine | ops.Reshape)):
            raise UnsupportedError(
                f"layer '{node.name}': the dual bound covers affine layers and ReLU, got {_kind(node.op)}. "
                f"Use {argument('method', 'fastlin')} or 'crown', which cover more."
            )


def _kind(op: ops.Op) -> str:
    return f"the activation '{op.kind}'" if isinstance(op, ops.Activation) else type(op).__name__


def polytope(graph: Graph, inputs: Region) -> Polytope:
    """Bound the input of every ReLU by dual passes for those neurons that intervals leave unstable.

    On a ball, where boxes are loose, the whole first layer is bounded by the dual norm.
    """
    p = Polytope(graph, inputs)
    first = first_layer(graph)

    def refine(i: int, lower: Tensor, upper: Tensor) -> interval.Interval:
        if i != first:
            return _refined(p, i, lower, upper, (lower < 0) & (upper > 0))
        if inputs.threat is None:  # one layer maps a box exactly
            return lower, upper
        return _refined(p, i, lower, upper, torch.ones_like(lower, dtype=torch.bool))

    _walk(p, refine)
    return p


def first_layer(graph: Graph) -> int:
    """The first node that mixes values of the input."""
    mixes = (i for i, n in enumerate(graph.nodes) if isinstance(n.op, ops.Affine) and not isinstance(n.op, ops.Scale))
    return next(mixes, 0)


def _walk(p: Polytope, refine: Callable[[int, Tensor, Tensor], interval.Interval]) -> None:
    """Boxes from layer to layer, `refine`d at the first layer and before ReLUs; slopes and gaps of the ReLUs."""
    check_chain(p.graph)
    first, last = first_layer(p.graph), len(p.graph.nodes) - 1
    p.boxes.append((p.region.lower, p.region.upper))
    for i, node in enumerate(p.graph.nodes[1:], start=1):
        before = p.boxes[-1]
        if isinstance(node.op, ops.Activation):
            p.slopes[i] = chord(0.0, *before)
            p.gaps[i] = upper_shift(0.0, p.slopes[i], *before)
        box = interval.step(node, [before], sound=False)
        if i == first or (i < last and isinstance(p.graph.nodes[i + 1].op, ops.Activation)):
            box = refine(i, *box)
        p.boxes.append(box)


def _refined(p: Polytope, i: int, lower: Tensor, upper: Tensor, which: Tensor) -> interval.Interval:
    """The box of node i tightened by dual passes for the neurons `which`, bool (B, *shape)."""
    chosen = which.flatten(1)
    most = int(chosen.sum(1).max()) if len(chosen) else 0
    if most == 0:
        return lower, upper
    low, high = lower.flatten(1), upper.flatten(1)
    widest = max(torch.Size(node.shape).numel() for node in p.graph.nodes[: i + 1])
    # Every input gets as many rows as the one with the most neurons to bound; the spare rows bound others, harmlessly.
    neurons = chosen.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :most]
    for part in neurons.split(max(1, linear.MEMORY // (widest * len(lower))), dim=1):
        rows = F.one_hot(part, low.shape[1]).to(low.dtype).view(*part.shape, *lower.shape[1:])
        below, above = dual_pass(p, i, rows)
        low = low.scatter(1, part, torch.maximum(low.gather(1, part), below))
        high = high.scatter(1, part, torch.minimum(high.gather(1, part), above))
    return low.view_as(lower), high.view_as(upper)


def dual_pass(p: Polytope, i: int, c: Tensor) -> interval.Interval:
    """Lower and upper bounds of <c, value of node i> for M rows of each input.

    Args:
        p: the network with slopes for all ReLUs before node i.
        i: node where the rows start.
        c: their coefficients, (B, M, *shape).

    Returns:
        Two tensors (B, M).
    """
    nu, low = c, c.new_zeros(c.shape[:2])
    high = low
    for j in range(i, 0, -1):
        node, before = p.graph.nodes[j], p.graph.nodes[j - 1].shape
        if j in p.slopes:  # nu arrives as nuhat
            low = low + _inner(nu.clamp(max=0), p.gaps[j])
            high = high + _inner(nu.clamp(min=0), p.gaps[j])
            nu = nu * p.slopes[j][:, None]
        elif isinstance(node.op, ops.Affine):
            rows = nu.flatten(0, 1)
            shift = node.op.bias_dot(rows)
            if shift is not None:
                low, high = low + shift.view_as(low), high + shift.view_as(high)
            nu = node.op.transpose(rows).view(*nu.shape[:2], *before)
        else:
            nu = nu.reshape(*nu.shape[:2], *before)
    below, above = (minimum(p.region, Coefficients(xi), sound=False) for xi in (nu, -nu))
    return low + below, high - above


def _inner(a: Tensor, v: Tensor) -> Tensor:
    """<a, v>, (B, M, *shape) and (B, *shape) -> (B, M)."""
    return (a.flatten(2) @ v.flatten(1)[:, :, None])[:, :, 0]


def output_bounds(p: Polytope) -> interval.Interval:
    """Bounds of the logits, (B, K) each: the better of the dual and the interval bound."""
    lower, upper = p.boxes[-1]
    return _refined(p, len(p.graph.nodes) - 1, lower, upper, torch.ones_like(lower, dtype=torch.bool))


def margin_bounds(p: Polytope, y: Tensor) -> Tensor:
    """Lower bounds of z_y - z_j for every class j, (B, K); zero at j = y. Rounding is not accounted for."""
    one_hot = torch.eye(p.graph.nodes[-1].shape[0], dtype=p.region.x.dtype, device=y.device)
    return dual_pass(p, len(p.graph.nodes) - 1, one_hot[y][:, None] - one_hot)[0].scatter(1, y[:, None], 0.0)
