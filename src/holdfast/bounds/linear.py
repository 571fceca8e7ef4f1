"""Linear bounds by backward substitution: the Fast-Lin and CROWN family.

A lower bound of <A, z> at a node is carried back to the input: an affine layer turns A into W^T A, an activation is
replaced by a line below it where A is positive and by a line above it where A is negative. What arrives at the input is
<g, x'> + c, minimised over the region in closed form. An upper bound of z is minus a lower bound of -z.

Rounding (sound=True): the coefficients that were computed are taken as they are; carrying them through an affine layer
then misses the exact functional by at most gamma <|A|, |W| |z| + |b|>, with |z| from the interval bounds, which is
subtracted. The same term again covers the rounding of the network itself when it is run.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from holdfast.bounds import interval, ops
from holdfast.bounds.backward import carry
from holdfast.bounds.coefficients import Coefficients, Places, Window, add, clean, dense, dot
from holdfast.bounds.ops import Graph
from holdfast.bounds.region import Region, minimum
from holdfast.bounds.relax import Lines, Slopes, relax, unstable
from holdfast.bounds.rounding import gamma, underflow, unit

MEMORY = 2**21
"""Coefficients in memory at a time; rows beyond that wait for the next chunk. Small enough for blocks to be reused."""


@dataclass(frozen=True, eq=False)
class Planes:
    """Lower bounds <g, x'> + c: `coefficients` g of the input for M rows of each input, `shift` c (B, M)."""

    coefficients: Coefficients
    shift: Tensor


@dataclass(frozen=True, eq=False)
class Relaxation:
    """A network whose activations have been replaced by lines: all that a backward pass needs.

    Attributes:
        intervals: bounds of every node, (B, *shape) each.
        lines: for every activation, by node.
        errors: for every node that rounds, what one unit of coefficient costs, (B, *shape); empty if not sound.
    """

    graph: Graph
    region: Region
    sound: bool
    intervals: list[interval.Interval] = field(default_factory=list)
    lines: dict[int, Lines] = field(default_factory=dict)
    errors: dict[int, Tensor] = field(default_factory=dict)


def relaxation(
    graph: Graph,
    region: Region,
    *,
    slopes: Slopes | None,
    hidden: bool,
    sound: bool,
    lower_slopes: dict[tuple[int, int, int], Tensor] | None = None,
) -> Relaxation:
    """Walks forward, bounding the input of every activation, and replaces each activation by lines.

    Args:
        graph: the network.
        region: the inputs.
        slopes: which lines; None for interval bounds alone.
        hidden: bound hidden layers by backward passes as well (CROWN, Fast-Lin); else by intervals (CROWN-IBP). The
            backward pass runs for those neurons alone that intervals leave unstable: elsewhere the lines are exact.
            On a ball the first layer is always bounded by the dual norm.
        sound: account for rounding.
        lower_slopes: lower slopes of activation k in the pass that bounds hidden node i from below (sign 1) or above
            (sign -1), by (i, sign, k): (B, *shape); where k is stable they do not count.
    """
    r = Relaxation(graph, region, sound)
    r.intervals.append((region.lower, region.upper))
    users = _users(graph)
    flat = {0}  # nodes reached from the input by scaling and reshaping alone: the image of a box is a box
    for i, node in enumerate(graph.nodes[1:], start=1):
        bounds = interval.step(node, [r.intervals[j] for j in node.inputs], sound=sound)
        r.intervals.append(bounds)
        first = isinstance(node.op, ops.Affine) and node.inputs[0] in flat
        if node.inputs[0] in flat and isinstance(node.op, ops.Scale | ops.Reshape):
            flat.add(i)
        if sound and slopes is not None:
            _note_rounding(r, i, users[i])
        if first and i not in flat and region.threat is not None:
            r.intervals[i] = _refined(r, i, torch.ones_like(bounds[0], dtype=torch.bool))
        if slopes is None:
            continue
        nonlinear = [k for k in users[i] if isinstance(graph.nodes[k].op, ops.Activation | ops.MaxPool | ops.MinMax)]
        if nonlinear and hidden and not first:
            r.intervals[i] = _refined(r, i, unstable(graph.nodes[nonlinear[0]].op, *bounds), lower_slopes)
        for k in nonlinear:
            op = graph.nodes[k].op
            if isinstance(op, ops.Activation):
                r.lines[k] = relax(op, *r.intervals[i], slopes, graph.nodes[k].name)
    return r


def hidden_layers(graph: Graph) -> list[int]:
    """Nodes that an activation, a max pooling or a MinMax reads from."""
    kinds = ops.Activation | ops.MaxPool | ops.MinMax
    return [i for i, users in enumerate(_users(graph)) if any(isinstance(graph.nodes[k].op, kinds) for k in users)]


def _users(graph: Graph) -> list[list[int]]:
    users: list[list[int]] = [[] for _ in graph.nodes]
    for i, node in enumerate(graph.nodes):
        for j in node.inputs:
            users[j].append(i)
    return users


def _magnitude(bounds: interval.Interval) -> Tensor:
    return torch.maximum(bounds[0].abs(), bounds[1].abs())


def _note_rounding(r: Relaxation, i: int, users: list[int]) -> None:
    """What one unit of coefficient at node i can lose to rounding (see the module's docstring)."""
    node = r.graph.nodes[i]
    size = _magnitude(r.intervals[i])
    if isinstance(node.op, ops.Affine):
        reach = node.op.apply_abs(_magnitude(r.intervals[node.inputs[0]]), 1.0)
        # Forward sums have `terms` terms; the transposed product adds up as many as an input has outputs.
        factor = gamma(node.op.terms, size.dtype) + gamma(_transposed_terms(node.op), size.dtype)
        r.errors[i] = 3 * factor * reach + underflow(node.op.terms, size.dtype)
    elif isinstance(node.op, ops.Add | ops.MaxPool | ops.MinMax) or len(users) > 1:
        r.errors[i] = 16 * unit(size.dtype) * size
    elif isinstance(node.op, ops.Activation) and node.op.kind not in interval.EXACT:
        r.errors[i] = 4 * interval.ULPS * unit(size.dtype) * size


def _transposed_terms(op: ops.Affine) -> int:
    match op:
        case ops.Linear():
            return int(op.weight.shape[0])
        case ops.Conv():
            return int(op.weight.shape[0] // op.groups * op.weight.shape[2] * op.weight.shape[3])
    return op.terms


def _refined(
    r: Relaxation, i: int, which: Tensor, lower_slopes: dict[tuple[int, int, int], Tensor] | None = None
) -> interval.Interval:
    """Interval bounds of node i, tightened by backward passes where `which` (B, *shape) is true.

    Every input gets as many rows as the one with the most neurons to tighten; the spare rows repeat others.
    """
    lower, upper = r.intervals[i]
    chosen = which.flatten(1)
    most = int(chosen.sum(1).max())
    if most == 0:
        return lower, upper
    neurons = chosen.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :most]
    low, high = lower.flatten(1), upper.flatten(1)
    for part in neurons.split(_chunk(r, i), dim=1):
        if lower_slopes:
            below, above = (_end(r, i, part, (sign,), _given(r, i, sign, lower_slopes)) for sign in (1, -1))
        else:
            below, above = _end(r, i, part, (1, -1)).chunk(2, 1)
        low = low.scatter(1, part, torch.maximum(low.gather(1, part), below))
        high = high.scatter(1, part, torch.minimum(high.gather(1, part), -above))
    return low.view_as(lower), high.view_as(upper)


def _end(
    r: Relaxation, i: int, neurons: Tensor, signs: tuple[int, ...], slopes: dict[int, Tensor] | None = None
) -> Tensor:
    """Lower bounds of sign * z for single neurons (B, M) of node i, one block of M rows for each sign."""
    j, start, shift = _behind(r, i, neurons, signs)
    if i in r.errors and j != i:
        shift = shift - r.errors[i].flatten(1).gather(1, neurons).repeat(1, len(signs))
    return concretise(r, backward(r, j, start, slopes, shift), scratch=j != 0)


def _behind(r: Relaxation, i: int, neurons: Tensor, signs: tuple[int, ...]) -> tuple[int, Coefficients, Tensor]:
    """Rows that pick neurons of node i, already carried through it where that is a look-up of weights.

    Returns the node that they are coefficients of, the rows, and what the bias adds, (B, M).
    """
    node, dtype = r.graph.nodes[i], r.region.x.dtype
    nothing = torch.zeros_like(neurons, dtype=dtype).repeat(1, len(signs))

    def look_up(weight: Tensor, index: Tensor) -> Tensor:
        """sign * weight[index] for all signs, in one gather."""
        signed = torch.cat([sign * weight for sign in signs])
        return signed[torch.cat([index + k * len(weight) for k in range(len(signs))], 1)]

    match node.op:
        case ops.Linear() if len(node.shape) == 1:
            shift = nothing if node.op.bias is None else look_up(node.op.bias, neurons)
            return node.inputs[0], Coefficients(look_up(node.op.weight, neurons)), shift
        case ops.Conv() if node.op.groups == 1 and node.op.dilation == (1, 1):
            area = node.shape[1] * node.shape[2]
            channel, places = neurons // area, Places(neurons % area, (node.shape[1], node.shape[2]), len(signs))
            shift = nothing if node.op.bias is None else look_up(node.op.bias, channel)
            values, window = look_up(node.op.weight, channel), Window(node.op.stride, node.op.padding)
            return node.inputs[0], Coefficients(values, window, places, clean=False), shift
    rows = unit_rows(r.graph, i, neurons, dtype)
    values = torch.cat([sign * rows.values for sign in signs], 1)
    several = None if rows.places is None else replace(rows.places, copies=len(signs))
    return i, Coefficients(values, rows.window, several), nothing


def _given(
    r: Relaxation, i: int, sign: int, lower_slopes: dict[tuple[int, int, int], Tensor] | None
) -> dict[int, Tensor] | None:
    """The given slopes of the pass (i, sign) where they are free, those of the lines elsewhere, (B, 1, *shape)."""
    if not lower_slopes:
        return None
    given = {}
    for (node, side, k), slope in lower_slopes.items():
        if (node, side) == (i, sign):
            lower, upper = r.intervals[r.graph.nodes[k].inputs[0]]
            given[k] = torch.where((lower < 0) & (upper > 0), slope, r.lines[k].lower_slope)[:, None]
    return given


def unit_rows(graph: Graph, i: int, neurons: Tensor, dtype: torch.dtype) -> Coefficients:
    """Rows that pick single neurons (B, M), flat indices of node i: windows on feature maps, dense elsewhere."""
    shape = graph.nodes[i].shape
    if len(shape) != 3:
        return Coefficients(F.one_hot(neurons, _numel(shape)).to(dtype).view(*neurons.shape, *shape))
    area = shape[1] * shape[2]
    values = F.one_hot(neurons // area, shape[0]).to(dtype)[..., None, None]
    places = Places(neurons % area, (shape[1], shape[2]))
    return Coefficients(values, Window((1, 1), (0, 0)), places)


def _numel(shape: ops.Shape) -> int:
    return int(torch.Size(shape).numel())


def _chunk(r: Relaxation, i: int) -> int:
    """Rows of each input at a time: as many as keep their coefficients within MEMORY at the widest node on the way."""
    widest = max(_numel(node.shape) for node in r.graph.nodes[: i + 1])
    if len(r.graph.nodes[i].shape) == 3:
        widest = min(widest, _widest_window(r.graph, i))
    return max(1, MEMORY // (2 * widest * len(r.region.x)))


def _widest_window(graph: Graph, i: int) -> int:
    """Largest window, in coefficients, on the way from one place of node i to the input."""
    size: dict[int, tuple[int, int]] = {i: (1, 1)}
    widest = 1
    for j in range(i, 0, -1):
        if j not in size:
            continue
        node, (h, w) = graph.nodes[j], size[j]
        if isinstance(node.op, ops.Conv):
            kernel = node.op.weight.shape[2:]
            h = (h - 1) * node.op.stride[0] + node.op.dilation[0] * (kernel[0] - 1) + 1
            w = (w - 1) * node.op.stride[1] + node.op.dilation[1] * (kernel[1] - 1) + 1
        elif not isinstance(node.op, ops.Scale | ops.Activation | ops.Add | ops.MinMax):
            h = w = 10**6
        for k in node.inputs:
            old = size.get(k, (1, 1))
            size[k] = (max(h, old[0]), max(w, old[1]))
            shape = graph.nodes[k].shape
            area = min(size[k][0] * size[k][1], _numel(shape[1:]))
            widest = max(widest, shape[0] * area)
    return widest


def output_bounds(r: Relaxation) -> interval.Interval:
    """Bounds of the logits, (B, K) each: the better of the linear and the interval bound."""
    return _refined(r, len(r.graph.nodes) - 1, torch.ones_like(r.intervals[-1][0], dtype=torch.bool))


def margin_bounds(r: Relaxation, y: Tensor) -> Tensor:
    """Lower bounds of z_y - z_j for every class j, (B, K); zero at j = y."""
    return concretise(r, margin_planes(r, y)).scatter(1, y[:, None], 0.0)


def margin_planes(r: Relaxation, y: Tensor, slopes: dict[int, Tensor] | None = None) -> Planes:
    """Linear lower bounds of z_y - z_j, one row for each class j; the row of j = y is zero."""
    return backward(r, len(r.graph.nodes) - 1, margin_rows(r, y), slopes)


def margin_rows(r: Relaxation, y: Tensor) -> Coefficients:
    """The rows z_y - z_j at the output, (B, K, K)."""
    one_hot = torch.eye(r.graph.nodes[-1].shape[0], dtype=r.region.x.dtype, device=y.device)
    return Coefficients(one_hot[y][:, None] - one_hot)


def backward(
    r: Relaxation,
    i: int,
    start: Coefficients,
    slopes: dict[int, Tensor] | None = None,
    shift: Tensor | None = None,
) -> Planes:
    """Carries lower bounds of <start, value of node i> back to the input.

    Args:
        r: the relaxed network.
        i: node where the rows start.
        start: their coefficients there, M rows for each input.
        slopes: lower slopes to use instead of those of the lines, by node: (B, 1 or M, *shape).
        shift: what the bounds start from, (B, M); zero if none is given.
    """
    pending: dict[int, Coefficients] = {i: start}
    shift = start.values.new_zeros(start.values.shape[:2]) if shift is None else shift
    for j in range(i, 0, -1):
        if j not in pending:
            continue
        c, node = pending.pop(j), r.graph.nodes[j]
        if c.window is not None and c.values.shape[3] * c.values.shape[4] >= node.shape[1] * node.shape[2]:
            c = Coefficients(dense(c, node.shape))
        if j in r.errors:
            c = clean(c, node.shape)
            shift = shift - dot(c.values.abs(), c, r.errors[j])
        given = None if slopes is None else slopes.get(j)
        parts, added = carry(r.graph, j, c, r.lines.get(j), given, r.intervals, sound=r.sound)
        if added is not None:
            shift = shift + added
            if r.sound:
                shift = shift - 4 * unit(shift.dtype) * shift.abs()
        for k, part in zip(node.inputs, parts, strict=True):
            pending[k] = add(pending[k], part, r.graph.nodes[k].shape) if k in pending else part
    if 0 not in pending:  # the rows do not depend on the input
        pending[0] = Coefficients(start.values.new_zeros(*start.values.shape[:2], *r.graph.nodes[0].shape))
    return Planes(pending[0], shift)


def concretise(r: Relaxation, planes: Planes, *, scratch: bool = False) -> Tensor:
    """The smallest value of each bound over the region, (B, M); `scratch` allows to overwrite the coefficients."""
    value = minimum(r.region, planes.coefficients, sound=r.sound, scratch=scratch) + planes.shift
    return value - 4 * unit(value.dtype) * value.abs() if r.sound else value
