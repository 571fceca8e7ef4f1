"""Zonotopes with rounding: bounds of every neuron over many boxes at once, in one forward sweep.

A value of the network is held as c + sum_k s_k g_k + r with |s_k| <= 1 and |r| <= e: centre c, generators g and
remainder e. The symbols s begin as the position in the box, one for each input that varies; an activation that is not
linear on its range is replaced by two parallel lines and adds a symbol for the distance to them (Singh et al., "Fast
and effective robustness certification", 2018). Unlike a backward pass for each layer, the sweep costs as many forward
passes as there are symbols, and small boxes leave few neurons open.

Rounding. The sweep is computed in float64, the network is run in `dtype`. What is bounded is the value *as computed*:
an affine layer maps the remainder to |A| e and adds gamma (|A| |z| + |b|) for the sums of the run and of the sweep
itself; a line of slope d scales it by d. So a neuron that is off stops the error that reaches it.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from holdfast.bounding import interval
from holdfast.bounding.core.rounding import gamma, underflow, unit
from holdfast.bounding.graph import ops
from holdfast.bounding.graph.ops import Graph, Node
from holdfast.bounding.interval import EXACT, ULPS, Interval
from holdfast.bounding.linear.forward import linear_part
from holdfast.bounding.linear.relax import PIECEWISE, S_SHAPED, relax, unstable
from holdfast.bounding.linear.relaxation import Relaxation, draw_lines, note_rounding, open_neurons, refined, users_of
from holdfast.errors import UnsupportedError

DOUBLE = torch.float64


@dataclass(frozen=True, eq=False)
class Form:
    """A node over B boxes: `centre` and `rest` (B, *shape), `generators` (B, G, *shape); G counts the symbols so far.

    `spread` (B, *shape) is the sum of the absolute generators.
    """

    centre: Tensor
    generators: Tensor
    rest: Tensor
    spread: Tensor

    @property
    def size(self) -> Tensor:
        """A bound of the absolute values, (B, *shape)."""
        return self.centre.abs() + self.spread + self.rest


def _form(centre: Tensor, generators: Tensor, rest: Tensor) -> Form:
    return Form(centre, generators, rest, torch.linalg.vector_norm(generators, 1, 1))


def covers(graph: Graph) -> bool:
    """True if the sweep, and CROWN, have a rule for every operation of the graph."""
    return not _strange(graph)


def check_rules(graph: Graph) -> None:
    """Refuse a network with an operation that the sweep has no rule for."""
    for node in _strange(graph):
        what = node.op.kind if isinstance(node.op, ops.Activation) else type(node.op).__name__
        raise UnsupportedError(
            f"layer '{node.name}': input splitting has no rule for '{what}'; it covers affine layers, "
            f"{', '.join(sorted(PIECEWISE | S_SHAPED))}, clippings, max pooling, MinMax, sums and concatenation. "
            "Use method='crown' or method='ibp'."
        )


def _strange(graph: Graph) -> list[Node]:
    plain = ops.Input | ops.Affine | ops.Add | ops.Reshape | ops.Concat | ops.MaxPool | ops.MinMax
    known = PIECEWISE | S_SHAPED
    return [
        node
        for node in graph.nodes
        if not isinstance(node.op, plain) and not (isinstance(node.op, ops.Activation) and node.op.kind in known)
    ]


def values_of(graph: Graph, inputs: int) -> int:
    """Numbers in the largest set of generators over one box of `inputs` that vary, if every neuron stays open."""
    sizes = [math.prod(node.shape) for node in graph.nodes]
    symbols = inputs + sum(
        size for size, node in zip(sizes, graph.nodes, strict=True) if isinstance(node.op, ops.Activation)
    )
    return max(sizes) * symbols


def sweep(r: Relaxation, dtype: torch.dtype) -> None:
    """Fill in a relaxation: bounds of every node over its boxes, lines of the activations, and how much nodes round.

    The bounds are of the values as computed in `dtype`. Neurons that zonotopes leave open are tightened by a backward
    pass (CROWN) before the lines of their activations are drawn: together they need a tenth of the splits of zonotopes.

    Args:
        r: of a graph in float64 over boxes in float64, with sound=True and nothing else yet.
        dtype: in which the network is run.
    """
    users = users_of(r.graph)
    r.intervals.append((r.region.lower, r.region.upper))
    draw_lines(r, 0, users[0], "adaptive")
    forms = [_start(r.region.lower, r.region.upper)]
    symbols = _Symbols(forms[0].generators.shape[1])
    for i, node in enumerate(r.graph.nodes[1:], start=1):
        given, before = [forms[j] for j in node.inputs], r.intervals[node.inputs[0]]
        form, error = _step(node, given, before, symbols, dtype)
        forms.append(form)
        r.intervals.append(_range(form, before, node))
        note_rounding(r, i, users[i])
        if error is not None:
            r.errors[i] = r.errors[i] + error if i in r.errors else error
        if node.inputs[0] and any(isinstance(r.graph.nodes[k].op, ops.Activation) for k in users[i]):
            r.intervals[i] = refined(r, i, open_neurons(r, i))
        draw_lines(r, i, users[i], "adaptive")


class _Symbols:
    """How many symbols there are."""

    def __init__(self, count: int) -> None:
        self.count = count


def _start(lower: Tensor, upper: Tensor) -> Form:
    """The box: one symbol for each input that varies in any of them."""
    varies = (upper > lower).any(0).flatten().nonzero()[:, 0]
    centre = (lower + upper) / 2
    radius = torch.maximum(upper - centre, centre - lower) * (1 + 4 * unit(DOUBLE)) + underflow(0, DOUBLE)
    flat = torch.zeros(len(lower), len(varies), centre[0].numel(), dtype=DOUBLE)
    flat[:, torch.arange(len(varies)), varies] = radius.flatten(1)[:, varies]
    return _form(centre, flat.view(len(lower), len(varies), *lower.shape[1:]), torch.zeros_like(centre))


def _range(form: Form, before: Interval, node: Node) -> Interval:
    """Bounds of the values of a form; an activation also stays between the values at the ends of its range."""
    reach = form.spread + form.rest
    lost = gamma(form.generators.shape[1], DOUBLE) * (form.centre.abs() + reach) + underflow(0, DOUBLE)
    low, high = form.centre - reach - lost, form.centre + reach + lost
    if isinstance(node.op, ops.Activation):
        ends = interval.step(node, [before], sound=True)
        return torch.maximum(low, ends[0]), torch.minimum(high, ends[1])
    return low, high


def _step(
    node: Node, forms: list[Form], before: Interval, symbols: _Symbols, dtype: torch.dtype
) -> tuple[Form, Tensor | None]:
    """The form of a node, and by how much it rounds."""
    form = forms[0]
    match node.op:
        case ops.Affine():
            return _affine(node, node.op, form, dtype)
        case ops.Activation():
            return _activation(node, node.op, form, before, symbols, dtype)
        case ops.Add():
            a, b = (_filled(f, symbols.count) for f in forms)
            made = _form(a.centre + b.centre, a.generators + b.generators, a.rest + b.rest)
            error = (2 * unit(dtype) + 8 * unit(DOUBLE)) * made.size + underflow(0, dtype)
            return replace(made, rest=made.rest * (1 + 8 * unit(DOUBLE)) + error), error
        case ops.Reshape():
            shape = node.shape
            count = form.generators.shape[:2]
            flat = (part.reshape(-1, *shape) for part in (form.centre, form.rest, form.spread))
            centre, rest, spread = flat
            return Form(centre, form.generators.reshape(*count, *shape), rest, spread), None
        case ops.Concat():
            parts = [_filled(f, symbols.count) for f in forms]
            dim = node.op.dim
            return Form(
                torch.cat([p.centre for p in parts], dim),
                torch.cat([p.generators for p in parts], dim + 1),
                torch.cat([p.rest for p in parts], dim),
                torch.cat([p.spread for p in parts], dim),
            ), None
        case ops.MaxPool() | ops.MinMax():  # the ends of its range, which keep no symbol; a selection does not round
            low, high = interval.step(node, [before], sound=True)
            centre, half = interval.centre_radius(low, high, sound=True)
            return _form(centre, centre.new_zeros(len(centre), 0, *node.shape), half), None
    raise UnsupportedError(f"layer '{node.name}': zonotopes have no rule for {type(node.op).__name__}")


def _filled(form: Form, count: int) -> Form:
    """The form with zeros for the symbols that were added elsewhere."""
    missing = count - form.generators.shape[1]
    if not missing:
        return form
    pads = [0, 0] * (form.generators.ndim - 2) + [0, missing]
    return replace(form, generators=F.pad(form.generators, pads))


def _affine(node: Node, op: ops.Affine, form: Form, dtype: torch.dtype) -> tuple[Form, Tensor]:
    b, count = form.generators.shape[:2]
    generators = linear_part(op, form.generators.flatten(0, 1)).view(b, count, *node.shape)
    both = op.apply_abs(torch.cat([form.size, form.rest]))
    reach, passed = both[:b], both[b:]
    if op.bias_abs is not None:
        reach = reach + op.bias_abs
    # The sweep adds up the same products in float64: in the centre, in each generator, and in the remainder.
    factor = (gamma(op.terms, dtype) + 8 * gamma(op.terms + count, DOUBLE)) * (1 + 1e-6)
    error = factor * reach + underflow(op.terms, dtype)
    return _form(op.apply(form.centre), generators, passed * (1 + gamma(op.terms, DOUBLE)) + error), error


def _activation(
    node: Node, op: ops.Activation, form: Form, before: Interval, symbols: _Symbols, dtype: torch.dtype
) -> tuple[Form, Tensor | None]:
    """d z + [low, high] on the range of z, with a new symbol for the distance in the widest such places of each box."""
    lower, upper = before
    lines = relax(op, lower, upper, "parallel", node.name)
    slope = lines.upper_slope
    low = torch.zeros_like(slope) if lines.lower_shift is None else lines.lower_shift
    middle, half = (low + lines.upper_shift) / 2, (lines.upper_shift - low) / 2
    new = torch.where(unstable(op, lower, upper), half, 0.0).flatten(1)
    most = int((new > 0).sum(1).max()) if len(new) else 0
    made = replace(form, generators=slope[:, None] * form.generators)
    fresh, places = new.topk(most, 1) if most < new.shape[1] else (new, torch.arange(new.shape[1]).expand_as(new))
    block = torch.zeros(len(new), most, new.shape[1], dtype=DOUBLE).scatter_(2, places[:, :, None], fresh[:, :, None])
    generators = torch.cat([_filled(made, symbols.count).generators, block.view(len(new), most, *node.shape)], 1)
    symbols.count += most
    kept = torch.where(new.view_as(half) > 0, 0.0, half.abs())
    own = None
    rounding = 16 * unit(DOUBLE) * (slope * form.size + middle.abs() + half.abs()) + underflow(0, DOUBLE)
    if op.kind not in EXACT:
        size = torch.maximum(*(end.abs() for end in op.ends(lower, upper)))
        own = (2 * ULPS + 2) * unit(dtype) * size + underflow(0, dtype)
        rounding = rounding + own
    centre, rest = slope * form.centre + middle, slope * form.rest + kept + rounding
    return Form(centre, generators, rest, slope * form.spread + torch.where(kept > 0, 0.0, half.abs())), own
