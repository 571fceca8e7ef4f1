"""Lower bounds of sub-problems, with optimised slopes and multipliers.

Where a neuron z is known to be at least 0, its ReLU is the identity; where it is at most 0, the other branch. A
constraint z >= 0 has a multiplier b >= 0: the minimum of f over the part is at least the minimum of f - b z over all
inputs, for every b. Slopes and multipliers are optimised together by gradient ascent (Wang et al., "Beta-CROWN:
efficient bound propagation with per-neuron split constraints for neural network robustness verification", 2021). An
S-shaped neuron is split by its range, p <= z <= q: its lines are drawn for the range, and one multiplier b of either
sign stands for both ends, f - b (z - p) for b > 0 and f - b (z - q) for b < 0. If one of several rows has to be
positive, their mixture is optimised as well. Every value of all these gives a valid bound, so they are found in the
precision of the model; `prove` then bounds each part once in float64 with an account of rounding.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from holdfast.bounding.core.adam import Adam
from holdfast.bounding.core.rounding import gamma
from holdfast.bounding.graph import ops
from holdfast.bounding.graph.ops import Graph
from holdfast.bounding.interval import Interval
from holdfast.bounding.linear import alpha
from holdfast.bounding.linear import relaxation as linear
from holdfast.bounding.linear.coefficients import Coefficients
from holdfast.bounding.linear.relax import Lines, curved_lines, slope_range
from holdfast.bounding.linear.relaxation import Planes, Relaxation
from holdfast.certificates.complete.parts import Parts, Tasks
from holdfast.utils import clock

RATE = 0.2
"""Step of the ascent, for slopes and for multipliers relative to the largest coefficient of their layer."""
DECAY = 0.95


@dataclass(frozen=True, eq=False)
class View:
    """Parts as a backward pass needs them.

    Attributes:
        relaxed: the network on N parts, with exact lines for the neurons that are split by their sign.
        rows: (N, R, K).
        free: by node, where the value is a slope: (N, *shape) bool; for a curved layer, where a range is split.
        force: by node, (N, *shape): the pull of a multiplier of 1; its unit for a curved layer.
        ranges: by curved layer, the ends of each neuron's range, (N, *shape) each.
    """

    relaxed: Relaxation
    rows: Tensor
    free: dict[int, Tensor]
    force: dict[int, Tensor]
    ranges: dict[int, Interval]


def view(tasks: Tasks, parts: Parts, *, exact: bool = False) -> View:
    """Relax the network on each part."""
    whole, inputs = tasks.exact if exact else tasks.fast, tasks.inputs[parts.task]
    r = alpha.select(whole, inputs)
    dtype, scale = r.region.x.dtype, tasks.scale[parts.task].to(r.region.x.dtype)
    free, force, ranges = {}, {}, {}
    signs_of = tasks.layout.signs(parts.signs)
    for number, layer in enumerate(tasks.layout.layers):
        k, signs = layer.node, signs_of[layer.node]
        node, unit = r.graph.nodes[k], scale[:, number].view(-1, *[1] * len(layer.shape))
        assert isinstance(node.op, ops.Activation)
        if layer.curved:
            ends = parts.ranges[:, layer.neurons].to(dtype).view(-1, *layer.shape, 2)
            ranges[k] = ends[..., 0], ends[..., 1]
            free[k], force[k] = signs != 0, -unit.expand(signs.shape)
            continue
        line, open_, (low, high) = r.lines[k], signs == 0, r.intervals[node.inputs[0]]
        slope = torch.where(signs > 0, 1.0, node.op.parameter).to(dtype)
        below = torch.where(open_, line.lower_slope, slope)
        r.lines[k] = Lines(below, None, torch.where(open_, line.upper_slope, slope), line.upper_shift * open_)
        free[k] = open_ & (low < 0) & (high > 0)
        force[k] = -signs.to(dtype) * unit
    return View(r, tasks.rows[parts.task].to(dtype), free, force, ranges)


@dataclass(frozen=True, eq=False)
class Choice:
    """What an ascent chooses: slopes and multipliers by node, and the mixture of the rows, (N, R)."""

    values: dict[int, Tensor]
    mix: Tensor

    def tensors(self) -> list[Tensor]:
        """What has gradients: the mixture only if there are several rows."""
        return [*self.values.values(), *([self.mix] if self.mix.shape[1] > 1 else [])]


def choice(tasks: Tasks, parts: Parts, v: View) -> Choice:
    """The choice that parts come with, moved into its range: out of it, it would prove nothing."""
    values = {k: one.to(v.rows, copy=True) for k, one in tasks.layout.values(parts.values).items()}
    found = Choice(values, parts.mix.to(v.rows, copy=True))
    _project(v, found)
    return found


@torch.no_grad()
def _project(v: View, chosen: Choice) -> None:
    """Move slopes, multipliers and mixtures into their ranges, in place."""
    for k, one in chosen.values.items():
        if k in v.ranges:
            one[:, :2].clamp_(0.0, 1.0)
            one[:, 2].mul_(v.free[k])
        else:
            torch.maximum(one, _floor(v.relaxed.graph, k, v.free[k]), out=one)
            torch.where(v.free[k], one.clamp(max=1.0), one, out=one)
    mix = chosen.mix.clamp_(min=0.0)
    mix.div_(mix.sum(1, keepdim=True).clamp(min=1e-9))


def evaluate(v: View, chosen: Choice, seen: dict[int, Tensor] | None = None) -> tuple[Tensor, Planes]:
    """Lower bound of each part (N,), and the plane it comes from.

    Args:
        v: the parts.
        chosen: slopes, multipliers and mixtures.
        seen: filled with the coefficients of each activation, (N, *shape), if given.
    """
    nodes, lines, values = v.relaxed.graph.nodes, v.relaxed.lines, chosen.values
    shift = lost = v.rows.new_zeros(len(v.rows))
    extra: dict[int, Tensor] = {}
    for k, value in values.items():
        before, pull = nodes[k].inputs[0], v.force[k] * (value[:, 2] if k in v.ranges else value)
        if k in v.ranges:  # -b z, with b = -pull, at the end of the range that b pulls to
            low, high = v.ranges[k]
            ends = (-pull * torch.where(pull < 0, low, high)).flatten(1)
            shift, lost = shift + ends.sum(1), lost + ends.abs().sum(1)
        extra[before] = extra[before] + pull[:, None] if before in extra else pull[:, None]

    def slopes(k: int, c: Coefficients) -> Tensor | Lines | None:
        if k not in values:
            return None
        if seen is not None:
            seen[k] = c.values[:, 0].clone()
        if k in v.ranges:
            return own_lines(v, k, values[k])
        return torch.where(v.free[k], values[k], lines[k].lower_slope)[:, None]

    if v.relaxed.sound:
        shift = shift - _lost(v, chosen, lost)
    start = Coefficients(torch.bmm(chosen.mix[:, None], v.rows))
    planes = linear.backward(v.relaxed, len(nodes) - 1, start, slopes, shift[:, None], extra)
    return linear.concretise(v.relaxed, planes)[:, 0], planes


def own_lines(v: View, k: int, value: Tensor) -> Lines:
    """The lines of curved neurons over their ranges, (N, 1, *shape), from the numbers (N, CURVED, *shape)."""
    op = v.relaxed.graph.nodes[k].op
    assert isinstance(op, ops.Activation)
    ends = v.ranges[k]
    least, most = slope_range(op.kind, *ends)
    low, up = (least + value[:, i] * (most - least) for i in range(2))
    line = curved_lines(op.kind, low, up, *ends)
    assert line.lower_shift is not None
    return Lines(*(one[:, None] for one in (line.lower_slope, line.lower_shift, line.upper_slope, line.upper_shift)))


def _lost(v: View, chosen: Choice, size: Tensor) -> Tensor:
    """What rounding of the mixture, and of a sum of terms whose absolute values add up to `size`, can cost, (N,)."""
    largest = torch.maximum(*(end.abs() for end in v.relaxed.intervals[-1]))
    reach = (torch.bmm(chosen.mix[:, None], v.rows.abs())[:, 0] * largest).sum(1)
    terms = sum(value[0].numel() for value in chosen.values.values()) + v.rows.shape[1]
    exact = v.rows.shape[1] == 1  # a mixture of one row is the row
    return 2 * gamma(terms, size.dtype) * (size if exact else size + reach)


def optimise(tasks: Tasks, parts: Parts, steps: int) -> tuple[Parts, Tensor]:
    """Better slopes, multipliers and mixtures, and the input where the bound of each part is attained, (N, *shape).

    A deadline that is set around the call ends the ascent early.
    """
    v = view(tasks, parts)
    chosen = choice(tasks, parts, v)
    best = torch.full_like(parts.bound, -torch.inf)
    kept = Choice({k: one.clone() for k, one in chosen.values.items()}, chosen.mix.clone())
    tensors = chosen.tensors()
    with torch.enable_grad():
        for one in tensors:
            one.requires_grad_(True)
        adam = Adam(tensors, rate=RATE, decay=DECAY)
        for step in range(steps + 1):
            found, planes = evaluate(v, chosen)
            with torch.no_grad():
                better = found.detach() > best
                best = torch.where(better, found.detach().to(best), best)
                for old, new in zip(kept.tensors(), tensors, strict=True):
                    torch.where(better.view(-1, *[1] * (new.ndim - 1)), new, old, out=old)
            if not tensors or step == steps or bool((best > 0).all()) or clock.over():
                break
            gradients = torch.autograd.grad(-found.sum(), tensors, allow_unused=True)
            adam.step(tuple(None if g is None else g.nan_to_num(0.0, 0.0, 0.0) for g in gradients))
            _project(v, chosen)
    flat = torch.cat([one.flatten(1) for one in kept.values.values()], 1) if kept.values else parts.values
    return replace(parts, values=flat.detach().to(parts.values), mix=kept.mix.detach().to(parts.mix)), corner(v, planes)


def _floor(graph: Graph, k: int, free: Tensor) -> Tensor:
    """Least slope where a neuron is free, zero for multipliers."""
    op = graph.nodes[k].op
    assert isinstance(op, ops.Activation)
    return torch.where(free, op.parameter, 0.0)


@torch.no_grad()
def corner(v: View, planes: Planes) -> Tensor:
    """Where the plane of each part is least over the box, (N, *shape)."""
    region = v.relaxed.region
    return torch.where(planes.coefficients.values[:, 0] > 0, region.lower, region.upper)


@torch.no_grad()
def prove(tasks: Tasks, parts: Parts) -> Parts:
    """The same parts with bounds that hold in spite of rounding; never worse than the bounds that they come with."""
    v = view(tasks, parts, exact=True)
    found = evaluate(v, choice(tasks, parts, v))[0]
    found = torch.where(found.isfinite(), found, -torch.inf)  # an overflow proves nothing
    return replace(parts, bound=torch.maximum(parts.bound, found))
