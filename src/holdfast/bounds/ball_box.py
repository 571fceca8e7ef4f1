"""A ball and a box through a network together, and the smallest margins over both: the outer bound of BCP.

Lee, Lee and Park, "Lipschitz-certifiable training with a tight outer bound", 2020. The ball is centred at the value of
the input itself and grows by the norm of each layer; the box is the intersection of what intervals give and of what the
ball gives, row by row. The ball knows that few directions are stretched, the box that a ReLU is never negative.

With sound=True both hold for the network in real arithmetic and for any floating-point evaluation of it. Let s range
over all values that such an evaluation can give to the start of a run of affine layers, c be those at x, and A the run.
A layer z -> W z + b is off by at most g (|W| |z| + |b|), g = gamma(terms), at s and at c alike. So `error`, which grows
from zero by error <- |W| error + g (|W| (|z(c)| + max |box|) + 2 |b|), bounds z(s) - z(c) - A (s - c) at each neuron:
it is added to what the ball gives, and its norm to the radius once the run is measured.
"""

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from holdfast.bounds import interval, ops
from holdfast.bounds.interval import EXACT, ULPS, Interval
from holdfast.bounds.lipschitz import activation_slope, in_double, merge_affine, overlap, plus_identity, refusal
from holdfast.bounds.ops import Affine, Graph, Node, Shape, evaluate
from holdfast.bounds.region import Region
from holdfast.bounds.rounding import gamma, underflow, unit
from holdfast.bounds.spectral import domain, linear_part, norm_bound, power_iteration, start_vector
from holdfast.threats import L1, L2, norm_2

Norm = Callable[[Affine, str], Tensor]
"""From an operator and a name for it to its l2 norm, a scalar tensor."""
UP = 1 + 1e-9  # covers sums of up to a million products in float64, and the merging of scalings into weights
FIRST_STEPS = 20  # of power iteration where there is no vector to start from yet


def proven_norm(bound: Callable[[Affine], float] = norm_bound) -> Norm:
    """Upper bounds of the norms, float64: for certificates."""
    # 1e-15: in I + A the diagonal of A may cancel, and then its rounding error is relative to I.
    return lambda op, name: torch.tensor((bound(op) + 1e-15) * UP, dtype=torch.float64)


def estimated_norm(state: MutableMapping[str, Tensor], *, steps: int = 1) -> Norm:
    """Power iteration from the vectors in `state`, which it replaces; with gradients to the weights, for training."""

    def norm(op: Affine, name: str) -> Tensor:
        if isinstance(op, ops.Scale):
            return op.factor.abs().amax()
        v = state.get(f"norm {name}")
        warm = v is not None and v.shape == domain(op)
        like = op.weight if isinstance(op, ops.Linear | ops.Conv) else torch.zeros(())
        start = v.to(like) if v is not None and warm else start_vector(op, like)
        sigma, _, state[f"norm {name}"] = power_iteration(op, start, steps if warm else FIRST_STEPS)
        return sigma

    return norm


@dataclass(frozen=True, eq=False)
class BallBox:
    """What is known of one node.

    Attributes:
        centre: its value at x.  lower, upper: its box. All (B, *shape).
        rho: (B,) radius of the ball around the centre of the node `source`.
        source: the node itself, or where the run of affine layers started that ends here.
        op: the run as one operator, not yet measured because the next layers may be merged into it; None at its start.
        shape: of what `op` returns; reshapes that follow do not change it.
        error: (B, *shape) rounding errors of the run, if sound.
        name: of the run.
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
        rho = value.rho * self._norm(value.op, value.name)
        return rho if value.error is None else (rho + _length(value.error)) * UP

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
                return self._here(centre, box, self.ball(node.inputs[0]) * activation_slope(node, node.op), rounding)
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

    def _here(self, centre: Tensor, box: Interval, rho: Tensor, rounding: float) -> BallBox:
        """A ball around the centre; each value is rounded by `rounding` relative to it, there and at the centre."""
        if self.sound:
            error = 2 * (rounding * _largest(*box) + underflow(0, centre.dtype)) if rounding else None
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
    corner = norm_2(torch.maximum(r.upper - r.x, r.x - r.lower))
    count, u = r.x[:1].numel(), unit(r.x.dtype)
    if sound:
        corner = corner * (1 + gamma(count, r.x.dtype))
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
    return norm_2(error.double()) * UP


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


@dataclass(frozen=True, eq=False)
class Outer:
    """The set that the logits are proved to lie in: the image of a ball and a box under the last affine layer.

    Attributes:
        logits: (B, K), at x.
        rows: (K, n), the last affine layer (or run of them).
        centre, lower, upper: (B, n), of the features that enter it.  rho: (B,) radius of their ball.
        error: (B, K) rounding errors of the last layer, if sound.
    """

    logits: Tensor
    rows: Tensor
    centre: Tensor
    lower: Tensor
    upper: Tensor
    rho: Tensor
    error: Tensor | None


def outer_bound(graph: Graph, r: Region, norm: Norm, *, sound: bool) -> Outer:
    """The outer set of the logits over a region of inputs; float64 if sound.

    Args:
        graph: of the model as it is now.
        r: the inputs.
        norm: `proven_norm` for proofs, `estimated_norm` for training.
        sound: account for rounding.
    """
    values = Propagation(graph, r, norm, sound=sound).values
    last = values[-1]
    source, dtype = values[last.source], torch.float64 if sound else r.x.dtype
    rows = torch.eye(last.centre.shape[1], dtype=dtype, device=r.x.device)
    if last.op is not None:
        rows = last.op.transpose(rows.view(-1, *last.shape)).flatten(1)
    error = last.error if last.error is not None else torch.zeros_like(last.centre) if sound else None
    return Outer(
        logits=last.centre.to(dtype),
        rows=rows,
        centre=source.centre.flatten(1).to(dtype),
        lower=source.lower.flatten(1).to(dtype),
        upper=source.upper.flatten(1).to(dtype),
        rho=last.rho,
        error=None if error is None else error.to(dtype),
    )


def margins(o: Outer, y: Tensor, *, steps: int | None = None) -> Tensor:
    """Lower bounds of z_y - z_j over the outer set, (B, K); zero at j = y. The worst logits are their negatives.

    Args:
        o: the outer set.
        y: labels, shape (B,).
        steps: of the solver; until it is exact if None.
    """
    found = o.logits.gather(1, y[:, None]) - o.logits - translations(o, y, steps=steps)
    if o.error is not None:
        found = found - (o.error + o.error.gather(1, y[:, None])) * UP - 1e-15 * o.logits.abs().amax(1, keepdim=True)
    return found.scatter(1, y[:, None], 0.0)


def translations(o: Outer, y: Tensor, *, steps: int | None = None) -> Tensor:
    """By how much z_y - z_j can fall below its value at x, t_j >= 0, (B, K); zero at j = y."""
    c = o.rows[y][:, None] - o.rows
    drop = largest_drop(c, o.centre, o.lower, o.upper, o.rho, steps=steps)
    if o.error is None:
        return drop
    # The rows were merged from float64 products, and their difference may cancel.
    return drop * UP + o.rho[:, None] * (1e-12 * o.rows.square().sum(1).amax().sqrt() + 1e-15)


def largest_drop(
    c: Tensor, z: Tensor, lower: Tensor, upper: Tensor, rho: Tensor, *, steps: int | None = None
) -> Tensor:
    """Largest <c, z - p> over the p of a ball around z and a box, (B, M).

    The dual function at a multiplier m >= 0 of |p - z|^2 <= rho^2 is sum_i (|c_i| s_i - m s_i^2 / 2) + m rho^2 / 2 with
    s_i = min(|c_i| / m, room_i), where room_i is the way to the box along -c_i. It is an upper bound for every m, so
    neither early stopping nor rounding of m can make it wrong. The best m is found from above as in the paper: all
    coordinates that leave the box are stopped there, the others share what is left of the radius, until none leaves it
    (the paper scales about the origin; the ball is centred at z). At the best m the derivative by m vanishes, so it is
    held fixed for gradients.

    Args:
        c: coefficients, shape (B, M, n).
        z: centre of the ball, in the box.  lower, upper: the box. Shape (B, n).
        rho: radius, shape (B,).
        steps: how often coordinates may be stopped; until none leaves the box if None.
    """
    size = c.abs()
    room = torch.where(c > 0, (z - lower)[:, None], (upper - z)[:, None]).clamp(min=0)
    m = _multiplier(size.detach(), room.detach(), rho.detach(), steps)[..., None]
    s = torch.where(size > m * room, room, (size / m.clamp(min=torch.finfo(c.dtype).tiny)).detach())
    return (size * s - m / 2 * s.square()).sum(2) + m[..., 0] / 2 * rho.square()[:, None]


@torch.no_grad()
def _multiplier(size: Tensor, room: Tensor, rho: Tensor, steps: int | None) -> Tensor:
    """1 / (the way that a coordinate with |c_i| = 1 may go), (B, M); zero where the box alone decides."""
    budget, squares, rooms = rho.square()[:, None], size.square(), room.square()
    # Not zero, and not so small that the division below overflows.
    smallest = torch.finfo(size.dtype).eps * budget + torch.finfo(size.dtype).tiny * (1 + squares.sum(2))

    def share(stopped: Tensor) -> Tensor:
        left = (budget - (rooms * stopped).sum(2)).maximum(smallest)
        return ((squares * ~stopped).sum(2) / left).sqrt()

    stopped = torch.zeros_like(size, dtype=torch.bool)
    m = share(stopped)
    for _ in range(size.shape[2] if steps is None else steps):
        more = stopped | (size > m[..., None] * room)
        if torch.equal(more, stopped):
            break
        stopped = more
        m = share(stopped)
    return m
