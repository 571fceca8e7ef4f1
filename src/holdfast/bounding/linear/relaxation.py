"""Linear bounds by backward substitution: the Fast-Lin and CROWN family.

A lower bound of <A, z> at a node is carried back to the input: an affine layer turns A into W^T A, an activation is
replaced by a line below it where A is positive and by a line above it where A is negative. What arrives at the input is
<g, x'> + c, minimised over the region in closed form. An upper bound of z is minus a lower bound of -z.

Rounding (sound=True): the coefficients that were computed are taken as they are; carrying them through an affine layer
then misses the exact functional by at most gamma <|A|, |W| |z| + |b|>, with |z| from the interval bounds, which is
subtracted. The same term again covers the rounding of the network itself when it is run. Coefficients that underflow
are off by the smallest normal number each, whatever their size: that number times the sum of |z| is subtracted too.
With `runs_in`, a network that is run in float32 is bounded in float64: its own rounding is then all that costs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from holdfast.bounding import interval
from holdfast.bounding.core.evaluation import own_error
from holdfast.bounding.core.region import Region, minimum
from holdfast.bounding.core.rounding import gamma, underflow, unit
from holdfast.bounding.graph import ops
from holdfast.bounding.graph.ops import Graph
from holdfast.bounding.linear.backward import carry
from holdfast.bounding.linear.coefficients import Coefficients, Window, add, clean, dense, dot
from holdfast.bounding.linear.relax import Lines, Slopes, relax, unstable
from holdfast.utils.clock import check_time
from holdfast.utils.reference import is_reference

MEMORY = 2**21
"""Coefficients in memory at a time; rows beyond that wait for the next chunk. Small enough for blocks to be reused."""
FULL = 0.6
"""Share of a layer's neurons from which on all of them are bounded: rows that all inputs share cost less."""
NONLINEAR = ops.Activation | ops.MaxPool | ops.MinMax
SIGNS = (1, -1)
"""Every neuron gets two rows: a lower bound of z and one of -z."""


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
        losses: for every node, what coefficients that underflow on the way through it cost, (B,); empty if not sound.
        runs_in: precision in which the network is run, where that is not the precision of the bounds.
    """

    graph: Graph
    region: Region
    sound: bool
    intervals: list[interval.Interval] = field(default_factory=list)
    lines: dict[int, Lines] = field(default_factory=dict)
    errors: dict[int, Tensor] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    runs_in: torch.dtype | None = None


@dataclass(frozen=True, eq=False)
class Rows:
    """Which rows to bound in each hidden layer, and with which lower slopes.

    Attributes:
        neurons: by node, see `chosen`.
        known: bounds of these nodes that hold anyway, (B, *shape) each.
        slopes: called with the relaxation, the node and the number of the chunk of rows, the activation, and the
            coefficients there; gives slopes that broadcast against these, or lines.
        found: told the node and the number of the chunk, and the bounds (B, M) that its rows gave.
    """

    neurons: dict[int, Tensor]
    known: dict[int, interval.Interval]
    slopes: Callable[[Relaxation, tuple[int, int], int, Coefficients], Tensor | Lines | None]
    found: Callable[[tuple[int, int], Tensor, Tensor], None] | None = None


def relaxation(
    graph: Graph,
    region: Region,
    *,
    slopes: Slopes | None,
    hidden: bool,
    sound: bool,
    rows: Rows | None = None,
    runs_in: torch.dtype | None = None,
) -> Relaxation:
    """Walk forward, bounding the input of every activation, and replaces each activation by lines.

    Args:
        graph: the network.
        region: the inputs.
        slopes: which lines; None for interval bounds only.
        hidden: bound hidden layers by backward passes as well (CROWN, Fast-Lin); else by intervals (CROWN-IBP). The
            backward pass runs only for neurons that intervals leave unstable: elsewhere the lines are exact.
            On a ball the first layer is always bounded by the dual norm.
        sound: account for rounding.
        rows: the neurons to bound and their slopes, instead of the unstable ones and the slopes of the lines.
        runs_in: the precision in which the network is run, if it is bounded in float64 (see `evaluation.doubled`). The
            bounds hold for every such run, and for real arithmetic.
    """
    r = Relaxation(graph, region, sound, runs_in=runs_in)
    r.intervals.append((region.lower, region.upper))
    users = users_of(graph)
    if slopes is not None:
        draw_lines(r, 0, users[0], slopes)
    flat = {0}  # nodes whose values each read one value of the input, or none: the image of a box is a box
    for i, node in enumerate(graph.nodes[1:], start=1):
        check_time()
        bounds, own = _stepped(r, i)
        if rows is not None and i in rows.known:
            bounds = torch.maximum(bounds[0], rows.known[i][0]), torch.minimum(bounds[1], rows.known[i][1])
        r.intervals.append(bounds)
        first = isinstance(node.op, ops.Affine) and node.inputs[0] in flat
        if node.inputs[0] in flat and (isinstance(node.op, ops.Scale | ops.Reshape) or _single(node.op)):
            flat.add(i)
        if sound and slopes is not None:
            note_rounding(r, i, users[i], own)
        if first and i not in flat and region.threat is not None:
            r.intervals[i] = refined(r, i, torch.ones_like(bounds[0], dtype=torch.bool))
        if slopes is None:
            continue
        if hidden and not first and any(isinstance(graph.nodes[k].op, NONLINEAR) for k in users[i]):
            r.intervals[i] = refined(r, i, open_neurons(r, i), rows)
        if sound:
            interval.check_order(*r.intervals[i], f"layer '{node.name}'")
        draw_lines(r, i, users[i], slopes)
    return r


def _stepped(r: Relaxation, i: int) -> tuple[interval.Interval, Tensor | None]:
    """Interval bounds of node i from the bounds of its inputs, and what rounding adds when the node is run."""
    node, inputs = r.graph.nodes[i], [r.intervals[j] for j in r.graph.nodes[i].inputs]
    lower, upper = interval.step(node, inputs, sound=r.sound)
    own = None if r.runs_in is None else own_error(node, inputs, (lower, upper), r.runs_in)
    return ((lower, upper) if own is None else (lower - own, upper + own)), own


def draw_lines(r: Relaxation, i: int, users: list[int], slopes: Slopes) -> None:
    """Replace the activations that read from node i by lines over its bounds."""
    for k in users:
        node = r.graph.nodes[k]
        if isinstance(node.op, ops.Activation):
            r.lines[k] = relax(node.op, *r.intervals[i], slopes, node.name)


def _single(op: ops.Op) -> bool:
    """True for zero padding, and for an average over windows of one value."""
    return isinstance(op, ops.Average) and op.window == 1


def hidden_layers(graph: Graph) -> list[int]:
    """Nodes that an activation, a max pooling or a MinMax reads from."""
    return [
        i for i, users in enumerate(users_of(graph)) if any(isinstance(graph.nodes[k].op, NONLINEAR) for k in users)
    ]


def open_neurons(r: Relaxation, i: int) -> Tensor:
    """Where one that reads from hidden node i is not linear on the bounds so far, bool (B, *shape)."""
    nodes = r.graph.nodes
    masks = [unstable(n.op, *r.intervals[i]) for n in nodes if i in n.inputs and isinstance(n.op, NONLINEAR)]
    return torch.stack(masks).any(0)


def users_of(graph: Graph) -> list[list[int]]:
    """For each node, the nodes that read from it."""
    users: list[list[int]] = [[] for _ in graph.nodes]
    for i, node in enumerate(graph.nodes):
        for j in node.inputs:
            users[j].append(i)
    return users


def _magnitude(bounds: interval.Interval) -> Tensor:
    return torch.maximum(bounds[0].abs(), bounds[1].abs())


def note_rounding(r: Relaxation, i: int, users: list[int], own: Tensor | None = None) -> None:
    """What one unit of coefficient at node i can lose to rounding; `own` of it when the node is run elsewhere."""
    node = r.graph.nodes[i]
    size = _magnitude(r.intervals[i])
    if isinstance(node.op, ops.Affine):
        reach = node.op.apply_abs(_magnitude(r.intervals[node.inputs[0]]), 1.0)
        # Forward sums have `terms` terms; the transposed product adds up as many as an input has outputs.
        factor = gamma(node.op.terms, size.dtype) + gamma(_transposed_terms(node.op), size.dtype)
        r.errors[i] = 3 * factor * reach + underflow(node.op.terms, size.dtype)
        if node.op.bias_abs is not None:
            r.errors[i] = r.errors[i] + gamma(_bias_terms(node), size.dtype) * node.op.bias_abs
    elif isinstance(node.op, ops.Add | ops.MaxPool | ops.MinMax) or len(users) > 1:
        r.errors[i] = 16 * unit(size.dtype) * size + underflow(0, size.dtype)
    elif isinstance(node.op, ops.Activation) and node.op.kind not in interval.EXACT:
        r.errors[i] = 4 * interval.ULPS * unit(size.dtype) * size + underflow(0, size.dtype)
    if own is not None:
        r.errors[i] = r.errors[i] + own if i in r.errors else own
    r.losses[i] = _underflows(r, i)


def _underflows(r: Relaxation, i: int) -> Tensor:
    """What it costs that each coefficient of the inputs of node i is a sum of products that may underflow, (B,)."""
    node = r.graph.nodes[i]
    terms = _transposed_terms(node.op) if isinstance(node.op, ops.Affine) else 1
    sizes = [_magnitude(r.intervals[j]).flatten(1) for j in node.inputs]
    count = _numel(node.shape) + sum(size.shape[1] for size in sizes)  # of products with shifts, biases and errors
    total = torch.stack([size.sum(1) for size in sizes]).sum(0)
    return 2 * underflow(terms, total.dtype) * total + underflow(4 * count, total.dtype)


def _transposed_terms(op: ops.Affine) -> int:
    match op:
        case ops.Linear():
            return int(op.weight.shape[0])
        case ops.Conv():
            return int(op.weight.shape[0] // op.groups * op.weight.shape[2] * op.weight.shape[3])
    return op.terms


def _bias_terms(node: ops.Node) -> int:
    """How many coefficients are added up for the share of the bias, at most, one after the other."""
    if isinstance(node.op, ops.Conv):  # the places of each channel first
        return node.shape[0] + _numel(node.shape[1:])
    return _numel(node.shape)


def refined(r: Relaxation, i: int, which: Tensor, rows: Rows | None = None) -> interval.Interval:
    """Interval bounds of node i, tightened by backward passes where `which` (B, *shape) is true."""
    lower, upper = r.intervals[i]
    neurons = chosen(r.graph, i, which) if rows is None else rows.neurons[i]
    if neurons.shape[-1] == 0:
        return lower, upper
    low, high = lower.flatten(1), upper.flatten(1)
    for number, part in enumerate(neurons.split(_chunk(r, i, neurons), dim=-1)):
        slopes = None if rows is None else partial(rows.slopes, r, (i, number))
        below, above = _ends(r, i, part, slopes)
        if rows is not None and rows.found is not None:
            rows.found((i, number), below, above)
        part = part.expand(len(low), part.shape[-1])
        # Neurons that were not asked for stay as they are: what else is in the batch must not show.
        asked, old_low, old_high = which.flatten(1).gather(1, part), low.gather(1, part), high.gather(1, part)
        larger = torch.maximum if rows is None else straight_maximum
        low = low.scatter(1, part, torch.where(asked, larger(old_low, below), old_low))
        high = high.scatter(1, part, torch.where(asked, -larger(-old_high, -above), old_high))
    return low.view_as(lower), high.view_as(upper)


class _StraightMaximum(Function):
    """See `straight_maximum`."""

    @staticmethod
    def forward(ctx: Any, known: Tensor, new: Tensor) -> Tensor:
        return torch.maximum(known, new)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor]:
        return None, g


def straight_maximum(known: Tensor, new: Tensor) -> Tensor:
    """The larger of two bounds; the gradient goes to the new one even where that is behind.

    An ascent on slopes could otherwise not move a row again that has once fallen behind the bound known before.
    """
    larger: Tensor = _StraightMaximum.apply(known, new)  # type: ignore[no-untyped-call]
    return larger


def chosen(graph: Graph, i: int, which: Tensor) -> Tensor:
    """Neurons of node i to tighten, flat indices (B, M), or (M,) for all neurons, grouped by place.

    Every input gets as many as the one with the most neurons in `which`; the spare ones are repeats or others.
    """
    shape, flat = graph.nodes[i].shape, which.flatten(1)
    most = int(flat.sum(1).max()) if len(flat) else 0
    if most < FULL * flat.shape[1]:
        return flat.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :most]
    order = torch.arange(flat.shape[1], device=which.device)
    return order.view(shape[0], -1).T.reshape(-1) if len(shape) == 3 else order


def _ends(r: Relaxation, i: int, neurons: Tensor, slopes: "Given | None") -> interval.Interval:
    """Lower and upper bounds (B, M) of neurons of node i, (B, M) or (M,) as in `chosen`."""
    j, start, shift = _behind(r, i, neurons)
    shift = shift.expand(_rows_of(start))
    if i in r.errors and j != i:
        lost = r.errors[i].flatten(1).gather(1, neurons.expand(len(r.region.x), neurons.shape[-1]))
        shift = shift - lost.repeat_interleave(len(SIGNS), 1).view(len(lost), *_rows_of(start)[1:])
    ends = concretise(r, backward(r, j, start, slopes, shift), scratch=True)
    ends = ends.reshape(len(r.region.x), neurons.shape[-1], len(SIGNS))
    return ends[..., 0], -ends[..., 1]


def _rows_of(c: Coefficients) -> tuple[int, ...]:
    """(B, M) or (B, P, N), with the number of places even where their rows are held once."""
    return tuple(c.rows) if c.window is None else (c.rows[0], c.window.index.shape[1], c.rows[2])


def _behind(r: Relaxation, i: int, neurons: Tensor) -> tuple[int, Coefficients, Tensor]:
    """Two rows for each of some neurons of node i, carried through it where that is a look-up of weights.

    Returns the node that they are coefficients of, the rows, and what the bias adds. All neurons
    of a place have rows that are the same at every place, and held once.
    """
    node, dtype, device = r.graph.nodes[i], r.region.x.dtype, neurons.device
    count = len(SIGNS)

    def look_up(table: Tensor, index: Tensor) -> Tensor:
        """Both signs of table[index], side by side in the last axis of the index."""
        signed = torch.stack([sign * table for sign in SIGNS], 1).flatten(0, 1)
        return signed[torch.stack([count * index + k for k in range(count)], -1)]

    if _has_windows(node):
        channels, area = node.shape[0], node.shape[1] * node.shape[2]
        if neurons.ndim == 1:
            channel, index = torch.arange(channels, device=device)[None, None], (neurons[::channels] % area)[None]
        else:
            channel, index = (neurons // area)[:, :, None], neurons % area
        grid = (node.shape[1], node.shape[2])
        match node.op:
            case ops.Conv() if node.op.groups == 1 and node.op.dilation == (1, 1):
                bias, window = node.op.bias, Window(index, grid, node.op.stride, node.op.padding)
                rows = Coefficients(look_up(node.op.weight, channel).flatten(2, 3), window, clean=False, scratch=True)
                shift = rows.values.new_zeros(rows.rows) if bias is None else look_up(bias, channel).flatten(2)
                return node.inputs[0], rows, shift
        values = look_up(torch.eye(channels, dtype=dtype, device=device), channel).flatten(2, 3)[..., None, None]
        rows = Coefficients(values, Window(index, grid, (1, 1), (0, 0)), scratch=True)
        return i, rows, values.new_zeros(rows.rows)
    neurons = neurons if neurons.ndim == 2 else neurons[None]
    match node.op:
        case ops.Linear() if len(node.shape) == 1:
            bias, rows = node.op.bias, Coefficients(look_up(node.op.weight, neurons).flatten(1, 2), scratch=True)
            shift = rows.values.new_zeros(rows.rows) if bias is None else look_up(bias, neurons).flatten(1)
            return node.inputs[0], rows, shift
    unit = torch.eye(_numel(node.shape), dtype=dtype, device=device)
    rows = Coefficients(look_up(unit, neurons).flatten(1, 2).unflatten(2, node.shape), scratch=True)
    return i, rows, rows.values.new_zeros(rows.rows)


def _numel(shape: ops.Shape) -> int:
    return int(torch.Size(shape).numel())


def _has_windows(node: ops.Node) -> bool:
    """True if rows that start at the node are kept as windows of its maps: smaller than the whole map, and faster."""
    return len(node.shape) == 3 and not is_reference()


def _chunk(r: Relaxation, i: int, neurons: Tensor) -> int:
    """Neurons of each input at a time: as many as keep the rows within MEMORY at the widest node on the way."""
    shape = r.graph.nodes[i].shape
    widest = max(_numel(node.shape) for node in r.graph.nodes[: i + 1])
    if _has_windows(r.graph.nodes[i]):
        widest = min(widest, _widest_window(r.graph, i))
    most = max(1, MEMORY // (len(SIGNS) * widest * len(r.region.x)))
    whole_places = len(shape) == 3 and neurons.ndim == 1
    return max(1, most // shape[0]) * shape[0] if whole_places else most


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
    return refined(r, len(r.graph.nodes) - 1, torch.ones_like(r.intervals[-1][0], dtype=torch.bool))


def other_classes(y: Tensor, classes: int) -> Tensor:
    """The classes other than the labels y (B,), in order, (B, classes - 1)."""
    index = torch.arange(classes - 1, device=y.device).expand(len(y), -1)
    return index + (index >= y[:, None]).to(index)


def margin_bounds(r: Relaxation, y: Tensor, slopes: dict[int, Tensor] | None = None) -> Tensor:
    """Lower bounds of z_y - z_j for every class j, (B, K); zero at j = y.

    Lower slopes (B, 1 or K - 1, *shape) by activation may be given instead of the slopes of the lines.
    """
    classes = r.graph.nodes[-1].shape[0]
    others, found = other_classes(y, classes), r.region.x.new_zeros(len(y), classes)
    if classes == 1:
        return found
    one_hot = torch.eye(classes, dtype=found.dtype, device=y.device)
    rows = Coefficients(one_hot[y][:, None] - one_hot[others])
    return found.scatter(1, others, concretise(r, backward(r, len(r.graph.nodes) - 1, rows, slopes)))


def margin_planes(r: Relaxation, y: Tensor, slopes: dict[int, Tensor] | None = None) -> Planes:
    """Linear lower bounds of z_y - z_j, one row for each class j; the row of j = y is zero."""
    return backward(r, len(r.graph.nodes) - 1, margin_rows(r, y), slopes)


def margin_rows(r: Relaxation, y: Tensor) -> Coefficients:
    """The rows z_y - z_j at the output, (B, K, K)."""
    one_hot = torch.eye(r.graph.nodes[-1].shape[0], dtype=r.region.x.dtype, device=y.device)
    return Coefficients(one_hot[y][:, None] - one_hot)


Given = Mapping[int, Tensor | Lines] | Callable[[int, Coefficients], Tensor | Lines | None]
"""Lower slopes or lines by activation, (B, 1 or M, *shape), or a function of the activation and its coefficients."""


def backward(
    r: Relaxation,
    i: int,
    start: Coefficients,
    slopes: Given | None = None,
    shift: Tensor | None = None,
    extra: Mapping[int, Tensor] | None = None,
) -> Planes:
    """Carry lower bounds of <start, value of node i> back to the input.

    Args:
        r: the relaxed network.
        i: node where the rows start.
        start: their coefficients there, M rows for each input.
        slopes: lower slopes that replace the slopes of the lines.
        shift: what the bounds start from, one number for each row; zero if none is given.
        extra: coefficients that are added on the way, by node, dense (B, M, *shape): multipliers of constraints.
    """
    pending: dict[int, Coefficients] = {i: start}
    shift = start.values.new_zeros(_rows_of(start)) if shift is None else shift
    for j in range(i, 0, -1):
        if j not in pending:
            continue
        check_time()
        c, node = pending.pop(j), r.graph.nodes[j]
        if c.window is not None and c.values.shape[4] * c.values.shape[5] >= node.shape[1] * node.shape[2]:
            c = dense(c, node.shape)
        if extra is not None and j in extra:
            c = Coefficients(dense(c, node.shape).values + extra[j], scratch=True)
        if j in r.errors:
            c = clean(c, node.shape)
            shift = _plus(shift, -dot(c.values.abs(), c, r.errors[j]))
        if j in r.losses:
            shift = shift - r.losses[j].view(-1, *[1] * (shift.ndim - 1))
        given = slopes(j, c) if callable(slopes) else None if slopes is None else slopes.get(j)
        parts, added = carry(r.graph, j, c, r.lines.get(j), given, r.intervals, sound=r.sound)
        if added is not None:
            shift = _plus(shift, added)
            if r.sound:
                shift = shift - 4 * unit(shift.dtype) * shift.abs()
        for k, part in zip(node.inputs, parts, strict=True):
            pending[k] = add(pending[k], part, r.graph.nodes[k].shape) if k in pending else part
    if 0 not in pending:  # the rows do not depend on the input
        none = start.values.new_zeros(*_rows_of(start), *r.graph.nodes[0].shape)
        pending[0] = Coefficients(none if start.window is None else none.flatten(1, 2))
    return Planes(pending[0], shift.flatten(1))


def _plus(shift: Tensor, added: Tensor) -> Tensor:
    """Add one number for each row to the shift, which has all rows in the layout that they started with.

    Rows that started at places, (B, P, N), may have become dense on the way, (B, P N), on one branch and not yet on
    another; and those that all places share are held once, (B, 1, N).
    """
    return shift + (added if added.ndim == shift.ndim else added.unflatten(1, shift.shape[1:]))


def concretise(r: Relaxation, planes: Planes, *, scratch: bool = False) -> Tensor:
    """The smallest value of each bound over the region, (B, M); `scratch` allows to overwrite the coefficients."""
    value = minimum(r.region, planes.coefficients, sound=r.sound, scratch=scratch).flatten(1) + planes.shift
    return value - 4 * unit(value.dtype) * value.abs() if r.sound else value
