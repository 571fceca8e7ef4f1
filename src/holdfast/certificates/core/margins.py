"""From bounds of the margins z_y - z_j to a certificate."""

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from holdfast.bounding.core.evaluation import doubled
from holdfast.bounding.core.placements import boxes
from holdfast.bounding.core.region import Region, region
from holdfast.bounding.core.rounding import below
from holdfast.bounding.graph.ops import Graph
from holdfast.bounding.graph.trace import trace
from holdfast.bounding.linear import affine, alpha
from holdfast.bounding.linear import relaxation as linear
from holdfast.bounding.linear.relax import Slopes
from holdfast.bounding.linear.relaxation import Relaxation
from holdfast.errors import OutOfTime
from holdfast.results import CertifyResult
from holdfast.threats import Patch, Threat
from holdfast.utils.clock import check_time


class Margins(Protocol):
    """From a network, a region and labels (B,) to lower bounds of z_y - z_j over the region, (B, K)."""

    def __call__(self, graph: Graph, r: Region, y: Tensor, *, sound: bool) -> Tensor: ...


def interval_margins(graph: Graph, r: Region, y: Tensor, *, sound: bool) -> Tensor:
    """Interval bounds of the margins, (B, K); exact on boxes and sparse sets if the network has no activation."""
    before = Graph(graph.nodes[:-1])
    relaxed = linear.relaxation(before, r, slopes=None, hidden=False, sound=sound)
    return affine.interval_margins(graph, relaxed, y)


LOOK = 8.0
"""Rounding may have cost a proof where so many times the error terms of the last pass would save it. The terms of the
hidden layers widen the lines as well: on three trained networks all terms took 1.2 to 4.5 times as much as the last."""


def linear_margins(graph: Graph, r: Region, y: Tensor, *, slopes: Slopes, hidden: bool, sound: bool) -> Tensor:
    """Linear bounds of the margins, (B, K)."""
    return linear.margin_bounds(linear.relaxation(graph, r, slopes=slopes, hidden=hidden, sound=sound), y)


def decided_margins(graph: Graph, r: Region, y: Tensor, *, slopes: Slopes, hidden: bool, sound: bool) -> Tensor:
    """`linear_margins` that rounding costs little: what is cheap, or decides a proof, is done in float64.

    The last pass is cheap where the hidden layers have backward passes too. All of them are repeated only for inputs
    that rounding may have cost the proof.
    """
    relaxed = linear.relaxation(graph, r, slopes=slopes, hidden=hidden, sound=sound)
    margins = linear.margin_bounds(relaxed, y)
    if not sound or r.x.dtype == torch.float64:
        return margins
    without = linear.margin_bounds(replace(relaxed, sound=False, errors={}, losses={}), y)
    hoped = (margins + LOOK * (without - margins)).scatter(1, y[:, None], torch.inf).amin(1)
    with suppress(OutOfTime):  # what float32 proved stands
        if hidden:
            margins = torch.fmax(margins, in_float64(relaxed, y, slopes=slopes, hidden=False))
        open_ = margins.scatter(1, y[:, None], torch.inf).amin(1) <= 0
        doubtful = (open_ & (hoped > 0)).nonzero()[:, 0]
        if len(doubtful):
            again = in_float64(alpha.select(relaxed, doubtful), y[doubtful], slopes=slopes, hidden=hidden)
            margins = margins.index_copy(0, doubtful, torch.fmax(margins[doubtful], again))
    return margins


def in_float64(r: Relaxation, y: Tensor, *, slopes: Slopes, hidden: bool) -> Tensor:
    """Margins (B, K) by float64, of the network as it is run; `hidden` layers keep the bounds of r or get new ones."""
    known = {i: (low.double(), high.double()) for i, (low, high) in enumerate(r.intervals) if i}
    exact = linear.relaxation(
        doubled(r.graph),
        r.region.double(),
        slopes=slopes,
        hidden=hidden,
        sound=True,
        rows=None if hidden else linear.Rows({}, known, lambda *_: None),
        runs_in=r.region.x.dtype,
    )
    return below(linear.margin_bounds(exact, y), r.region.x.dtype)


def certify_margins(
    model: nn.Module, x: Tensor, y: Tensor, threat: Threat, name: str, margins: Margins, *, sound: bool, chunk: int = 1
) -> CertifyResult:
    """Certify the inputs whose margins are all positive over the threat set; for patches, over all locations.

    `name` is the certificate's, `chunk` the number of boxes in memory at a time, for patches.
    """
    graph = trace(model, x, threat)
    if not isinstance(threat, Patch):
        return from_margins(margins(graph, region(threat, x, sound=sound), y, sound=sound), y, name)
    worst, places = None, threat.locations(tuple(x.shape[1:])).to(x.device)
    for lower, upper, m in boxes(threat, x, sound=sound, chunk=chunk):
        check_time()
        box = Region(lower, upper, x.repeat_interleave(m, 0))
        found = margins(graph, box, y.repeat_interleave(m), sound=sound)
        worst = worst_place(found.unflatten(0, (-1, m)), y, worst)
    assert worst is not None
    return from_margins(worst.margins, y, name, place=places[worst.place])


@dataclass(frozen=True, eq=False)
class Worst:
    """The worst of many places: the smallest `margins` (B, K), the `place` (B,) of the `least` of them (B,)."""

    margins: Tensor
    place: Tensor
    least: Tensor
    count: int


def worst_place(margins: Tensor, y: Tensor, before: Worst | None = None) -> Worst:
    """The worst of the places that `before` has seen and of L further ones, with the margins (B, L, K)."""
    rivals = margins.scatter(2, y[:, None, None].expand(-1, margins.shape[1], 1), torch.inf).amin(2)
    least, place = rivals.min(1)
    if before is None:
        return Worst(margins.amin(1), place, least, margins.shape[1])
    lower = least < before.least
    return Worst(
        torch.minimum(before.margins, margins.amin(1)),
        torch.where(lower, before.count + place, before.place),
        torch.where(lower, least, before.least),
        before.count + margins.shape[1],
    )


def from_margins(margins: Tensor, y: Tensor, name: str, *, place: Tensor | None = None) -> CertifyResult:
    """The result that follows from proven margins (B, K); NaN (an overflow) proves nothing.

    `place` (B, 2) is where a patch has its smallest margin, if known.
    """
    margin, rival = margins.scatter(1, y[:, None], torch.inf).min(1)
    margin = torch.where(margin.isnan(), torch.full_like(margin, -torch.inf), margin)
    certified = margin > 0
    by = tuple(name if c else "" for c in certified.tolist())
    return CertifyResult(certified, margin, by=by, worst_place=place, worst_class=None if place is None else rival)
