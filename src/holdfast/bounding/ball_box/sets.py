"""A ball and a box through a network together, one rule for each operation.

The ball is centred at the value of the input itself and grows by the norm of each layer; the box is the intersection of
what intervals give and of what the ball gives, row by row.

With sound=True both hold for the network in real arithmetic and for any floating-point evaluation of it. Let s range
over all values that such an evaluation can give to the start of a run of affine layers, c be those at x, and A the run.
A layer z -> W z + b is off by at most g (|W| |z| + |b|), g = gamma(terms), at s and at c alike. So `error`, which grows
from zero by error <- |W| error + g (|W| (|z(c)| + max |box|) + 2 |b|), bounds z(s) - z(c) - A (s - c) at each neuron:
it is added to what the ball gives, and its norm to the radius once the run is measured.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from holdfast.bounding import interval
from holdfast.bounding.core.region import Region
from holdfast.bounding.core.rounding import gamma, norm_above, underflow, unit
from holdfast.bounding.graph import ops
from holdfast.bounding.graph.ops import Affine, Graph, Node, Shape, evaluate
from holdfast.bounding.interval import EXACT, ULPS, Interval
from holdfast.bounding.lipschitz.single_layers import (
    activation_slope,
    in_double,
    merge_affine,
    overlap,
    plus_identity,
    refusal,
)
from holdfast.bounding.lipschitz.spectral import linear_part
from holdfast.threats import L1, L2, norm_2

Norm = Callable[[Affine, str], Tensor]
"""From an operator and a name for it to its l2 norm, a scalar tensor."""
UP = 1 + 1e-9  # covers sums of up to a million products in float64, and the merging of scalings into weights


@dataclass(frozen=True, eq=False)
class BallBox:
    """What is known of one node.

    Attributes:
        centre: its value at x.  lower, upper: its box. All (B, *shape).
        rho: (B,) radius of the ball around the centre of the node `source`.
        source: the node itself, or where the run of affine layers started that ends here.
        op: the run as one operator, not yet measured because the next layers may be merged into it; None at its start.
        shape: shape of what `op` returns; reshapes that follow do not change it.
        error: (B, *shape) rounding errors of the run, if sound.
        name: name of the run.
    """

    centre: Tensor
    lower: Tensor
    upper: Tensor
    rho: Tensor
    source: int
    op: Affine | None = None
    shape: Shape = ()
    error: Tensor | None = None
    name: str = ""


class Propagation:
    """The sets of all nodes of a graph: `values`, and `ball(i)` for the radius at node i."""

    def __init__(self, graph: Graph, r: Region, norm: Norm, *, sound: bool) -> None:
        self.graph, self.norm, self.sound = graph, norm, sound
        self.u = unit(r.x.dtype)
        self.norms: dict[str, Tensor] = {}
        rho = input_radius(r, sound=sound)
        self.values = [BallBox(r.x, r.lower, r.upper, rho.double() if sound else rho, 0)]
        for node in graph.nodes[1:]:
            self.values.append(self._step(node))

    def ball(self, index: int) -> Tensor:
        """Radius of a ball around the centre of the node that holds all its values, (B,)."""
        value = self.values[index]
        if value.op is None:
            return value.rho
        rho = value.rho * self.norm_of(index)
        return rho if value.error is None else (rho + _length(value.error)) * UP

    def norm_of(self, index: int) -> Tensor:
        """Norm of the run of affine layers that ends at the node, a scalar tensor."""
        value = self.values[index]
        assert value.op is not None
        return self._norm(value.op, value.name)

    def _norm(self, op: Affine, name: str) -> Tensor:
        if name not in self.norms:
            self.norms[name] = self.norm(op, name).to(self.values[0].centre.device)
        return self.norms[name]

    def _step(self, node: Node) -> BallBox:
        values = [self.values[i] for i in node.inputs]
        centre = evaluate(node.op, [value.centre for value in values])
        box = interval.step(node, [(value.lower, value.upper) for value in values], sound=self.sound)
        match node.op:
            case Affine():
                return self._affine(node, node.op, centre, box)
            case ops.Activation():
                rounding = 0.0 if node.op.kind in EXACT else 2 * ULPS * self.u
                slope = activation_slope(node, node.op)
                return self._here(centre, box, self.ball(node.inputs[0]) * slope, rounding, node.op.error)
            case ops.MaxPool():
                return self._here(centre, box, self.ball(node.inputs[0]) * overlap(node.op, node.shape) ** 0.5, 0.0)
            case ops.MinMax():  # sorting is 1-Lipschitz
                return self._here(centre, box, self.ball(node.inputs[0]), 0.0)
            case ops.Reshape():
                value = replace(values[0], centre=centre, lower=box[0], upper=box[1])
                if value.op is None:
                    return replace(value, source=len(self.values))
                return value if value.error is None else replace(value, error=value.error.reshape(centre.shape))
            case ops.Add():
                return self._add(node, centre, box)
            case ops.Concat():
                radii = torch.stack([self.ball(i) for i in node.inputs])
                return self._here(centre, box, torch.linalg.vector_norm(radii, dim=0), 0.0)
        raise refusal(node, type(node.op).__name__)

    def _here(self, centre: Tensor, box: Interval, rho: Tensor, rounding: float, off: float = 0.0) -> BallBox:
        """A ball around the centre; values and centre are off by `rounding` relative to their size, plus `off`."""
        if self.sound:
            error = None
            if rounding or off:
                error = 2 * (rounding * _largest(*box) + (off + underflow(0, centre.dtype)))
            rho = (rho if error is None else rho + _length(error)) * UP
        return BallBox(centre, *box, rho, len(self.values))

    def _affine(self, node: Node, op: Affine, centre: Tensor, box: Interval) -> BallBox:
        before, part = self.values[node.inputs[0]], in_double(op) if self.sound else linear_part(op)
        name, rho, source, error = f"{len(self.values)} {node.name}", before.rho, before.source, before.error
        run = None
        if before.op is not None and before.shape == self.graph.nodes[node.inputs[0]].shape:
            run = merge_affine(before.op, part)
        if run is None:
            run, source, error, rho = part, node.inputs[0], None, self.ball(node.inputs[0])
        if self.sound:
            g = gamma(op.terms, centre.dtype)
            grow = 1 + 4 * g
            spread = g * grow * (before.centre.abs() + _largest(before.lower, before.upper))
            spread = spread if error is None else spread + grow * error
            error = op.apply_abs(spread, 2 * g * grow, 2 * underflow(op.terms, centre.dtype))
        return self._cut(BallBox(centre, *box, rho, source, run, node.shape, error, name), run)

    def _add(self, node: Node, centre: Tensor, box: Interval) -> BallBox:
        """Balls and boxes add up; where one side is A times the other, the run goes on with I + A."""
        for skip, branch in (node.inputs, node.inputs[::-1]):
            value = self.values[branch]
            if value.op is not None and value.source == skip and value.shape == node.shape:
                run = plus_identity(value.op)
                if run is not None:
                    error = None if value.error is None else value.error + 4 * self.u * _largest(*box)
                    name = f"{len(self.values)} {node.name}"
                    return self._cut(BallBox(centre, *box, value.rho, skip, run, node.shape, error, name), run)
        return self._here(centre, box, self.ball(node.inputs[0]) + self.ball(node.inputs[1]), 2 * self.u)

    def _cut(self, value: BallBox, run: Affine) -> BallBox:
        """The box cut with centre -+ |A_i| rho, row by row."""
        rows = _row_norms(run)
        rows = self._norm(run, value.name) if rows is None else rows
        reach = rows * value.rho.view(-1, *[1] * len(value.shape))
        if value.error is not None:
            reach = reach * UP + 1e-15 * value.rho.view(-1, *[1] * len(value.shape))  # as in `proven_norm`
            reach = (reach.to(value.error) + value.error) * (1 + 8 * self.u)
        low, high = value.centre - reach, value.centre + reach
        if self.sound:
            low, high = interval.widen(low, high, ulps=2)
        return replace(value, lower=torch.maximum(value.lower, low), upper=torch.minimum(value.upper, high))


def input_radius(r: Region, *, sound: bool) -> Tensor:
    """Radius of the smallest ball around x that holds the region, (B,): sqrt(N) eps for linf away from the range."""
    apart = torch.maximum(r.upper - r.x, r.x - r.lower)
    corner = norm_2(apart)
    count, u = r.x[:1].numel(), unit(r.x.dtype)
    if sound:
        corner = norm_above(apart.flatten(1)).to(corner) * (1 + gamma(count, r.x.dtype))
    if not isinstance(r.threat, L1 | L2):
        return corner
    eps = corner.new_tensor(r.threat.eps) if r.eps is None else r.eps
    if sound:  # a distance within the budget up to rounding counts as within
        places = count if isinstance(r.threat, L1) else count**0.5
        eps = eps * (1 + 64 * u) + 4 * u * places * max(abs(r.threat.low), abs(r.threat.high))
    return torch.minimum(corner, eps)


def _largest(lower: Tensor, upper: Tensor) -> Tensor:
    return torch.maximum(lower.abs(), upper.abs())


def _length(error: Tensor) -> Tensor:
    return norm_above(error.flatten(1)) * UP


def _row_norms(op: Affine) -> Tensor | None:
    """The norm of each row, broadcasts against (B, *out); at the border of a map, of what the padding leaves of it."""
    match op:
        case ops.Linear():
            norms: Tensor = torch.linalg.vector_norm(op.weight, dim=1)
            return norms
        case ops.Conv():
            squares = replace(op, weight=op.weight.square(), bias=None)
            ones = torch.ones(1, *op.in_shape, dtype=op.weight.dtype, device=op.weight.device)
            return squares.apply(ones).clamp(min=torch.finfo(ones.dtype).tiny).sqrt()
        case ops.Scale():
            return op.factor.abs()
    return None
