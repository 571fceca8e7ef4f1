"""Certificates from bounds: intervals, and linear bounds with one or two slopes, of the margins z_y - z_j."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from holdfast.bounding.core.placements import boxes
from holdfast.bounding.core.region import REGIONS, Region, region
from holdfast.bounding.graph.ops import Graph
from holdfast.bounding.graph.trace import trace
from holdfast.bounding.linear import affine
from holdfast.bounding.linear import relaxation as linear
from holdfast.bounding.linear.relax import Slopes
from holdfast.registry import Certificate, register
from holdfast.results import CertifyResult
from holdfast.threats import Patch, Threat

Margins = Callable[[Graph, Region, Tensor], Tensor]
"""From a network, a region and labels (B,) to lower bounds of z_y - z_j over the region, (B, K)."""


def interval_margins(graph: Graph, r: Region, y: Tensor, *, sound: bool) -> Tensor:
    """Interval bounds of the margins, (B, K); exact on boxes and sparse sets if the network has no activation."""
    before = Graph(graph.nodes[:-1])
    relaxed = linear.relaxation(before, r, slopes=None, hidden=False, sound=sound)
    return affine.interval_margins(graph, relaxed, y)


def linear_margins(graph: Graph, r: Region, y: Tensor, *, slopes: Slopes, hidden: bool, sound: bool) -> Tensor:
    """Linear bounds of the margins, (B, K)."""
    return linear.margin_bounds(linear.relaxation(graph, r, slopes=slopes, hidden=hidden, sound=sound), y)


def worst_margins(
    graph: Graph, x: Tensor, y: Tensor, threat: Threat, margins: Margins, *, sound: bool, chunk: int
) -> Tensor:
    """Smallest proven margin of each class over the threat set, (B, K); for patches over all locations.

    Args:
        graph: the network.
        x: inputs (B, ...).  y: labels (B,).
        threat: what the adversary may do.
        margins: bounds over one region.
        sound: account for the rounding of the region itself.
        chunk: boxes in memory at a time, for patches.
    """
    if not isinstance(threat, Patch):
        return margins(graph, region(threat, x, sound=sound), y)
    worst = []
    for lower, upper, m in boxes(threat, x, sound=sound, chunk=chunk):
        box = Region(lower, upper, x.repeat_interleave(m, 0))
        worst.append(margins(graph, box, y.repeat_interleave(m)).unflatten(0, (-1, m)).amin(1))
    return torch.stack(worst).amin(0)


def from_margins(margins: Tensor, y: Tensor, name: str) -> CertifyResult:
    """The result that follows from proven margins (B, K); NaN (an overflow) proves nothing."""
    margin = margins.scatter(1, y[:, None], torch.inf).amin(1)
    margin = torch.where(margin.isnan(), torch.full_like(margin, -torch.inf), margin)
    certified = margin > 0
    return CertifyResult(certified, margin, by=tuple(name if c else "" for c in certified.tolist()))


@register(
    Certificate(
        "ibp",
        summary="interval bounds of the margins; for patches one box for every location",
        threats=REGIONS,
        reference="Gowal et al., On the effectiveness of interval bound propagation, 2018; Chiang et al., 2020 "
        "(patches)",
        radius="bisection",
    )
)
def ibp(
    model: nn.Module, x: Tensor, y: Tensor, threat: Threat, *, sound: bool = True, chunk_boxes: int = 1024
) -> CertifyResult:
    """Certified if the interval bound of every margin z_y - z_j is above zero.

    Prefer it for networks trained with it; on others it proves almost nothing beyond tiny budgets.

    Args:
        model: from (B, ...) to logits (B, K).  x: inputs, shape (B, ...).  y: labels, shape (B,).
        threat: any; on a ball the first layer is bounded by the dual norm.
        sound: widen every interval by what rounding can do.
        chunk_boxes: boxes in memory at a time, for patches.
    """

    def margins(graph: Graph, r: Region, y: Tensor) -> Tensor:
        return interval_margins(graph, r, y, sound=sound)

    found = worst_margins(trace(model, x, threat), x, y, threat, margins, sound=sound, chunk=chunk_boxes)
    return from_margins(found, y, "ibp")


def _linear(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    name: str,
    *,
    slopes: Slopes,
    hidden: bool,
    sound: bool,
    chunk_boxes: int,
) -> CertifyResult:
    def margins(graph: Graph, r: Region, y: Tensor) -> Tensor:
        return linear_margins(graph, r, y, slopes=slopes, hidden=hidden, sound=sound)

    found = worst_margins(trace(model, x, threat), x, y, threat, margins, sound=sound, chunk=chunk_boxes)
    return from_margins(found, y, name)


@register(
    Certificate(
        "crown",
        summary="linear bounds of the margins with two slopes, by backward passes for every layer",
        threats=REGIONS,
        reference="Zhang et al., Efficient neural network robustness certification with general activation "
        "functions, 2018",
        radius="bisection",
    )
)
def crown(
    model: nn.Module, x: Tensor, y: Tensor, threat: Threat, *, sound: bool = True, chunk_boxes: int = 64
) -> CertifyResult:
    """Certified if the linear lower bound of every margin is above zero over the threat set.

    Args:
        model: from (B, ...) to logits (B, K).  x: inputs, shape (B, ...).  y: labels, shape (B,).
        threat: any.
        sound: account for floating-point rounding.
        chunk_boxes: boxes in memory at a time, for patches.
    """
    return _linear(model, x, y, threat, "crown", slopes="adaptive", hidden=True, sound=sound, chunk_boxes=chunk_boxes)


@register(
    Certificate(
        "crown-ibp",
        summary="intervals for the hidden layers, linear bounds for the margins",
        threats=REGIONS,
        reference="Zhang et al., Towards stable and efficient training of verifiably robust neural networks, 2020",
        radius="bisection",
    )
)
def crown_ibp(
    model: nn.Module, x: Tensor, y: Tensor, threat: Threat, *, sound: bool = True, chunk_boxes: int = 256
) -> CertifyResult:
    """One backward pass on interval bounds of the hidden layers; arguments as for `crown`."""
    return _linear(
        model, x, y, threat, "crown-ibp", slopes="adaptive", hidden=False, sound=sound, chunk_boxes=chunk_boxes
    )


@register(
    Certificate(
        "fastlin",
        summary="linear bounds of the margins with one slope per neuron, by backward passes for every layer",
        threats=REGIONS,
        reference="Weng et al., Towards fast computation of certified robustness for ReLU networks, 2018",
        radius="bisection",
    )
)
def fastlin(
    model: nn.Module, x: Tensor, y: Tensor, threat: Threat, *, sound: bool = True, chunk_boxes: int = 64
) -> CertifyResult:
    """Both lines of a neuron have the same slope; arguments as for `crown`."""
    return _linear(model, x, y, threat, "fastlin", slopes="parallel", hidden=True, sound=sound, chunk_boxes=chunk_boxes)
