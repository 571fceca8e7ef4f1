"""Certified boxes of the largest volume: each input value gets a radius of its own.

Maximise sum_i log eps_i subject to margin_j(eps) >= delta for every class j != y, where margin_j is a linear bound over
the box x -+ eps, by an augmented Lagrangian (Liu, Tomioka and Cevher, "On certifying non-uniform bounds against
adversarial attacks", 2019). What the optimiser returns is shrunk until the bounds, rounding included, prove the box.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from holdfast.bounding.core.region import Region
from holdfast.bounding.core.rounding import unit
from holdfast.bounding.graph.ops import Graph
from holdfast.bounding.graph.trace import trace
from holdfast.bounding.linear.relax import Slopes
from holdfast.bounding.linear.relaxation import margin_bounds, output_bounds, relaxation
from holdfast.certificates.core.margins import from_margins
from holdfast.checks import check_precision, check_task
from holdfast.registry import Certificate
from holdfast.results import CertifyResult
from holdfast.threats import Linf, per_input
from holdfast.utils.options import Positive, Whole, check_options, options_of
from holdfast.utils.show import Shown

Margins = Callable[[Tensor, bool], Tensor]
"""From half-widths (B, ...) and `sound` to lower bounds of z_y - z_j over the box, (B, K); infinite at j = y."""


@dataclass(frozen=True, eq=False, repr=False)
class NonuniformResult(Shown):
    """The box found around each input."""

    radius: Tensor  # half-width of the box for every input value, shape of x; 0 where nothing was proved
    certified: Tensor  # (B,) bool, True where the box was proved, with rounding
    margin: Tensor  # (B,) proven lower bound of the margin over the box, or over the least box if that was not proved
    log_volume: Tensor  # (B,) mean over the input values of log radius; -inf where nothing was proved
    uniform: Tensor  # (B,) half-width of the largest box with equal sides that the same bounds prove
    ratio: Tensor  # (B,) geometric mean of `radius` divided by `uniform`; 1 where nothing was proved


def nonuniform(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Linf,
    *,
    steps: Whole = 100,  # of Adam, each with one evaluation of the bounds and its gradient
    step_size: Positive = 0.1,  # learning rate of Adam, on the logarithm of the half-widths
    penalty: Positive = 4.0,  # weight of the quadratic term, with margins in units of the clean margin
    delta: float = 1e-4,  # margin to keep, in the same unit
    tolerance: Positive = 1e-3,  # relative precision to which the box is shrunk, and the uniform one searched
    slopes: Slopes = "parallel",  # one slope per neuron (Fast-Lin); "adaptive" for two (CROWN)
    hidden: bool = True,  # bound the hidden layers by backward passes; else by intervals, which is cheaper and looser
    elide: bool = True,  # bound differences of logits (larger boxes); else the logits one by one, as the paper does
) -> NonuniformResult:
    """The certified box of largest volume that contains the threat set; `Linf(0)` asks for any box.

    The box is not cut with the valid range: it is proved as it stands, and with it the part that is valid.
    Inputs for which not even the threat set is proved get `certified=False`, never a smaller box.
    """
    check_precision(x)
    clean = check_task(model, x, y, threat)
    given = {"steps": steps, "step_size": step_size, "penalty": penalty, "tolerance": tolerance}
    check_options(options_of(nonuniform), given, "method 'nonuniform'")
    graph = trace(model, x, threat)
    margins = _margins(graph, x, y, slopes, hidden, elide)
    least = torch.full_like(x, threat.eps)
    with torch.no_grad():
        start = from_margins(margins(least, True), y, "")
    chosen = (start.certified & (clean.argmax(1) == y)).nonzero()[:, 0]
    radius, margin, uniform = torch.zeros_like(x), start.margin.clone(), x.new_zeros(len(x))
    if len(chosen):
        part = _margins(graph, x[chosen], y[chosen], slopes, hidden, elide)
        side = _largest(part, torch.ones_like(x[chosen]), least[chosen], tolerance)
        best = _maximise(part, side.clamp(min=torch.finfo(x.dtype).tiny), steps, step_size, penalty, delta)
        best = _largest(part, torch.maximum(best, least[chosen]), least[chosen], tolerance)
        better = best.log().flatten(1).mean(1) > side.log().flatten(1).mean(1)
        best = torch.where(per_input(better, x), best, side)
        radius[chosen], uniform[chosen] = best, side.flatten(1)[:, 0]
        with torch.no_grad():
            margin[chosen] = part(best, True).amin(1)
    volume = radius.log().flatten(1).mean(1)
    ratio = torch.where(uniform > 0, volume.exp() / uniform, torch.ones_like(uniform))
    certified = torch.zeros_like(start.certified)
    certified[chosen] = True
    return NonuniformResult(radius, certified, margin, volume, uniform, ratio)


@Certificate(
    "nonuniform",
    summary="the certified box of largest volume around the threat set, each value with its own radius",
    threats=("linf",),
    reference="Liu, Tomioka and Cevher, On certifying non-uniform bounds against adversarial attacks, 2019",
)
def certify_nonuniform(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Linf,
    *,
    steps: Whole = 100,
    slopes: Slopes = "parallel",
    hidden: bool = True,
) -> CertifyResult:
    """Certified where `nonuniform` finds a box; `radius` is its least half-width, the radius of a proved ball.

    It certifies what linear bounds with the same slopes do. `holdfast.certificates.nonuniform.nonuniform` gives the
    box itself, explains the options, and has more of them.
    """
    found = nonuniform(model, x, y, threat, steps=steps, slopes=slopes, hidden=hidden)
    by = tuple("nonuniform" if c else "" for c in found.certified.tolist())
    return CertifyResult(found.certified, found.margin, found.radius.flatten(1).amin(1), by=by)


def _margins(graph: Graph, x: Tensor, y: Tensor, slopes: Slopes, hidden: bool, elide: bool) -> Margins:
    def margins(radius: Tensor, sound: bool) -> Tensor:
        if sound:  # x -+ radius is rounded
            radius = radius + 4 * unit(x.dtype) * (x.abs() + radius)
        region = Region(x - radius, x + radius, x)
        r = relaxation(graph, region, slopes=slopes, hidden=hidden, sound=sound)
        if elide:
            return margin_bounds(r, y).scatter(1, y[:, None], torch.inf)
        lower, upper = output_bounds(r)
        found = lower.gather(1, y[:, None]) - upper
        found = found - 4 * unit(x.dtype) * found.abs() if sound else found
        return found.scatter(1, y[:, None], torch.inf)

    return margins


@torch.no_grad()
def _largest(margins: Margins, shape: Tensor, least: Tensor, tolerance: float) -> Tensor:
    """The largest box max(t * shape, least) that is proved, by bisection on t; `least` itself is known to be.

    The upper end starts at 1 and doubles while the box is still proved, as far as the dtype allows.
    """
    low, high = shape.new_zeros(len(shape)), shape.new_ones(len(shape))
    growing = torch.ones_like(low, dtype=torch.bool)
    best = least
    while True:
        tried = torch.where(growing, high, (low + high) / 2)
        active = growing | (high - low > tolerance * high)
        active &= tried * shape.flatten(1).amax(1) < _REACH
        # Below that the box is a point for all purposes; a point has no volume to speak of.
        active &= high > torch.finfo(shape.dtype).eps
        if not bool(active.any()):
            return best
        box = torch.maximum(per_input(tried, shape) * shape, least)
        proved = (margins(box, True) > 0).all(1) & active
        best = torch.where(per_input(proved, shape), box, best)
        failed = active & ~proved
        low, high = torch.where(proved, tried, low), torch.where(failed, tried, high)
        high = torch.where(proved & growing, 2 * high, high)
        growing &= proved


_REACH = 1e6
"""No half-width is tried beyond this: a box so wide is proved only for a network that ignores its input."""


@torch.enable_grad()
def _maximise(margins: Margins, start: Tensor, steps: int, step_size: float, penalty: float, delta: float) -> Tensor:
    """Half-widths after `steps` of Adam on the augmented Lagrangian; nearly feasible, not proved.

    With d_j = margin_j / clean margin_j - delta and multipliers m_j <= 0 the Lagrangian, minimised over its slack
    variables, is  -mean(log eps) + sum_j m_j v_j + penalty / 2 v_j^2  with  v_j = min(d_j, -m_j / penalty).
    """
    with torch.no_grad():
        clean = margins(torch.zeros_like(start), False)
        clean = clean.clamp(min=torch.finfo(clean.dtype).tiny).masked_fill(clean.isinf(), 1.0)
    log_radius = start.log().requires_grad_()
    multiplier = torch.zeros_like(clean)
    optimizer = torch.optim.Adam([log_radius], lr=step_size)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = step_size * (1 - step / steps)
        gap = margins(log_radius.exp(), False) / clean - delta
        violated = torch.minimum(gap, -multiplier / penalty)
        value = (multiplier * violated + penalty / 2 * violated.square()).sum() - log_radius.flatten(1).mean(1).sum()
        (log_radius.grad,) = torch.autograd.grad(value, [log_radius])
        optimizer.step()
        if step % 5 == 4:
            multiplier = multiplier + penalty * violated.detach()
    return log_radius.detach().exp()
