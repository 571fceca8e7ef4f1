"""Random projections in place of one backward pass per neuron: ESTIMATES of hidden bounds, only for training.

Replace every activation by its two parallel lines, alpha z + s -+ gap / 2 with s the shift half way between them. A
neuron is then an affine function of the input and of one free number in [-1, 1] per activation, and its bounds are

    value at the middle of the inputs  -+  ( sum radius |xi| + sum gap / 2 |nuhat| ),

with nuhat and xi its coefficients at the activations and at the input. (A one-sided sum of the dual, such as the sum
of gap [nuhat]_+, is half of two sums: of gap nuhat, which the value at the middle contains, and of gap |nuhat|.)
Cauchy variables are 1-stable: the product of a vector with Cauchy noise is a Cauchy variable whose scale is the l1 norm
of the vector, and the median of its absolute value is that norm. So a few noise vectors go forward through the network
beside the values, and the median over them stands for a backward pass for each neuron. On an l2 ball the input's part
is eps |xi|_2, the root mean square of Gaussian projections.

(Wong, Schmidt, Metzen and Kolter, "Scaling provable adversarial defenses", 2018. There the noise of each layer is
carried and its median taken by itself; here the rays of all layers are added up on the way, which keeps the
distribution. Separate medians have a smaller error for the same number of rays, never for the same work.)

The estimate of a bound can be too tight. It is therefore no registered method, and its type is not a bound's type.
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from holdfast.bounding import interval
from holdfast.bounding.core.region import Region
from holdfast.bounding.graph import ops
from holdfast.bounding.graph.ops import Graph, Node
from holdfast.bounding.linear import relaxation as linear
from holdfast.bounding.linear.forward import linear_part
from holdfast.bounding.linear.relax import Lines, relax
from holdfast.bounding.linear.relaxation import Relaxation
from holdfast.errors import UnsupportedError
from holdfast.random import Noise
from holdfast.threats import L2


@dataclass(frozen=True, eq=False)
class Estimate:
    """A network relaxed on hidden bounds that are ESTIMATES. Nothing that is computed from it is a proof.

    It is not a `Relaxation`, so that no certificate accepts it.

    Attributes:
        unproven: the relaxation, for what trains on it; its lines may fail to enclose the activations.
    """

    unproven: Relaxation

    def margins(self, y: Tensor) -> Tensor:
        """Estimated lower bounds of z_y - z_j for every class j, (B, K); zero at j = y. Never certify with them."""
        return linear.margin_bounds(self.unproven, y)


@dataclass(frozen=True, eq=False)
class _Rays:
    """A node of the linearised network.

    Attributes:
        centre: its value at the middle of the inputs, (B, *shape).
        rays: its noise, (B, R, *shape): `projections` rays of Cauchy noise, before them as many of Gaussian noise if
            the input is a ball.
    """

    centre: Tensor
    rays: Tensor


def estimate(graph: Graph, region: Region, *, noise: Noise, projections: int = 50) -> Estimate:
    """Relax the network on hidden bounds estimated by random projections: for training, never for a certificate.

    The first layer that mixes the inputs is bounded exactly, and neurons that intervals prove to be stable are left
    alone. Gradients flow; the same noise gives the same estimate, for pictures of one loss at many weights.

    Args:
        graph: affine layers, activations that have linear bounds, and additions.
        region: a box (linf) or an l2 ball, which is taken without the valid range.
        noise: noise of each input; or of one input, whose rays all inputs share, which saves most of the time.
        projections: rays of each kind; the relative error falls as 1 / sqrt(projections).

    Raises:
        UnsupportedError: for another layer, and for a region whose dual norm has no such projection.
    """
    _check(graph)
    r, hidden, exact = Relaxation(graph, region, sound=False), linear.hidden_layers(graph), _exact(graph)
    first = Graph(graph.nodes[: max(exact) + 1])
    known = linear.relaxation(first, region, slopes=None, hidden=False, sound=False).intervals
    states = [_start(region, noise.fork(0), projections)]
    r.intervals.append(known[0])
    for i, node in enumerate(graph.nodes[1:], start=1):
        box = known[i] if i in exact else interval.step(node, [r.intervals[j] for j in node.inputs], sound=False)
        if isinstance(node.op, ops.Activation):
            r.lines[i] = relax(node.op, *r.intervals[node.inputs[0]], "parallel", node.name)
        if i <= max(hidden, default=0):  # nobody asks for an estimate behind the last hidden layer
            before = [states[j] for j in node.inputs]
            bend = partial(_bend, noise=noise.fork(i), count=projections)
            states.append(bend(before[0], r.lines[i]) if i in r.lines else _advance(node, before))
        r.intervals.append(box)
        if i in hidden and i not in exact:
            r.intervals[i] = _tightened(box, linear.open_neurons(r, i), states[i], projections)
    return Estimate(r)


def _check(graph: Graph) -> None:
    for node in graph.nodes[1:]:
        if not isinstance(node.op, ops.Affine | ops.Reshape | ops.Activation | ops.Add):
            raise UnsupportedError(
                f"layer '{node.name}': random projections cover affine layers, activations and additions, got "
                f"{type(node.op).__name__}. Use exact bounds, without projections."
            )


def _exact(graph: Graph) -> set[int]:
    """Nodes with no more than one mixing layer between them and the input: their intervals are exact."""
    flat, exact = {0}, {0}
    for i, node in enumerate(graph.nodes[1:], start=1):
        if isinstance(node.op, ops.Scale | ops.Reshape):
            for known in (flat, exact):
                known |= {i} if node.inputs[0] in known else set()
        elif isinstance(node.op, ops.Affine) and node.inputs[0] in flat:
            exact.add(i)
    return exact


def _start(region: Region, noise: Noise, count: int) -> _Rays:
    if region.threat is None:
        radius = (region.upper - region.lower) / 2
        return _Rays((region.lower + region.upper) / 2, cauchy(noise, count, radius) * radius[:, None])
    if not isinstance(region.threat, L2):
        raise UnsupportedError(
            f"random projections estimate l1 and l2 norms, for the threats linf and l2, not for '{region.threat}'. "
            "Use exact bounds, without projections."
        )
    eps = region.threat.eps if region.eps is None else region.eps.view(-1, *[1] * region.x.ndim)
    gauss = noise.normal((count, *region.x.shape[1:]), region.x.dtype) * eps
    gauss = gauss.expand(len(region.x), *gauss.shape[1:])
    return _Rays(region.x, torch.cat([gauss, torch.zeros_like(gauss)], 1))


def cauchy(noise: Noise, count: int, like: Tensor) -> Tensor:
    """Standard Cauchy variables, (inputs of the noise, count, *shape), for values like (B, *shape)."""
    return torch.tan(torch.pi * (noise.uniform((count, *like.shape[1:]), like.dtype) - 0.5))


def _bend(state: _Rays, lines: Lines, noise: Noise, count: int) -> _Rays:
    """Through an activation: the slope of its lines, and new noise for the gap between them."""
    low = torch.zeros_like(lines.upper_shift) if lines.lower_shift is None else lines.lower_shift
    half = (lines.upper_shift - low) / 2
    rays = state.rays * lines.upper_slope[:, None]
    rays[:, -count:] += cauchy(noise, count, half) * half[:, None]
    return _Rays(lines.upper_slope * state.centre + low + half, rays)


def _advance(node: Node, states: list[_Rays]) -> _Rays:
    """Through an affine layer, whose shift the rays do not see, a reshape or an addition."""
    flat = [s.rays.flatten(0, 1) for s in states]
    moved = linear_part(node.op, flat[0]) if isinstance(node.op, ops.Affine) else ops.evaluate(node.op, flat)
    centre = ops.evaluate(node.op, [s.centre for s in states])
    return _Rays(centre, moved.view(*states[0].rays.shape[:2], *node.shape))


def _tightened(box: interval.Interval, which: Tensor, state: _Rays, count: int) -> interval.Interval:
    """The box, cut with the estimate at the neurons `which`, bool (B, *shape)."""
    gauss, rest = state.rays[:, :-count], state.rays[:, -count:]
    spread = rest.abs().median(1).values + torch.linalg.vector_norm(gauss, dim=1) / math.sqrt(count)
    # Clamped on both sides: an estimate may lie beside the box, and must not turn it around.
    low, high = (torch.clamp(end, *box) for end in (state.centre - spread, state.centre + spread))
    return torch.where(which, low, box[0]), torch.where(which, high, box[1])
