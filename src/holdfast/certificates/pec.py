"""Polyhedral envelope certification: a failed proof of the whole ball still yields a radius.

Linear bounds over the ball of radius eps say z_y - z_j >= <U_j, x'> + p_j there. They cut a polyhedron out of the ball
in which the class cannot change. The radius is min(eps, distance from x to the nearest face), where the distance may
take into account that pixels stay in their range.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from holdfast.bounding.core.region import BALLS, balls
from holdfast.bounding.core.rounding import unit
from holdfast.bounding.graph.ops import Graph
from holdfast.bounding.graph.trace import trace
from holdfast.bounding.linear.coefficients import dense
from holdfast.bounding.linear.forward import forward_planes
from holdfast.bounding.linear.relax import Slopes
from holdfast.bounding.linear.relaxation import Relaxation, concretise, margin_planes, relaxation
from holdfast.certificates.core.distance import distance, dual, half_spaces, norm_of, reach
from holdfast.certificates.core.margins import from_margins
from holdfast.certificates.core.radius_search import Ball, Proof, Question, searched
from holdfast.errors import InputError
from holdfast.registry import Certificate
from holdfast.results import CertifyResult


@dataclass(frozen=True)
class Envelope:
    """Which linear bounds make the envelope."""

    slopes: Slopes = "parallel"  # one slope per neuron (Fast-Lin); "adaptive" for two (CROWN)
    hidden: bool = True  # bound the hidden layers by backward passes; else by intervals, which is cheaper and looser
    forward: bool = False  # carry one affine form for each neuron forward instead; needs parallel slopes
    in_range: bool = True  # measure the distance only to valid inputs (larger), or to all of space
    sound: bool = True


def envelope(graph: Graph, x: Tensor, y: Tensor, threat: Ball, eps: Tensor, options: Envelope) -> tuple[Tensor, Tensor]:
    """Radius proved by the bounds over the ball of radius eps, and margins over that ball.

    `threat` says the kind of ball and the valid range, `eps` (B,) the radius of the ball of each input.

    Returns:
        radius: (B,), at most eps; 0 where nothing is proved.
        margins: lower bounds of z_y - z_j, (B, K); all positive, but for j = y, exactly where the radius is eps.
    """
    sound, norm = options.sound, norm_of(threat)
    ball = balls(threat, x, eps, sound=sound)
    if options.forward:
        r = Relaxation(graph, ball, sound)
        planes = forward_planes(graph, ball, y, sound=sound)
    else:
        r = relaxation(graph, ball, slopes=options.slopes, hidden=options.hidden, sound=sound)
        planes = margin_planes(r, y)
    slope = dense(planes.coefficients, tuple(x.shape[1:])).values
    valid = (threat.low, threat.high) if options.in_range else None
    faces = dual(half_spaces(x, slope, planes.shift, valid=valid, sound=sound), norm)
    own = torch.nn.functional.one_hot(y, slope.shape[1]).bool()
    nearest = distance(faces).masked_fill(own, torch.inf).amin(1)
    # Stepping down by two units pays for the conversion to the dtype of x, and makes the closed ball safe.
    nearest = (nearest * (1 - 4 * unit(x.dtype))).to(x.dtype)
    # The budget that was rounded to eps may have been half a unit larger.
    inside = reach(faces, eps.double() * (1 + 2 * unit(x.dtype)))
    inside = (inside - 4 * unit(x.dtype) * inside.abs()).to(x.dtype)
    margins = torch.fmax(concretise(r, planes), inside)
    whole = (margins > 0).masked_fill(own, True).all(1)
    return torch.where(whole, eps, torch.minimum(nearest, eps * (1 - 4 * unit(x.dtype)))), margins


def _proof(graph: Graph, q: Question) -> Proof:
    options = Envelope(slopes=q.slopes, sound=q.sound)

    def prove(x: Tensor, y: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
        proved, found = envelope(graph, x, y, q.ball, eps, options)
        return proved, from_margins(found, y, "").margin

    return prove


@Certificate(
    "pec",
    summary="linear bounds of the margins as a polyhedron; a radius even where the whole ball cannot be proved",
    threats=BALLS,
    reference="Liu, Salzmann and Süsstrunk, Training provably robust models by polyhedral envelope regularization, "
    "2020",
    radius=searched(_proof),
)
def pec(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Ball,
    *,
    slopes: Slopes = "parallel",
    hidden: bool = True,
    forward: bool = False,
    in_range: bool = True,
    sound: bool = True,
) -> CertifyResult:
    """Certified if the whole ball is; `radius` is min(eps, distance to the envelope) in any case.

    Prefer it to `fastlin` where a radius is of use. The distances add one sort of the planes to the cost of the bounds,
    which shows where these are cheap. For the largest radius that can be proved search over eps with `hf.radius`. At L2
    and L1 it proves more than `fastlin`: the corners that a ball has outside the valid range are cut off exactly.

    The options make an `Envelope`. `forward` is cheaper on a deep network of a small input, and looser.
    """
    if forward and slopes != "parallel":
        raise InputError('forward=True keeps one slope for both lines: leave slopes at "parallel"')
    eps = torch.full((len(x),), threat.eps, dtype=x.dtype, device=x.device)
    radius, margins = envelope(
        trace(model, x, threat), x, y, threat, eps, Envelope(slopes, hidden, forward, in_range, sound)
    )
    right = model(x).argmax(1) == y
    return replace(from_margins(margins, y, "pec"), radius=torch.where(right, radius, torch.zeros_like(radius)))
