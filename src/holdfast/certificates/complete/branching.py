"""Which neuron to split: candidates by what their relaxation costs, the best of them by the bounds of both halves.

The cost of a relaxed ReLU with coefficient a is |a| times the intercept of the line above where a < 0, and at most a
times the gap to the line below where a > 0 (Bunel et al., "Branch and bound for piecewise linear neural network
verification", 2020). A few candidates of the largest cost are then tried: both halves are bounded with the slopes of
their parent (De Palma et al., "Improved branch and bound for neural network verification via Lagrangian decomposition",
2021, filtered smart branching). An S-shaped neuron costs |a| times the largest gap between function and line; it is
split in the middle of its range.
"""

import torch
from torch import Tensor

from holdfast.bounding.graph import ops
from holdfast.bounding.linear.relax import relax, slope_range
from holdfast.certificates.complete.parts import Layer, Parts, Tasks
from holdfast.certificates.complete.split import Choice, View, choice, evaluate, own_lines, view

NARROW = 1e-4
"""Width of a range that is not split any more."""
PLACES = 5
"""Where the gap between a curved function and its lines is measured, from one end of the range to the other."""


@torch.no_grad()
def candidates(tasks: Tasks, parts: Parts, count: int) -> tuple[Tensor, Tensor]:
    """Neurons to try for each part, (N, count), and which of them can be split at all, bool."""
    v = view(tasks, parts)
    chosen = choice(tasks, parts, v)
    seen: dict[int, Tensor] = {}
    evaluate(v, chosen, seen)
    scores = []
    for layer in tasks.layout.layers:
        a = seen.get(layer.node, v.rows.new_zeros(()))
        scores.append((_curved(v, layer, chosen, a) if layer.curved else _piecewise(v, layer, chosen, a)).flatten(1))
    score = torch.cat(scores, 1).nan_to_num(0.0)
    best = score.topk(min(count, score.shape[1]), dim=1)
    return best.indices, best.values >= 0


def _piecewise(v: View, layer: Layer, chosen: Choice, a: Tensor) -> Tensor:
    """What the relaxation of a (leaky) ReLU costs, (N, *shape); -1 where it cannot be split."""
    k, value = layer.node, chosen.values[layer.node]
    line, (lower, upper) = v.relaxed.lines[k], v.relaxed.intervals[v.relaxed.graph.nodes[k].inputs[0]]
    below = torch.minimum(value * -lower, (1 - value) * upper)
    cost = -a.clamp(max=0) * line.upper_shift + 0.5 * a.clamp(min=0) * below
    # The small term orders neurons without a cost, which are split last.
    return torch.where(v.free[k], cost + 1e-6 * torch.minimum(-lower, upper), -1.0)


def _curved(v: View, layer: Layer, chosen: Choice, a: Tensor) -> Tensor:
    """What the lines of an S-shaped function cost over its range, (N, *shape); -1 where that is narrow."""
    op, (low, high) = v.relaxed.graph.nodes[layer.node].op, v.ranges[layer.node]
    assert isinstance(op, ops.Activation)
    lines = own_lines(v, layer.node, chosen.values[layer.node])
    assert lines.lower_shift is not None
    below, above = torch.zeros_like(low), torch.zeros_like(low)
    for share in torch.linspace(0, 1, PLACES).tolist():
        z = low + share * (high - low)
        y = op.function(z)
        below = torch.maximum(below, y - lines.lower_slope[:, 0] * z - lines.lower_shift[:, 0])
        above = torch.maximum(above, lines.upper_slope[:, 0] * z + lines.upper_shift[:, 0] - y)
    cost = a.clamp(min=0) * below - a.clamp(max=0) * above
    return torch.where(high - low > NARROW, cost, -1.0)


def halves(tasks: Tasks, parts: Parts, neuron: Tensor) -> Parts:
    """Both halves of each part, the first N with the neuron (N,) above the split; the new multipliers are zero."""
    where = neuron[:, None]
    values, lower, upper = parts.values.clone(), parts.ranges.clone(), parts.ranges.clone()
    signs = torch.cat([parts.signs.scatter(1, where, sign) for sign in (1, -1)])
    both = torch.cat([values, values])
    for layer in tasks.layout.layers:
        mine = ((neuron >= layer.neurons.start) & (neuron < layer.neurons.stop)).nonzero()[:, 0]
        at = neuron[mine] - layer.neurons.start + layer.columns.start
        if not layer.curved:
            both[mine, at] = both[mine + len(parts), at] = 0.0
            continue
        middle = parts.ranges[mine, neuron[mine]].mean(1)
        upper[mine, neuron[mine], 0] = lower[mine, neuron[mine], 1] = middle
        signs[mine + len(parts), neuron[mine]] = 1
        _redraw(tasks, layer, both, mine, at, upper[mine, neuron[mine]])
        _redraw(tasks, layer, both, mine + len(parts), at, lower[mine, neuron[mine]])
    ranges = torch.cat([upper, lower])
    return Parts(parts.task.repeat(2), parts.bound.repeat(2), signs, both, parts.mix.repeat(2, 1), ranges)


def _redraw(tasks: Tasks, layer: Layer, values: Tensor, part: Tensor, column: Tensor, ends: Tensor) -> None:
    """Give the curved neurons at `column` (first of their numbers) of some parts the lines of CROWN for a new range."""
    op = tasks.exact.graph.nodes[layer.node].op
    assert isinstance(op, ops.Activation)
    size = (layer.columns.stop - layer.columns.start) // 3
    for i, place in enumerate(places(op, ends[:, 0], ends[:, 1])):
        values[part, column + i * size] = place.to(values)


def places(op: ops.Activation, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """Where in the range of derivatives the slopes of CROWN's lines lie, below and above, each from 0 to 1."""
    lines, (least, most) = relax(op, lower, upper, "adaptive", op.kind), slope_range(op.kind, lower, upper)
    width = (most - least).clamp(min=torch.finfo(least.dtype).tiny)
    return ((lines.lower_slope - least) / width).clamp(0, 1), ((lines.upper_slope - least) / width).clamp(0, 1)


@torch.no_grad()
def quick_bounds(tasks: Tasks, parts: Parts) -> Tensor:
    """Bounds of parts with the slopes and multipliers that they have, not proved, (N,) float64."""
    v = view(tasks, parts)
    return evaluate(v, choice(tasks, parts, v))[0].double().nan_to_num(-torch.inf)


def split(tasks: Tasks, parts: Parts, count: int) -> tuple[Parts, Tensor]:
    """Split each part at the best of `count` candidates; also returns which parts have a neuron to split, (N,) bool.

    Of two gains, g and h, the product counts: a split that helps one half only leaves the other as it was. A gain
    beyond what closes a half is worth no more.
    """
    neurons, usable = candidates(tasks, parts, count)
    can = usable.any(1)
    parts, neurons, usable = parts.select(can), neurons[can], usable[can]
    if len(parts) == 0 or neurons.shape[1] == 1:
        return halves(tasks, parts, neurons[:, 0]), can
    before = quick_bounds(tasks, parts)
    gains = []
    for number in range(neurons.shape[1]):
        after = quick_bounds(tasks, halves(tasks, parts, neurons[:, number])).clamp(max=0.0)
        up, down = (after - before.repeat(2)).clamp(min=0).chunk(2)
        unit = 1e-3 * (-before).clamp(min=1e-12)
        gains.append(torch.where(usable[:, number], (up + unit) * (down + unit), -1.0))
    best = torch.stack(gains, 1).nan_to_num(0.0).argmax(1)
    return halves(tasks, parts, neurons.gather(1, best[:, None])[:, 0]), can
